"""Cases with a number that is not finite: unsupported where the backend says so, and only there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn.backends import Backend, TorchBackend
from dsattn.layouts import TopK
from dsattn.spec.case import Bad
from dsattn.spec.cases import CASES
from dsattn.spec.inputs import inputs
from dsattn.spec.problem import Problem
from dsattn.verify.checks import CHECKS
from dsattn.verify.non_finite import OPERATORS_OF
from dsattn.verify.records import Record
from dsattn.verify.run import run, tasks
from dsattn.verify.subject import Subject

CPU = torch.device("cpu")
NAMED = {case.name: case for case in CASES}


class Says(TorchBackend):
    """The torch backend, which says of some operators that NaN vanishes in them, though it does not."""

    name = "says"

    def __init__(self, *operators: str, backward: bool = False) -> None:
        self.operators, self.backward = operators, backward
        self.asked: list[Problem] = []
        self.noted: list[Problem] = []

    def supports(self, problem: Problem) -> str | None:
        self.asked.append(problem)
        return None

    def non_finite(self, problem: Problem) -> str | None:
        self.noted.append(problem)
        says = problem.operator in self.operators and problem.backward == self.backward
        return f"{problem.operator} drops NaN" if says else None


def judged(name: str, backend: str | Backend, **changes: Any) -> dict[str, Record]:
    case = replace(NAMED[name], **changes)
    subject = Subject(suite="quick", case=case, make_inputs=partial(inputs, case))
    return {record.operator: record for record in run(tasks([subject], [backend], CPU, ["fp32"]))}


def verdicts(records: dict[str, Record], verdict: str) -> dict[str, str]:
    return {name: record.reason for name, record in records.items() if record.verdict == verdict}


@pytest.mark.parametrize(
    ("case", "backend", "unsupported"),
    [
        ("nan-kv-value", Says("dense_attention"), {"dense_attention", "dsa_attention:visible"}),
        ("nan-kv-value", Says("dense_attention", backward=True), {"dense_attention", "dsa_attention:visible"}),
        ("nan-kv-value", Says("indexer_topk", "indexer_scores"), set()),
        ("nan-index-k", Says("indexer_topk"), {"indexer_topk", "dsa_attention:selected"}),
        ("nan-index-k", Says("sparse_attention", "dense_attention"), set()),
        ("nan-sink", Says("indexer_loss"), set()),
        ("nan-sink", Says("sparse_attention"), {"sparse_attention", "dsa_attention:selected"}),
        (
            "nan-q",
            Says("indexer_loss"),
            {name for name in CHECKS if name.startswith(("indexer_loss", "dsa_attention"))},
        ),
        ("nan-q", TorchBackend(), set()),
    ],
)
def test_a_check_is_unsupported_where_an_operator_drops_what_it_is_given(
    case: str, backend: TorchBackend, unsupported: set[str]
) -> None:
    records = judged(case, backend)
    found = verdicts(records, "unsupported")
    assert set(found) == unsupported
    if isinstance(backend, Says):
        assert set(found.values()) <= {f"{operator} drops NaN" for operator in backend.operators}
    assert verdicts(records, "fail") == {}
    assert len(verdicts(records, "pass")) == len(records) - len(unsupported)


def test_cases_without_such_a_number_are_judged() -> None:
    backend = Says("sparse_attention", "dense_attention", "indexer_loss", "indexer_topk", "indexer_scores")
    assert set(verdicts(judged("sink-zero", backend), "pass")) == set(CHECKS) - {
        "indexer_scores",
        "indexer_topk",
        "indexer_loss:selected",
        "indexer_loss:visible",
    }
    assert backend.noted == []


def test_it_is_asked_about_the_calls_of_the_check() -> None:
    backend = Says()
    records = judged("bshd-b3", backend, bad=Bad("kv", 3, 3, nan), sink="normal", operators=("dsa_attention",))
    assert verdicts(records, "fail") == {}
    directions = [(problem.operator, problem.backward, problem.support) for problem in backend.noted]
    assert directions == [
        ("sparse_attention", False, None),
        ("sparse_attention", True, None),
        ("indexer_loss", False, "selected"),
        ("dense_attention", False, None),
        ("dense_attention", True, None),
        ("indexer_loss", False, "visible"),
    ]
    for problem in backend.noted:
        assert problem.batch == 3
        assert backend.asked.count(problem) >= 2, "the call asked something else"


def test_every_check_is_known() -> None:
    assert set(OPERATORS_OF) == set(CHECKS)


class Drops(TorchBackend):
    """A backend in which NaN vanishes."""

    name = "drops"

    def sparse_attention(self, a: Any, topk: TopK) -> tuple[Tensor, Tensor]:
        out, lse = super().sparse_attention(a, topk)
        return out.nan_to_num(), lse


class Owns(Drops):
    """And says so."""

    def non_finite(self, problem: Problem) -> str | None:
        return "NaN becomes 0" if problem.operator == "sparse_attention" else None


def test_a_backend_that_drops_nan_is_red_until_it_says_so() -> None:
    both = {"sparse_attention", "dsa_attention:selected"}
    assert set(verdicts(judged("nan-q", Drops()), "fail")) == both
    records = judged("nan-q", Owns())
    assert verdicts(records, "unsupported") == dict.fromkeys(both, "NaN becomes 0")
    assert verdicts(records, "fail") == {}


@pytest.mark.parametrize("name", ["says", "auto"])
def test_a_named_backend_is_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Says("dense_attention")
    for module in ("dsattn.verify.non_finite", "dsattn.functional.problems"):
        monkeypatch.setattr(f"{module}.ordered", lambda: (backend, TorchBackend()))
    records = judged("nan-q", name, operators=("dense_attention",))
    assert verdicts(records, "unsupported") == {"dense_attention": "dense_attention drops NaN"}
    assert verdicts(judged("nan-q", "torch", operators=("dense_attention",)), "pass") == {"dense_attention": ""}


def test_a_refusal_comes_before_a_word_about_nan() -> None:
    class Refuses(Says):
        def supports(self, problem: Problem) -> str | None:
            return "only on Sundays"

    backend = Refuses("dense_attention")
    records = judged("nan-q", backend, operators=("dense_attention",))
    assert "only on Sundays" in verdicts(records, "unsupported")["dense_attention"]
    assert backend.noted == []
