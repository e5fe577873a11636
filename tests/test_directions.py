"""Forward and backward of one call are two questions: each may be taken, refused and told of alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import Tensors, random_tensors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsattn import (
    CausalLayout,
    UnsupportedProblem,
    dense_attention,
    dsa_attention,
    explain,
    indexer_loss,
    indexer_scores,
    indexer_topk,
    sparse_attention,
)
from dsattn.backends import Backend, TorchBackend, choose, dispatch
from dsattn.cli import main
from dsattn.cli.doctor import examine
from dsattn.functional.problems import last_backend
from dsattn.spec.problem import OPERATORS, WITH_BACKWARD, Operator, Problem

LAYOUT = CausalLayout.batched(2, 12)
ATTENDING: dict[str, Any] = {"value_dim": 16, "softmax_scale": 0.2}
OPERATIONS = [name for operator in WITH_BACKWARD for name in (operator, f"{operator}_backward")]

Register = Callable[..., None]


class OneWay(TorchBackend):
    """The torch backend for one direction of the operators that have two; it notes what it is asked and what ran."""

    def __init__(self, name: str, *, backward: bool, factor: float = 1.0) -> None:
        self.name, self.backward, self.factor = name, backward, factor
        self.asked: list[Problem] = []
        self.ran: list[str] = []
        for operation in OPERATIONS:
            setattr(self, operation, partial(self._run, operation))

    def supports(self, problem: Problem) -> str | None:
        self.asked.append(problem)
        if problem.operator not in WITH_BACKWARD or problem.backward == self.backward:
            return None
        return f"no {'backward' if problem.backward else 'forward'} in {self.name}"

    def _run(self, operation: str, *arguments: Any) -> Any:
        self.ran.append(operation)
        result = getattr(TorchBackend, operation)(self, *arguments)
        if not operation.endswith("_backward"):
            return result
        return tuple(None if x is None else x * self.factor for x in result)


class Neither(TorchBackend):
    name = "neither"

    def supports(self, problem: Problem) -> str | None:
        return "nothing at all"


def both() -> tuple[OneWay, OneWay]:
    return OneWay("fore", backward=False), OneWay("back", backward=True)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Makes backends the ones that dsattn knows, none of which was warned of before."""

    def known(*backends: Backend) -> None:
        # In the package the function hides the module of its name.
        for module in ("dsattn.functional.problems", "dsattn.functional.explain", "dsattn.cli.doctor"):
            monkeypatch.setattr(sys.modules[module], "ordered", lambda: backends)
        monkeypatch.setattr(dispatch, "_PASSED_OVER", set())

    return known


def call(operator: Operator, x: Tensors, backend: str | Backend) -> Tensor:
    if operator == "indexer_scores":
        return indexer_scores(*x.index(), LAYOUT, backend=backend).tril()
    if operator == "dense_attention":
        return dense_attention(x.q, x.kv, LAYOUT, backend=backend, **ATTENDING)
    # The selection is none of the question's, so it comes from elsewhere.
    topk = indexer_topk(*x.index(), LAYOUT, top_k=5, backend=TorchBackend())
    return sparse_attention(x.q, x.kv, topk, backend=backend, **ATTENDING)


def leaves(operator: Operator, x: Tensors) -> tuple[Tensor, ...]:
    return x.index() if operator == "indexer_scores" else (x.q, x.kv)


def gradients(operator: Operator, x: Tensors, backend: str | Backend) -> tuple[Tensor, ...]:
    out = call(operator, x, backend)
    # Scores of unseen keys are -inf, of which no gradient is asked.
    seen = out.masked_fill(out.isinf(), 0)
    return torch.autograd.grad(seen, leaves(operator, x), seen.detach().cos())


@pytest.mark.parametrize("operator", WITH_BACKWARD)
@pytest.mark.parametrize("first", ["fore", "back"])
def test_auto_runs_each_direction_where_it_is_taken(operator: Operator, first: str, register: Register) -> None:
    fore, back = both()
    register(*((fore, back) if first == "fore" else (back, fore)), TorchBackend())
    x = random_tensors(LAYOUT).requires_grad_()
    if first == "fore":
        words = f"^the backward of {operator} runs on 'back' because 'fore' does not take it: no backward in fore"
    else:
        words = f"^{operator} runs on 'fore' because 'back' does not take it: no forward in back"
    with pytest.warns(UserWarning, match=words) as told:
        found = gradients(operator, x, "auto")
    assert len(told) == 1
    assert (fore.ran, back.ran) == ([operator], [f"{operator}_backward"])
    for got, wanted in zip(found, gradients(operator, x, TorchBackend()), strict=True):
        assert torch.equal(got, wanted)
    gradients(operator, x, "auto")  # a second warning would be an error here


