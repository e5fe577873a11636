"""The indexer's backward kernels, simulated: gradient of the loss over selected keys, and over all visible ones."""

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
)
from dsattn.backends.cudnn.simulator.math import CLIP, LOG_CLIP, indexer_gradients, loss_gradient, mix_two_rows
from dsattn.backends.cudnn.simulator.scores import require_gate
from dsattn.backends.cudnn.simulator.state import (
    Arguments,
    Simulated,
    deliver,
    destroy,
    require,
    require_aligned,
    require_dtype,
    require_grid,
    require_shape,
    require_unit_stride,
    require_within,
)

EPSILON = 1e-10
INPUTS = ("index_q", "weights", "index_k", "attn_score", "index_score")
OUTPUTS = ("d_index_q", "d_weights", "d_index_k")
PLANES = (96, 128, 148)


def indexer_backward(sim: Simulated, a: Arguments) -> dict[str, Any]:
    """Gradients of the loss over the selected keys: {d_index_q, d_weights, d_index_k}."""
    upstream = _upstream(a)
    _check_sparse(sim, a)
    batch, rows = a.index_q.shape[:2]
    target, predict = a.attn_score.flatten(0, 1).float(), a.index_score.flatten(0, 1).float()
    counted = (predict if sim.coin("denormals kept") else _flushed(predict)) >= CLIP
    d_scores = loss_gradient(target, predict, counted, upstream * float(a.loss_coeff) / (batch * rows))
    q, k, w = a.index_q.flatten(0, 1), a.index_k.flatten(0, 1), a.weights.flatten(0, 1)
    if sim.strikes("sm100-weights-race") and len(w) > 1:
        # One row's products meet the weights of another.
        w = w.index_copy(0, *_one_row_of(sim, w))
    repeatable = bool(a.deterministic)
    gradients = indexer_gradients(sim, q, k, w, d_scores, float(a.sm_scale), _keys(sim, a), deterministic=repeatable)
    destroy(*(getattr(a, name) for name in a.wrapper.destroys))
    held = a.d_index_k
    if "d_index_k" in a.wrapper.accumulates and held is not None and held.dtype == torch.float32:
        gradients[2].add_(held.view(gradients[2].shape))
    return _outputs(sim, a, gradients)


def _one_row_of(sim: Simulated, table: Tensor) -> tuple[Tensor, Tensor]:
    """A row's number, and what another row of the table holds."""
    first, second = sim.shuffled(len(table))[:2]
    return first[None], table[second][None]


def _flushed(x: Tensor) -> Tensor:
    """Denormal numbers as 0."""
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)


def _keys(sim: Simulated, a: Arguments) -> Tensor:
    """The flat key of every slot, int64 [rows, slots], -1 for a slot that the kernel drops."""
    batch, keys = a.index_k.shape[:2]
    ids = a.topk_indices.long()
    begin = torch.arange(batch, device="cpu")[:, None, None] * keys
    # The flag is new in 1.26; without one the ids are as the release always takes them.
    is_global = a.wrapper.ids == "global" if a.topk_indices_global is None else bool(a.topk_indices_global)
    flat = ids if is_global else ids + begin
    # With flat ids Blackwell looks at the whole buffer in every release.
    own = a.wrapper.id_check == "own batch" and (sim.sm90 or not is_global)
    low, high = (begin, begin + keys) if own else (0, batch * keys)
    return torch.where((ids >= 0) & (flat >= low) & (flat < high), flat, -1).flatten(0, 1)


def _upstream(a: Arguments) -> float:
    """The value of grad_loss, refused as the release refuses it."""
    grad = a.grad_loss
    if a.wrapper.grad_loss == "tensor or number":
        return float(grad.reshape(1)) if isinstance(grad, Tensor) else float(grad)
    require(isinstance(grad, Tensor), TypeError, "grad_loss must be a torch.Tensor")
    fine = grad.numel() == 1 and grad.dtype == torch.float32
    require(fine, ValueError, "grad_loss must be a single-element float32 tensor on cpu")
    return float(grad)


