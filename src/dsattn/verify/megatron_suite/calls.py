"""Megatron's own functions, called as its autograd functions call them."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from dsattn.integrations.megatron_module import SELECT, Kernels
from dsattn.verify.frontend_defaults.naive import Gradients
from dsattn.verify.frontend_defaults.problems import SparseLoss
from dsattn.verify.megatron_suite.problems import TOP_K, Selection


def select(kernels: Kernels, problem: Selection, **options: Any) -> tuple[Int[Tensor, "t k"], Int[Tensor, " t"], Any]:
    """The keys that each row of a document selects, as Megatron's attention gets them, how many there are, and scores.

    Args:
        kernels: Megatron's functions.
        problem: the rows and the keys.
        options: of Megatron's function: whether it returns scores of the selected keys, None else.
    """
    device = problem.index_q.device
    starts = torch.tensor(problem.starts, dtype=torch.int32, device=device)
    first, last = _windows(kernels, problem, starts)
    layout: dict[str, Any] = {"single_packed_thd_sequence": True}
    if len(problem.documents) > 1:
        layout = {
            "packed_cu_seqlens_q": starts,
            "packed_cu_seqlens_k": starts,
            "packed_max_seqlen_q": max(problem.documents),
            "packed_max_seqlen_k": max(problem.documents),
            "packed_cp_size": problem.cp_size,
        }
    if problem.rows is not None:
        layout |= {"local_packed_cp_query_start": problem.rows[0], "local_packed_cp_query_len": problem.local_rows}
    ids, lengths, scores = kernels.names[SELECT](
        problem.index_q[None],
        problem.index_k[None],
        problem.weights[None],
        TOP_K,
        varlen_starts=first,
        varlen_ends=last,
        return_scores=False,
        use_local_indexer_varlen=True,
        local_packed_cp_rank=problem.cp_rank,
        **layout,
        **options,
    )
    count = problem.layout.num_q
    return ids[0, :count], lengths[0, :count], None if scores is None else scores[0, :count]


def loss_gradients(kernels: Kernels, problem: SparseLoss) -> Gradients:
    """Gradients of the sum over sequences of their mean loss; Megatron counts ids through the micro-batch."""
    batch, keys = problem.index_k.shape[:2]
    device = problem.index_q.device
    begin = torch.arange(batch, dtype=torch.int32, device=device)[:, None, None] * keys
    d_q, d_w, d_k = kernels.names["_run_sparse_indexer_backward"](
        problem.index_q,
        problem.weights,
        problem.index_k,
        problem.target.clone(),
        problem.predict.clone(),
        problem.ids + begin,
        loss_coeff=float(batch),
        grad_loss=torch.ones((), device=device),
        block_i=128,
    )
    return Gradients(d_q.cpu(), d_w.cpu(), d_k.cpu())


def _windows(kernels: Kernels, problem: Selection, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The keys that Megatron's mask builder shows to each row."""
    positions = kernels.names["dsa_layout"].build_packed_allgather_cp_local_positions(
        starts, problem.cp_size, problem.cp_rank, starts.device, output_size=problem.local_rows
    )
    first, last = kernels.names["dsa_masking"].generate_varlen_mask_params_for_positions(starts, positions)
    rows = slice(None) if problem.rows is None else slice(*problem.rows)
    return first[rows], last[rows]
