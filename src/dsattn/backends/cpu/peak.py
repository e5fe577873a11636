"""What the matrix units of one core can do, as the measure of the kernels' speed."""

from __future__ import annotations

import ctypes
import time

import torch

from dsattn.backends.cpu.build import dtype_for, library

_ROUNDS = 4_000_000
_REPEATS = 5


def matrix_peak(dtype: torch.dtype) -> float:
    """Flop/s of one thread in products of registers, the best of a few runs; called on several threads, of each.

    Args:
        dtype: bf16, fp16 or fp32; what the kernels compute in for it is measured.

    Raises:
        BackendMissing: no compiler, or a build that fails.
    """
    compute = dtype_for(dtype)
    function = library("peak", compute).peak
    function.argtypes, function.restype = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_double
    # Zeros: sums that grow, or shrink, would leave the range in which all CPUs are equally fast.
    factors, result = torch.zeros(64, device="cpu"), torch.zeros(16 * 64, device="cpu")
    best = 0.0
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        flops = function(_ROUNDS, factors.data_ptr(), result.data_ptr())
        best = max(best, flops / (time.perf_counter() - begin))
    return best
