"""Which backend would run a call, and why not the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from dsattn.backends import ordered
from dsattn.errors import BadInput
from dsattn.functional.attention import dense_attention, sparse_attention
from dsattn.functional.call import Call, observed
from dsattn.functional.dsa import dsa_attention
from dsattn.functional.indexer import indexer_scores, indexer_topk
from dsattn.functional.loss import indexer_loss
from dsattn.functional.problems import problem_of

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
    """One backend's answer for one operator of a call.

    Attributes:
        operator: the operator that it was asked about.
        backend: its name.
        takes: whether it would take the problem.
        reason: why not; None if it does.
        chosen: whether "auto" takes it.
    """

    operator: str
    backend: str
    takes: bool
    reason: str | None
    chosen: bool


@dataclass(frozen=True, repr=False)
class Explanation:
    """All answers for a call; printed, a table."""

    answers: tuple[Answer, ...]

    def __repr__(self) -> str:
        rows = [("operator", "backend", "", "reason")]
        for answer in self.answers:
            verdict = "no" if not answer.takes else "yes, chosen" if answer.chosen else "yes"
            rows.append((answer.operator, answer.backend, verdict, answer.reason or ""))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def explain(operator: str, /, *args: Any, **kwargs: Any) -> Explanation:
    """Which backends would take a call of `operator`, and why not the others; nothing is computed.

    Args:
        operator: the name of a public operator, e.g. "indexer_topk" or "dsa_attention".
        args: the call's own arguments.
        kwargs: the call's own keywords; `backend` is ignored, since all backends are asked.

    Returns:
        One answer per operator that the call needs and backend that dsattn knows.

    Raises:
        BadInput: an unknown operator, or arguments that the call itself would refuse.
    """
    if not isinstance(operator, str) or operator not in _OPERATORS:
        raise BadInput("operator", given=repr(operator), needed=f"one of {', '.join(map(repr, _OPERATORS))}")
    calls: list[Call] = []
    # Fake tensors have shapes and no numbers: the call is validated and every operator is reached, but none runs.
    with FakeTensorMode(allow_non_fake_inputs=True), observed(calls.append):
        _OPERATORS[operator](*args, **(kwargs | {"backend": "auto"}))
    return Explanation(tuple(answer for call in calls for answer in _answers(call)))


def _answers(call: Call) -> list[Answer]:
    support = ("visible" if call.topk is None else "selected") if call.operator == "indexer_loss" else None
    problem = problem_of(
        call.operator,
        call.x,
        call.a,
        batch=call.batch,
        layout=call.layout,
        top_k=call.top_k,
        support=support,
        requires_grad=call.requires_grad,
    )
    answers: list[Answer] = []
    for backend in ordered():
        reason = backend.missing() or backend.supports(problem)
        first = reason is None and not any(answer.chosen for answer in answers)
        answers.append(Answer(call.operator, backend.name, reason is None, reason, first))
    return answers
