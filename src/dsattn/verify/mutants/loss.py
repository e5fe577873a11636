"""Faults in the indexer loss: its divisor, its teacher and its student."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log
from typing import Any

import torch
from torch import Tensor

from dsattn.backends import TorchBackend
from dsattn.ops.inputs import LossOptions
from dsattn.verify.mutants import (
    BACKWARD,
    LOSS,
    LOSS_BACKWARD,
    LOSS_SELECTED,
    LOSS_SELECTED_BACKWARD,
    Fault,
    Operation,
    changed,
)

_BOTH = LOSS + LOSS_BACKWARD
_TORCH = TorchBackend()
_SMALL = 1e-4


@dataclass(frozen=True)
class LossTables:
    """The loss once more in plain tables [t, s], for faults that no argument gives.

    Attributes:
        seen: which keys are in the support of each row.
        scores: indexer scores, -inf at keys that are not visible.
        logits: of the attention, [t, h, s].
        row_weight: what the KL of each row is multiplied by, [t].
        lse: of the attention [t, h], where it was given.
    """

    seen: Tensor
    scores: Tensor
    logits: Tensor
    row_weight: Tensor
    lse: Tensor | None

    @classmethod
    def of(cls, operation: Operation) -> LossTables:
        """The tables of a right call."""
        x, a, options, layout = operation.x, operation.a, operation.options, operation.layout
        start, end = (bound[:, None] for bound in layout.bounds(x.index_q.device))
        keys = torch.arange(layout.num_k, device=start.device)
        seen = (keys >= start) & (keys < end)
        if operation.topk is not None:
            # A last column takes the unused slots.
            table = torch.zeros(layout.num_q, layout.num_k + 1, dtype=torch.bool, device=start.device)
            seen = table.scatter_(1, operation.topk.indices.long() % (layout.num_k + 1), True)[:, :-1]
        if options.row_mask is not None:
            seen = seen & options.row_mask[:, None]
        logits = a.softmax_scale * torch.einsum("thd,sd->ths", a.q.to(a.dtype), a.kv.to(a.dtype))
        counted = seen.any(1)
        rows = options.num_rows if options.num_rows is not None else 1
        if options.num_rows is None and options.reduction == "mean":
            rows = counted.sum().clamp(min=1)
        row_weight = counted.to(x.dtype) * options.coeff / rows
        return cls(seen, _TORCH.indexer_scores(x, layout), logits, row_weight, operation.lse)

    @property
    def mass(self) -> Tensor:
        """Attention probabilities summed over heads, 0 outside the support."""
        return _softmax(self.logits, self.seen[:, None]).sum(1)

    @property
    def teacher(self) -> Tensor:
        """The mass over its sum."""
        return _normalised(self.mass)

    def log_student(self, seen: Tensor | None = None) -> Tensor:
        """The log-softmax of the scores over the support, or over other keys; -inf elsewhere."""
        seen = self.seen if seen is None else seen
        return torch.log_softmax(self.scores.masked_fill(~seen, -torch.inf), -1).masked_fill(~seen, -torch.inf)

    def d_scores(self, student: Tensor, teacher: Tensor) -> Tensor:
        """The gradient of the scores."""
        return ((student - teacher) * self.row_weight[:, None]).masked_fill(~self.seen, 0)


def _normalised(mass: Tensor) -> Tensor:
    total = mass.sum(1, keepdim=True)
    return mass / total.where(total > 0, 1)


def _softmax(x: Tensor, seen: Tensor) -> Tensor:
    return torch.softmax(x.masked_fill(~seen, -torch.inf), -1).masked_fill(~seen, 0)


def _loss(tables: LossTables, teacher: Tensor, log_teacher: Tensor, log_student: Tensor) -> Tensor:
    """The loss of teacher * (log teacher - log student) with 0 log 0 = 0."""
    terms = (teacher * (log_teacher - log_student)).masked_fill((teacher == 0) | ~tables.seen, 0)
    return (terms.sum(1) * tables.row_weight).sum()


def rewritten(
    teacher_of: Callable[[LossTables], Tensor] = lambda tables: tables.teacher,
    log_student_of: Callable[[LossTables], Tensor] = lambda tables: tables.log_student(),
) -> Callable[[Operation], Any]:
    """A fault's `apply` with another teacher or student; with both as they are it gives right results.

    Only finite inputs have the fault: the tables do not keep NaN where it belongs.
    """

    def apply(operation: Operation) -> Any:
        x, a = operation.x, operation.a
        if not all(bool(torch.isfinite(tensor).all()) for tensor in (x.index_q, x.index_k, x.weights, a.q, a.kv)):
            return operation()
        tables = LossTables.of(operation)
        teacher, log_student = teacher_of(tables), log_student_of(tables)
        if not operation.part.endswith(BACKWARD):
            return _loss(tables, teacher, teacher.log(), log_student)
        d_scores = tables.d_scores(log_student.exp(), teacher)
        return _TORCH.indexer_scores_backward(operation.x, operation.layout, d_scores)

    return apply


def _reversed_kl(operation: Operation) -> Tensor:
    tables = LossTables.of(operation)
    return _loss(tables, tables.log_student().exp(), tables.log_student(), tables.teacher.log())


def _cross_entropy(operation: Operation) -> Tensor:
    tables = LossTables.of(operation)
    return _loss(tables, tables.teacher, torch.zeros_like(tables.teacher), tables.log_student())


def _gate_missing(operation: Operation) -> Any:
    tables, x = LossTables.of(operation), replace(operation.x, relu=False)
    d_scores = tables.d_scores(tables.log_student().exp(), tables.teacher)
    d_index_q, d_index_k, _ = _TORCH.indexer_scores_backward(x, operation.layout, d_scores)
    return d_index_q, d_index_k, operation()[2]


def _without_maximum(tables: LossTables) -> Tensor:
    total = tables.scores.masked_fill(~tables.seen, -torch.inf).exp().sum(1, keepdim=True)
    return tables.log_student().masked_fill(tables.seen & (total.isinf() | (total == 0)), torch.nan)


def _student_over_visible(tables: LossTables) -> Tensor:
    return tables.log_student(tables.scores != -torch.inf)


def _teacher_of_wrong_lse(tables: LossTables) -> Tensor:
    if tables.lse is None:
        return tables.teacher
    probabilities = torch.exp(tables.logits - tables.lse[..., None] * log(2))
    return _normalised(probabilities.masked_fill(~tables.seen[:, None], 0).sum(1))


def _small_dropped(tables: LossTables) -> Tensor:
    # Where the student is the teacher, no gradient is sent.
    log_student = tables.log_student()
    return torch.where(log_student < log(_SMALL), tables.teacher.log(), log_student)


def _options(change: Callable[[LossOptions, Operation], LossOptions]) -> Callable[[Operation], Any]:
    """A fault's `apply` that changes the options of the loss."""
    return lambda operation: operation(options=change(operation.options, operation))


