"""The indexer loss over the frontend's kernels: teacher and gradients by them, student by our own scores.

The student is computed here because one of the wrappers has no scale, and because its gradient with respect to fp32
weights comes out of the kernels rounded to bf16.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dsattn.backends.cudnn.calls import Calls
from dsattn.backends.cudnn.folding import Fold, Piece, batch_of, folds, table_elements
from dsattn.layouts import CausalLayout
from dsattn.ops.attention import attend
from dsattn.ops.blocks import Block, run_blocks
from dsattn.ops.indexer import block_scores, block_weights_gradient
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.ops.loss import row_kl, row_weight
from dsattn.ops.numerics import exact_products
from dsattn.ops.softmax import masked_softmax
from dsattn.ops.support import Selected, Visible

Gradients = tuple[Tensor, Tensor, Tensor]


def selected_loss(
    calls: Calls,
    x: IndexerInputs,
    a: AttentionInputs,
    support: Selected,
    layout: CausalLayout,
    lse: Tensor | None,
    options: LossOptions,
    with_gradients: bool,
) -> tuple[Tensor, Gradients | None]:
    """The loss over selected keys, and its gradients of index_q, index_k and weights.

    Args:
        calls: of a release.
        x: the indexer's side; its scale is not negative.
        a: the attention's side.
        support: the selection.
        layout: the segments of the call.
        lse: [t, h] of the attention over the selection; computed where not given.
        options: of the loss.
        with_gradients: whether to compute gradients.
    """
    if options.row_mask is not None:
        support = support.masked(options.row_mask)
    counted, weight = row_weight(support, options, torch.float32)
    used = torch.arange(support.ids.shape[1], device=support.ids.device) < support.lengths[:, None]
    ids = support.ids.masked_fill(~used, -1)
    ids, batch = calls.steps.flat_ids(ids, layout), _entries(ids, batch_of(layout), support.num_k)
    lse = attend(a, support)[1] if lse is None else lse
    mass = calls.attention_mass(a.q, a.kv, lse, ids, support.lengths, a.softmax_scale, batch)
    teacher = _over_ranks(mass * a.q.shape[1], options.tp_group)
    loss, student, d_weights = _student(calls, x, support, teacher, torch.where(counted, weight, 0.0), with_gradients)
    if not with_gradients:
        return loss, None
    tables = calls.backward_tables(ids, teacher, calls.steps.student(student, used))
    d_q, d_k, low_d_weights = _summed(
        [
            calls.indexer_backward(x.index_q, x.index_k, part, tables, x.scale, batch, _any(counted, weight))
            for part in calls.steps.weight_parts("indexer_backward", x.weights, 2)
        ]
    )
    d_weights = low_d_weights if d_weights is None else d_weights
    return loss, (d_q.to(x.index_q.dtype), d_k.to(x.index_k.dtype), d_weights.to(x.weights.dtype))


def _student(
    calls: Calls, x: IndexerInputs, support: Selected, teacher: Tensor, row_weights: Tensor, with_gradients: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss, the student's probabilities [t, k], and for fp32 weights their gradient."""
    device = x.index_q.device
    student = torch.zeros_like(teacher)
    kl = torch.zeros(support.num_q, dtype=torch.float32, device=device)
    wanted = with_gradients and x.weights.dtype == torch.float32
    d_weights = torch.zeros_like(x.weights, memory_format=torch.contiguous_format) if wanted else None

    def work(block: Block) -> None:
        rows, columns = slice(block.q_begin, block.q_end), slice(0, block.k_end)
        seen, keys, target = support.seen(block), support.keys(block, x.index_k, x.dtype), teacher[rows, columns]
        scores = block_scores(x, block, keys)
        probabilities, lse = masked_softmax(scores, seen)
        student[rows, columns] = probabilities
        kl[rows] = row_kl(target, scores, lse, seen)
        if d_weights is not None:
            d_scores = (probabilities - target).mul_(row_weights[rows, None]).masked_fill_(~seen, 0)
            d_weights[rows] = block_weights_gradient(x, block, keys, d_scores, seen)

    with exact_products(device):
        run_blocks(work, support.blocks(x.weights.shape[1] * 4, x.index_k.shape[1] * 4), device)
    return _loss(kl, row_weights), student, d_weights


def visible_loss(
    calls: Calls,
    x: IndexerInputs,
    a: AttentionInputs,
    layout: CausalLayout,
    lse: Tensor | None,
    options: LossOptions,
    with_gradients: bool,
) -> tuple[Tensor, Gradients | None]:
    """The loss over all visible keys, and its gradients; arguments as `selected_loss`, with the layout for both."""
    device = x.index_q.device
    support = Visible.of(layout, device)
    lse = attend(a, support)[1] if lse is None else lse
    if options.row_mask is not None:
        support = support.masked(options.row_mask)
    counted, weight = row_weight(support, options, torch.float32)
    run = _Visible(calls, x, a, lse, counted, weight, options.tp_group, with_gradients)
    for fold in folds(layout, squared=calls.squared("dense_attn_score_recompute"), elements=table_elements(device)):
        run.add(fold)
    loss = _loss(run.kl, torch.where(counted, weight, 0.0))
    if not with_gradients:
        return loss, None
    d_q, d_k, d_w = run.d_index_q, run.d_index_k, run.d_weights
    return loss, (d_q.to(x.index_q.dtype), d_k.to(x.index_k.dtype), d_w.to(x.weights.dtype))


