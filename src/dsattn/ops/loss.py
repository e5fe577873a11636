"""The indexer loss: KL from the attention's probabilities to the indexer's, and its gradients in the same pass.

teacher[i, j] = sum_h softmax_j(logit[i, h, :]), over its sum      student[i, :] = softmax(score[i, :])
loss = sum_i row_weight_i * sum_j teacher * (log teacher - log student)
d_score[i, j] = row_weight_i * (student - teacher)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

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


class LossProducts(ABC):
    """The products behind the loss, for one block of rows at a time; what they make of a row's keys is summed here.

    Args:
        x: the indexer's side.
        a: the attention's side; its sink takes no part.
        support: the keys of each row.
        parallel: whether the heads of other ranks are added to the teacher, so that all must cut their rows alike.
    """

    lanes: int | None = None
    """How many accumulators of key gradients; None: a number that depends on shapes alone."""

    def __init__(self, x: IndexerInputs, a: AttentionInputs, support: Support, parallel: bool) -> None:
        self.x, self.a, self.support, self.parallel = x, a, support, parallel

    @abstractmethod
    def blocks(self) -> Sequence[Block]:
        """The blocks that cover every row with a key."""

    @abstractmethod
    def head_sum(self, block: Block, seen: Bool[Tensor, "c n"]) -> Float[Tensor, "c n"]:
        """Attention probabilities of a block, summed over heads; anything at unseen keys."""

    @abstractmethod
    def scores(self, block: Block) -> Float[Tensor, "c n"]:
        """Indexer scores of a block; anything at unseen keys."""

    @abstractmethod
    def row_buffers(self) -> tuple[Tensor, Tensor]:
        """Zeros for the gradients of index_q and weights, whose last axis may be longer, in any dtype."""

    @property
    @abstractmethod
    def key_width(self) -> int:
        """Columns of an accumulator of index_k's gradient, at least those of index_k."""

    @abstractmethod
    def add_gradients(
        self, block: Block, d_scores: Float[Tensor, "c n"], seen: Bool[Tensor, "c n"], buffers: LossGradients
    ) -> None:
        """Writes a block's rows of d_index_q and d_weights and adds to the accumulator between them."""


class TorchProducts(LossProducts):
    """The products of `dsattn.ops`."""

    def blocks(self) -> Sequence[Block]:  # noqa: D102
        x, a = self.x, self.a
        # Ranks may hold different numbers of heads, but have to cut their rows alike.
        heads = x.weights.shape[1] + (_PARALLEL_HEADS if self.parallel else a.q.shape[1])
        widths = a.kv.shape[1] + x.index_k.shape[1]
        return self.support.blocks(heads * x.dtype.itemsize, widths * x.dtype.itemsize)

    def head_sum(self, block: Block, seen: Bool[Tensor, "c n"]) -> Float[Tensor, "c n"]:  # noqa: D102
        a = self.a
        keys = self.support.keys(block, a.kv, a.dtype)
        queries = a.q[block.q_begin : block.q_end].to(a.dtype)
        return attention_probabilities(a, queries, keys, seen)[0].sum(1)

    def scores(self, block: Block) -> Float[Tensor, "c n"]:  # noqa: D102
        return block_scores(self.x, block, self._keys(block))

    def row_buffers(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        found = [torch.zeros(x.shape, dtype=unscaled_gradient_dtype(x.dtype), device=x.device) for x in self._by_row]
        return found[0], found[1]

    @property
    def key_width(self) -> int:  # noqa: D102
        return self.x.index_k.shape[1]

    def add_gradients(  # noqa: D102
        self, block: Block, d_scores: Float[Tensor, "c n"], seen: Bool[Tensor, "c n"], buffers: LossGradients
    ) -> None:
        d_index_q, total, d_weights = buffers
        rows = slice(block.q_begin, block.q_end)
        found = block_scores_backward(self.x, block, self._keys(block), d_scores, seen)
        d_index_q[rows], d_keys, d_weights[rows] = found
        self.support.add(block, total, d_keys)

    @property
    def _by_row(self) -> tuple[Tensor, Tensor]:
        return self.x.index_q, self.x.weights

    def _keys(self, block: Block) -> Tensor:
        return self.support.keys(block, self.x.index_k, self.x.dtype)


def indexer_kl(
    x: IndexerInputs,
    a: AttentionInputs,
    support: Support,
    options: LossOptions,
    with_gradients: bool,
    products: Callable[[IndexerInputs, AttentionInputs, Support, bool], LossProducts] = TorchProducts,
) -> tuple[Float[Tensor, ""], LossGradients | None]:
    """The loss in the dtype of scores, and if asked for its gradients of index_q, index_k and weights.

    Gradients are those of the loss itself, in the dtypes of `unscaled_gradient_dtype`.

    Args:
        x: the indexer's side.
        a: the attention's side; its sink takes no part.
        support: the keys that both softmaxes run over.
        options: what turns the KL of rows into the loss.
        with_gradients: whether to compute gradients.
        products: what computes the products of a block.
    """
    device, tp_group = x.index_q.device, options.tp_group
    if options.row_mask is not None:
        support = support.masked(options.row_mask)
    made = products(x, a, support, tp_group is not None)
    counted, weight = row_weight(support, options, x.dtype)
    # Chosen, not multiplied: a given count of 0 is right where no row takes part.
    row_weights = torch.where(counted, weight, 0)
    kl = torch.zeros(support.num_q, dtype=x.dtype, device=device)
    by_row = made.row_buffers() if with_gradients else None

    def work(block: Block, totals: Sequence[Tensor]) -> None:
        rows, seen = slice(block.q_begin, block.q_end), support.seen(block)
        teacher = _teacher(made.head_sum(block, seen), seen, tp_group).to(x.dtype)
        scores = made.scores(block)
        student, student_lse = masked_softmax(scores, seen)
        kl[rows] = row_kl(teacher, scores, student_lse, seen)
        if by_row is None:
            return
        d_scores = (student - teacher).mul_(row_weights[rows, None]).masked_fill_(~seen, 0)
        made.add_gradients(block, d_scores, seen, (by_row[0], totals[0], by_row[1]))

    with exact_products(device):
        widths = [made.key_width] if with_gradients else []
        # Collectives must run in one order on all ranks.
        lanes = made.lanes if tp_group is None else 1
        d_index_k = accumulate(support, made.blocks(), widths, x.dtype, device, work, lanes)
    # A row with a weight of 0 takes no part even if its KL is infinite; rows without keys have KL 0.
    loss = on_one_thread(lambda: torch.where(row_weights == 0, 0, kl * row_weights).sum(), device)
    if by_row is None:
        return loss, None
    found = (by_row[0], x.index_q), (d_index_k[0], x.index_k), (by_row[1], x.weights)
    d_index_q, d_keys, d_weights = (
        part[..., : of.shape[-1]].to(unscaled_gradient_dtype(of.dtype)).contiguous() for part, of in found
    )
    return loss, (d_index_q, d_keys, d_weights)


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


def _teacher(
    head_sum: Float[Tensor, "c n"], seen: Bool[Tensor, "c n"], tp_group: dist.ProcessGroup | None
) -> Float[Tensor, "c n"]:
    """Attention probabilities summed over all heads, of all ranks, and normalised; 0 at unseen keys."""
    teacher = head_sum.masked_fill_(~seen, 0)
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
