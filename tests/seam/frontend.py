"""The installed release as the backend and the cases call it: its own wrappers, on CPU tensors."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from packaging.version import Version

from dsattn.backends.cudnn.namespace import Namespace
from seam.emulated import emulator
from seam.facts import Release
from seam.pretend import Gpu


class SeamFrontend:
    """The DSA namespace of the installed release, on a GPU that is not there.

    Args:
        arch: "sm90" or "sm100".
        compiles: whether kernels are also compiled for real; a kernel that the compiler refuses raises.
    """

    def __init__(self, arch: str, *, compiles: bool = False) -> None:
        module = importlib.import_module("cudnn")
        self.version = Version(module.__version__)
        release = Release(self.version.release, arch)
        self.gpu = Gpu(arch, emulator(release), compiles)
        self._dsa = module.DSA

    def __getattr__(self, name: str) -> Callable[..., Any]:
        with self.gpu.present():
            wrapper = getattr(self._dsa, name)

        @functools.wraps(wrapper)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.gpu.present():
                return wrapper(*args, **kwargs)

        return call

    def namespace(self) -> Namespace:
        """What the backend runs on."""
        return Namespace(self, self.version, self.gpu.arch)


def forget() -> None:
    """Empties the release's own caches of compiled kernels and plans, as in a new process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("cudnn.deepseek_sparse_attention"):
            for value in list(vars(module).values()):
                _empty(module.__name__, value)
            for key, value in list(vars(module).items()):
                if "cache" in key.lower() and isinstance(value, dict):
                    value.clear()


def _empty(module: str, function: Any) -> None:
    if callable(function) and getattr(function, "__module__", None) == module and hasattr(function, "__dict__"):
        for key, value in list(vars(function).items()):
            if "cache" in key.lower() and isinstance(value, dict):
                value.clear()