class _Visible:
    """The sums of `visible_loss`, to which one launch after the other is added."""

    def __init__(
        self,
        calls: Calls,
        x: IndexerInputs,
        a: AttentionInputs,
        lse: Tensor,
        counted: Tensor,
        weight: Tensor,
        tp_group: dist.ProcessGroup | None,
        with_gradients: bool,
    ) -> None:
        self.calls, self.x, self.a, self.lse = calls, x, a, lse
        self.counted, self.weight, self.tp_group = counted, weight, tp_group
        self.with_gradients = with_gradients
        self.kl = torch.zeros(x.index_q.shape[0], dtype=torch.float32, device=x.index_q.device)
        self.d_index_q, self.d_index_k, self.d_weights = (
            torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
            for tensor in (x.index_q, x.index_k, x.weights)
        )

    def add(self, fold: Fold) -> None:
        """Adds the rows of one launch."""
        x, a, device = self.x, self.a, self.x.index_q.device
        seen = fold.seen(device)
        mass, _ = self.calls.dense_attention_mass(
            fold.queries(a.q), fold.keys(a.kv), fold.queries(self.lse, -torch.inf), fold, a.softmax_scale
        )
        teacher = _over_ranks(mass, self.tp_group)
        q, k, weights = fold.queries(x.index_q), fold.keys(x.index_k), fold.queries(x.weights)
        scores, _ = self.calls.dense_indexer(q, k, weights, fold, x.scale)
        # Below its largest a row's scores are small numbers: fp32 holds their log-sum-exp to the last bits of a nat.
        scores = scores - scores.amax(1, keepdim=True).masked_fill(~seen.any(1, keepdim=True), 0.0)
        lse = scores.logsumexp(1)
        kl = row_kl(teacher, scores, lse, seen)
        fold.place_queries(kl, self.kl)
        if not self.with_gradients:
            return
        kept = fold.queries(self.counted.to(torch.float32)) > 0
        silent, sent = self.calls.steps.silenced(teacher, lse, kept)
        given = {
            "teacher": silent,
            "scores": self.calls.steps.raised(scores, lse),
            "lse": sent,
            "row_weight": _any(self.counted, self.weight),
        }
        d_q, d_k, d_w = _summed(
            [
                self.calls.dense_backward(q, k, part, fold, x.scale, **given)
                for part in self.calls.steps.weight_parts("dense_indexer_backward", weights, 2)
            ]
        )
        fold.place_queries(d_q, self.d_index_q)
        fold.add_keys(d_k, self.d_index_k)
        if x.weights.dtype != torch.float32:
            fold.place_queries(d_w, self.d_weights)
            return
        for piece, rows, _ in fold.parts():
            at = slice(piece.q_begin, piece.q_end)
            columns = slice(0, piece.k_end - piece.k_begin)
            student = torch.exp(scores[rows, columns] - lse[rows, None])
            self.d_weights[at] = self._exact_d_weights(
                piece, (student - teacher[rows, columns]) * self.weight, seen[rows, columns] & kept[rows, None]
            )

    def _exact_d_weights(self, piece: Piece, d_scores: Tensor, seen: Tensor) -> Tensor:
        """The gradient of fp32 weights, which the kernel would round to bf16."""
        block = Block(piece.q_begin, piece.q_end, piece.k_begin, piece.k_end)
        keys = self.x.index_k[piece.k_begin : piece.k_end].to(self.x.dtype)
        d_scores = torch.where(seen, d_scores, 0.0)
        with exact_products(d_scores.device):
            return block_weights_gradient(self.x, block, keys, d_scores, seen)


def _entries(ids: Tensor, batch: int, num_k: int) -> int:
    """`batch`, or 1 where a row selects a key of another entry: of a call with a batch the kernels would drop it.

    Only a caller's own selection can do that. An accelerator is not waited for: there it is an assertion of the device.
    """
    if batch == 1:
        return 1
    entry = torch.arange(batch, device=ids.device).repeat_interleave(len(ids) // batch)[:, None]
    own = ((ids < 0) | (ids // (num_k // batch) == entry)).all()
    if ids.device.type == "cpu":
        return batch if own else 1
    torch._assert_async(own, "a selection in which a row has keys of another batch entry")
    return batch


def _over_ranks(mass: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The teacher: head sums of all ranks, normalised; 0 where there is no mass."""
    if group is not None:
        dist.all_reduce(mass, group=group)
    total = mass.sum(1, keepdim=True)
    return torch.where(total == 0, 0.0, mass / total)


def _summed(parts: list[Gradients]) -> Gradients:
    """The gradients d_q, d_k, d_w of all parts of the weights, from (d_q, d_w, d_k)."""
    d_q = sum((part[0].float() for part in parts[1:]), parts[0][0].float())
    return d_q, sum((part[2] for part in parts[1:]), parts[0][2]), parts[0][1]


def _any(counted: Tensor, weight: Tensor) -> Tensor:
    """The weight of rows that count, 0 where none does: a count of 0 would make it inf."""
    return torch.where(counted.any(), weight, 0.0)


def _loss(kl: Tensor, row_weights: Tensor) -> Tensor:
    # A row with a weight of 0 takes no part even if its KL is infinite.
    return torch.where(row_weights == 0, 0.0, kl * row_weights).sum()
