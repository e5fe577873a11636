"""The selecting kernels, emulated. Which of equal scores wins, and the order of slots, is as it happens here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from seam.emulated_scores import NONE, places
from seam.facts import Release, sequences


def top_k(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """IndexerTopKKernelVarlenDecode: the largest of the first columns of each row; a short row gives all of them."""
    k, ties = kernel.top_k, getattr(kernel, "tie_break", 0)
    if len(a.input_values) == 0:
        raise RuntimeError("CUDA error: invalid configuration argument")
    for row in range(a.input_values.shape[0]):
        length = int(a.seqlen[row // kernel.next_n]) - kernel.next_n + row % kernel.next_n + 1
        values = a.input_values[row, :length]
        ids = torch.full((k,), -1, dtype=torch.int64)
        if length <= k:
            ids[: max(length, 0)] = torch.arange(max(length, 0))
        else:
            keys = values if ties != 2 else values.flip(0)
            found = keys.sort(descending=True, stable=True).indices[:k]
            ids = found if ties != 2 else length - 1 - found
        a.output_indices[row] = ids.int()
        if a.output_values is not None:
            a.output_values[row] = torch.where(ids >= 0, a.input_values[row][ids.clamp(min=0)], NONE)


def local_to_global(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """LocalToGlobalTopK: adds where the keys of the row's sequence begin."""
    packed = a.mCuSeqlensQ is not None
    for row in range(a.mLocal.shape[0]):
        begin = row * a.seqlen_k
        if packed:
            begin = int(a.mCuSeqlensK[int((a.mCuSeqlensQ[1:-1] <= row).sum())])
        a.mGlobal[row] = torch.where(a.mLocal[row] >= 0, a.mLocal[row] + begin, -1).int()


def compactify(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """CompactifyKernel: ids that are not negative come first."""
    for row in range(a.rows):
        ids = a.mIn[row]
        kept = ids[ids >= 0]
        a.mOut[row] = -1
        a.mOut[row, : len(kept)] = kept
        a.mLen[row] = len(kept)


def compressed_top_k(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """CompressTopkStage2: the largest candidates of each row, local ids."""
    k, ratio, packed = a.mIdx.shape[-1], kernel.ratio, a.mCuSeqlensQ is not None
    # Packed tables have one more dimension in the middle.
    ids, logits = (x[:, 0] if packed else x for x in (a.mIdx, a.mVal))
    softmax = a.mSoftmax[:, 0] if packed and a.mSoftmax is not None else a.mSoftmax
    keys = torch.empty(ids.shape[0], a.seqlen_k, 0)
    launch = SimpleNamespace(**vars(a), max_seqlen_q=a.seqlen_q)
    for one in sequences(release, launch, ids, keys, ratio):
        for row, place in enumerate(places(a.mCand, a, one, ratio)):
            found = place[: int(one.limits[row])].sort(descending=True, stable=True)
            slots = min(k, len(found.values))
            ids[one.rows][row], logits[one.rows][row] = -1, NONE
            ids[one.rows][row, :slots], logits[one.rows][row, :slots] = (
                found.indices[:slots].int(),
                found.values[:slots],
            )
            if softmax is not None:
                softmax[one.rows][row] = 0.0
                softmax[one.rows][row, :slots] = found.values[:slots].softmax(0)
