"""A process that has Megatron loaded: what its import changes, and the stand-ins it needs, end with it."""

from __future__ import annotations

import importlib.util
import os
import sys
import typing
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch

from dsattn.errors import BackendMissing
from dsattn.integrations.megatron_module import HELD, Kernels, find

P = ParamSpec("P")
T = TypeVar("T")


class Host:
    """A process of its own in which functions are called with Megatron's kernels; a context manager.

    Args:
        folder: of an unpacked megatron-core; None for the installed one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def call(self, function: Callable[Concatenate[Kernels, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function(kernels, *args, **kwargs)` returns there; its errors are raised here.

        Args:
            function: a function of a module.
            args: what it is given, sent by pickle.
            kwargs: what it is given by name.

        Raises:
            BackendMissing: Megatron cannot be imported, or the process died.
        """
        try:
            return self._pool.submit(_call, self._folder, function, args, kwargs).result()
        except BrokenProcessPool as error:
            raise BackendMissing("Megatron", given="the process that had it loaded died") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


def load(folder: Path | None) -> Kernels:
    """Megatron's kernels, imported into this process, which should be there for nothing else.

    Python 3.11 gets `typing.override`, and where there is no triton, modules that only have that name take its place
    during the import. Megatron's warnings of packages that it would like to have are not shown.

    Args:
        folder: of an unpacked megatron-core; None for the installed one.

    Raises:
        BackendMissing: it cannot be imported.
        ContractDrift: its kernels are not to be found.
    """
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
    # Else it runs git to find out its version.
    os.environ.setdefault("NO_VCS_VERSION", "1")
    with warnings.catch_warnings(), _triton():
        warnings.simplefilter("ignore")
        return find()


def put(kernels: Kernels, frontend: Any, arch: str | None = None) -> None:
    """Gives Megatron a frontend to hold.

    Args:
        kernels: Megatron's functions.
        frontend: `cudnn.DSA`, or a stand-in.
        arch: "sm90" or "sm100" for a stand-in on the CPU: Megatron's questions to the device are answered so.
    """
    kernels.names[HELD] = frontend
    if arch is not None:
        kernels.names["_current_sm"] = lambda: (10, 0) if arch == "sm100" else (9, 0)
        torch.cuda.nvtx.range = lambda *_, **__: nullcontext()  # type: ignore[assignment]


_LOADED: dict[Path | None, Kernels] = {}


def _call(folder: Path | None, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    if folder not in _LOADED:
        _LOADED[folder] = load(folder)
    return function(_LOADED[folder], *args, **kwargs)


class _Anything(ModuleType):
    """A module that has every name; a decorator of it leaves its function alone."""

    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if decorates else lambda function: function


@contextmanager
def _triton() -> Generator[None]:
    """Triton while something is imported that only decorates functions with it."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    names, compiles = ("triton", "triton.language"), torch.compile
    for name in names:
        module = _Anything(name)
        module.__path__ = []
        sys.modules[name] = module
    # It would look for the real one.
    torch.compile = lambda model=None, **_: model if model is not None else lambda function: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiles  # type: ignore[assignment]
        for name in names:
            del sys.modules[name]
