"""What this machine's matrix units can do at most, measured now."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from dsattn.backends.cpu.peak import matrix_peak as of_one_thread
from dsattn.errors import BackendMissing

REGISTERS, PRODUCTS = "registers", "torch.mm in fp32"
"""Where a figure is from: products that stay in registers, or, without a compiler, the fastest product of matrices."""
_SHAPES = ((1024, 1024, 1024), (2048, 2048, 1024), (512, 2048, 512))
_SECONDS = 0.2


def matrix_peak(dtype: torch.dtype, threads: int) -> tuple[float, str]:
    """flop/s of all threads together in products of a dtype that are summed in fp32, and where the figure is from.

    Args:
        dtype: of the factors.
        threads: how many threads compute at once.
    """
    try:
        # Built before threads ask for it at once.
        of_one_thread(dtype)
        # It runs outside of Python's lock.
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(of_one_thread, [dtype] * threads)), REGISTERS
    except BackendMissing:
        return _products(threads), PRODUCTS


def _products(threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return max(_product(*shape) for shape in _SHAPES)
    finally:
        torch.set_num_threads(before)


def _product(m: int, n: int, k: int) -> float:
    """The best flop/s of a product of matrices."""
    a, b = torch.randn(m, k, device="cpu"), torch.randn(k, n, device="cpu")
    out = torch.mm(a, b)
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < _SECONDS:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * m * n * k / best
