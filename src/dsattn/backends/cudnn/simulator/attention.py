"""The sparse attention kernels, simulated: the backward of every release, Blackwell's forward from 1.29 on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsattn.backends.cudnn.simulator.math import mix_two_rows
from dsattn.backends.cudnn.simulator.state import (
    Arguments,
    Simulated,
    blocks,
    deliver,
    require,
    require_aligned,
    require_dtype,
    require_shape,
    require_unit_stride,
    require_within,
)

VALUE_WIDTH = 512
# (query, head) rows of one tile of the Hopper backward.
SM90_TILE_ROWS = 64
DETERMINISTIC_HEADS = (16, 32, 64, 96, 128)
INDEXER_TOP_K = {64: (0, 512, 1024, 2048), 128: (0, 512, 1024)}


class Selected(NamedTuple):
    """The slots of all rows, each [rows, slots]: the key row, whether it takes part, whether its content is garbage."""

    key: Tensor
    counts: Tensor
    garbage: Tensor


def sparse_attention_backward(sim: Simulated, a: Arguments) -> dict[str, Any]:
    """Gradients of the attention over flat ids, overwriting the caller's buffers: {dq, dkv, d_sink}."""
    _check_backward(sim, a)
    rows, heads, width = a.q.shape
    scale = width**-0.5 if a.softmax_scale is None else float(a.softmax_scale)
    chosen = _backward_slots(sim, a)
    q, kv, lse, sink = a.q.float(), a.kv.float(), a.lse, a.attn_sink
    total, p_sink = _with_sink(sim, lse, sink)
    if sim.sm90:
        # In base 2 -inf is taken for 0; the sink's gradient does not take part in that.
        total = _with_sink(sim, torch.where(lse == -torch.inf, 0.0, lse), sink)[0]
    if sim.has("sm100-attn-bwd-576-sink") and width != VALUE_WIDTH:
        total, p_sink = lse, torch.zeros_like(p_sink)
    d_out = a.dout.float()
    dots = (d_out * a.out.float()).sum(-1)
    d_q, d_kv = torch.zeros_like(q), torch.zeros_like(kv)
    parts = list(blocks(rows, chosen.key.shape[1] * (2 * heads + width)))
    order = range(len(parts)) if a.deterministic else sim.shuffled(len(parts)).tolist()
    for at in (parts[i] for i in order):
        keys = kv[chosen.key[at].clamp(0, max(kv.shape[0] - 1, 0))]
        keys = torch.where(chosen.counts[at][..., None] & ~chosen.garbage[at][..., None], keys, 0.0)
        keys = keys.masked_fill(chosen.garbage[at][..., None], torch.nan)
        logits = scale * (q[at] @ keys.mT) - total[at][..., None]
        p = torch.exp(logits)
        if not sim.has("sm90-attn-bwd-tail"):
            p = torch.where(chosen.counts[at][:, None], p, 0.0)
        d_logits = p * (d_out[at] @ keys[..., :VALUE_WIDTH].mT - dots[at][..., None])
        p, d_logits = sim.factor(p, a.q.dtype), sim.factor(d_logits, a.q.dtype)
        d_q[at] = scale * (d_logits @ keys)
        d_keys = scale * (d_logits.mT @ q[at])
        d_keys[..., :VALUE_WIDTH] += p.mT @ d_out[at]
        lands = (chosen.counts[at] & ~chosen.garbage[at]).flatten()
        mixed = torch.arange(lands.numel(), device="cpu") if a.deterministic else sim.shuffled(lands.numel())
        mixed = mixed[lands[mixed]]
        d_kv.index_add_(0, chosen.key[at].flatten()[mixed], d_keys.flatten(0, 1)[mixed])
    if sim.strikes("sm100-attn-bwd-dkv-race") and width != VALUE_WIDTH:
        mix_two_rows(sim, d_kv)
    if sim.has("attn-bwd-empty-row") and a.topk_length is not None:
        d_q[a.topk_length <= 0] = torch.nan
    return {
        "dq": deliver(d_q, a.dq, a.q.dtype),
        "dkv": deliver(d_kv, a.dkv, a.kv.dtype),
        "d_sink": -(p_sink * dots).sum(0),
    }


