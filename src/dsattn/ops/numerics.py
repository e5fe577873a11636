"""Arithmetic that every operator shares: accumulation dtype, exact products, products that contain NaN and inf."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_LOCK = threading.Lock()
_SAVED: dict[str, str] = {}
_DEPTH = 0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of products and sums over inputs of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unscaled_gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a loss gradient that an upstream gradient is still to multiply.

    fp32 for fp16: a loss scaler's factor would come too late for what fp16 has rounded to 0.
    """
    return torch.float32 if dtype == torch.float16 else dtype


@contextmanager
def exact_products(device: torch.device) -> Generator[None]:
    """Products in full precision: autocast is off and fp32 products run neither in TF32 nor in bf16 parts.

    The switches of PyTorch are global to the process, so the outermost block saves them and the last one out puts
    them back; a backward in another thread may overlap with a forward.
    """
    global _DEPTH
    with torch.autocast(device.type, enabled=False):
        with _LOCK:
            if _DEPTH == 0:
                _make_exact()
            _DEPTH += 1
        try:
            yield
        finally:
            with _LOCK:
                _DEPTH -= 1
                if _DEPTH == 0:
                    _put_back()


def _switches() -> dict[str, Any]:
    return {"cuda": torch.backends.cuda.matmul, "mkldnn": torch.backends.mkldnn.matmul}  # pyrefly: ignore[missing-attribute]


def _make_exact() -> None:
    for name, switch in _switches().items():
        found = switch.fp32_precision
        if found in ("ieee", "none"):
            continue
        # A switch that follows a more general one shows that one's value: it has to go on following.
        switch.fp32_precision = "none"
        _SAVED[name] = "none" if switch.fp32_precision == found else found
        switch.fp32_precision = "ieee"


def _put_back() -> None:
    for name, switch in _switches().items():
        if name in _SAVED:
            switch.fp32_precision = _SAVED.pop(name)


def _after_fork() -> None:
    """A child of a process that was inside a block is outside of it; its lock may have been taken for ever."""
    global _DEPTH, _LOCK
    _LOCK, _DEPTH = threading.Lock(), 0
    _put_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def split_finite(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x with NaN and inf replaced by 0, and a bool mask of their places (None if there are none).

    A product whose left factor is 0 where a row sees nothing still gives 0 * NaN = NaN: one bad key would spoil every
    row that shares its block. So products run over the finite part, and `spread_bad` puts NaN where it belongs.
    """
    # A sum with a NaN or inf in it is not finite. On an accelerator, looking at it would synchronise.
    if x.device.type == "cpu" and math.isfinite(x.sum().item()):
        return x, None
    finite = torch.isfinite(x)
    return torch.where(finite, x, 0), ~finite


def spread_bad(product: Tensor, seen: Tensor, bad: Tensor | None) -> Tensor:
    """`product` [m, ..., c] with NaN in row i, column c wherever some j has seen[i, j] and bad[j, c]; in place.

    Args:
        product: what came of the finite part.
        seen: bool [m, n]: row i of the product took part in row j of the right factor.
        bad: bool [n, c], the mask of `split_finite`; None leaves the product as it is.
    """
    if bad is None:
        return product
    spoiled = (seen.to(product.dtype) @ bad.to(product.dtype)) > 0
    return product.masked_fill_(spoiled.view(spoiled.shape[0], *(1,) * (product.ndim - 2), -1), torch.nan)
