"""The release whose kernels are emulated, and the sequences of a launch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor


class Release(NamedTuple):
    """A release on one architecture."""

    version: tuple[int, ...]
    arch: str

    def since(self, minor: int) -> bool:
        """Whether this is release 1.`minor` or later."""
        return self.version >= (1, minor)


class Sequence(NamedTuple):
    """One sequence of a launch.

    Attributes:
        number: which one.
        rows: its query rows, an index of the first dimensions of per-row tensors.
        keys: its key rows, likewise.
        offset: causal offset of its first row.
        limits: how many keys each of its rows sees.
        count: how many keys it has.
    """

    number: int
    rows: tuple[int | slice, ...]
    keys: tuple[int | slice, ...]
    offset: int
    limits: Tensor
    count: int

    @property
    def shown(self) -> Tensor:
        """Which keys each row sees, bool [rows, keys]."""
        return torch.arange(self.count) < self.limits[:, None]


def sequences(release: Release, a: SimpleNamespace, q: Tensor, k: Tensor, ratio: int) -> Iterator[Sequence]:
    """The sequences of a launch over q and k, packed where it has cu_seqlens, with the kernels' causal limits.

    Up to 1.25 the kernels align the last row with the last key; from 1.26 on they add the offset that they are given,
    or none.
    """
    packed = getattr(a, "mCuSeqlensQ", None) is not None
    count = len(a.mCuSeqlensQ) - 1 if packed else q.shape[0]
    for i in range(count):
        if packed:
            (q0, q1), (k0, k1) = a.mCuSeqlensQ[i : i + 2].tolist(), a.mCuSeqlensK[i : i + 2].tolist()
            # The grid has so many rows.
            rows: tuple[int | slice, ...] = (slice(q0, q0 + min(q1 - q0, a.max_seqlen_q)),)
            keys: tuple[int | slice, ...] = (slice(k0, k1),)
        else:
            q0, q1, k0, k1, rows, keys = 0, q.shape[1], 0, k.shape[1], (i,), (i,)
        given = getattr(a, "mQCausalOffsets", None)
        first = 0 if given is None else int(given[i])
        if not release.since(26):
            first = (k1 - k0) * ratio - (q1 - q0)
        limits = (first + torch.arange(q[rows].shape[0]) + 1) // ratio
        yield Sequence(i, rows, keys, first, limits.clamp(0, k1 - k0), k1 - k0)
