"""Validated calls of the operators, packed in and packed out; what public functions share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsattn.backends import Backend, name_of
from dsattn.functional import custom_ops
from dsattn.functional.validation import Rows
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions

Choice = str | Backend


def run_scores(rows: Rows, x: IndexerInputs, layout: CausalLayout, backend: Choice) -> Tensor:
    """Scores [t, s]."""
    tensors = x.index_q, x.index_k, x.weights
    common = _common(rows, tensors, backend)
    return custom_ops.indexer_scores(*tensors, layout._table, sizes=_sizes(layout), **_scoring(x), **common)


def run_topk(
    rows: Rows, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool, backend: Choice
) -> TopK:
    """The selection."""
    indices, lengths, scores = custom_ops.indexer_topk(
        x.index_q.detach(),
        x.index_k.detach(),
        x.weights.detach(),
        layout._table,
        sizes=_sizes(layout),
        top_k=top_k,
        return_scores=return_scores,
        batch=rows.batch,
        backend=name_of(backend),
        **_scoring(x),
    )
    return TopK._trusted(indices, lengths, scores if return_scores else None, layout.num_q, layout.num_k)


def run_attention(rows: Rows, a: AttentionInputs, keys: CausalLayout | TopK, backend: Choice) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over a selection, or over all keys that a layout shows."""
    if isinstance(keys, TopK):
        where, sizes = (keys.indices, keys.lengths, None), [keys.num_q, keys.num_k, 1]
    else:
        where, sizes = (None, None, keys._table), _sizes(keys)
    common = _common(rows, (a.q, a.kv, a.sink), backend)
    options = {"value_dim": a.value_dim, "softmax_scale": float(a.softmax_scale)}
    return custom_ops.attention(a.q, a.kv, a.sink, *where, sizes=sizes, **options, **common)


def run_loss(
    rows: Rows,
    x: IndexerInputs,
    a: AttentionInputs,
    layout: CausalLayout,
    topk: TopK | None,
    lse: Tensor | None,
    options: LossOptions,
    backend: Choice,
) -> Tensor:
    """The loss over a selection, or over all keys that the layout shows."""
    tensors = x.index_q, x.index_k, x.weights
    counted = isinstance(options.num_rows, Tensor)
    loss, *_ = custom_ops.indexer_loss(
        *tensors,
        a.q.detach(),
        a.kv.detach(),
        layout._table,
        None if topk is None else topk.indices,
        None if topk is None else topk.lengths,
        lse,
        options.row_mask,
        options.num_rows if counted else None,
        sizes=_sizes(layout),
        softmax_scale=float(a.softmax_scale),
        coeff=float(options.coeff),
        reduction=options.reduction,
        num_rows=None if counted else options.num_rows,
        tp_group=None if options.tp_group is None else options.tp_group.group_name,
        **_scoring(x),
        **_common(rows, tensors, backend),
    )
    return loss


def _sizes(layout: CausalLayout) -> list[int]:
    return [layout.num_q, layout.num_k, layout.ratio]


def _scoring(x: IndexerInputs) -> dict[str, Any]:
    return {"scale": float(x.scale), "relu": x.relu}


def _common(rows: Rows, tensors: tuple[Tensor | None, ...], backend: Choice) -> dict[str, Any]:
    requires_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return {"batch": rows.batch, "requires_grad": requires_grad, "backend": name_of(backend)}