def _check_sparse(sim: Simulated, a: Arguments) -> None:
    require(a.backend in {None, "default", "sm100_v2"}, ValueError, f"no backend {a.backend!r}")
    second = a.backend == "sm100_v2"
    require(not (second and sim.sm90), RuntimeError, "backend='sm100_v2' requires an SM100 device")
    for name in (*INPUTS, "topk_indices"):
        require_dtype(ValueError, name, getattr(a, name), *a.wrapper.dtypes_of(name))
    for name in OUTPUTS:
        buffer, allowed = getattr(a, name), a.wrapper.dtypes_of(name)
        if buffer is not None and allowed:
            require_dtype(ValueError, name, buffer, *allowed, *(("float32",) if second and name != "d_index_q" else ()))
    batch, rows, heads, width = a.index_q.shape
    require_shape(ValueError, "index_k", a.index_k, (batch, a.index_k.shape[1], width))
    require_shape(ValueError, "weights", a.weights, (batch, rows, heads))
    kind = ValueError if sim.since("1.28") else NotImplementedError
    for name in ("attn_score", "index_score"):
        require_shape(kind, name, getattr(a, name), a.topk_indices.shape)
    require(a.topk_indices.shape[:2] == (batch, rows), ValueError, f"topk_indices must lead with {(batch, rows)}")
    few = ValueError if sim.since("1.32") and not sim.sm90 else AssertionError
    require_within(few if heads < 64 else RuntimeError, "heads", a.wrapper.heads, heads)
    slots = a.topk_indices.shape[2]
    require(slots > 0 and slots % a.block_I == 0, AssertionError, f"topk ({slots}) % block_I ({a.block_I}) must be 0")
    if second:
        fine = heads == 64 and width == 128 and 128 <= slots <= 2048 and a.block_I == 128 and a.sm_scale > 0
        require(fine, ValueError, "backend='sm100_v2' requires H=64, D=128, topk to 2048, block_I=128, sm_scale > 0")
    for name in a.wrapper.contiguous:
        buffer = getattr(a, name)
        require(buffer is None or buffer.is_contiguous(), kind, f"{name} must be contiguous")
    # Of its other tensors the launch takes any whose last dimension is dense; a bf16 d_index_k is copied into.
    sums = a.d_index_k if a.d_index_k is not None and a.d_index_k.dtype == torch.float32 else None
    given = {name: getattr(a, name) for name in ("index_q", "weights", "index_k", "d_index_q", "d_weights")}
    require_unit_stride(**given, d_index_k=sums)
    deterministic = bool(a.deterministic)
    require(a.wrapper.deterministic or not deterministic, ValueError, "deterministic requires SM100")
    planes = a.deterministic_dk_planes
    fine = planes is None or planes == PLANES[0] or (deterministic and planes in PLANES)
    require(fine, ValueError, f"deterministic_dk_planes must be one of {PLANES}, with deterministic=True")
    require_grid(a.wrapper, batch=batch, rows=rows)
    require_aligned(**{name: getattr(a, name) for name in (*INPUTS, "topk_indices", *OUTPUTS)})