def _has_keys(operation: Operation) -> Tensor:
    if operation.topk is not None:
        return operation.topk.lengths > 0
    start, end = operation.layout.bounds(operation.x.index_q.device)
    return end > start


def _mean_over(rows_of: Callable[[Operation], Tensor | int]) -> Callable[[Operation], Any]:
    """A fault's `apply` that divides by another number of rows where the mean is asked for."""

    def change(options: LossOptions, operation: Operation) -> LossOptions:
        is_mean = options.num_rows is None and options.reduction == "mean"
        return replace(options, num_rows=rows_of(operation)) if is_mean else options

    return _options(change)


FAULTS = (
    Fault(
        name="mean over all rows",
        imitates="the loss divided by the rows of the buffer, padding and masked rows too",
        parts=_BOTH,
        apply=_mean_over(lambda operation: max(1, operation.layout.num_q)),
    ),
    Fault(
        name="mean over masked rows too",
        imitates="the loss divided by the rows that have keys, whatever row_mask says",
        parts=_BOTH,
        apply=_mean_over(lambda operation: _has_keys(operation).sum().clamp(min=1)),
    ),
    Fault(
        name="num_rows ignored",
        imitates="the mean over the rank's own rows where the global count was given",
        parts=_BOTH,
        apply=_options(lambda options, _: replace(options, num_rows=None)),
    ),
    Fault(
        name="num_rows as a tensor ignored",
        imitates="the count is used only where it is an int",
        parts=_BOTH,
        apply=_options(
            lambda options, _: replace(options, num_rows=None) if isinstance(options.num_rows, Tensor) else options
        ),
    ),
    Fault(
        name="sum taken as mean",
        imitates="reduction ignored",
        parts=_BOTH,
        apply=_options(lambda options, _: replace(options, reduction="mean")),
    ),
    Fault(
        name="row mask ignored",
        imitates="prompt and padding rows train the indexer too",
        parts=_BOTH,
        apply=_options(lambda options, _: replace(options, row_mask=None)),
    ),
    Fault(
        name="coefficient ignored",
        imitates="the loss as if coeff were 1",
        parts=_BOTH,
        apply=_options(lambda options, _: replace(options, coeff=1.0)),
    ),
    Fault(
        name="teacher of head 0 only",
        imitates="attention probabilities not summed over heads",
        parts=_BOTH,
        apply=changed("a", lambda a: replace(a, q=a.q[:, :1].contiguous())),
    ),
    Fault(
        name="teacher not normalised",
        imitates="the sum over heads is not divided by its sum over keys",
        parts=_BOTH,
        apply=rewritten(teacher_of=lambda tables: tables.mass),
    ),
    Fault(
        name="teacher's heads summed before the softmax",
        imitates="one sum of exp over heads and keys: heads with large logits count for more",
        parts=_BOTH,
        apply=rewritten(teacher_of=lambda tables: _softmax(tables.logits.logsumexp(1), tables.seen)),
    ),
    Fault(
        name="given lse read in base 2",
        imitates="the teacher is made with the log-sum-exp of a kernel on exp2",
        parts=_BOTH,
        apply=rewritten(teacher_of=_teacher_of_wrong_lse),
    ),
    Fault(
        name="student over all visible keys",
        imitates="the loss over selected keys takes the indexer's softmax over all keys",
        parts=LOSS_SELECTED + LOSS_SELECTED_BACKWARD,
        apply=rewritten(log_student_of=_student_over_visible),
    ),
    Fault(
        name="KL the other way round",
        imitates="the student's KL from the teacher",
        parts=LOSS,
        apply=_reversed_kl,
    ),
    Fault(
        name="cross entropy",
        imitates="teacher * log teacher left out, since it has no gradient",
        parts=LOSS,
        apply=_cross_entropy,
    ),
    Fault(
        name="student without its maximum",
        imitates="exp of the scores themselves, which overflows",
        parts=_BOTH,
        apply=rewritten(log_student_of=_without_maximum),
    ),
    Fault(
        name="epsilon in the logarithm",
        imitates="log(p + 1e-6) in place of a log-softmax",
        parts=LOSS,
        apply=rewritten(log_student_of=lambda tables: (tables.log_student().exp() + 1e-6).log()),
    ),
    Fault(
        name="gradient negated",
        imitates="teacher minus student: the indexer is trained away from the attention",
        parts=LOSS_BACKWARD,
        apply=lambda operation: tuple(-gradient for gradient in operation()),
    ),
    Fault(
        name="small probabilities send no gradient",
        imitates=f"slots whose student probability is below {_SMALL} are skipped",
        parts=LOSS_BACKWARD,
        apply=rewritten(log_student_of=_small_dropped),
    ),
    Fault(
        name="relu gate missing in the loss",
        imitates="the backward of the indexer lets gradients through heads whose dot the relu cut off",
        parts=LOSS_BACKWARD,
        apply=_gate_missing,
    ),
)
"""The faults of this module."""
