"""The same problems through dsattn's cuDNN backend.

The losses are asked of the backend itself: on some releases a public call is refused, for race conditions that do not
strike here.
"""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor

import dsattn
from dsattn.backends.cudnn.backend import CudnnBackend
from dsattn.backends.cudnn.calls import Calls
from dsattn.backends.cudnn.folding import Fold, folds
from dsattn.backends.cudnn.namespace import Namespace
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.verify.frontend_defaults.naive import Dense, Gradients
from dsattn.verify.frontend_defaults.problems import SOFTMAX_SCALE, TOP_K, DenseLoss, Loss, Selection, SparseLoss


def select(namespace: Namespace, problem: Selection) -> tuple[Int32[Tensor, "t k"], Int32[Tensor, " t"]]:
    """The keys that each row selects, ascending, -1 in unused slots at the end, and how many there are."""
    topk = dsattn.indexer_topk(
        problem.index_q,
        problem.index_k,
        problem.weights,
        problem.layout,
        top_k=TOP_K,
        backend=CudnnBackend(namespace),
    )
    return topk.indices, topk.lengths


def sparse_gradients(namespace: Namespace, problem: SparseLoss) -> Gradients:
    """Gradients of the loss over selected keys."""
    layout = _layout(problem)
    topk = TopK.from_ids(problem.ids.flatten(0, 1), layout, space="local")
    return _gradients(namespace, problem, layout, topk)


def dense(namespace: Namespace, problem: DenseLoss) -> Dense:
    """Scores, attention mass and gradients of the loss over all keys that a row sees."""
    layout, calls = _layout(problem), Calls(namespace)
    index_q, weights, q, lse = (x.flatten(0, 1) for x in (problem.index_q, problem.weights, problem.q, problem.lse))
    index_k, kv = problem.index_k.flatten(0, 1), problem.kv.flatten(0, 1)
    # Small enough for one launch.
    (fold,) = folds(layout, squared=calls.squared("dense_indexer_score_recompute"), elements=index_q.numel())
    scores, score_lse = calls.dense_indexer(fold.queries(index_q), fold.keys(index_k), fold.queries(weights), fold, 1.0)
    mass, total = calls.dense_attention_mass(
        fold.queries(q), fold.keys(kv), fold.queries(lse, -torch.inf), fold, SOFTMAX_SCALE
    )
    keys = problem.index_k.shape[1]
    return Dense(
        index_out=_rows(fold, scores)[..., :keys],
        index_denom=_rows(fold, score_lse),
        attn_out=_rows(fold, mass)[..., :keys],
        attn_denom=_rows(fold, total),
        gradients=_gradients(namespace, problem, layout, None),
    )


def _layout(problem: Loss) -> CausalLayout:
    """The rows of each batch entry are the last ones of their keys."""
    (batch, rows), keys = problem.index_q.shape[:2], problem.index_k.shape[1]
    return CausalLayout.batched(batch, rows, keys, q_offset=keys - rows)


def _gradients(namespace: Namespace, problem: Loss, layout: CausalLayout, topk: TopK | None) -> Gradients:
    batch = len(problem.index_q)
    index_q, index_k, weights, q, kv, lse = (
        x.flatten(0, 1) for x in (problem.index_q, problem.index_k, problem.weights, problem.q, problem.kv, problem.lse)
    )
    _, gradients = CudnnBackend(namespace).indexer_loss(
        IndexerInputs(index_q, index_k, weights, scale=1.0, relu=True),
        AttentionInputs(q, kv, value_dim=kv.shape[1], softmax_scale=SOFTMAX_SCALE),
        layout,
        topk,
        lse,
        LossOptions(),
        with_gradients=True,
    )
    d_q, d_k, d_w = (x.unflatten(0, (batch, -1)) for x in gradients or ())
    return Gradients(d_index_q=d_q, d_weights=d_w, d_index_k=d_k)


def _rows(fold: Fold, x: Tensor) -> Tensor:
    """Folded rows as [b, sq, ...], without padding: every piece is one batch entry."""
    return torch.stack([x[part] for _, part, _ in fold.parts()])
