"""Which keys the simulated kernels show to which rows: segments, default alignment, and masks that leak."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dsattn.backends.cudnn.simulator.state import (
    LAUNCH_ALIGNMENT,
    Arguments,
    require,
    require_aligned,
    require_dtype,
)

# Key columns that the Hopper kernels mask or skip as one.
SM90_TILE = 64
# (query row, head) pairs of one tile of the Hopper score kernel.
SM90_TILE_ROWS = 128


class Span(NamedTuple):
    """One sequence of a call: rows [q0, q1) of the flat queries, [k0, k1) of the flat keys, offset of its first row."""

    q0: int
    q1: int
    k0: int
    k1: int
    offset: int

    @property
    def keys(self) -> int:
        """Number of key rows."""
        return self.k1 - self.k0

    def limits(self, ratio: int) -> Tensor:
        """How many keys each row sees, int64 [q1 - q0]."""
        rows = torch.arange(self.q0, self.q1, device="cpu") - self.q0
        return ((self.offset + rows + 1) // ratio).clamp(0, self.keys)


def is_packed(a: Arguments, kind: type[Exception]) -> bool:
    """Whether the call is packed (THD); `kind` is raised when only one of the two cu_seqlens is given."""
    both = (a.cu_seqlens_q is None) == (a.cu_seqlens_k is None)
    require(both, kind, "THD input requires both cu_seqlens_q and cu_seqlens_k")
    return a.cu_seqlens_q is not None


def checked_cu_seqlens(
    a: Arguments, kind: type[Exception], *dtypes: str, launched: bool = True
) -> tuple[list[int], list[int]]:
    """The two cu_seqlens as lists, after the frontend's checks.

    Args:
        a: the arguments of the call.
        kind: how the release refuses them.
        dtypes: those that it takes, int32 if none is named; others are copied to int32.
        launched: whether the kernel reads them itself.
    """
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        tensor = getattr(a, name)
        require_dtype(kind, name, tensor, *(dtypes or ("int32",)))
        require(tensor.ndim == 1 and tensor.is_contiguous(), kind, f"{name} must be 1D and contiguous")
        if launched and tensor.dtype == torch.int32:
            require_aligned(**{name: tensor})
    same = a.cu_seqlens_q.shape == a.cu_seqlens_k.shape
    require(same, kind, "cu_seqlens_q and cu_seqlens_k must have the same shape")
    return a.cu_seqlens_q.tolist(), a.cu_seqlens_k.tolist()


def checked_offsets(a: Arguments, count: int) -> list[int] | None:
    """The q_causal_offsets as a list, after the frontend's checks; None when the call gives none."""
    offsets = a.q_causal_offsets
    if offsets is None:
        return None
    require_dtype(ValueError, "q_causal_offsets", offsets, "int32")
    fits = offsets.ndim == 1 and offsets.shape[0] == count
    require(fits, ValueError, f"q_causal_offsets must have shape ({count},), got {tuple(offsets.shape)}")
    return offsets.tolist()


def spans(
    a: Arguments, queries: list[int], keys: list[int], ratio: int, *, boundary: int = LAUNCH_ALIGNMENT
) -> list[Span]:
    """The sequences of a call, with the causal offset given or the release's default.

    Args:
        a: the arguments of the call.
        queries: where each sequence begins in the flat query rows, and where the last one ends.
        keys: the same for the key rows.
        ratio: query positions per key.
        boundary: the bytes to which the tensor of offsets must be aligned.
    """
    offsets = checked_offsets(a, len(queries) - 1)
    require_aligned(boundary, q_causal_offsets=a.q_causal_offsets)
    found = []
    for i in range(len(queries) - 1):
        (q0, q1), (k0, k1) = queries[i : i + 2], keys[i : i + 2]
        default = (k1 - k0) * ratio - (q1 - q0) if a.wrapper.alignment == "bottom-right" else 0
        found.append(Span(q0, q1, k0, k1, default if offsets is None else offsets[i]))
    return found


def equal_starts(batch: int, length: int) -> list[int]:
    """Where each of `batch` sequences of the same length begins, and where the last one ends."""
    return [i * length for i in range(batch + 1)]


def longest(starts: list[int]) -> int:
    """The length of the longest of the sequences that begin at `starts`."""
    return max((end - begin for begin, end in pairwise(starts)), default=0)


def visible(span: Span, ratio: int) -> Tensor:
    """The causal mask of one sequence, bool [rows, keys]."""
    return torch.arange(span.keys, device="cpu") < span.limits(ratio)[:, None]


def visible_with_leak(span: Span, ratio: int, heads: int) -> Tensor:
    """The mask that the Hopper score kernel applies, bool [rows, keys].

    A tile holds 128 // heads query rows and walks the key tiles that its last row needs. Only the right-most of them
    (with 16 heads: the two right-most) is masked key by key; the others are taken whole, for every row of the tile.
    """
    rows_per_tile = SM90_TILE_ROWS // heads
    rows = torch.arange(span.q1 - span.q0, device="cpu")
    last = (rows // rows_per_tile + 1) * rows_per_tile - 1
    walked = -(-((span.offset + last + 1) // ratio).clamp(0, span.keys) // SM90_TILE)
    whole = (walked - (2 if heads == 16 else 1)) * SM90_TILE
    return visible(span, ratio) | (torch.arange(span.keys, device="cpu") < whole[:, None])
