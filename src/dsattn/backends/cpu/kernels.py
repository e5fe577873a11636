"""The C functions as they are called: tensors in, one block of query rows at a time.

Every call runs on the thread that makes it and lets other Python threads run meanwhile.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsattn.backends.cpu import build

PAD = 16
"""Columns are padded to a multiple of this many, with zeros."""
PANEL = 64
"""Keys that stand side by side in a packed panel."""

# p: an address or None; i: an integer; d: a number; b: a yes or no.
_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double, "b": ctypes.c_int}
_SIGNATURES = {
    "pack_keys": ("scores", "ppiiii"),
    "indexer_scores": ("scores", "pppppp" + "iiiiii" + "db"),
    "topk": ("topk", "piippppiii"),
    "gathered_scores": ("indexer", "ppppippp" + "iiiiii" + "db"),
    "scores_backward": ("indexer", "ppppippp" + "ii" + "ppp" + "iiii" + "db"),
    "attend": ("attention", "pppippppp" + "iiiii" + "d"),
    "attend_backward": ("attention_backward", "pppipp" + "pppppp" + "iiiiii" + "d"),
    "teacher": ("teacher", "pppipppp" + "iiiiii" + "d"),
}
"""Which source has a function, and what it takes."""


def sources(*functions: str) -> set[str]:
    """The sources of some functions."""
    return {_SIGNATURES[name][0] for name in functions}


@cache
def _function(name: str, dtype: torch.dtype, level: str) -> Any:
    source, kinds = _SIGNATURES[name]
    function = getattr(build.library(source, dtype), name)
    function.argtypes, function.restype = [_KINDS[kind] for kind in kinds], ctypes.c_int
    return function


def call(name: str, dtype: torch.dtype, *arguments: Tensor | float | None) -> None:
    """Calls a function of the kernels for `dtype`; tensors are handed over as they lie in memory.

    Raises:
        BackendMissing: its library cannot be built.
        MemoryError: it found no memory for its buffers.
    """
    function = _function(name, dtype, build.level())
    values = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
    if function(*values) != 0:
        raise MemoryError(f"{name}: no memory for the buffers of a block of rows")


def operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as the kernels take it: of their dtype, contiguous, the last axis padded, aligned; x itself where it is so."""
    x = x.detach().to(dtype)
    short = -x.shape[-1] % PAD
    x = F.pad(x, (0, short)) if short else x.contiguous()
    # Two numbers of bf16 are loaded as one word.
    return x if x.data_ptr() % 8 == 0 else x.clone()


@dataclass(frozen=True)
class Keys:
    """The keys of each query row, as all functions take them.

    Attributes:
        ids: int32 [t, k], or None: the keys from `first` on.
        first: int32 [t], or None with ids.
        count: int32 [t].
    """

    ids: Tensor | None
    first: Tensor | None
    count: Tensor

    @staticmethod
    def windows(start: Tensor, end: Tensor) -> Keys:
        """Those from `start` to before `end`."""
        return Keys(None, start.to(torch.int32).contiguous(), (end - start).to(torch.int32).contiguous())

    @staticmethod
    def selected(ids: Tensor, lengths: Tensor) -> Keys:
        """The first `lengths` of each row of `ids`."""
        return Keys(ids.to(torch.int32).contiguous(), None, lengths.to(torch.int32).contiguous())

    def rows(self, begin: int, end: int) -> Keys:
        """Those of some rows, renumbered from 0."""
        parts = [None if x is None else x[begin:end] for x in (self.ids, self.first)]
        return Keys(parts[0], parts[1], self.count[begin:end])

    @property
    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """ids, slots, first, count."""
        slots = 0 if self.ids is None else self.ids.shape[1]
        return self.ids, slots, self.first, self.count