def test_the_gradients_are_those_of_the_backward_that_was_chosen(register: Register) -> None:
    register(OneWay("wrong", backward=True, factor=2.0), TorchBackend())
    x = random_tensors(LAYOUT).requires_grad_()
    with pytest.warns(UserWarning, match="'wrong'"):
        found = gradients("dense_attention", x, "auto")
    for got, right in zip(found, gradients("dense_attention", x, TorchBackend()), strict=True):
        assert torch.equal(got, 2 * right)


def test_each_direction_is_warned_of_once(register: Register) -> None:
    register(Neither(), TorchBackend())
    x = random_tensors(LAYOUT).requires_grad_()
    with pytest.warns(UserWarning, match="nothing at all") as told:
        gradients("sparse_attention", x, "auto")
    gradients("sparse_attention", x, "auto")  # a further warning would be an error here
    assert [str(warning.message).split(" runs")[0] for warning in told] == [
        "sparse_attention",
        "the backward of sparse_attention",
    ]


@pytest.mark.parametrize("operator", WITH_BACKWARD)
@pytest.mark.parametrize("form", ["name", "object"])
def test_a_named_backend_without_the_backward_is_refused_before_it_runs(
    operator: Operator, form: str, register: Register
) -> None:
    fore = OneWay("fore", backward=False)
    register(fore, TorchBackend())
    chosen = "fore" if form == "name" else fore
    x = random_tensors(LAYOUT)
    without = call(operator, x, chosen)
    x.requires_grad_()
    with torch.no_grad():
        assert torch.equal(call(operator, x, chosen), without)
    fore.ran.clear()
    with pytest.raises(UnsupportedProblem, match=rf"^the backward of {operator} on backend 'fore': given no backward"):
        call(operator, x, chosen)
    assert fore.ran == []


def test_a_named_backend_without_the_forward_is_refused_for_that(register: Register) -> None:
    back = OneWay("back", backward=True)
    register(back, TorchBackend())
    with pytest.raises(UnsupportedProblem, match=r"^sparse_attention on backend 'back': given no forward in back$"):
        call("sparse_attention", random_tensors(LAYOUT).requires_grad_(), "back")
    assert back.ran == []


def test_a_refusal_in_the_backward_says_that_it_is_the_backward(register: Register) -> None:
    fickle = OneWay("fickle", backward=False)
    register(fickle)
    x = random_tensors(LAYOUT).requires_grad_()
    fickle.supports = lambda problem: None
    out = dense_attention(x.q, x.kv, LAYOUT, backend="fickle", **ATTENDING)
    del fickle.supports
    with pytest.raises(UnsupportedProblem, match="the backward of dense_attention on backend 'fickle': given no backw"):
        out.sum().backward()
    out = dense_attention(x.q, x.kv, LAYOUT, **ATTENDING)
    with pytest.raises(UnsupportedProblem, match="the backward of dense_attention: given fickle: no backward"):
        out.sum().backward()


def test_the_loss_and_the_selection_have_no_backward_to_ask_for(register: Register) -> None:
    fore = OneWay("fore", backward=False)
    register(fore)
    x = random_tensors(LAYOUT).requires_grad_()
    topk = indexer_topk(*x.index(), LAYOUT, top_k=5, backend="fore")
    indexer_loss(*x.all(), LAYOUT, topk=topk, softmax_scale=0.2, backend="fore").backward()
    assert x.index_q.grad is not None
    assert [(problem.operator, problem.backward) for problem in fore.asked] == [
        ("indexer_topk", False),
        ("indexer_loss", False),
    ]


def test_what_ran_names_the_forwards(register: Register) -> None:
    register(*both())
    x = random_tensors(LAYOUT).requires_grad_()
    result = dsa_attention(*x.dsa(), LAYOUT, top_k=5, loss="selected", **ATTENDING)
    with pytest.warns(UserWarning, match="the backward of sparse"):
        result.out.sum().backward()
    assert result.backend == dict.fromkeys(("indexer_topk", "sparse_attention", "indexer_loss"), "fore")
    assert last_backend() == "fore"


def test_recomputed_calls_have_both_directions(register: Register) -> None:
    fore, back = both()
    register(fore, back)
    x = random_tensors(LAYOUT).requires_grad_()
    right = gradients("dense_attention", x, TorchBackend())

    def attend(q: Tensor, kv: Tensor) -> Tensor:
        return dense_attention(q, kv, LAYOUT, **ATTENDING)

    out = checkpoint(attend, x.q, x.kv, use_reentrant=False)
    with pytest.warns(UserWarning, match="the backward of dense_attention"):
        found = torch.autograd.grad(out, (x.q, x.kv), out.detach().cos())
    assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))
    assert (fore.ran, back.ran) == (["dense_attention"] * 2, ["dense_attention_backward"])


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"attend": "selected", "loss": "selected"}, ["indexer_topk", "sparse_attention", "indexer_loss"]),
        ({"attend": "visible", "loss": "visible"}, ["dense_attention", "indexer_loss"]),
    ],
    ids=["selected", "visible"],
)
def test_explain_asks_what_the_call_asks(options: dict[str, str], asked: list[str], register: Register) -> None:
    fore, back = both()
    register(fore, back)
    q, kv, *index = [y.unflatten(0, (2, -1)).requires_grad_() for y in random_tensors(LAYOUT).dsa()]
    given: dict[str, Any] = {"top_k": 5, "sink": torch.zeros(4, requires_grad=True), **options, **ATTENDING}
    explain("dsa_attention", q, kv, *index, LAYOUT, **given)
    explained = list(fore.asked)
    assert [problem.operator for problem in explained if not problem.backward] == asked
    fore.asked.clear()
    out = dsa_attention(q, kv, *index, layout=LAYOUT, **given).out
    with pytest.warns(UserWarning, match="the backward of"):
        out.sum().backward()
    assert sorted(explained, key=str) == sorted(fore.asked, key=str)


class Quiet(OneWay):
    """Takes the forward alone, and says of it that NaN vanishes."""

    def non_finite(self, problem: Problem) -> str | None:
        assert self.supports(problem) is None, "asked of a problem that it does not take"
        return "its maximum drops NaN" if problem.operator == "dense_attention" else None


def test_explain_answers_for_each_direction_and_has_notes(register: Register) -> None:
    register(Quiet("fore", backward=False), TorchBackend())
    x = random_tensors(LAYOUT).requires_grad_()
    found = explain("dense_attention", x.q, x.kv, LAYOUT, **ATTENDING)
    fields = [(a.operator, a.backward, a.backend, a.takes, a.reason, a.chosen, a.note) for a in found.answers]
    assert fields == [
        ("dense_attention", False, "fore", True, None, True, "its maximum drops NaN"),
        ("dense_attention", False, "torch", True, None, False, None),
        ("dense_attention", True, "fore", False, "no backward in fore", False, None),
        ("dense_attention", True, "torch", True, None, True, None),
    ]
    assert str(found).splitlines() == [
        "operator                  backend               reason               note",
        "dense_attention           fore     yes, chosen                       its maximum drops NaN",
        "dense_attention           torch    yes",
        "dense_attention backward  fore     no           no backward in fore",
        "dense_attention backward  torch    yes, chosen",
    ]


def test_explain_has_no_backward_where_none_may_follow(register: Register) -> None:
    register(TorchBackend())
    x = random_tensors(LAYOUT)

    def directions() -> list[bool]:
        return [a.backward for a in explain("indexer_scores", *x.index(), LAYOUT).answers]

    assert directions() == [False]
    x.requires_grad_()
    assert directions() == [False, True]
    with torch.no_grad():
        assert directions() == [False]
    loss = explain("indexer_loss", *x.all(), LAYOUT, softmax_scale=0.2)
    assert [a.backward for a in loss.answers] == [False]


def test_doctor_has_a_row_for_each_direction(
    register: Register, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    register(OneWay("fore", backward=False))
    rows = [(a["operator"], a["backward"], a["reason"]) for a in examine()["operators"] if a["device"] == "cpu"]
    expected: list[tuple[str, bool, str]] = []
    for operator in OPERATORS:
        expected.append((operator, False, ""))
        if operator in WITH_BACKWARD:
            expected.append((operator, True, "no backward in fore"))
    assert rows == expected
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "sparse_attention backward" in line]
    assert any("no: no backward in fore" in line for line in lines)
    assert json.loads((tmp_path / "d.json").read_text())["operators"] == examine()["operators"]


def test_a_problem_knows_its_backward() -> None:
    problem = Problem(operator="sparse_attention", num_q=1, num_k=1, device=torch.device("cpu"), requires_grad=True)
    forward, backward = problem.directions()
    assert forward is problem
    assert (backward.backward, backward.operator, backward.requires_grad) == (True, "sparse_attention", True)
    assert backward.directions() == (backward,)
    assert (forward.title, backward.title) == ("sparse_attention", "the backward of sparse_attention")
    # Without a direction it is the forward, as before.
    assert choose(problem, "fore", [OneWay("fore", backward=False)]).name == "fore"