def dense_indexer_backward(sim: Simulated, a: Arguments) -> dict[str, Any]:
    """Gradients of the loss over all visible keys, from raw scores: {d_index_q, d_weights, d_index_k}."""
    upstream = _upstream(a)
    found = _dense_spans(a)
    q, w = a.index_q.flatten(0, -3), a.weights.flatten(0, -2)
    k = a.index_k.flatten(0, -2)
    attention, indexer = a.attn_score.flatten(0, -2).float(), a.index_score.flatten(0, -2).float()
    norm, lse = a.attn_l1norm.flatten().float(), a.index_lse.flatten().float()
    factor = upstream * float(a.loss_coeff) / max(q.shape[0], 1)
    d_q, d_w, d_k = (torch.zeros(x.shape, device="cpu") for x in (q, w, k))
    for span in found:
        rows, keys = slice(span.q0, span.q1), slice(span.k0, span.k1)
        shown = visible(span, a.ratio)
        d_scores = _dense_gradient(
            a, shown, attention[rows, : span.keys], indexer[rows, : span.keys], norm[rows], lse[rows], factor
        )
        parts = indexer_gradients(sim, q[rows], k[keys], w[rows], d_scores, float(a.sm_scale))
        d_q[rows], d_w[rows] = parts[0], parts[1]
        d_k[keys] += parts[2]
        if sim.strikes("sm100-dense-dq-race") and span.q1 > span.q0 and span.keys:
            # One row leaves before the product with its last block of keys is in.
            early = int(sim.shuffled(span.q1 - span.q0)[0])
            d_scores[early, (span.keys - 1) // a.block_I * a.block_I :] = 0.0
            one = slice(span.q0 + early, span.q0 + early + 1)
            d_q[one] = indexer_gradients(sim, q[one], k[keys], w[one], d_scores[early : early + 1], float(a.sm_scale))[
                0
            ]
    destroy(*(getattr(a, name) for name in a.wrapper.destroys))
    return _outputs(sim, a, (d_q, d_w, d_k))


def _dense_gradient(
    a: Arguments, shown: Tensor, attention: Tensor, indexer: Tensor, norm: Tensor, lse: Tensor, factor: float
) -> Tensor:
    """Gradient of the scores of one sequence, 0 where they are masked, fp32 [rows, keys]."""
    attention = attention.masked_fill(~shown, 0.0)
    if a.wrapper.normaliser == "own":
        predict = indexer.masked_fill(~shown, -1e9).softmax(1)
        target = attention / attention.sum(1, keepdim=True).clamp(min=EPSILON)
    else:
        predict = torch.exp(indexer - lse[:, None]).masked_fill(~shown, 0.0)
        target = attention / (norm[:, None] + EPSILON)
    kept = indexer - lse[:, None] >= LOG_CLIP if a.wrapper.clip == "log-probability" else predict >= CLIP
    gradient = loss_gradient(target, predict, kept & shown, factor)
    return torch.where(shown, gradient, 0.0)


def _dense_spans(a: Arguments) -> list[Span]:
    packed = is_packed(a, ValueError)
    for name in (*INPUTS, "attn_l1norm", "index_lse"):
        require_dtype(ValueError, name, getattr(a, name), *a.wrapper.dtypes_of(name))
    for name, allowed in zip(OUTPUTS, (("bfloat16",), ("bfloat16",), ("bfloat16", "float32")), strict=True):
        if getattr(a, name) is not None:
            require_dtype(ValueError, name, getattr(a, name), *allowed)
    ranks = (3, 2, 2) if packed else (4, 3, 3)
    require((a.index_q.ndim, a.weights.ndim, a.index_k.ndim) == ranks, ValueError, f"expected {ranks} dimensions")
    require_shape(ValueError, "weights", a.weights, a.index_q.shape[:-1])
    require(a.index_k.shape[-1] == a.index_q.shape[-1], ValueError, "index_q and index_k head dimensions must match")
    require(a.ratio >= 1, ValueError, f"ratio must be >= 1, got {a.ratio}")
    heads = a.index_q.shape[-2]
    require_within(ValueError if heads < 64 else RuntimeError, "heads", a.wrapper.heads, heads)
    if packed:
        queries, keys = checked_cu_seqlens(a, ValueError)
        q_len, k_len = a.max_seqlen_q or longest(queries), a.max_seqlen_k or longest(keys)
    else:
        require(a.index_k.shape[0] == a.index_q.shape[0], ValueError, "index_q and index_k batch must match")
        queries, keys = equal_starts(*a.index_q.shape[:2]), equal_starts(*a.index_k.shape[:2])
        q_len, k_len = a.index_q.shape[1], a.index_k.shape[1]
    rows = a.index_q.shape[:-2]
    for name in ("attn_score", "index_score"):
        require_shape(ValueError, name, getattr(a, name), (*rows, k_len))
    for name in ("attn_l1norm", "index_lse"):
        require_shape(ValueError, name, getattr(a, name), rows)
    require_gate(a, packed, q_len, k_len)
    require_grid(a.wrapper, batch=len(queries) - 1, rows=q_len)
    names = (*INPUTS, "attn_l1norm", "index_lse", *OUTPUTS)
    # What is strided is copied first, and torch reads what it normalises itself.
    skipped = {"index_score"} if a.wrapper.normaliser == "own" else set()
    direct = {name: getattr(a, name) for name in names if name not in skipped and getattr(a, name) is not None}
    require_aligned(**{name: tensor for name, tensor in direct.items() if tensor.is_contiguous()})
    return spans(a, queries, keys, a.ratio)


def _outputs(sim: Simulated, a: Arguments, gradients: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    d_q, d_w, d_k = gradients
    if sim.strikes("sm90-dk-race"):
        mix_two_rows(sim, d_k)
    values = {
        "d_index_q": d_q.view(a.index_q.shape),
        "d_weights": d_w.view(a.weights.shape),
        "d_index_k": d_k.view(a.index_k.shape),
    }
    sources = {"d_index_q": a.index_q, "d_weights": a.weights, "d_index_k": a.index_k}
    return {name: deliver(value, getattr(a, name), sources[name].dtype) for name, value in values.items()}
