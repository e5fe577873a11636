"""Which backend would run a call, and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from dsattn.backends import ordered
from dsattn.backends.trust import standing
from dsattn.errors import BadInput
from dsattn.functional.attention import dense_attention, sparse_attention
from dsattn.functional.call import Call, observed
from dsattn.functional.dsa import dsa_attention
from dsattn.functional.indexer import indexer_scores, indexer_topk
from dsattn.functional.loss import indexer_loss
from dsattn.functional.problems import problem_of
from dsattn.spec.problem import Problem

_OPERATORS: dict[str, Callable[..., Any]] = {
    "indexer_scores": indexer_scores,
    "indexer_topk": indexer_topk,
    "sparse_attention": sparse_attention,
    "dense_attention": dense_attention,
    "indexer_loss": indexer_loss,
    "dsa_attention": dsa_attention,
}


@dataclass(frozen=True)
class Answer:
    """One backend's answer for one direction of one operator of a call.

    Attributes:
        operator: the operator that it was asked about.
        backward: whether it was asked about the operator's backward.
        backend: its name.
        takes: whether it would take the problem.
        reason: why not; None if it does.
        chosen: whether "auto" takes it.
        note: why NaN and infinities do not come out of it as docs/semantics says; None if they do or it does not take
            the problem.
        self_check: "passed", "failed: ..." with the likely cause, "not yet run" or "off"; "" for a backend that needs
            none or does not take the problem.
    """

    operator: str
    backward: bool
    backend: str
    takes: bool
    reason: str | None
    chosen: bool
    note: str | None
    self_check: str = ""


@dataclass(frozen=True, repr=False)
class Explanation:
    """All answers for a call; printed, a table."""

    answers: tuple[Answer, ...]

    def __repr__(self) -> str:
        rows = [("operator", "backend", "", "reason", "note")]
        for answer in self.answers:
            verdict = "no" if not answer.takes else "yes, chosen" if answer.chosen else "yes"
            asked = f"{answer.operator} backward" if answer.backward else answer.operator
            verdict += f", self-check {answer.self_check}" if answer.takes and answer.self_check else ""
            rows.append((asked, answer.backend, verdict, answer.reason or "", answer.note or ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def explain(operator: str, /, *args: Any, **kwargs: Any) -> Explanation:
    """Which backends would take a call of `operator`, and why not the others; nothing is computed.

    Args:
        operator: the name of a public operator, e.g. "indexer_topk" or "dsa_attention".
        args: the call's own arguments.
        kwargs: the call's own keywords; `backend` is ignored, since all backends are asked.

    Returns:
        One answer per operator that the call needs and backend that dsattn knows; where a backward may follow, also one
        for each backend's backward of the operator. The loss computes its gradients beside itself and has none.

    Raises:
        BadInput: an unknown operator, or arguments that the call itself would refuse.
    """
    asked = [direction for problem in problems_of(operator, args, kwargs) for direction in problem.directions()]
    return Explanation(tuple(answer for problem in asked for answer in _answers_to(problem)))


def problems_of(operator: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Problem]:
    """The problems that a call of `operator` poses, forward; nothing is computed and no backend is asked.

    Raises:
        BadInput: see `explain`.
    """
    if not isinstance(operator, str) or operator not in _OPERATORS:
        raise BadInput("operator", given=repr(operator), needed=f"one of {', '.join(map(repr, _OPERATORS))}")
    calls: list[Call] = []
    # Fake tensors have shapes and no numbers: the call is validated and every operator is reached, but none runs.
    with FakeTensorMode(allow_non_fake_inputs=True), observed(calls.append):
        _OPERATORS[operator](*args, **(kwargs | {"backend": "auto"}))
    return [_problem(call) for call in calls]


def _problem(call: Call) -> Problem:
    support = ("visible" if call.topk is None else "selected") if call.operator == "indexer_loss" else None
    return problem_of(
        call.operator,
        call.x,
        call.a,
        batch=call.batch,
        layout=call.layout,
        top_k=call.top_k,
        support=support,
        requires_grad=call.requires_grad,
    )


def _answers_to(problem: Problem) -> list[Answer]:
    answers: list[Answer] = []
    for backend in ordered():
        reason, check = backend.missing() or backend.supports(problem), ""
        if reason is None:
            check = standing(backend, problem)
            reason = f"its self-check {check}" if check.startswith("failed") else None
        takes = reason is None
        answer = Answer(
            operator=problem.operator,
            backward=problem.backward,
            backend=backend.name,
            takes=takes,
            reason=reason,
            chosen=takes and not any(earlier.chosen for earlier in answers),
            note=backend.non_finite(problem) if takes else None,
            self_check=check,
        )
        answers.append(answer)
    return answers
