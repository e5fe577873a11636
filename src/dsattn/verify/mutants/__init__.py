"""Mutants: the torch backend with one fault in one part of one operator. `self_test` shows that verify catches them.

Those of the cuDNN backend are in `steps`, their faults in `cudnn`.

A part is an operator's forward or its backward; the loss has both for either choice of keys. A mutant runs every other
part as the torch backend does, so what catches it is the check of its own operator or, where a fault shows in no direct
call, that of the whole layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsattn.backends import Backend, TorchBackend
from dsattn.backends.base import AttentionGradients, IndexerGradients
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.spec.problem import Problem

Part = str
BACKWARD = " backward"

SCORES: tuple[Part, ...] = ("indexer_scores",)
SCORES_BACKWARD: tuple[Part, ...] = ("indexer_scores backward",)
SELECTION: tuple[Part, ...] = ("indexer_topk",)
SPARSE: tuple[Part, ...] = ("sparse_attention",)
SPARSE_BACKWARD: tuple[Part, ...] = ("sparse_attention backward",)
DENSE: tuple[Part, ...] = ("dense_attention",)
DENSE_BACKWARD: tuple[Part, ...] = ("dense_attention backward",)
LOSS_SELECTED: tuple[Part, ...] = ("indexer_loss:selected",)
LOSS_SELECTED_BACKWARD: tuple[Part, ...] = ("indexer_loss:selected backward",)
LOSS_VISIBLE: tuple[Part, ...] = ("indexer_loss:visible",)
LOSS_VISIBLE_BACKWARD: tuple[Part, ...] = ("indexer_loss:visible backward",)

ATTENTION = SPARSE + DENSE
ATTENTION_BACKWARD = SPARSE_BACKWARD + DENSE_BACKWARD
LOSS = LOSS_SELECTED + LOSS_VISIBLE
LOSS_BACKWARD = LOSS_SELECTED_BACKWARD + LOSS_VISIBLE_BACKWARD
PARTS = SCORES + SCORES_BACKWARD + SELECTION + ATTENTION + ATTENTION_BACKWARD + LOSS + LOSS_BACKWARD

_WHOLE = {
    "dsa_attention:selected": SELECTION + SPARSE + LOSS_SELECTED,
    "dsa_attention:visible": DENSE + LOSS_VISIBLE,
}


class Operation:
    """One call of a part, as a fault gets it: called, it gives the right results.

    The arguments are attributes: `operation.layout` is the layout of the call. Results are those of `Backend`; the
    forward of the loss gives the loss alone and its backward the three gradients.

    Args:
        part: which part is called.
        run: the right operator.
        given: its arguments by name.
        batch: b of a BSHD call, None for a packed one.
    """

    def __init__(self, part: Part, run: Callable[..., Any], given: dict[str, Any], batch: int | None) -> None:
        self.part, self.given, self.batch, self._run = part, given, batch, run

    def __call__(self, **changes: Any) -> Any:
        """The results of the right operator with some arguments changed."""
        return self._run(**{**self.given, **changes})

    def __getattr__(self, name: str) -> Any:
        try:
            return self.given[name]
        except KeyError:
            raise AttributeError(f"the operator has no argument {name!r}") from None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One wrong behaviour, which makes one mutant of each part it may be in.

    Attributes:
        name: what is wrong.
        imitates: what a user would have done or seen.
        parts: where it may be.
        apply: the results of a call with the fault in it; must not write to the arguments.
        dtype: short name of the inputs' dtype in which the fault must show.
    """

    name: str
    imitates: str
    parts: tuple[Part, ...]
    apply: Callable[[Operation], Any]
    dtype: str = "fp32"


NO_FAULT = Fault(name="no fault", imitates="the right backend", parts=(), apply=lambda operation: operation())
"""The control's."""


