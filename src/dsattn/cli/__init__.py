"""The command `dsattn`, one file per command.

The packages that only the commands need (rich, jinja2, griffe) are imported when a command runs, so that the library
works without them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dsattn.errors import DsattnError

USAGE = 2
INTERRUPTED = 130
# Module -> the distribution that has it.
_NEEDED = {
    "rich": "rich",
    "jinja2": "jinja2",
    "packaging": "packaging",
    "platformdirs": "platformdirs",
    "griffe": "griffelib",
    "matplotlib": "matplotlib",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a command line: 0 holds, 1 a check failed or none ran, 2 wrong usage or bad input.

    Args:
        arguments: the words after `dsattn`; None takes them from `sys.argv`.
    """
    try:
        from dsattn.cli.app import run

        return run(sys.argv[1:] if arguments is None else arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _NEEDED:
            raise
        return _complain(f"the command needs the package {package}: pip install {_NEEDED[package]}")
    except DsattnError as error:
        return _complain(str(error))
    except BrokenPipeError:
        # The reader of a pipe has seen enough; without this the interpreter would complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED


def _complain(message: str) -> int:
    print(f"dsattn: {message}", file=sys.stderr)
    return USAGE
