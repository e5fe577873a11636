"""Environments with a released package, in dsattn's cache, on the torch of the interpreter that makes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dsattn.errors import BadInput
from dsattn.wheels import cache_folder, pip, put, scratch

_PYTHON = Path("bin", "python")
_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


def environment(package: str, release: str, cache: Path | None = None) -> Path:
    """The interpreter of an environment that has the release; made on first use.

    Args:
        package: the distribution's name.
        release: its release.
        cache: where environments are kept; None for dsattn's own place.

    Semantics:
        The environment sees the packages of this interpreter, which an option of `venv` would not do where this one is
        an environment itself. One is made for each version of Python.

    Raises:
        BadInput: it cannot be made, or pip refuses.
        Unreachable: the package index does not answer.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = (cache or cache_folder()) / "bench" / f"{package}-{release}-python-{python}"
    if not folder.is_dir():
        with scratch(folder.parent) as fresh:
            made = fresh / "whole"
            _run([sys.executable, "-m", "venv", str(made)])
            _show_packages(made)
            # By `python -m pip`, since its scripts would name the folder in which they were made.
            pip("install", "--quiet", f"{package}=={release}", python=made / _PYTHON)
            put(made, folder)
    # Written anew each time: the packages of the caller may have moved.
    _show_packages(folder)
    return folder / _PYTHON


def _show_packages(folder: Path) -> None:
    """Lets an environment see the packages of this interpreter."""
    own = Path(_run([str(folder / _PYTHON), "-c", _PACKAGES]).strip())
    seen = [f"import site; site.addsitedir({path!r})" for path in sys.path if path.endswith("-packages")]
    (own / "packages-of-caller.pth").write_text("\n".join(seen) + "\n", encoding="utf-8")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise BadInput("environment", given=lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout
