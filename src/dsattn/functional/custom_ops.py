"""The operators as PyTorch sees them: one opaque custom op each, forward and backward, for every backend.

The backend is chosen when an op runs, never while it is traced; the backward is an op too, and may run on another. A
layout travels as its table and three sizes, so that a compiled graph neither guards on its values nor is compiled again
for them. Tensors are positional, options are keywords.
"""

# Not `from __future__ import annotations`: custom ops read their schemas from the annotations themselves.

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Optional

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.library import custom_op

from dsattn.backends import Backend
from dsattn.functional.problems import backend_for
from dsattn.layouts import CausalLayout, DeviceLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.ops.numerics import accumulation_dtype, unscaled_gradient_dtype

# Schema inference of the torch floor does not know `Tensor | None`.
MaybeTensor = Optional[Tensor]  # noqa: UP045
MaybeInt = Optional[int]  # noqa: UP045
MaybeStr = Optional[str]  # noqa: UP045


@custom_op("dsattn::indexer_scores", mutates_args=())
def indexer_scores(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    table: Tensor,
    *,
    sizes: Sequence[int],
    scale: float,
    relu: bool,
    batch: MaybeInt,
    requires_grad: bool,
    backend: str,
) -> Tensor:
    """Scores [t, s]."""
    x, layout = IndexerInputs(index_q, index_k, weights, scale, relu), layout_of(table, sizes)
    return _scorer(x, layout, batch, requires_grad, backend).indexer_scores(x, layout)


@indexer_scores.register_fake
def _(index_q: Tensor, index_k: Tensor, weights: Tensor, table: Tensor, **_: Any) -> Tensor:
    return index_q.new_empty(index_q.shape[0], index_k.shape[0], dtype=accumulation_dtype(index_q.dtype))


