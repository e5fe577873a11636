"""Wheels made on the spot, and a folder that pip takes for the package index."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest


def make(
    folder: Path,
    version: str,
    files: Mapping[str, str],
    *,
    name: str = "kernels",
    metadata: Sequence[str] = (),
    python: str = "py3",
) -> Path:
    """Writes a wheel that pip takes; `files` is path -> text."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{python}-none-any.whl"
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {python}-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def serve(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets pip find the wheels of a folder and nothing else, and dsattn keep its files in `cache`."""
    monkeypatch.setenv("DSATTN_CACHE_DIR", str(cache))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def read(path: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}
