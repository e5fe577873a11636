"""What the results of a subject must be: the oracle's numbers and the plain run's, computed once and kept."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dsattn.layouts import CausalLayout, TopK
from dsattn.spec import oracle, plain
from dsattn.spec.metrics import tau
from dsattn.spec.oracle import Exact, Rows
from dsattn.spec.problem import Support
from dsattn.verify.subject import Subject
from dsattn.verify.threads import one_thread

_BLOCK_ROWS = 64


@dataclass(frozen=True)
class Expected:
    """One result: the oracle's number, and the plain run's, whose error is the budget."""

    exact: Exact
    plain: Tensor


class Reference:
    """The expected results of one subject in one dtype, on the CPU, each computed when it is first asked for.

    Per-row results hold the judged rows only, in the order of `rows`. Of the others nothing is computed, so that a call
    of very many rows can be judged in some of them.

    Args:
        subject: what is judged.
        dtype: of the inputs.
    """

    def __init__(self, subject: Subject, dtype: torch.dtype) -> None:
        self.subject, self.case, self.dtype = subject, subject.case, dtype
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.layout = subject.case.layout()
        self.inputs = subject.make_inputs(dtype)
        everything = torch.arange(self.layout.num_q, device="cpu")
        self.rows = everything if subject.rows is None else subject.rows
        self._part = self.layout if subject.rows is None else _part(self.layout, subject.rows)
        self.visible = self._by_row(oracle.visible_keys(self._part))
        self._attention: dict[Support, dict[str, Expected]] = {}
        self._loss: dict[Support, dict[str, Expected]] = {}

    @cached_property
    def row_batches(self) -> Tensor:
        """The batch entry of every query row, or of a packed call the segment; -1 in padding."""
        return self._batches([(s.q_start, s.q_len) for s in self.layout.segments], self.layout.num_q)

    @cached_property
    def key_batches(self) -> Tensor:
        """The batch entry of every key row, or of a packed call the first segment that has it; -1 in padding."""
        return self._batches([(s.k_start, s.k_len) for s in self.layout.segments], self.layout.num_k)

    def _batches(self, ranges: list[tuple[int, int]], rows: int) -> Tensor:
        if self.case.batch is not None:
            return torch.arange(rows, device="cpu") // max(1, rows // self.case.batch)
        batches = torch.full((rows,), -1, dtype=torch.int64, device="cpu")
        # Key ranges may overlap: written last to first, the first stays.
        for number, (start, length) in reversed(list(enumerate(ranges))):
            batches[start : start + length] = number
        return batches

    def judged(self, rows: Mapping[int, Tensor]) -> Rows:
        """The supports of the judged rows, in order."""
        return [rows[int(row)] for row in self.rows]

    def _by_row(self, supports: Rows) -> dict[int, Tensor]:
        return dict(zip(self.rows.tolist(), supports, strict=True))

    @property
    def d_scores(self) -> Tensor:
        """The gradient that comes in for the score table [t, s]; also at unseen keys, where it must have no effect."""
        table = torch.zeros(self.layout.num_q, self.layout.num_k, dtype=self.wide, device="cpu")
        table[self.rows] = self._d_scores
        return table

    @cached_property
    def _d_scores(self) -> Tensor:
        """The judged rows of `d_scores`."""
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(b"d_scores" + self.case.name.encode()))
        shape = len(self.rows), self.layout.num_k
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(self.wide)

    @property
    def _scoring(self) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's tensors, of the judged rows where they have rows."""
        x = self.inputs
        return x.index_q[self.rows], x.index_k, x.weights[self.rows]

    @cached_property
    @one_thread()
    def table(self) -> Exact:
        """The score table of the judged rows."""
        return oracle.indexer_scores(*self._scoring, self._part, scale=self.case.scale, relu=self.case.relu)

    @cached_property
    @one_thread()
    def scores(self) -> dict[str, Expected]:
        """The score table of the judged rows and its gradients."""
        tensors, options = self._scoring, {"scale": self.case.scale, "relu": self.case.relu}
        mine = plain.indexer_scores(*tensors, self._part, **options)
        gradients = self._score_gradients(tensors, self._d_scores, **options)
        value = self._score_gradients([x.double() for x in tensors], self._d_scores.double(), **options)
        # Without the relu's gate and with absolute values a gradient is the sum of the absolute values of its terms.
        magnitudes = [x.double().abs() for x in tensors]
        terms = self._score_gradients(magnitudes, self._d_scores.double().abs(), scale=abs(self.case.scale), relu=False)
        names = "d_index_q", "d_index_k", "d_weights"
        results = {"scores": Expected(self.table, mine)}
        for name, *numbers in zip(names, value, terms, gradients, strict=True):
            results[name] = Expected(Exact(numbers[0], numbers[1]), numbers[2])
        return results

    def _score_gradients(self, tensors: Sequence[Tensor], d_scores: Tensor, **options: Any) -> list[Tensor]:
        """Gradients of the plain score table by autograd, in blocks of rows."""
        leaves = index_q, index_k, weights = [x.detach().clone().requires_grad_() for x in tensors]
        for rows in torch.arange(len(self.rows), device="cpu").split(_BLOCK_ROWS):
            with torch.enable_grad():
                table = plain.indexer_scores(index_q, index_k, weights, self._part, rows=rows, **options)
            if table.requires_grad:
                table.backward(d_scores[rows])
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]

    @cached_property
    @one_thread()
    def tau(self) -> Tensor:
        """The allowance of each judged row's scores."""
        return tau(*self._scoring, self._part, scale=self.case.scale)

    @cached_property
    @one_thread()
    def selected(self) -> dict[int, Tensor]:
        """The oracle's selection of the judged rows."""
        visible = self.judged(self.visible)
        return self._by_row(oracle.indexer_topk(self.table.value, visible, top_k=self.case.top_k))

    @cached_property
    def topk(self) -> TopK:
        """The oracle's selection as an argument of an operator, packed; the last keys of rows that are not judged."""
        start, end = self.layout.bounds()
        lengths = (end - start).clamp(max=self.case.top_k)
        slots = torch.arange(self.case.top_k, dtype=torch.int32, device="cpu")
        indices = ((end - lengths)[:, None] + slots).masked_fill_(slots >= lengths[:, None], -1)
        for row, keys in self.selected.items():
            indices[row] = -1
            indices[row, : len(keys)] = keys
            lengths[row] = len(keys)
        return TopK(indices, lengths, num_q=self.layout.num_q, num_k=self.layout.num_k)

    def support(self, kind: Support) -> Rows:
        """The keys of the judged rows: the oracle's selection, or all visible ones."""
        return self.judged(self.selected if kind == "selected" else self.visible)

    def attention(self, kind: Support, support: Rows | None = None) -> dict[str, Expected]:
        """Output, log-sum-exp and gradients of the attention.

        Args:
            kind: over which keys.
            support: the keys of the judged rows, where they are not the oracle's.
        """
        if support is not None:
            return self._attend(support)
        if kind not in self._attention:
            self._attention[kind] = self._attend(self.support(kind))
        return self._attention[kind]

    @one_thread()
    def _attend(self, support: Rows) -> dict[str, Expected]:
        x, case = self.inputs, self.case
        options = {
            "value_dim": case.value_width,
            "softmax_scale": case.softmax_scale,
            "sink": x.sink,
            "d_out": x.d_out[self.rows],
        }
        q = x.q[self.rows]
        return _paired(oracle.attention(q, x.kv, support, **options), plain.attention(q, x.kv, support, **options))

    def loss(self, kind: Support, support: Rows | None = None) -> dict[str, Expected]:
        """The indexer loss and its gradients, these times the gradient that comes in; arguments as `attention`."""
        if support is not None:
            return self._teach(support)
        if kind not in self._loss:
            self._loss[kind] = self._teach(self.support(kind))
        return self._loss[kind]

    @one_thread()
    def _teach(self, support: Rows) -> dict[str, Expected]:
        x, case = self.inputs, self.case
        options = {
            "softmax_scale": case.softmax_scale,
            "scale": case.scale,
            "relu": case.relu,
            "coeff": case.coeff,
            "reduction": case.reduction,
            "num_rows": case.num_rows,
            "row_mask": None if x.row_mask is None else x.row_mask[self.rows],
        }
        tensors = x.index_q[self.rows], x.index_k, x.weights[self.rows], x.q[self.rows], x.kv, support
        results = _paired(oracle.indexer_loss(*tensors, **options), plain.indexer_loss(*tensors, **options))
        return {name: e if name == "loss" else _times(e, x.d_loss) for name, e in results.items()}


