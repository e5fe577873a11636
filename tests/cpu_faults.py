"""Native kernels with a fault on purpose."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from dsattn.backends.cpu import attention, indexer, kernels, loss

FUNCTIONS = tuple(kernels._SIGNATURES)


@contextmanager
def broken(name: str, place: int = 0) -> Generator[list[str]]:
    """One number that a kernel writes is wrong in every call: the first that it changes in its `place`-th result.

    Yields what was changed, one entry per call.
    """
    changed: list[str] = []

    def call(function: str, dtype: torch.dtype, *arguments: Tensor | float | None) -> None:
        before = [(x, x.clone()) for x in arguments if isinstance(x, Tensor)] if function == name else []
        kernels.call(function, dtype, *arguments)
        # Bits, since memory that was not written before may be NaN.
        results = [(x, _bits(x) != _bits(old)) for x, old in before]
        written = [(x, where) for x, where in results if where.any()]
        if len(written) > place:
            x, where = written[place]
            spot = tuple(where.nonzero()[0].tolist())
            # An id stays within the keys: others would be read from there.
            x[spot] = x[spot] * 1.5 + 1 if x.is_floating_point() else x[spot] ^ 1
            changed.append(f"{function} {spot}")

    with ExitStack() as stack:
        for module in (attention, indexer, loss):
            stack.enter_context(patch.object(module, "call", call))
        yield changed


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.itemsize == 2 else torch.int32)
