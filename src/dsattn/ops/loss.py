"""The indexer loss: KL from the attention's probabilities to the indexer's, and its gradients in the same pass.

teacher[i, j] = sum_h softmax_j(logit[i, h, :]), over its sum      student[i, :] = softmax(score[i, :])
loss = sum_i row_weight_i * sum_j teacher * (log teacher - log student)
d_score[i, j] = row_weight_i * (student - teacher)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from dsattn.ops.attention import attention_probabilities
from dsattn.ops.blocks import Block, on_one_thread
from dsattn.ops.indexer import block_scores, block_scores_backward
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.ops.numerics import exact_products, unscaled_gradient_dtype
from dsattn.ops.softmax import masked_softmax
from dsattn.ops.support import Support, accumulate

# What a rank's share of the heads is taken for when blocks are planned.
_PARALLEL_HEADS = 128

LossGradients = tuple[Tensor, Tensor, Tensor]


def indexer_kl(
    x: IndexerInputs,
    a: AttentionInputs,
    support: Support,
    options: LossOptions,
    with_gradients: bool,
) -> tuple[Float[Tensor, ""], LossGradients | None]:
    """The loss in the dtype of scores, and if asked for its gradients of index_q, index_k and weights.

    Gradients are those of the loss itself, in the dtypes of `unscaled_gradient_dtype`.

    Args:
        x: the indexer's side.
        a: the attention's side; its sink takes no part.
        support: the keys that both softmaxes run over.
        options: what turns the KL of rows into the loss.
        with_gradients: whether to compute gradients.
    """
    device, tp_group = x.index_q.device, options.tp_group
    if options.row_mask is not None:
        support = support.masked(options.row_mask)
    counted, weight = row_weight(support, options, x.dtype)
    # Chosen, not multiplied: a given count of 0 is right where no row takes part.
    row_weights = torch.where(counted, weight, 0)
    kl = torch.zeros(support.num_q, dtype=x.dtype, device=device)
    d_index_q = _gradient_buffer(x.index_q) if with_gradients else None
    d_weights = _gradient_buffer(x.weights) if with_gradients else None

    def work(block: Block, totals: Sequence[Tensor]) -> None:
        rows, seen = slice(block.q_begin, block.q_end), support.seen(block)
        teacher = _teacher(a, support, block, seen, tp_group).to(x.dtype)
        keys = support.keys(block, x.index_k, x.dtype)
        scores = block_scores(x, block, keys)
        student, student_lse = masked_softmax(scores, seen)
        kl[rows] = row_kl(teacher, scores, student_lse, seen)
        if d_index_q is None or d_weights is None:
            return
        d_scores = (student - teacher).mul_(row_weights[rows, None]).masked_fill_(~seen, 0)
        d_index_q[rows], d_keys, d_weights[rows] = block_scores_backward(x, block, keys, d_scores, seen)
        support.add(block, totals[0], d_keys)

    # Ranks may hold different numbers of heads, but have to cut their rows alike.
    heads = x.weights.shape[1] + (a.q.shape[1] if tp_group is None else _PARALLEL_HEADS)
    widths = a.kv.shape[1] + x.index_k.shape[1]
    with exact_products(device):
        blocks = support.blocks(heads * x.dtype.itemsize, widths * x.dtype.itemsize)
        key_widths = [x.index_k.shape[1]] if with_gradients else []
        # Collectives must run in one order on all ranks.
        d_index_k = accumulate(support, blocks, key_widths, x.dtype, device, work, one_lane=tp_group is not None)
    # A row with a weight of 0 takes no part even if its KL is infinite; rows without keys have KL 0.
    loss = on_one_thread(lambda: torch.where(row_weights == 0, 0, kl * row_weights).sum(), device)
    if d_index_q is None or d_weights is None:
        return loss, None
    return loss, (d_index_q, d_index_k[0].to(d_index_q.dtype), d_weights)


def row_weight(
    support: Support, options: LossOptions, dtype: torch.dtype
) -> tuple[Bool[Tensor, " t"], Float[Tensor, ""]]:
    """Which rows take part, and what the KL of each of them is multiplied by, the coefficient included."""
    counted = support.has_keys()
    rows: int | Tensor = 1
    if options.num_rows is not None:
        rows = options.num_rows
    elif options.reduction == "mean":
        rows = counted.sum().clamp(min=1)
    # Divided in this dtype: a Python float over a tensor of ints would be fp32.
    weight = (torch.full((), options.coeff, dtype=dtype, device=counted.device) / rows).to(dtype)
    return counted, weight


def _gradient_buffer(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=unscaled_gradient_dtype(x.dtype), device=x.device)


def _teacher(
    a: AttentionInputs, support: Support, block: Block, seen: Bool[Tensor, "c n"], tp_group: dist.ProcessGroup | None
) -> Float[Tensor, "c n"]:
    """Attention probabilities summed over all heads, of all ranks, and normalised; 0 at unseen keys."""
    keys = support.keys(block, a.kv, a.dtype)
    queries = a.q[block.q_begin : block.q_end].to(a.dtype)
    probabilities, _ = attention_probabilities(a, queries, keys, seen)
    teacher = probabilities.sum(1)
    if tp_group is not None:
        dist.all_reduce(teacher, group=tp_group)
    # A row without keys has no sum to divide by.
    return (teacher / teacher.sum(1, keepdim=True)).masked_fill_(~seen, 0)


def row_kl(
    teacher: Float[Tensor, "c n"],
    scores: Float[Tensor, "c n"],
    student_lse: Float[Tensor, " c"],
    seen: Bool[Tensor, "c n"],
) -> Float[Tensor, " c"]:
    """sum_j teacher * (log teacher - log student) with 0 log 0 = 0; a NaN teacher gives NaN."""
    terms = teacher * (teacher.log() - (scores - student_lse[:, None]))
    return terms.masked_fill_((teacher == 0) | ~seen, 0).sum(1)
