"""Tensors that the compiler takes for memory of a GPU, while they lie on the CPU."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

KDL_CUDA = 2
# Where the device stands in what a capsule of DLPack points to, behind the data pointer; a versioned one has a header.
_OFFSETS = {b"dltensor": 8, b"dltensor_versioned": 40}


@contextmanager
def tensors_on_the_gpu() -> Generator[None]:
    """Inside, cute's tensors from DLPack are in global memory."""
    tensor = importlib.import_module("cutlass.cute.runtime")._Tensor
    load = tensor.load_dltensor

    def load_dltensor(self: Any) -> None:
        _move(self._dlpack_data)
        load(self)
        held = getattr(self, "_tvm_ffi_tensor", None)
        if held is not None:
            # Asked for its device when the launch's checks are compiled; the memory must stay.
            device = SimpleNamespace(type="cuda", index=0)
            self._tvm_ffi_tensor = SimpleNamespace(device=device, dtype=held.dtype, held=held)

    with mock.patch.object(tensor, "load_dltensor", load_dltensor):
        yield


def _move(capsule: Any) -> None:
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = api.PyCapsule_GetName(capsule)
    if name in _OFFSETS:
        place = api.PyCapsule_GetPointer(capsule, name) + _OFFSETS[name]
        ctypes.c_int32.from_address(place).value = KDL_CUDA