def _with_sink(sim: Simulated, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp with the sink in it, and the sink's probability, both [rows, heads]."""
    if sim.since("1.29"):
        p_sink = 1 / (1 + torch.exp(lse - sink))
        p_sink = torch.where(lse == sink, 0.5, p_sink)
        return torch.logaddexp(lse, sink), torch.where(lse == torch.inf, 0.0, p_sink)
    peak = torch.maximum(lse, sink)
    total = peak + torch.log(torch.exp(lse - peak) + torch.exp(sink - peak))
    empty = lse == torch.inf
    return torch.where(empty, torch.inf, total), torch.where(empty, 0.0, torch.exp(sink - total))


def _backward_slots(sim: Simulated, a: Arguments) -> Selected:
    """Which key each slot of each row reads, with the releases' own ideas of what an unused slot is."""
    ids, keys = a.topk_idxs.long(), a.kv.shape[0]
    rows, slots = ids.shape
    length = a.topk_length
    if sim.has("sm90-attn-bwd-h64") and a.q.shape[1] < SM90_TILE_ROWS:
        # All rows of a tile read the slots of the tile's first query.
        query = torch.arange(rows, device="cpu")
        first = query * a.q.shape[1] // SM90_TILE_ROWS * SM90_TILE_ROWS // a.q.shape[1]
        ids, length = ids[first], None if length is None else length[first]
    within = torch.ones_like(ids, dtype=torch.bool)
    if length is not None:
        within = torch.arange(slots, device="cpu") < length[:, None]
    real = (ids >= 0) & (ids < keys)
    hangs = sim.sm90 and length is not None and sim.has("attn-bwd-empty-row") and bool((length <= 0).any())
    require(not hangs, RuntimeError, "the kernel hangs: a row with topk_length 0 leaves its barriers unmatched")
    if not sim.has("attn-bwd-ids-unchecked"):
        return Selected(ids, within & real, torch.zeros_like(real))
    # Hopper takes every slot before the length for a key. A length beyond the slots reads whatever follows the row.
    counts = within if sim.sm90 and length is not None else within & (ids >= 0)
    beyond = torch.zeros_like(real) if length is None else (length > slots)[:, None] & within
    return Selected(ids, counts, counts & (beyond | ~real))


def _check_backward(sim: Simulated, a: Arguments) -> None:
    rows, heads, width = a.q.shape if a.q.ndim == 3 else (0, 0, 0)
    require(a.q.ndim == 3 and a.kv.ndim == 2, ValueError, "Q must be 3-D and KV 2-D")
    for name in ("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs"):
        require_dtype(ValueError, name, getattr(a, name), *a.wrapper.dtypes_of(name))
    for name in ("kv", "out", "dout"):
        require(getattr(a, name).dtype == a.q.dtype, ValueError, f"{name} must have same dtype as Q")
    kind = ValueError if sim.since("1.27") else AssertionError
    require_within(kind, "head_dim", a.wrapper.widths, width)
    require_within(AssertionError, "heads", a.wrapper.heads, heads)
    require_shape(kind, "kv", a.kv, (a.kv.shape[0], width))
    for name in ("out", "dout"):
        require_shape(kind, name, getattr(a, name), (rows, heads, VALUE_WIDTH))
    require_shape(kind, "lse", a.lse, (rows, heads))
    require_shape(kind, "attn_sink", a.attn_sink, (heads,))
    require(a.topk_idxs.ndim == 2 and a.topk_idxs.shape[0] == rows, kind, f"topk_idxs must be ({rows}, topk_max)")
    if a.topk_length is not None:
        require_dtype(ValueError, "topk_length", a.topk_length, *a.wrapper.dtypes_of("topk_length"))
        require_shape(kind, "topk_length", a.topk_length, (rows,))
    able = a.wrapper.deterministic and heads in DETERMINISTIC_HEADS
    require(not a.deterministic or bool(able), ValueError, "deterministic DSA backward requires SM100")
    for name in ("dq", "dkv"):
        buffer, like = getattr(a, name), a.q if name == "dq" else a.kv
        if buffer is not None:
            require_shape(AssertionError, name, buffer, like.shape)
            require(buffer.dtype == like.dtype, AssertionError, f"{name} dtype mismatch")
            compact = name not in a.wrapper.contiguous or buffer.is_contiguous()
            require(compact, AssertionError, f"{name} must be contiguous")
    if not sim.since("1.32") and (sim.sm90 or not sim.since("1.27")):
        require_unit_stride(dq=a.dq, dkv=a.dkv, attn_sink=a.attn_sink, topk_idxs=a.topk_idxs)
    require_aligned(max(4, a.wrapper.alignment_of("lse")), lse=a.lse)
    names = ("q", "kv", "out", "dout", "attn_sink", "topk_idxs", "topk_length", "dq", "dkv")
    require_aligned(**{name: getattr(a, name) for name in names})


def sparse_attention_forward(sim: Simulated, a: Arguments) -> dict[str, Any]:
    """Attention over flat ids, any number of slots: {out, max_logits, lse, lse_indexer}."""
    _check_forward(a)
    rows, heads, width = a.q.shape
    scale = width**-0.5 if a.softmax_scale is None else float(a.softmax_scale)
    ids, keys = a.topk_idxs.long(), a.kv.shape[0]
    counts = (ids >= 0) & (ids < keys)
    if a.topk_length is not None:
        counts &= torch.arange(ids.shape[1], device="cpu") < a.topk_length[:, None]
    q, kv = a.q.float(), a.kv.float()
    out = torch.empty(rows, heads, VALUE_WIDTH, device="cpu")
    lse, peak, lse_indexer = (torch.empty(rows, heads, device="cpu") for _ in range(3))
    sink = torch.full((heads,), -torch.inf, device="cpu") if a.attn_sink is None else a.attn_sink
    order = sim.order(ids.shape[1])
    for at in blocks(rows, ids.shape[1] * (heads + width)):
        gathered = torch.where(counts[at][..., None], kv[ids[at].clamp(0, max(keys - 1, 0))], 0.0)
        logits = (scale * (q[at] @ gathered.mT)).masked_fill(~counts[at][:, None], -torch.inf)
        lse[at] = logits[..., order].logsumexp(-1)
        peak[at] = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf).amax(-1)
        lse_indexer[at] = logits[..., : a.indexer_topk].logsumexp(-1)
        p = torch.exp(logits - torch.logaddexp(lse[at], sink)[..., None])
        p = torch.where(counts[at][:, None], p, 0.0)
        p = sim.factor(p, a.q.dtype)
        out[at] = p[..., order] @ gathered[:, order, :VALUE_WIDTH]
    empty = torch.tensor(torch.inf, device="cpu")
    return {
        "out": out.to(a.q.dtype),
        "max_logits": peak,
        "lse": torch.where(lse == -torch.inf, empty, lse),
        "lse_indexer": torch.where(lse_indexer == -torch.inf, empty, lse_indexer) if a.indexer_topk else None,
    }


