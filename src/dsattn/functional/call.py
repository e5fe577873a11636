"""From a validated call to the backend that runs it: each function returns the packed result and the backend's name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsattn.backends import Backend, choose, ordered
from dsattn.functional.validation import Rows
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.spec.problem import AttentionSizes, IndexerSizes, Operator, Problem, Support

Choice = str | Backend


def run_scores(rows: Rows, x: IndexerInputs, layout: CausalLayout, backend: Choice) -> tuple[Tensor, str]:
    """Scores [t, s]."""
    chosen = _choose(backend, "indexer_scores", rows, x=x, layout=layout)
    return chosen.indexer_scores(x, layout), chosen.name


def run_topk(
    rows: Rows, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool, backend: Choice
) -> tuple[TopK, str]:
    """The selection."""
    chosen = _choose(backend, "indexer_topk", rows, x=x, layout=layout, top_k=top_k)
    return chosen.indexer_topk(x, layout, top_k, return_scores), chosen.name


def run_attention(
    rows: Rows, a: AttentionInputs, keys: CausalLayout | TopK, backend: Choice
) -> tuple[tuple[Tensor, Tensor], str]:
    """Output and log-sum-exp over a selection or over all keys that a layout shows."""
    if isinstance(keys, TopK):
        chosen = _choose(backend, "sparse_attention", rows, a=a, top_k=keys.indices.shape[-1])
        return chosen.sparse_attention(a, keys), chosen.name
    chosen = _choose(backend, "dense_attention", rows, a=a, layout=keys)
    return chosen.dense_attention(a, keys), chosen.name


def run_loss(
    rows: Rows,
    x: IndexerInputs,
    a: AttentionInputs,
    layout: CausalLayout,
    topk: TopK | None,
    lse: Tensor | None,
    options: LossOptions,
    backend: Choice,
) -> tuple[Tensor, str]:
    """The loss over a selection, or over all keys that the layout shows."""
    top_k = None if topk is None else topk.indices.shape[-1]
    support: Support = "visible" if topk is None else "selected"
    chosen = _choose(backend, "indexer_loss", rows, x=x, a=a, layout=layout, top_k=top_k, support=support)
    return chosen.indexer_loss(x, a, layout, topk, lse, options), chosen.name


def _choose(
    backend: Choice,
    operator: Operator,
    rows: Rows,
    *,
    x: IndexerInputs | None = None,
    a: AttentionInputs | None = None,
    **sizes: Any,
) -> Backend:
    """The backend for a call of `operator`; errors as `dsattn.backends.choose` has them."""
    trained = []
    if x is not None:
        trained += [x.index_q, x.index_k, x.weights]
    if a is not None and operator != "indexer_loss":
        trained += [a.q, a.kv] if a.sink is None else [a.q, a.kv, a.sink]
    problem = Problem(
        operator=operator,
        num_q=rows.num_q,
        num_k=rows.num_k,
        batch=rows.batch,
        device=trained[0].device,
        indexer=None if x is None else _indexer_sizes(x),
        attention=None if a is None else _attention_sizes(a),
        requires_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in trained),
        **sizes,
    )
    return choose(problem, backend, ordered())


def _indexer_sizes(x: IndexerInputs) -> IndexerSizes:
    _, heads, width = x.index_q.shape
    return IndexerSizes(heads=heads, width=width, dtype=x.index_q.dtype, weights_dtype=x.weights.dtype, relu=x.relu)


def _attention_sizes(a: AttentionInputs) -> AttentionSizes:
    _, heads, width = a.q.shape
    return AttentionSizes(
        heads=heads, key_width=width, value_width=a.value_dim, dtype=a.kv.dtype, sink=a.sink is not None
    )
