"""A GPU that is not there: CPU tensors that say they are on one, memory that nothing was written to, launches.

The wrappers of an installed frontend run unchanged inside `Gpu.present()`. What they hand to `cute.compile` is kept,
and what they launch is emulated (`emulated`) from the arguments of that launch.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from seam import gmem

CAPABILITIES = {"sm90": (9, 0), "sm100": (10, 0)}
PROCESSORS = {"sm90": 132, "sm100": 148}
# What memory holds to which nothing was written: NaN, and ids that are nowhere.
GARBAGE = {torch.int32: 0x7FF00000, torch.int64: 0x7FF0000000000000, torch.uint8: 0xFF}
Emulate = Callable[[Any, SimpleNamespace], None]


@dataclass
class Compiled:
    """One kernel that a wrapper compiled: its class, how long it took, and why the compiler refused it."""

    kernel: str
    seconds: float = 0.0
    refused: str | None = None


@dataclass
class Gpu:
    """A GPU of one architecture.

    Attributes:
        arch: "sm90" or "sm100".
        emulate: does what a kernel does, from its object and the arguments of its launch by name.
        compiles: whether kernels are also compiled for real.
        kernels: what was compiled, or would have been.
        launches: the classes of the kernels that were launched, in order.
    """

    arch: str
    emulate: Emulate
    compiles: bool = False
    kernels: list[Compiled] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)

    @contextmanager
    def present(self) -> Generator[None]:
        """Everything inside sees the GPU."""
        cute = importlib.import_module("cutlass.cute")
        driver, runtime = (importlib.import_module(f"cuda.bindings.{name}") for name in ("driver", "runtime"))
        with ExitStack() as stack:
            for name, value in self._cuda().items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, "range", _Range))
            stack.enter_context(mock.patch.object(Tensor, "record_stream"))
            stack.enter_context(mock.patch.object(driver, "cuStreamGetDevice", _device_of_stream(driver)))
            stack.enter_context(mock.patch.object(cute, "compile", self._compile(cute.compile)))
            stack.enter_context(mock.patch.object(runtime, "cudaMemsetAsync", _fill(runtime)))
            if self.compiles:
                stack.enter_context(gmem.tensors_on_the_gpu())
            stack.enter_context(_OnGpu())
            yield

    def _cuda(self) -> dict[str, Any]:
        stream = SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0), device_index=0, device_type=1)
        major, minor = CAPABILITIES[self.arch]
        properties = SimpleNamespace(multi_processor_count=PROCESSORS[self.arch], major=major, minor=minor)
        return {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_capability": lambda *_: (major, minor),
            "get_device_properties": lambda *_: properties,
            "current_device": lambda: 0,
            "current_stream": lambda *_: stream,
            "default_stream": lambda *_: stream,
            "get_stream_from_external": lambda *_: stream,
            "ExternalStream": lambda *_, **__: stream,
            "is_current_stream_capturing": lambda: False,
            "synchronize": lambda *_: None,
            "device": lambda *_: nullcontext(),
            "stream": lambda *_: nullcontext(),
        }

    def _compile(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def compile(kernel: Any, *args: Any, **kwargs: Any) -> _Launcher:
            name = getattr(kernel, "__name__", type(kernel).__name__)
            found = Compiled(name)
            self.kernels.append(found)
            if self.compiles:
                begin = time.perf_counter()
                try:
                    real(kernel, *args, **kwargs)
                except Exception as error:
                    found.refused = f"{type(error).__name__}: {error}"
                    raise
                finally:
                    found.seconds = time.perf_counter() - begin
            kwargs.pop("options", None)
            return _Launcher(self, kernel, name, args, kwargs)

        return compile


class _Launcher:
    """A compiled kernel: refuses what its launch would refuse, and does what the kernel does."""

    def __init__(self, gpu: Gpu, kernel: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.gpu, self.kernel, self.name = gpu, kernel, name
        signature = inspect.signature(kernel)
        compiled = signature.bind(*args, **kwargs).arguments
        # Constants are compiled in, and so is a stream that is looked up at the launch.
        self.compiled = {
            key: value
            for key, value in compiled.items()
            if "Constexpr" not in str(signature.parameters[key].annotation)
            and not getattr(value, "use_tvm_ffi_env_stream", False)
        }

    def __call__(self, *args: Any) -> None:
        given = dict(zip(self.compiled, args, strict=False))
        for key, value in given.items():
            if isinstance(value, Tensor):
                _refuse(key, value, self.compiled[key])
        self.gpu.launches.append(self.name)
        plain = {key: getattr(value, "value", value) for key, value in given.items()}
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self.gpu.emulate(self.kernel, SimpleNamespace(**plain))


def _refuse(name: str, tensor: Tensor, compiled: Any) -> None:
    """What the launch checks of a tensor: its first byte, and that it is compact where it was compiled so."""
    if compiled is None:
        raise ValueError(f"Mismatched type on argument {name}: compiled for None")
    boundary = getattr(compiled, "_assumed_align", None) or 1
    if tensor.numel() and tensor.data_ptr() % boundary:
        raise ValueError(f"Misaligned Tensor data on argument {name}: expected {boundary} bytes")
    if type(compiled).__name__ == "_FakeTensor" and not tensor.is_contiguous():
        raise ValueError(f"Mismatched strides on argument {name}: expected a compact tensor")


class _Range:
    """A named range of a profiler."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _device_of_stream(driver: Any) -> Callable[..., Any]:
    return lambda *_: (driver.CUresult.CUDA_SUCCESS, 0)


def _fill(runtime: Any) -> Callable[..., Any]:
    """cudaMemsetAsync, which some releases call beside torch."""

    def fill(place: int, value: int, count: int, *_: Any) -> tuple[Any]:
        ctypes.memset(place, value, count)
        return (runtime.cudaError_t.cudaSuccess,)

    return fill


class _OnGpu(TorchFunctionMode):
    """Tensors that say they are on the GPU; the new ones hold garbage until something is written."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cuda", 0)
        if func is torch.Tensor.get_device:
            return 0
        found = func(*map(_on_cpu, args), **{key: _on_cpu(value) for key, value in (kwargs or {}).items()})
        if func in {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}:
            found.fill_(GARBAGE.get(found.dtype, float("nan")))
        return found


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value
