"""The score kernels, emulated."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from seam.facts import Release, Sequence, sequences

NONE = float("-inf")
EPSILON = 1e-10
LOG2_E = 1.4426950408889634


def head_sum(q: Tensor, k: Tensor, w: Tensor, scale: float) -> Tensor:
    """scale * sum_h w_h relu(q_h . k) for q [r, h, d], w [r, h] and k [n, d] or [r, n, d], float64 [r, n]."""
    dots = q.double() @ k.double().mT
    return scale * (torch.where(dots > 0, dots, 0.0) * w.double()[..., None]).sum(1)


def mass(q: Tensor, k: Tensor, lse: Tensor, scale: float) -> Tensor:
    """sum_h exp(scale * q_h . k - lse_h), shapes as `head_sum`."""
    return torch.exp(scale * (q.double() @ k.double().mT) - lse.double()[..., None]).sum(1)


def _natural(release: Release, per_head: Tensor) -> Tensor:
    """The log-sum-exp given to Blackwell's kernels; up to 1.25 their wrapper negates it and scales it to base 2."""
    return per_head if release.since(26) else -per_head / LOG2_E


def _one_head(k: Tensor) -> Tensor:
    """Keys without their dimension of one head."""
    return k[..., 0, :]


def forward(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """IndexerForward: writes the scores that it does not mask, and nothing else."""
    _forward(release, kernel, a, a.mW, a.sm_scale, getattr(a, "mLse", None))


def unified(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """IndexerScoreUnified: the forward's scores, the recomputation's and their log-sum-exp, or a list of candidates."""
    if kernel.is_compressed_logits:
        _candidates(release, kernel, a)
        return
    _forward(release, kernel, a, a.mPerHead, a.softmax_scale, a.mDenom if kernel.compute_lse else None)


def _forward(release: Release, kernel: Any, a: SimpleNamespace, w: Tensor, scale: float, lse: Tensor | None) -> None:
    keys = _one_head(a.mK)
    for one in sequences(release, a, a.mQ, keys, kernel.ratio):
        scores = head_sum(a.mQ[one.rows], keys[one.keys], w[one.rows], scale).float()
        shown = _shown_sm90(kernel, one) if release.arch == "sm90" else one.shown
        out = a.mOut[one.rows]
        width = min(one.count, out.shape[1])
        out[:, :width] = scores.masked_fill(~shown, NONE)[:, :width]
        if lse is not None:
            lse[one.rows] = scores.masked_fill(~shown, NONE).logsumexp(1)


def _shown_sm90(kernel: Any, one: Sequence) -> Tensor:
    """What the tiles of Hopper's forward show: keys are masked in the right-most blocks of a tile only."""
    shown = one.shown
    tokens = kernel.q_tokens_per_tile
    masked = 2 if getattr(kernel, "mask_two_rightmost_nblocks", False) else 1
    for begin in range(0, len(one.limits), tokens):
        last = min(max((one.offset + begin + tokens) // kernel.ratio, 0), one.count)
        shown[begin : begin + tokens, : max(0, -(-last // 64) - masked) * 64] = True
    return shown


def _candidates(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """The visible scores of every row, one row after the other, in one buffer."""
    keys = _one_head(a.mK)
    for one in sequences(release, a, a.mQ, keys, kernel.ratio):
        scores = head_sum(a.mQ[one.rows], keys[one.keys], a.mPerHead[one.rows], a.softmax_scale).float()
        for row, place in enumerate(places(a.mOut, a, one, kernel.ratio)):
            place[: int(one.limits[row])] = scores[row, : int(one.limits[row])]
        if kernel.compute_lse:
            a.mDenom[one.rows] = scores.masked_fill(~one.shown, NONE).logsumexp(1)


def places(buffer: Tensor, a: SimpleNamespace, one: Sequence, ratio: int) -> Iterator[Tensor]:
    """Where the candidates of each row of a sequence stand: the row and all that follows."""
    counts = ((one.offset + torch.arange(len(one.limits)) + 1) // ratio).tolist()
    if buffer.ndim == 2:
        flat, at = buffer[one.number], 0
    elif a.mCandBatchOffsets is not None:
        flat, at = buffer, int(a.mCandBatchOffsets[one.number])
    else:
        flat, at = buffer, one.number * sum(counts)
    for count in counts:
        yield flat[at:]
        at += count


def dense_sm90(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """DenseScoreRecomputeSm90: walks the blocks of 64 keys that a row sees some of."""
    keys, aux = _one_head(a.mKV), a.weights_or_lse.transpose(1, 2)
    product = head_sum if kernel.is_index_scores else mass
    for one in sequences(release, a, a.mQ, keys, kernel.ratio):
        values = product(a.mQ[one.rows], keys[one.keys], aux[one.rows], kernel.softmax_scale).float()
        walked = torch.arange(one.count) < (-(-one.limits // 64) * 64)[:, None]
        filler = torch.full_like(values, NONE if release.since(30) else 0.0)
        a.mOut[one.rows] = torch.where(one.shown, values, torch.where(walked, filler, a.mOut[one.rows]))
        a.mL1NormDenom[one.rows] = _denominator(values, one, kernel.is_index_scores)


def _denominator(values: Tensor, one: Sequence, indexer: bool) -> Tensor:
    if indexer:
        return values.masked_fill(~one.shown, NONE).logsumexp(1)
    return values.masked_fill(~one.shown, 0.0).sum(1)


def dense_sm100(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """DenseScoreRecomputeSm100, up to 1.25: all blocks of 128 keys of a sequence, 0 where they are masked."""
    keys, indexer = _one_head(a.mK), kernel.score_type == "indexer"
    product = head_sum if indexer else mass
    aux = a.mPerHead if indexer else _natural(release, a.mPerHead)
    for one in sequences(release, a, a.mQ, keys, kernel.ratio):
        values = product(a.mQ[one.rows], keys[one.keys], aux[one.rows], a.softmax_scale).float()
        out = a.mOut[one.rows]
        if not release.since(26):
            out[:, : -(-one.count // 128) * 128] = 0.0
        elif not indexer or a.mCuSeqlensQ is None:
            # Packed indexer scores count on what was filled in before the launch.
            out.fill_(NONE)
        width = min(one.count, out.shape[1])
        out[:, :width] = torch.where(one.shown[:, :width], values[:, :width], out[:, :width])
        denom = _denominator(values, one, indexer)
        if indexer and not release.since(26):
            denom = torch.where(one.limits == 0, torch.nan, denom)
        a.mDenom[one.rows] = denom


def sparse_sm90(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """SparseScoreRecomputeSm90: a key that is nowhere is zeros; slots past the last whole 128 stay as they were."""
    whole = kernel.topk_max // 128 * 128
    if whole == 0:
        # So the compiler says.
        raise ValueError("Expected size in shape to be strictly positive, but got 0")
    keys, aux = _one_head(a.mKV), a.weights_or_lse.transpose(1, 2)
    slots = torch.arange(whole)
    for b in range(a.mQ.shape[0]):
        ids = a.mTopkIdxs[b, :, :whole].long()
        local = ids - b * keys.shape[1] if kernel.topk_indices_global else ids
        there = (local >= 0) & (local < keys.shape[1])
        rows = torch.where(there[..., None], keys[b][local.clamp(0, keys.shape[1] - 1)].float(), 0.0)
        counts = slots < a.mTopkLength[b, :, None] if kernel.has_topk_length else ids >= 0
        if kernel.is_index_scores:
            values = head_sum(a.mQ[b], rows, aux[b], kernel.softmax_scale).masked_fill(~counts, NONE)
            peak = values.amax(1, keepdim=True)
            values = torch.where(peak == NONE, 0.0, torch.exp(values - peak))
        else:
            values = mass(a.mQ[b], rows, aux[b], kernel.softmax_scale).masked_fill(~counts, 0.0)
        a.mOut[b, :, :whole] = (values / (values.sum(1, keepdim=True) + EPSILON)).float()


def sparse_sm100(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """SparseScoreRecomputeSm100: a key that is nowhere is not loaded, so what takes part is not defined."""
    lengths = a.mTopkLength if kernel.have_topk_length else None
    slots, keys = torch.arange(a.mTopkIdx.shape[2]), a.mK
    for b in range(a.mQ.shape[0]):
        ids = a.mTopkIdx[b].long()
        local = ids - b * keys.shape[1] if kernel.topk_indices_global else ids
        there = (local >= 0) & (local < keys.shape[1])
        rows = torch.where(there[..., None], keys[b][local.clamp(0, keys.shape[1] - 1)].float(), torch.nan)
        counts = ids >= 0 if lengths is None else slots < lengths[b, :, None]
        if kernel.score_type == "indexer":
            values = _relu_with_nan(a.mQ[b], rows, a.mPerHead[b], a.softmax_scale).masked_fill(~counts, NONE)
            peak = values.amax(1, keepdim=True)
            values = torch.where(peak == NONE, 0.0, torch.exp(values - peak))
            total = values.sum(1, keepdim=True)
            a.mOut[b] = torch.where(peak == NONE, 0.0, values / total).float()
        else:
            values = mass(a.mQ[b], rows, _natural(release, a.mPerHead[b]), a.softmax_scale).masked_fill(~counts, 0.0)
            total = values.sum(1, keepdim=True)
            # A comparison: what is not defined is 0, too.
            a.mOut[b] = torch.where(total > EPSILON, values / total, 0.0).float()


def _relu_with_nan(q: Tensor, k: Tensor, w: Tensor, scale: float) -> Tensor:
    dots = q.double() @ k.double().mT
    return scale * (torch.where(dots <= 0, 0.0, dots) * w.double()[..., None]).sum(1)
