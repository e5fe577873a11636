"""What a verdict is about: a kernel as it is compiled, on this machine and with these packages."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from dsattn.backends.base import Backend, Launch
from dsattn.spec.problem import AttentionSizes, IndexerSizes, Operator, Problem, Support

# Larger files (compiled libraries) are told apart by size and time: to read them would take seconds.
_READ_WHOLE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a kernel is compiled for; problems with equal keys and launches run the same ones.

    Attributes:
        operator: which operator.
        backward: whether its backward.
        support: which keys the indexer loss runs over.
        indexer: sizes of the indexer's side.
        attention: sizes of the attention's side.
        top_k: slots per row.
        ratio: key compression.
        gradients: whether the loss computes gradients beside itself.
        device: the GPU's name, or the kind of device.
    """

    operator: Operator
    backward: bool
    support: Support | None
    indexer: IndexerSizes | None
    attention: AttentionSizes | None
    top_k: int | None
    ratio: int
    gradients: bool
    device: str

    @property
    def title(self) -> str:
        """As messages name it."""
        return f"the backward of {self.operator}" if self.backward else self.operator

    def text(self, launch: Launch) -> str:
        """The key and a launch as text, the same in every process."""
        return json.dumps({**asdict(self), **launch._asdict()}, sort_keys=True, default=str)


def key_of(problem: Problem) -> Key:
    """The key of a problem."""
    return Key(
        operator=problem.operator,
        backward=problem.backward,
        support=problem.support,
        indexer=problem.indexer,
        attention=problem.attention,
        top_k=problem.top_k,
        ratio=1 if problem.layout is None else problem.layout.ratio,
        gradients=problem.requires_grad and problem.operator == "indexer_loss",
        device=device_name(problem.device),
    )


@lru_cache(maxsize=64)
def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def identity(backend: Backend, device: torch.device) -> dict[str, str] | None:
    """All that a verdict on a backend hangs on beside its key; None where none may be kept on disk."""
    own = backend.identity(device)
    if own is None:
        return None
    common = {"backend": backend.name, "torch": torch.__version__, "dsattn": _own_version(), "driver": _driver()}
    return {**common, **own}


@cache
def package_identity(name: str) -> dict[str, str] | None:
    """Version and digest of an importable package, found without importing it; None where it is not installed."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return {name: package_version(name), f"{name} files": folder_hash(Path(spec.origin).parent)}


def package_version(name: str) -> str:
    """The installed version of a package, "" where its metadata is absent or damaged."""
    try:
        return version(name) or ""
    except (PackageNotFoundError, KeyError):
        return ""


def folder_hash(folder: Path) -> str:
    """A digest of the names and contents of all files below a folder, compiled Python left out; "" if unreadable."""
    digest = hashlib.sha256()
    try:
        for path in sorted(_files(folder)):
            digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
            facts = path.stat()
            large = facts.st_size > _READ_WHOLE
            digest.update(f"{facts.st_size} {facts.st_mtime_ns}".encode() if large else path.read_bytes())
            digest.update(b"\0")
    except OSError:
        return ""
    return digest.hexdigest()[:32]


def _files(folder: Path) -> Iterable[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(place, name) for name in names)


@cache
def _own_version() -> str:
    """The version of dsattn with a digest of its sources, which change between versions too."""
    # Not imported: the package imports this module.
    version_of_own = getattr(sys.modules["dsattn"], "__version__", "")
    return f"{version_of_own} {folder_hash(Path(__file__).parents[2])}"


@cache
def _driver() -> str:
    """The GPU driver, "" where there is none that can be named."""
    listing = Path("/proc/driver/nvidia/version")
    try:
        return listing.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError, ValueError):
        # Elsewhere than on Linux, PyTorch knows what the driver was made for.
        found = getattr(torch._C, "_cuda_getDriverVersion", None)
        return "" if found is None or not torch.cuda.is_available() else str(found())
