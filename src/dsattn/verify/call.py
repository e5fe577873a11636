"""One call of an operator: its arguments in the form that the case asks for, and the verdicts on its results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsattn.backends import Backend
from dsattn.layouts import TopK
from dsattn.spec.inputs import Inputs
from dsattn.spec.metrics import FORWARD_FACTOR, GRADIENT_FACTOR, Comparison, TopKComparison, compare, compare_topk
from dsattn.verify.reference import Expected, Reference
from dsattn.verify.threads import one_thread

Outcome = dict[str, Comparison | TopKComparison]
_LEAVES = ("index_q", "index_k", "weights", "q", "kv", "sink")
_OF_KEYS = ("d_kv", "d_index_k")


class Call:
    """The arguments of one call in its case's form, as leaves of autograd, and the judge of its results.

    Args:
        reference: what the results must be.
        backend: a name or a backend.
        device: where the call runs.
    """

    def __init__(self, reference: Reference, backend: str | Backend, device: torch.device) -> None:
        self.reference, self.backend, self.device = reference, backend, device
        self.case, self.layout = reference.case, reference.layout
        x = reference.inputs.to(device)
        x = x if self.case.batch is None else x.to_bshd(self.case.batch)
        x = x.as_views() if self.case.strided else x
        leaves = {name: getattr(x, name).detach() for name in _LEAVES if getattr(x, name) is not None}
        self.x: Inputs = replace(x, **{name: leaf.requires_grad_(self.case.gradients) for name, leaf in leaves.items()})

    @property
    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's tensors."""
        return self.x.index_q, self.x.index_k, self.x.weights

    @property
    def scoring(self) -> dict[str, Any]:
        """Options of every operator that computes scores."""
        return {"scale": self.case.scale, "relu": self.case.relu, "backend": self.backend}

    @property
    def attending(self) -> dict[str, Any]:
        """Options of every attention."""
        case = self.case
        return {"value_dim": case.value_width, "softmax_scale": case.softmax_scale, "sink": self.x.sink}

    @property
    def losing(self) -> dict[str, Any]:
        """Options of every loss."""
        case = self.case
        options = {"coeff": case.coeff, "reduction": case.reduction, "row_mask": self.x.row_mask}
        return {**options, "num_rows": case.num_rows}

    def topk(self) -> TopK:
        """The oracle's selection in the form of the call."""
        topk = self.reference.topk.to(self.device)
        shape = () if self.case.batch is None else (self.case.batch, -1)
        indices, lengths = (x.unflatten(0, shape) if shape else x for x in (topk.indices, topk.lengths))
        return TopK(indices, lengths, num_q=topk.num_q, num_k=topk.num_k)

    def backward(self, *results: tuple[Tensor, Tensor]) -> None:
        """Goes backward from results with their incoming gradients, where the case does."""
        if self.case.gradients:
            torch.autograd.backward([result for result, _ in results], [gradient for _, gradient in results])

    def packed(self, result: Tensor) -> Tensor:
        """A result with its row axes made one."""
        return result if self.case.batch is None else result.flatten(0, 1)

    @one_thread()
    def compare_rows(self, name: str, got: Tensor, expected: Expected, dtype: torch.dtype) -> Comparison:
        """The verdict on a packed result with one entry per query row."""
        reference, rows = self.reference, self.reference.subject.rows
        options = {"factor": _factor(name), "dtype": dtype}
        if rows is None or got.shape[0] != reference.layout.num_q:
            return compare(name, got, expected.exact, expected.plain, batches=reference.row_batches, **options)
        judged = got.detach().index_select(0, rows.to(got.device))
        batches = reference.row_batches[rows]
        found = compare(name, judged, expected.exact, expected.plain, batches=batches, **options)
        if found.worst_row is not None:
            row = int(rows[found.worst_row])
            found = replace(found, worst_row=row, reason=found.reason and f"{found.reason} (row {row} of the call)")
        loud = _first_loud_row(got, rows) if name.startswith("d_") and found.verdict else None
        if loud is not None:
            reason = f"{name}: row {loud} is not zero though nothing was sent to it"
            found = replace(found, worst_row=loud, verdict=False, reason=reason)
        return found

    @one_thread()
    def compare_gradients(self, expected: dict[str, Expected]) -> Outcome:
        """The verdicts on all gradients that the reference has, where the case goes backward."""
        outcome: Outcome = {}
        for name, number in expected.items():
            if not name.startswith("d_") or not self.case.gradients:
                continue
            leaf = getattr(self.x, name.removeprefix("d_"))
            if leaf.grad is None:
                outcome[name] = fault(f"{name}: no gradient")
            elif name == "d_sink" or name in _OF_KEYS:
                got, batches = leaf.grad, None
                if name in _OF_KEYS:
                    got, batches = self.packed(got), self.reference.key_batches
                options = {"factor": GRADIENT_FACTOR, "dtype": leaf.dtype, "batches": batches}
                outcome[name] = compare(name, got, number.exact, number.plain, **options)
            else:
                outcome[name] = self.compare_rows(name, self.packed(leaf.grad), number, leaf.dtype)
        return outcome

    @one_thread()
    def compare_attention(self, out: Tensor, lse: Tensor, expected: dict[str, Expected]) -> Outcome:
        """The verdicts on the results of an attention after `backward`."""
        return {
            "out": self.compare_rows("out", self.packed(out), expected["out"], self.reference.dtype),
            "lse": self.compare_rows("lse", self.packed(lse), expected["lse"], self.reference.wide),
            **self.compare_gradients(expected),
        }

    @one_thread()
    def compare_loss(self, loss: Tensor, expected: dict[str, Expected]) -> Outcome:
        """The verdicts on a loss after `backward`."""
        number = expected["loss"]
        found = compare("loss", loss, number.exact, number.plain, factor=FORWARD_FACTOR, dtype=self.reference.wide)
        return {"loss": replace(found, worst_row=None), **self.compare_gradients(expected)}

    @one_thread()
    def compare_selection(self, topk: TopK) -> TopKComparison:
        """The verdict on a selection."""
        reference = self.reference
        for name, x in (("indices", topk.indices), ("lengths", topk.lengths)):
            if x.dtype != torch.int32:
                return TopKComparison(
                    0.0, 0.0, 0.0, 0, None, False, f"topk.{name}: dtype {x.dtype}, needed torch.int32"
                )
        return compare_topk(
            self.packed(topk.indices),
            self.packed(topk.lengths),
            reference.table,
            reference.judged(reference.visible),
            top_k=self.case.top_k,
            tau=reference.tau,
            exact_ids=self.case.grid,
            returned_scores=None if topk.scores is None else self.packed(topk.scores),
            rows=reference.subject.rows,
        )


def _factor(name: str) -> float:
    return GRADIENT_FACTOR if name.startswith("d_") else FORWARD_FACTOR


def fault(reason: str) -> Comparison:
    """The verdict on a result that is not there, or should not be."""
    return Comparison(float("inf"), float("inf"), None, None, False, reason)


def _first_loud_row(gradient: Tensor, silent_but: Tensor) -> int | None:
    """The first row that is not zero (NaN is not) and not one of `silent_but`; None if there is none."""
    loud = (gradient.detach().flatten(1) != 0).any(-1)
    loud[silent_but.to(loud.device)] = False
    return int(loud.nonzero()[0, 0]) if loud.any() else None
