"""The sparse attention kernels, emulated: Hopper's backward in three launches, Blackwell's in one, and its forward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from seam.facts import Release

LOG2_E = 1.4426950408889634
VALUES = 512


def before_sm90(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """Preprocess: sum of out * dout, log-sum-exp in base 2 with the sink, and the sink's gradient."""
    rows = a.mO.shape[1]
    dots = (a.mO.double() * a.mdO.double()).sum(-1)
    lse = a.mLSE.double()
    # In base 2 -inf becomes 0; the sink's gradient does not take part in that.
    total = _with_sink(release, torch.where(lse == -torch.inf, 0.0, lse), a.mAttnSink.double())[0]
    p_sink = _with_sink(release, lse, a.mAttnSink.double())[1]
    a.mdPsum[:, :rows], a.mLSElog2[:, :rows] = dots.float(), (total * LOG2_E).float()
    a.mdPsum[:, rows:], a.mLSElog2[:, rows:] = 0.0, torch.inf
    if a.mdSink is not None:
        a.mdSink += -(p_sink * dots).sum((0, 1)).float()


def _with_sink(release: Release, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp with the sink in it, and the sink's probability; up to 1.28 infinities are not cared for."""
    if release.since(29):
        p_sink = torch.where(lse == sink, 0.5, torch.sigmoid(sink - lse))
        return torch.logaddexp(lse, sink.expand_as(lse)), torch.where(lse == torch.inf, 0.0, p_sink)
    peak = torch.maximum(lse, sink)
    total = peak + torch.log(torch.exp(lse - peak) + torch.exp(sink - peak))
    empty = lse == torch.inf
    return torch.where(empty, torch.inf, total), torch.where(empty, 0.0, torch.exp(sink - total))


def backward_sm90(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """Hopper's main kernel: dq, and the sum of dkv, which it is given zeroed."""
    q, kv, d_out = a.mQ[0].double(), a.mKV[0, :, 0].double(), a.mdO[0].double()
    ids = a.mTopkIdxs[0].long()
    lengths = a.mTopkLength[0] if kernel.have_topk_length else None
    if not release.since(27) and q.shape[1] < 64:
        # A tile of 64 rows takes the slots of its first query.
        first = torch.arange(len(q)) * q.shape[1] // 64 * 64 // q.shape[1]
        ids, lengths = ids[first], None if lengths is None else lengths[first]
    counts = _counted(release, ids, lengths, len(kv))
    total, dots = a.mLSE[0, : len(q)].double() / LOG2_E, a.mdPsum[0, : len(q)].double()
    d_q, d_kv = _gradients(q, kv, d_out, ids, counts, total, dots, a.softmax_scale)
    a.mdQ[0] = d_q.to(a.mdQ.dtype)
    width = kv.shape[1]
    a.mdKV[0, 0].view(-1, a.mdKV.shape[2] // (-(-len(kv) // 64) * 64))[: len(kv), :width] += d_kv.float()


def after_sm90(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """Postprocess: the sum of dkv in the dtype of the keys."""
    rows, width = a.mdKV.shape[1], a.mdKV.shape[3]
    table = a.mdKVaccum[0, 0].view(-1, a.mdKVaccum.shape[2] // (-(-rows // 64) * 64))
    a.mdKV[0, :, 0] = table[:rows, :width].to(a.mdKV.dtype)


def backward_sm100(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """Blackwell's kernels: dq, dkv and d_sink in one launch."""
    q, kv, d_out = a.mQ.double(), a.mKV.double(), a.mdO.double()
    dots, lse = (a.mOut.double() * d_out).sum(-1), a.mLSE.double()
    total, p_sink = _with_sink(release, lse, a.mAttnSink.double())
    if not release.since(27) and kv.shape[1] != VALUES:
        total, p_sink = lse, torch.zeros_like(p_sink)
    ids = a.mTopkIdxs.long()
    counts = _counted(release, ids, a.mTopkLength, len(kv))
    d_q, d_kv = _gradients(q, kv, d_out, ids, counts, total, dots, a.softmax_scale)
    a.mdQ.copy_(d_q)
    a.mdKV.copy_(d_kv)
    if "TwoCTA" in type(kernel).__name__ or "Deterministic" in type(kernel).__name__:
        # Others add to what the wrapper has set to 0.
        a.mdSink.zero_()
    a.mdSink += -(p_sink * dots).sum(0).float()


def _counted(release: Release, ids: Tensor, lengths: Tensor | None, keys: int) -> Tensor:
    """Which slots have a key. What 1.28 and older read past the keys is not emulated: cases have no such ids there."""
    counts = (ids >= 0) & (ids < keys)
    if lengths is not None:
        counts &= torch.arange(ids.shape[1]) < lengths[:, None]
    return counts


def _gradients(
    q: Tensor,
    kv: Tensor,
    d_out: Tensor,
    ids: Tensor,
    counts: Tensor,
    total: Tensor,
    dots: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    d_q, d_kv = torch.zeros_like(q), torch.zeros_like(kv)
    for row in range(len(q)):
        at = ids[row][counts[row]]
        keys = kv[at]
        p = torch.exp(scale * (q[row] @ keys.T) - total[row][:, None])
        d_logits = scale * p * (d_out[row] @ keys[:, :VALUES].T - dots[row][:, None])
        d_q[row] = d_logits @ keys
        d_keys = d_logits.T @ q[row]
        d_keys[:, :VALUES] += p.T @ d_out[row]
        d_kv.index_add_(0, at, d_keys)
    return d_q, d_kv


def forward(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """Blackwell's forward: out with the sink, natural log-sum-exp without it, +inf where a row has no key."""
    q, kv, ids = a.q.double(), a.kv.double(), a.indices.long()
    counts = _counted(release, ids, a.topk_length, len(kv))
    for row in range(len(q)):
        used = counts[row]
        keys = kv[ids[row].clamp(0, len(kv) - 1)]
        logits = (a.softmax_scale * (q[row] @ keys.T)).masked_fill(~used, -torch.inf)
        lse = logits.logsumexp(1)
        sink = torch.full_like(lse, -torch.inf) if a.attn_sink is None else a.attn_sink.double()
        p = torch.exp(logits - torch.logaddexp(lse, sink)[:, None]).masked_fill(~used, 0.0)
        a.out[row] = (p @ keys[:, :VALUES]).to(a.out.dtype)
        a.max_logits[row] = logits.amax(1).float()
        a.lse[row] = torch.where(lse == -torch.inf, torch.inf, lse).float()
        if a.lse_indexer is not None:
            part = logits[:, : kernel.indexer_topk].logsumexp(1)
            a.lse_indexer[row] = torch.where(part == -torch.inf, torch.inf, part).float()
