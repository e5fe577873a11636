"""The commands put together.

argparse, though other libraries read options from signatures: the command has to run on machines where nothing can be
installed, and it comes with Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

import dsattn
from dsattn.cli import bench, doctor, drift, verify
from dsattn.errors import BadInput


class _Parser(argparse.ArgumentParser):
    """A parser that raises what it has to say instead of printing its usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise BadInput("usage", fix=f"{message}. `{self.prog} --help` lists what there is")


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; its exit code.

    Raises:
        BadInput: the arguments do not fit a command.
    """
    parser = _Parser(prog="dsattn", description=dsattn.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=dsattn.__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (verify, doctor, drift, bench):
        summary = (command.__doc__ or "").partition(": ")[2].partition("\n")[0]
        name = command.__name__.rpartition(".")[2]
        added = commands.add_parser(
            name,
            help=summary,
            description=command.DESCRIPTION,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_options(added)
        added.set_defaults(command=command.main)
    try:
        options = vars(parser.parse_args(arguments))
    except SystemExit:
        # --help and --version have printed what they are for.
        return 0
    command = options.pop("command", None)
    if command is None:
        parser.print_help()
        return 0
    return command(**options)
