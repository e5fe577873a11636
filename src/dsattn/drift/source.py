"""A wheel read as text: its metadata, and what its Python sources export."""

from __future__ import annotations

import ast
import platform
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path, PurePosixPath

import griffe

from dsattn.drift.exports import Sources
from dsattn.drift.snapshot import Snapshot
from dsattn.errors import BadInput
from dsattn.wheels import cache_folder, scratch


def read(path: Path, package: str, part: str) -> Snapshot:
    """What a wheel shows.

    Args:
        path: the wheel.
        package: the distribution's name.
        part: the folder in it to read; empty for all.

    Raises:
        BadInput: the wheel is broken, or written for a newer Python.
    """
    with zipfile.ZipFile(path) as archive, scratch(cache_folder() / "drift") as folder:
        try:
            facts = PathDistribution(zipfile.Path(archive, _metadata(archive)))
            version, meta, requires = facts.version, facts.metadata, tuple(facts.requires or ())
            _unpack(archive, part, folder)
            sources = Sources(folder, part)
        except (zipfile.BadZipFile, UnicodeDecodeError) as error:
            told = f"a broken wheel ({type(error).__name__}: {error})"
            raise BadInput(path.name, given=told, needed="one that can be read") from error
        except griffe.LoadingError as error:
            told = f"sources that Python {platform.python_version()} cannot parse ({error})"
            raise BadInput(path.name, given=told, fix="run dsattn drift under a newer Python") from error
        exports = {each.name: each for each in sources.exported()}
        unread = _unread(folder, sources.files())
    return Snapshot(
        package=package,
        version=version,
        part=part.replace("/", ".") or (sources.roots[0] if len(sources.roots) == 1 else ""),
        present=bool(exports),
        exports=exports,
        requires_python=next(iter(meta.get_all("Requires-Python") or ()), None),
        requires=requires,
        extras=tuple(meta.get_all("Provides-Extra") or ()),
        unread=unread,
    )


def _metadata(archive: zipfile.ZipFile) -> str:
    names = (PurePosixPath(name) for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return next(f"{name.parent}/" for name in names if len(name.parts) == 2)


def _unpack(archive: zipfile.ZipFile, part: str, folder: Path) -> None:
    """Unpacks the Python files of a part."""
    for name in archive.namelist():
        path = PurePosixPath(name)
        inside = name.startswith(f"{part}/") if part else not path.parts[0].endswith((".dist-info", ".data"))
        if inside and path.suffix in (".py", ".pyi"):
            archive.extract(name, folder)
    # griffe asks for packages all the way down; those above the part are not read, and some wheels leave the files out.
    for file in [*folder.rglob("*.py"), *folder.rglob("*.pyi")]:
        for parent in file.parents:
            if parent == folder:
                break
            (parent / "__init__.py").touch()


def _unread(folder: Path, loaded: set[Path]) -> tuple[str, ...]:
    """The files that were passed over since this Python cannot parse them."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        if file not in loaded:
            try:
                ast.parse(file.read_bytes())
            except (SyntaxError, ValueError):
                found.append(file.relative_to(folder).as_posix())
    return tuple(found)
