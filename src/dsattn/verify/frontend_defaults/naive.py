"""The wrappers called as one calls them who knows release 1.25 alone: its id space, its alignment, nothing else said.

Everything is passed by keyword, and the loss's gradient as the one-element tensor that later releases ask for, so that
each of them takes the calls and what differs is what the defaults mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from dsattn.verify.frontend_defaults.problems import HEADS, SOFTMAX_SCALE, TOP_K, DenseLoss, Selection, SparseLoss


class Gradients(NamedTuple):
    """Gradients of an indexer loss, in the dtypes that came out."""

    d_index_q: Float[Tensor, "b sq h_i d_i"]
    d_weights: Float[Tensor, "b sq h_i"]
    d_index_k: Float[Tensor, "b sk d_i"]


class Dense(NamedTuple):
    """Scores and attention mass over all keys, what they add up to in each row, and the gradients of the loss."""

    index_out: Float32[Tensor, "b sq sk"]
    index_denom: Float32[Tensor, "b sq"]
    attn_out: Float32[Tensor, "b sq sk"]
    attn_denom: Float32[Tensor, "b sq"]
    gradients: Gradients


def select(frontend: Any, problem: Selection) -> tuple[Int64[Tensor, "t k"], Int64[Tensor, " t"]]:
    """The keys that each row selects, ascending, -1 in unused slots at the end, and how many there are.

    One document is scored half by half, each against the keys up to its end; many in one packed call.
    """
    score = _one_document if len(problem.documents) == 1 else _many_documents
    ids = score(frontend, problem)
    used = ids >= 0
    # Negative ids, which are unused slots, go behind all others.
    ids = torch.where(used, ids, problem.layout.num_k).sort(1).values
    return torch.where(ids < problem.layout.num_k, ids, -1), used.sum(1)


def sparse_gradients(frontend: Any, problem: SparseLoss) -> Gradients:
    """Gradients of the loss over selected keys, the ids counted through the whole micro-batch."""
    batch, keys = problem.index_k.shape[:2]
    begin = torch.arange(batch, dtype=torch.int32, device="cpu")[:, None, None] * keys
    result = frontend.indexer_backward_wrapper(
        index_q=problem.index_q,
        weights=problem.weights,
        index_k=problem.index_k,
        attn_score=problem.target.clone(),
        index_score=problem.predict.clone(),
        topk_indices=problem.ids + begin,
        sm_scale=1.0,
        loss_coeff=1.0,
        grad_loss=torch.ones(1, device="cpu"),
        block_I=128,
    )
    return Gradients(result["d_index_q"], result["d_weights"], result["d_index_k"])


def dense(frontend: Any, problem: DenseLoss) -> Dense:
    """Scores, attention mass and gradients of the loss over all keys that a row sees."""
    common = {"qhead_per_kv_head": HEADS, "ratio": 1}
    index = frontend.dense_indexer_score_recompute_wrapper(
        q=problem.index_q, k=problem.index_k[:, :, None], weights=problem.weights, sm_scale=1.0, **common
    )
    attention = frontend.dense_attn_score_recompute_wrapper(
        q=problem.q, k=problem.kv[:, :, None], lse=problem.lse, softmax_scale=SOFTMAX_SCALE, **common
    )
    result = frontend.dense_indexer_backward_wrapper(
        index_q=problem.index_q,
        weights=problem.weights,
        index_k=problem.index_k,
        attn_score=attention["out"].clone(),
        attn_l1norm=attention["denom"],
        index_score=index["out"].clone(),
        index_lse=index["denom"],
        sm_scale=1.0,
        loss_coeff=1.0,
        grad_loss=torch.ones(1, device="cpu"),
        ratio=1,
        block_I=128,
    )
    gradients = Gradients(result["d_index_q"], result["d_weights"], result["d_index_k"])
    return Dense(index["out"], index["denom"], attention["out"], attention["denom"], gradients)


def _one_document(frontend: Any, problem: Selection) -> Tensor:
    rows, keys = problem.layout.num_q, problem.layout.num_k
    half = rows // 2
    found = []
    for begin, end in ((0, (problem.cp_rank + 1) * half), (half, keys - problem.cp_rank * half)):
        part = slice(begin, begin + half)
        scores = frontend.indexer_forward_wrapper(
            q=problem.index_q[None, part],
            k=problem.index_k[None, :end, None],
            w=problem.weights[None, part],
            ratio=1,
            sm_scale=1.0,
        )["scores"]
        seen = torch.arange(end - half + 1, end + 1, dtype=torch.int32, device="cpu")
        found.append(_best(frontend, scores[0], seen))
    return torch.cat(found)


def _many_documents(frontend: Any, problem: Selection) -> Tensor:
    rank, chunks = problem.cp_rank, 2 * problem.cp_size
    starts = [0, *accumulate(problem.documents)]
    halves, ends, begins = [], [], []
    for start, length in zip(starts, problem.documents, strict=False):
        half = length // chunks
        halves += [half, half]
        ends += [(rank + 1) * half, length - rank * half]
        begins += [start, start]
    keys = torch.cat([problem.index_k[begin : begin + end] for begin, end in zip(begins, ends, strict=True)])
    scores = frontend.indexer_forward_wrapper(
        q=problem.index_q,
        k=keys[:, None],
        w=problem.weights,
        ratio=1,
        sm_scale=1.0,
        cu_seqlens_q=_starts(halves),
        cu_seqlens_k=_starts(ends),
        max_seqlen_q=max(halves),
        max_seqlen_k=max(ends),
    )["scores"]
    seen = [torch.arange(end - half + 1, end + 1, device="cpu") for half, end in zip(halves, ends, strict=True)]
    ids = _best(frontend, scores, torch.cat(seen).int())
    first = torch.tensor(begins, device="cpu").repeat_interleave(torch.tensor(halves, device="cpu"))
    return torch.where(ids >= 0, ids + first[:, None], -1)


def _best(frontend: Any, scores: Tensor, seen: Tensor) -> Tensor:
    """The best columns of every row, those beyond the keys that it sees dropped."""
    ids = frontend.indexer_top_k_wrapper(input_values=scores, seq_lens=seen, top_k=TOP_K, next_n=1, return_val=False)[
        "indices"
    ].long()
    return torch.where((ids >= 0) & (ids < seen[:, None]), ids, -1)


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")
