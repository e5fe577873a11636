"""The score kernel of the indexer's forward, simulated: alone, and as indexer_forward_top_k has it inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsattn.backends.cudnn.simulator.masks import (
    Span,
    checked_cu_seqlens,
    equal_starts,
    is_packed,
    longest,
    spans,
    visible,
    visible_with_leak,
)
from dsattn.backends.cudnn.simulator.math import indexer_scores
from dsattn.backends.cudnn.simulator.state import (
    Arguments,
    Simulated,
    deliver,
    require,
    require_aligned,
    require_dtype,
    require_grid,
    require_shape,
    require_within,
    unwritten,
)

NONE = float("-inf")
TUNING = {"m_block_size": 128, "n_block_size": 128, "q_stage": 2, "kv_stage": 4}


def indexer_forward(sim: Simulated, a: Arguments) -> dict[str, Any]:
    """Dense indexer scores, -inf at keys that the release masks: {scores[, lse]}."""
    other = {name: getattr(a, name) for name, value in TUNING.items() if getattr(a, name) != value}
    require(not (sim.sm90 and other), ValueError, f"SM90 indexer_forward takes the default tuning only, got {other}")
    wants_lse = a.return_lse or a.lse_out is not None
    require(sim.sm90 or not wants_lse, NotImplementedError, "SM100 indexer_forward returns no lse")
    packed = is_packed(a, ValueError if sim.sm90 else AssertionError)
    both = not packed or (a.max_seqlen_q is not None and a.max_seqlen_k is not None)
    require(both, ValueError, "THD input requires max_seqlen_q and max_seqlen_k")
    found = forward_spans(a, packed, AssertionError if sim.sm90 else ValueError, AssertionError)
    q, k, w = a.q.flatten(0, -3), a.k.flatten(0, -3)[:, 0], a.w.flatten(0, -2)
    # Columns past the buffer and rows past the launch are never written.
    rows, columns = (int(a.max_seqlen_q), int(a.max_seqlen_k)) if packed else (a.q.shape[1], a.k.shape[1])
    scores = torch.full((q.shape[0], columns), NONE, device="cpu")
    lse = torch.full((q.shape[0],), NONE, device="cpu")
    for span in found:
        values = masked_scores(sim, a, span, q, k, w)[:rows, :columns]
        at = slice(span.q0, span.q0 + values.shape[0])
        scores[at, : values.shape[1]] = values
        lse[at] = values.logsumexp(1)
    shape = a.q.shape[:-2]
    result = {"scores": _into(sim, a, scores.view(*shape, columns))}
    if a.return_lse:
        result["lse"] = deliver(lse.view(shape), a.lse_out, torch.float32)
    return result


def masked_scores(sim: Simulated, a: Arguments, span: Span, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """The scores of one sequence with the release's own mask, fp32 [rows, keys]."""
    rows, keys = slice(span.q0, span.q1), slice(span.k0, span.k1)
    scores = indexer_scores(sim, q[rows], k[keys], w[rows], float(a.sm_scale))
    leaks = sim.has("sm90-h32-leak")
    shown = visible_with_leak(span, a.ratio, q.shape[1]) if leaks else visible(span, a.ratio)
    # Rows that cu_seqlens name but that are not there are neither read nor written.
    return scores.masked_fill(~shown[: len(scores)], NONE)


def forward_spans(a: Arguments, packed: bool, kind: type[Exception], dtype_kind: type[Exception]) -> list[Span]:
    """The sequences of a forward call, after its checks of dtypes, shapes and lengths.

    Args:
        a: the arguments of the call.
        packed: whether it is a THD call.
        kind: how the release refuses counts of heads and widths.
        dtype_kind: how it refuses dtypes.
    """
    _check_forward_tensors(a, packed, kind, dtype_kind)
    if packed:
        queries, keys = checked_cu_seqlens(a, dtype_kind)
        given = (a.max_seqlen_q, a.max_seqlen_k)
        lengths = [longest(starts) if n is None else int(n) for n, starts in zip(given, (queries, keys), strict=True)]
        batch = len(queries) - 1
    else:
        queries, keys = equal_starts(*a.q.shape[:2]), equal_starts(*a.k.shape[:2])
        lengths, batch = [a.q.shape[1], a.k.shape[1]], a.q.shape[0]
    require_grid(a.wrapper, batch=batch, rows=lengths[0])
    require_gate(a, packed, *lengths)
    return spans(a, queries, keys, a.ratio)


def require_gate(a: Arguments, packed: bool, q_len: int, k_len: int) -> None:
    """Refuse, where the release does, more query rows than the keys stand for."""
    gate = a.wrapper.gate
    gated = gate is not None and ("thd" if packed else "bshd") in gate.layouts
    passes = not gated or gate.allows(q_len, k_len, a.ratio)
    require(passes, ValueError, f"seqlen_q ({q_len}) must be <= seqlen_k * ratio ({k_len * a.ratio})")


def _check_forward_tensors(a: Arguments, packed: bool, kind: type[Exception], dtype_kind: type[Exception]) -> None:
    require(a.precision in {None, "bf16"}, NotImplementedError, "the simulator has bf16 scores only")
    require(a.ratio >= 1, ValueError, f"ratio must be >= 1, got {a.ratio}")
    for name in ("q", "k", "w"):
        require_dtype(dtype_kind, name, getattr(a, name), *a.wrapper.dtypes_of(name))
    unit = a.w.dtype != torch.float32 or a.w.stride(-1) == 1
    require(unit, NotImplementedError, f"FP32 w requires unit last stride, got strides {a.w.stride()}")
    ranks = (3, 3, 2) if packed else (4, 4, 3)
    require((a.q.ndim, a.k.ndim, a.w.ndim) == ranks, kind, f"q, k, w must have {ranks} dimensions")
    require_shape(kind, "w", a.w, a.q.shape[:-1])
    heads, width = a.q.shape[-2:]
    require(packed or a.k.shape[0] == a.q.shape[0], kind, "q and k must have the same batch size")
    require_shape(kind, "k", a.k, (*a.k.shape[:-2], 1, width))
    require_within(kind, "head_dim", a.wrapper.widths, width)
    require_within(kind, "qhead_per_kv_head", a.wrapper.heads, heads)
    require(a.qhead_per_kv_head in {None, heads}, kind, f"qhead_per_kv_head must be {heads}")
    require_aligned(q=a.q, k=a.k, w=a.w)


def _into(sim: Simulated, a: Arguments, scores: Tensor) -> Tensor:
    """The scores in the caller's buffer, or as the release allocates them."""
    if a.out is not None:
        require_shape(AssertionError, "out", a.out, scores.shape)
        require_dtype(AssertionError, "out", a.out, "float32")
        require(not sim.sm90 or a.out.is_contiguous(), AssertionError, "out must be contiguous")
        return a.out.copy_(scores)
    columns = scores.shape[-1]
    if a.wrapper.view and columns % 4:
        return unwritten((*scores.shape[:-1], -(-columns // 4) * 4))[..., :columns].copy_(scores)
    return scores