def _part(layout: CausalLayout, rows: Tensor) -> CausalLayout:
    """The layout of some query rows, renumbered in their order, against all keys."""
    segments = [
        replace(segment, q_start=place)
        for place, row in enumerate(rows.tolist())
        for segment in layout.slice_queries(row, row + 1).segments
    ]
    return CausalLayout.from_segments(segments, num_q=len(rows), num_k=layout.num_k, ratio=layout.ratio)


def _paired(exact: dict[str, Exact], mine: dict[str, Tensor]) -> dict[str, Expected]:
    return {name: Expected(number, mine[name]) for name, number in exact.items()}


def _times(expected: Expected, factor: float) -> Expected:
    exact = Exact(expected.exact.value * factor, expected.exact.terms * abs(factor))
    return replace(expected, exact=exact, plain=expected.plain * factor)


class References:
    """References by subject and dtype; those used least recently are dropped.

    Args:
        keep: how many to keep; None for all, so that several backends in turn are judged by one set.
    """

    def __init__(self, keep: int | None = 1) -> None:
        self._keep = keep
        self._kept: dict[tuple[str, str, torch.dtype], Reference] = {}

    def get(self, subject: Subject, dtype: torch.dtype) -> Reference:
        """The reference of a subject in a dtype."""
        key = subject.suite, subject.case.name, dtype
        # Taken out and put back: a dict keeps the order of insertion, so the first is the one used least recently.
        found = self._kept.pop(key, None) or Reference(subject, dtype)
        while self._keep is not None and len(self._kept) >= self._keep:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = found
        return found