@custom_op("dsattn::indexer_scores_backward", mutates_args=())
def indexer_scores_backward(
    d_scores: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    table: Tensor,
    *,
    sizes: Sequence[int],
    scale: float,
    relu: bool,
    batch: MaybeInt,
    requires_grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of index_q, index_k and weights."""
    x, layout = IndexerInputs(index_q, index_k, weights, scale, relu), layout_of(table, sizes)
    chosen = _scorer(x, layout, batch, requires_grad, backend, backward=True)
    return chosen.indexer_scores_backward(x, layout, d_scores)


@indexer_scores_backward.register_fake
def _(
    d_scores: Tensor, index_q: Tensor, index_k: Tensor, weights: Tensor, table: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(index_q), _like(index_k), _like(weights)


def _save_scores(ctx: Any, inputs: tuple[Tensor, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def _scores_backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor | None, ...]:
    return *indexer_scores_backward(d_scores, *ctx.saved_tensors, **ctx.options), None


indexer_scores.register_autograd(_scores_backward, setup_context=_save_scores)


@custom_op("dsattn::indexer_topk", mutates_args=())
def indexer_topk(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    table: Tensor,
    *,
    sizes: Sequence[int],
    top_k: int,
    scale: float,
    relu: bool,
    return_scores: bool,
    batch: MaybeInt,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [t, k], lengths [t] and scores [t, k] (empty unless asked for)."""
    x, layout = IndexerInputs(index_q, index_k, weights, scale, relu), layout_of(table, sizes)
    chosen = backend_for(backend, "indexer_topk", x=x, layout=layout, batch=batch, top_k=top_k)
    topk = chosen.indexer_topk(x, layout, top_k, return_scores)
    return topk.indices, topk.lengths, _empty(index_q) if topk.scores is None else topk.scores


@indexer_topk.register_fake
def _(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    table: Tensor,
    *,
    top_k: int,
    return_scores: bool,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    t = index_q.shape[0]
    ids, lengths = index_q.new_empty(t, top_k, dtype=torch.int32), index_q.new_empty(t, dtype=torch.int32)
    if not return_scores:
        return ids, lengths, _empty(index_q)
    return ids, lengths, index_q.new_empty(t, top_k, dtype=accumulation_dtype(index_q.dtype))


@custom_op("dsattn::attention", mutates_args=())
def attention(
    q: Tensor,
    kv: Tensor,
    sink: MaybeTensor,
    ids: MaybeTensor,
    lengths: MaybeTensor,
    table: MaybeTensor,
    *,
    sizes: Sequence[int],
    value_dim: int,
    softmax_scale: float,
    batch: MaybeInt,
    requires_grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Output [t, h, d_v] and log-sum-exp [t, h] over a selection (ids and lengths) or over a layout (table)."""
    a = AttentionInputs(q, kv, value_dim, softmax_scale, sink)
    keys = _keys(ids, lengths, table, sizes)
    chosen = _attender(a, keys, batch, requires_grad, backend)
    return chosen.sparse_attention(a, keys) if isinstance(keys, TopK) else chosen.dense_attention(a, keys)


@attention.register_fake
def _(
    q: Tensor,
    kv: Tensor,
    sink: MaybeTensor,
    ids: MaybeTensor,
    lengths: MaybeTensor,
    table: MaybeTensor,
    *,
    value_dim: int,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    t, heads, _width = q.shape
    return q.new_empty(t, heads, value_dim), q.new_empty(t, heads, dtype=accumulation_dtype(q.dtype))


@custom_op("dsattn::attention_backward", mutates_args=())
def attention_backward(
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    kv: Tensor,
    sink: MaybeTensor,
    ids: MaybeTensor,
    lengths: MaybeTensor,
    table: MaybeTensor,
    *,
    sizes: Sequence[int],
    value_dim: int,
    softmax_scale: float,
    batch: MaybeInt,
    requires_grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, kv and sink (empty without one)."""
    a = AttentionInputs(q, kv, value_dim, softmax_scale, sink)
    keys = _keys(ids, lengths, table, sizes)
    chosen = _attender(a, keys, batch, requires_grad, backend, backward=True)
    if isinstance(keys, TopK):
        d_q, d_kv, d_sink = chosen.sparse_attention_backward(a, keys, out, lse, d_out)
    else:
        d_q, d_kv, d_sink = chosen.dense_attention_backward(a, keys, out, lse, d_out)
    return d_q, d_kv, _empty(q) if d_sink is None else d_sink


@attention_backward.register_fake
def _(
    d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, kv: Tensor, sink: MaybeTensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(kv), _empty(q) if sink is None else _like(sink)


def _save_attention(
    ctx: Any, inputs: tuple[Tensor | None, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *inputs)
    ctx.options = keyword_only_inputs


def _attention_backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    out, lse, q, kv, sink, *keys = ctx.saved_tensors
    d_q, d_kv, d_sink = attention_backward(d_out, out, lse, q, kv, sink, *keys, **ctx.options)
    return d_q, d_kv, None if sink is None else d_sink, None, None, None


attention.register_autograd(_attention_backward, setup_context=_save_attention)


@custom_op("dsattn::indexer_loss", mutates_args=())
def indexer_loss(
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    ids: MaybeTensor,
    lengths: MaybeTensor,
    lse: MaybeTensor,
    row_mask: MaybeTensor,
    num_rows_tensor: MaybeTensor,
    *,
    sizes: Sequence[int],
    softmax_scale: float,
    scale: float,
    relu: bool,
    coeff: float,
    reduction: str,
    num_rows: MaybeInt,
    tp_group: MaybeStr,
    batch: MaybeInt,
    requires_grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and its gradients of index_q, index_k and weights (empty without `requires_grad` or a coefficient)."""
    x = IndexerInputs(index_q, index_k, weights, scale, relu)
    a = AttentionInputs(q, kv, kv.shape[1], softmax_scale)
    layout = layout_of(table, sizes)
    topk = None if ids is None or lengths is None else TopK._trusted(ids, lengths, None, *sizes[:2])
    group = None if tp_group is None else distributed_c10d._resolve_process_group(tp_group)  # pyrefly: ignore[bad-argument-type]
    options = LossOptions(coeff, reduction, num_rows if num_rows_tensor is None else num_rows_tensor, row_mask, group)
    rows: dict[str, Any] = {"layout": layout, "batch": batch, "requires_grad": requires_grad}
    top_k, support = (None, "visible") if topk is None else (topk.indices.shape[1], "selected")
    chosen = backend_for(backend, "indexer_loss", x=x, a=a, top_k=top_k, support=support, **rows)
    if coeff == 0:
        return index_q.new_zeros((), dtype=x.dtype), _empty(q), _empty(q), _empty(q)
    loss, gradients = chosen.indexer_loss(x, a, layout, topk, lse, options, requires_grad)
    d_index_q, d_index_k, d_weights = gradients or (_empty(q), _empty(q), _empty(q))
    return loss, d_index_q, d_index_k, d_weights


@indexer_loss.register_fake
def _(
    index_q: Tensor, index_k: Tensor, weights: Tensor, *_: Any, coeff: float, requires_grad: bool, **__: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = index_q.new_empty((), dtype=accumulation_dtype(index_q.dtype))
    if coeff == 0 or not requires_grad:
        return loss, _empty(index_q), _empty(index_q), _empty(index_q)
    return loss, _unscaled_like(index_q), _unscaled_like(index_k), _unscaled_like(weights)


@custom_op("dsattn::indexer_loss_backward", mutates_args=())
def indexer_loss_backward(
    d_loss: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    d_index_q: Tensor,
    d_index_k: Tensor,
    d_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss's own gradients, scaled; exact zeros where there are none, since the coefficient was 0.

    An op that takes the index tensors too, so that a second derivative is refused and not left out in silence.
    """
    given = ((index_q, d_index_q), (index_k, d_index_k), (weights, d_weights))
    d_q, d_k, d_w = (
        x.new_zeros(x.shape) if gradient.shape == (0,) != x.shape else (gradient * d_loss).to(x.dtype).view(x.shape)
        for x, gradient in given
    )
    return d_q, d_k, d_w


@indexer_loss_backward.register_fake
def _(d_loss: Tensor, index_q: Tensor, index_k: Tensor, weights: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(index_q), _like(index_k), _like(weights)


def _save_loss(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]
) -> None:
    ctx.mark_non_differentiable(*output[1:])
    # The gradients are at hand when the loss is: the backward only scales them.
    ctx.save_for_backward(*inputs[:3], *output[1:])


def _loss_backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return (*indexer_loss_backward(d_loss, *ctx.saved_tensors), *(None,) * 8)


indexer_loss.register_autograd(_loss_backward, setup_context=_save_loss)


def layout_of(table: Tensor, sizes: Sequence[int]) -> CausalLayout:
    """The layout of what `CausalLayout._wire` gave.

    The same segments give the same object, which keeps the windows and plans that were made of it.
    """
    if len(sizes) == 4:
        return DeviceLayout.of(table, *sizes)
    num_q, num_k, ratio = sizes
    return _layout(tuple(table.flatten().tolist()), num_q, num_k, ratio)


@lru_cache(maxsize=64)
def _layout(table: tuple[int, ...], num_q: int, num_k: int, ratio: int) -> CausalLayout:
    rows = torch.tensor(table, dtype=torch.int64, device="cpu").view(-1, 5)
    return CausalLayout._trusted(rows, num_q, num_k, ratio)


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _unscaled_like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=unscaled_gradient_dtype(x.dtype))


def _empty(source: Tensor) -> Tensor:
    """What stands for None, which a custom op cannot return."""
    return source.new_empty(0)


def _keys(
    ids: Tensor | None, lengths: Tensor | None, table: Tensor | None, sizes: Sequence[int]
) -> CausalLayout | TopK:
    if ids is not None and lengths is not None:
        return TopK._trusted(ids, lengths, None, *sizes[:2])
    if table is None:
        raise ValueError("attention needs a selection or a layout")
    return layout_of(table, sizes)


def _scorer(
    x: IndexerInputs, layout: CausalLayout, batch: int | None, requires_grad: bool, backend: str, backward: bool = False
) -> Backend:
    rows: dict[str, Any] = {"batch": batch, "requires_grad": requires_grad, "backward": backward}
    return backend_for(backend, "indexer_scores", x=x, layout=layout, **rows)


def _attender(
    a: AttentionInputs,
    keys: CausalLayout | TopK,
    batch: int | None,
    requires_grad: bool,
    backend: str,
    backward: bool = False,
) -> Backend:
    rows: dict[str, Any] = {"batch": batch, "requires_grad": requires_grad, "backward": backward}
    if isinstance(keys, TopK):
        return backend_for(backend, "sparse_attention", a=a, top_k=keys.indices.shape[1], **rows)
    return backend_for(backend, "dense_attention", a=a, layout=keys, **rows)