class Mutant(TorchBackend):
    """The torch backend with a fault in a part; without arguments the control, which has none in any.

    Args:
        fault: what is wrong.
        part: where, one of `PARTS`.

    Attributes:
        cases: the cases that it is run through; None for all.
    """

    cases: tuple[str, ...] | None = None

    def __init__(self, fault: Fault = NO_FAULT, part: Part = "") -> None:
        self.fault, self.part = fault, part
        self.name = f"{fault.name} in {part}" if part else "control"
        self._batch: int | None = None

    @property
    def backend(self) -> Backend:
        """What is judged."""
        return self

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks that may catch the mutant: that of its own operator, then the one of the whole layer."""
        own = self.part.removesuffix(BACKWARD)
        whole = [name for name, operators in _WHOLE.items() if own in operators]
        return own, *whole

    def supports(self, problem: Problem) -> str | None:
        """None; the batch size, which the operators are not told, is kept for the fault."""
        self._batch = problem.batch
        return super().supports(problem)

    def _do(self, part: Part, run: Callable[..., Any], **given: Any) -> Any:
        if part != self.part:
            return run(**given)
        return self.fault.apply(Operation(part, run, given, self._batch))

    def indexer_scores(self, x: IndexerInputs, layout: CausalLayout) -> Tensor:
        """See `Backend.indexer_scores`."""
        return self._do("indexer_scores", super().indexer_scores, x=x, layout=layout)

    def indexer_scores_backward(self, x: IndexerInputs, layout: CausalLayout, d_scores: Tensor) -> IndexerGradients:
        """See `Backend.indexer_scores_backward`."""
        run = super().indexer_scores_backward
        return self._do("indexer_scores backward", run, x=x, layout=layout, d_scores=d_scores)

    def indexer_topk(self, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        """See `Backend.indexer_topk`."""
        given = {"x": x, "layout": layout, "top_k": top_k, "return_scores": return_scores}
        return self._do("indexer_topk", super().indexer_topk, **given)

    def sparse_attention(self, a: AttentionInputs, topk: TopK) -> tuple[Tensor, Tensor]:
        """See `Backend.sparse_attention`."""
        return self._do("sparse_attention", super().sparse_attention, a=a, topk=topk)

    def sparse_attention_backward(
        self, a: AttentionInputs, topk: TopK, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> AttentionGradients:
        """See `Backend.sparse_attention_backward`."""
        given = {"a": a, "topk": topk, "out": out, "lse": lse, "d_out": d_out}
        return self._do("sparse_attention backward", super().sparse_attention_backward, **given)

    def dense_attention(self, a: AttentionInputs, layout: CausalLayout) -> tuple[Tensor, Tensor]:
        """See `Backend.dense_attention`."""
        return self._do("dense_attention", super().dense_attention, a=a, layout=layout)

    def dense_attention_backward(
        self, a: AttentionInputs, layout: CausalLayout, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> AttentionGradients:
        """See `Backend.dense_attention_backward`."""
        given = {"a": a, "layout": layout, "out": out, "lse": lse, "d_out": d_out}
        return self._do("dense_attention backward", super().dense_attention_backward, **given)

    def indexer_loss(
        self,
        x: IndexerInputs,
        a: AttentionInputs,
        layout: CausalLayout,
        topk: TopK | None,
        lse: Tensor | None,
        options: LossOptions,
        with_gradients: bool,
    ) -> tuple[Tensor, IndexerGradients | None]:
        """See `Backend.indexer_loss`; computed twice, so that the loss and its gradients can be wrong one by one."""
        run = super().indexer_loss
        part = "indexer_loss:visible" if topk is None else "indexer_loss:selected"
        given = {"x": x, "a": a, "layout": layout, "topk": topk, "lse": lse, "options": options}
        loss = self._do(part, lambda **given: run(**given, with_gradients=False)[0], **given)
        if not with_gradients:
            return loss, None
        return loss, self._do(part + BACKWARD, lambda **given: run(**given, with_gradients=True)[1], **given)


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Operation], Any]:
    """A fault's `apply` that changes one argument."""
    return lambda operation: operation(**{name: change(getattr(operation, name))})


def edited(place: int, change: Callable[[Tensor], Tensor]) -> Callable[[Operation], Any]:
    """A fault's `apply` that changes one of several results, where it is there."""

    def apply(operation: Operation) -> Any:
        results = list(operation())
        if results[place] is not None:
            results[place] = change(results[place])
        return tuple(results)

    return apply


def to_tf32(x: Tensor) -> Tensor:
    """fp32 numbers with the ten bits of mantissa that TF32 keeps, rounded to nearest."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
