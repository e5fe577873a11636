"""The backends in the order in which `backend="auto"` asks them."""

from __future__ import annotations

from dsattn.backends.base import Backend
from dsattn.backends.cpu.backend import CpuBackend
from dsattn.backends.cudnn.backend import CudnnBackend
from dsattn.backends.dispatch import choose, find, name_of
from dsattn.backends.flash_mla import FlashMLABackend
from dsattn.backends.torch_backend import TorchBackend

_ORDER: tuple[Backend, ...] = (CudnnBackend(), FlashMLABackend(), CpuBackend(), TorchBackend())


def ordered() -> tuple[Backend, ...]:
    """Every backend that dsattn knows, best first, usable here or not."""
    return _ORDER


def backends() -> tuple[str, ...]:
    """The names of the backends that are usable on this machine, best first."""
    return tuple(backend.name for backend in _ORDER if backend.missing() is None)


__all__ = [
    "Backend",
    "CpuBackend",
    "CudnnBackend",
    "FlashMLABackend",
    "TorchBackend",
    "backends",
    "choose",
    "find",
    "name_of",
    "ordered",
]
