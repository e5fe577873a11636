"""Wheels of a release: downloaded by pip without what they depend on, kept in the cache, never installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dsattn.errors import BadInput, DsattnError

if TYPE_CHECKING:
    from packaging.version import Version

# One build of each release, whatever machine asks: their Python is the same. Some have wheels for newer Pythons only.
PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.10")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64")
_QUIET = ("--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=20")
_UNREACHABLE = re.compile(
    r"connection broken|Max retries exceeded|ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError"
    r"|name resolution|Network is unreachable|HTTP error 5\d\d"
)


class Unreachable(DsattnError):
    """The package index cannot be reached."""


def build(python: str = PYTHONS[0]) -> list[str]:
    """pip's options for the build of a release that is read: Linux, x86-64, a wheel."""
    platforms = [f"--platform={platform}" for platform in _PLATFORMS]
    return ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]


def cache_folder() -> Path:
    """Where dsattn keeps files: $DSATTN_CACHE_DIR, else the user's cache.

    Raises:
        ImportError: the variable is not set, and platformdirs is not installed.
    """
    named = os.environ.get("DSATTN_CACHE_DIR")
    if named:
        return Path(named)
    from platformdirs import user_cache_path

    return user_cache_path("dsattn")


def pip(*arguments: str, python: str | Path = sys.executable) -> str:
    """What pip prints.

    Args:
        arguments: its command line.
        python: the interpreter whose pip runs.

    Raises:
        BadInput: it fails; the message has its last lines.
        Unreachable: it fails because the index does not answer.
    """
    command = [str(python), "-m", "pip", *arguments, *_QUIET]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return done.stdout
    if "No module named pip" in done.stderr:
        raise BadInput("pip", given="none beside this Python", fix=f"{python} -m ensurepip")
    errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    # An index that does not answer ends in the same errors as a package that it does not have.
    if _UNREACHABLE.search(done.stderr):
        raise Unreachable(
            "package index", given="no answer", fix="check the network, or pip's index and proxy settings"
        )
    last = done.stderr.strip().splitlines()[-1:]
    raise BadInput("pip", given="; ".join(errors or last) or f"exit code {done.returncode}")


def wheel(package: str, version: Version, folder: Path | None = None) -> Path:
    """The wheel of a release, whole; downloaded on first use.

    Args:
        package: the distribution's name, as the index has it.
        version: the release.
        folder: where wheels are kept; default: `wheels` in the cache.

    Raises:
        BadInput: the index has no such wheel, the wheel is broken, or the cache cannot be written.
        Unreachable: the index does not answer.
    """
    folder = folder or cache_folder() / "wheels"
    for kept in _kept(folder, package, version):
        if fault(kept) is None:
            return kept
    with scratch(folder) as fresh:
        downloaded = _downloaded(package, version, fresh)
        broken = fault(downloaded)
        if broken is not None:
            raise BadInput(
                f"{package} {version}", given=f"a broken wheel ({broken})", needed="a whole one on the index"
            )
        # Another process may have been faster; a rename replaces its file with the same one, whole.
        return downloaded.replace(folder / downloaded.name)


def fault(path: Path) -> str | None:
    """What is wrong with a wheel as a file; None where it is whole."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            found = any(name.endswith(".dist-info/METADATA") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        return str(error)
    if damaged is not None:
        return f"{damaged} is damaged"
    return None if found else "it has no METADATA"


@contextmanager
def scratch(folder: Path) -> Generator[Path]:
    """An empty folder on the file system of `folder`, removed afterwards.

    Raises:
        BadInput: the cache cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(dir=folder)
    except OSError as error:
        fix = "set DSATTN_CACHE_DIR to a folder that can be written to"
        raise BadInput(f"cache {folder}", given=error.strerror, fix=fix) from error
    with made as path:
        yield Path(path)


def put(whole: Path, folder: Path) -> None:
    """Puts a complete folder in its place; another process may have been faster, and has the same one there."""
    try:
        whole.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(whole)


def _kept(folder: Path, package: str, version: Version) -> Iterator[Path]:
    from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

    for path in sorted(folder.glob("*.whl")):
        try:
            name, found, _, _ = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if (name, found) == (canonicalize_name(package), version):
            yield path


def _downloaded(package: str, version: Version, folder: Path) -> Path:
    served: set[str] = set()
    for python in PYTHONS:
        try:
            pip("download", "--quiet", "--no-deps", f"--dest={folder}", *build(python), f"{package}=={version}")
        except BadInput as error:
            listed = re.search(r"\(from versions: (.*?)\)", str(error))
            if listed is None:
                raise _refused(package, version, str(error.given)) from error
            served.update(listed[1].split(", "))
            continue
        (path,) = folder.glob("*.whl")
        return path
    raise _unknown(package, version, served - {"none"})


def _unknown(package: str, version: Version, served: set[str]) -> BadInput:
    from packaging.version import Version

    if not served:
        needed = "the name of a package that the index has as a wheel"
        return BadInput(f"package {package!r}", given="none of that name on the index", needed=needed)
    newest = max(map(Version, served))
    needed = f"a release that the index has as a wheel; the newest is {newest}"
    return BadInput(f"{package} {version}", given="no such wheel on the index", needed=needed)


def _refused(package: str, version: Version, told: str) -> BadInput:
    # Of a wheel that is no zip file, or whose name and content disagree.
    if re.search(r"invalid|BadZipFile|inconsistent|not a supported wheel", told):
        return BadInput(f"{package} {version}", given=f"a broken wheel ({told})", needed="a whole one on the index")
    return BadInput(f"{package} {version}", given=f"a download that pip refuses: {told}")