def _check_forward(a: Arguments) -> None:
    require(a.q.ndim == 3 and a.kv.ndim == 2 and a.topk_idxs.ndim == 2, ValueError, "Q must be 3-D, KV and ids 2-D")
    for name in ("q", "kv", "topk_idxs"):
        require_dtype(ValueError, name, getattr(a, name), *a.wrapper.dtypes_of(name))
    rows, heads, width = a.q.shape
    require(a.kv.dtype == a.q.dtype, ValueError, "KV must have same dtype as Q")
    require(a.kv.shape[1] == width, ValueError, f"KV head dimension must be {width}")
    require(a.topk_idxs.shape[0] == rows, ValueError, f"topk_idxs must have {rows} rows")
    pair = (heads, width)
    require(pair in a.wrapper.pairs, ValueError, f"(H, D_qk) must be one of {a.wrapper.pairs}, got {pair}")
    allowed = INDEXER_TOP_K[heads]
    fine = a.indexer_topk in allowed and a.indexer_topk <= a.topk_idxs.shape[1]
    require(fine, ValueError, f"indexer_topk={a.indexer_topk} must be one of {allowed} and at most K")
    for name, shape in (("attn_sink", (heads,)), ("topk_length", (rows,))):
        tensor = getattr(a, name)
        if tensor is not None:
            require_dtype(ValueError, name, tensor, *a.wrapper.dtypes_of(name))
            require_shape(ValueError, name, tensor, shape)
