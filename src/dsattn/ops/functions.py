"""The operators as autograd sees them: packed tensors in, the hand-written backwards attached."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsattn.layouts import CausalLayout
from dsattn.ops.attention import attend, attend_backward
from dsattn.ops.indexer import all_scores, all_scores_backward
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.ops.loss import indexer_kl
from dsattn.ops.numerics import is_finite
from dsattn.ops.support import Selected, Support, Visible

Ids = tuple[Int[Tensor, "t k"], Int[Tensor, " t"]]


def indexer_scores(x: IndexerInputs, layout: CausalLayout) -> Float[Tensor, "t s"]:
    """The whole score table, -inf at unseen keys; differentiable."""
    return _Scores.apply(x.index_q, x.index_k, x.weights, layout, x.scale, x.relu)


def attention(x: AttentionInputs, keys: CausalLayout | Ids) -> tuple[Float[Tensor, "t h d_v"], Float[Tensor, "t h"]]:
    """Output and log-sum-exp over all visible keys of a layout, or over selected ids; differentiable but for lse."""
    layout, ids, lengths = (keys, None, None) if isinstance(keys, CausalLayout) else (None, *keys)
    return _Attention.apply(x.q, x.kv, x.sink, ids, lengths, layout, x.value_dim, x.softmax_scale)


def indexer_loss(
    x: IndexerInputs,
    a: AttentionInputs,
    keys: CausalLayout | Ids,
    options: LossOptions,
) -> Float[Tensor, ""]:
    """The indexer loss over all visible keys of a layout, or over selected ids.

    Differentiable in index_q, index_k and weights; q and kv get no gradient. With coeff 0 the loss and its gradients
    are exact zeros and nothing is computed.
    """
    if options.coeff == 0:
        return _ZeroLoss.apply(x.index_q, x.index_k, x.weights)
    if isinstance(keys, CausalLayout):
        support: Support = Visible.of(keys, x.index_q.device)
    else:
        support = Selected(*keys, num_k=x.index_k.shape[0])
    if options.row_mask is not None:
        support = support.masked(options.row_mask)
    counted = support.has_keys()
    rows: int | Tensor = 1
    if options.num_rows is not None:
        rows = options.num_rows
    elif options.reduction == "mean":
        rows = counted.sum().clamp(min=1)
    row_weights = counted.to(x.dtype) * options.coeff / rows
    with_gradients = torch.is_grad_enabled() and any(y.requires_grad for y in (x.index_q, x.index_k, x.weights))
    side = (a.q.detach(), a.kv.detach(), a.value_dim, a.softmax_scale)
    return _Loss.apply(
        x.index_q, x.index_k, x.weights, x.scale, x.relu, side, support, row_weights, options.tp_group, with_gradients
    )


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, index_q: Tensor, index_k: Tensor, weights: Tensor, layout: CausalLayout, scale: float, relu: bool
    ) -> Tensor:
        ctx.save_for_backward(index_q, index_k, weights)
        ctx.rest = layout, scale, relu
        return all_scores(IndexerInputs(index_q, index_k, weights, scale, relu), Visible.of(layout, index_q.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_table: Tensor) -> tuple[Tensor | None, ...]:
        layout, scale, relu = ctx.rest
        x = IndexerInputs(*ctx.saved_tensors, scale, relu)
        support = Visible.of(layout, x.index_q.device)
        finite = is_finite(x.index_q, x.index_k, x.weights)
        return (*all_scores_backward(x, support, d_table, finite), None, None, None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        sink: Tensor | None,
        ids: Tensor | None,
        lengths: Tensor | None,
        layout: CausalLayout | None,
        value_dim: int,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, kv, sink, ids, lengths)
        ctx.rest = layout, value_dim, softmax_scale
        out, lse = attend(AttentionInputs(q, kv, value_dim, softmax_scale, sink), _support(kv, ids, lengths, layout))
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sink, ids, lengths = ctx.saved_tensors
        layout, value_dim, softmax_scale = ctx.rest
        x = AttentionInputs(q, kv, value_dim, softmax_scale, sink)
        return (*attend_backward(x, _support(kv, ids, lengths, layout), d_out), None, None, None, None, None)


def _support(kv: Tensor, ids: Tensor | None, lengths: Tensor | None, layout: CausalLayout | None) -> Support:
    if layout is not None:
        return Visible.of(layout, kv.device)
    if ids is None or lengths is None:
        raise ValueError("attention needs a layout or a selection")
    return Selected(ids, lengths, num_k=kv.shape[0])


class _Loss(torch.autograd.Function):
    """Gradients are computed beside the loss, which has all they need at hand, and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        index_q: Tensor,
        index_k: Tensor,
        weights: Tensor,
        scale: float,
        relu: bool,
        side: tuple[Tensor, Tensor, int, float],
        support: Support,
        row_weights: Tensor,
        tp_group: dist.ProcessGroup | None,
        with_gradients: bool,
    ) -> Tensor:
        x = IndexerInputs(index_q, index_k, weights, scale, relu)
        loss, gradients = indexer_kl(x, AttentionInputs(*side), support, row_weights, tp_group, with_gradients)
        ctx.dtypes = index_q.dtype, index_k.dtype, weights.dtype
        if gradients is not None:
            ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            (gradient * d_loss).to(dtype) for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None, None, None, None, None, None)


class _ZeroLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index_q: Tensor, index_k: Tensor, weights: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in (index_q, index_k, weights)]
        dtype = torch.float64 if index_q.dtype == torch.float64 else torch.float32
        return torch.zeros((), dtype=dtype, device=index_q.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
