"""Whether the installed Megatron and cuDNN frontend need the repair, told from their files: neither is imported."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path

from packaging.version import Version

from dsattn.backends.cudnn.namespace import Absence
from dsattn.backends.cudnn.namespace import find as find_frontend
from dsattn.integrations.megatron_module import DISTRIBUTION
from dsattn.integrations.megatron_namespace import CHANGED, OFFSETS

_REPAIR = "dsattn.integrations.megatron.install()"
# A file that calls the frontend's sparse backward, wherever a release has put it.
_CALLS = "indexer_backward_wrapper("


def status() -> str:
    """One sentence on what is installed here: whether it needs `install()`, or what is missing to say so."""
    folder = _folder()
    if folder is None:
        return "not installed"
    name = f"{DISTRIBUTION} {_version()}".strip()
    texts = [text for path in sorted(folder.rglob("*.py")) if _CALLS in (text := _read(path))]
    if not texts:
        return f"{name} does not call the cuDNN frontend's DSA"
    if all(OFFSETS in text for text in texts):
        return f"{name} names its offsets itself and needs no repair"
    frontend = find_frontend()
    if isinstance(frontend, Absence):
        return f"{name} needs {_REPAIR} with a cuDNN frontend from {CHANGED} on; none is installed"
    if Version(frontend.version.base_version) < CHANGED:
        return f"{name} needs no repair with cuDNN frontend {frontend.version}, but from {CHANGED} on"
    return f"{name} with cuDNN frontend {frontend.version} needs {_REPAIR}"


def _folder() -> Path | None:
    """The folder of `megatron.core`; finding it imports the namespace above it, which is empty."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _version() -> str:
    try:
        return version_of(DISTRIBUTION)
    except PackageNotFoundError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
