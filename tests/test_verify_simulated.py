"""Simulated releases in verify: which ones run, what torch runs beside them, and what their records say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from packaging.version import Version
from simulated_fakes import Fake, Off, WrongBackward, release
from test_verify_run import Off as OffTorch
from torch import Tensor

from dsattn.backends import Backend, TorchBackend
from dsattn.backends.cudnn.contracts import contract, releases
from dsattn.errors import BackendMissing, BadInput
from dsattn.spec import oracle
from dsattn.spec.cases import CASES
from dsattn.spec.inputs import inputs
from dsattn.spec.problem import AttentionSizes, IndexerSizes, Problem
from dsattn.verify import run as runner
from dsattn.verify import suites
from dsattn.verify.records import Record
from dsattn.verify.run import run, tasks
from dsattn.verify.simulated import Chain, Release, chosen, notes
from dsattn.verify.subject import Subject

CPU = torch.device("cpu")
ATTENTION = AttentionSizes(heads=4, key_width=40, value_width=24, dtype=torch.bfloat16)
INDEXER = IndexerSizes(heads=4, width=32, dtype=torch.bfloat16, weights_dtype=torch.float32)


def subject_of(name: str = "bshd-b1") -> Subject:
    case = next(case for case in CASES if case.name == name)
    return Subject(suite="quick", case=case, make_inputs=partial(inputs, case))


def judged(*backends: str | Backend | Release, dtype: str = "bf16", name: str = "bshd-b1") -> list[Record]:
    return list(run(tasks([subject_of(name)], backends, CPU, [dtype])))


def of(records: Sequence[Record], operator: str) -> Record:
    (record,) = [record for record in records if record.operator == operator]
    return record


def problem(operator: Any, **changes: Any) -> Problem:
    side = {"indexer": INDEXER} if operator.startswith("indexer") else {"attention": ATTENTION}
    options: dict[str, Any] = {"num_q": 8, "num_k": 8, "device": CPU, "requires_grad": True, **side}
    return Problem(operator=operator, **{**options, **changes})


class One(TorchBackend):
    """Takes one direction of the operators that have two."""

    name = "one"

    def __init__(self, backward: bool) -> None:
        self.backward = backward

    def missing(self) -> str | None:
        return "no device"

    def supports(self, problem: Problem) -> str | None:
        return None if problem.backward is self.backward else "the other direction"

    def non_finite(self, problem: Problem) -> str | None:
        return "swallowed" if self.supports(problem) is None else pytest.fail("asked of what it does not take")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("operator", ["indexer_scores", "sparse_attention", "dense_attention"])
def test_a_chain_takes_both_directions_of_what_has_one(operator: str, backward: bool) -> None:
    chain = Chain(One(backward))
    for asked in problem(operator).directions():
        assert chain.supports(asked) is None
        assert chain.non_finite(asked) == ("swallowed" if asked.backward is backward else None)
    assert (chain.name, chain.missing()) == ("one", "no device")


def test_a_chain_refuses_what_has_no_other_direction() -> None:
    chain = Chain(One(backward=True))
    for asked in (
        problem("sparse_attention", requires_grad=False),
        problem("indexer_topk", requires_grad=False),
        problem("indexer_loss", attention=ATTENTION),
    ):
        assert chain.supports(asked) == "the other direction"
    wide = replace(ATTENTION, dtype=torch.float32)
    for asked in problem("sparse_attention", attention=wide).directions():
        assert Chain(Fake()).supports(asked) == "bf16 or fp16 only"


def test_what_torch_runs_beside_a_backend_is_told() -> None:
    records = judged(Chain(Fake()))
    for operator in ("sparse_attention", "dsa_attention:selected"):
        found = of(records, operator)
        assert (found.verdict, found.metrics["by_torch"]) == ("pass", ["sparse_attention forward"])
    for operator in ("indexer_scores", "indexer_topk", "indexer_loss:selected"):
        assert of(records, operator).verdict == "pass"
        assert "by_torch" not in of(records, operator).metrics
    refused = of(records, "dense_attention")
    assert (refused.verdict, refused.metrics) == ("unsupported", {})


def test_torch_beside_a_backend_hides_no_fault_of_it() -> None:
    records = judged(Chain(WrongBackward()))
    wrong = {record.operator for record in records if record.verdict == "fail"}
    assert wrong == {"sparse_attention", "dsa_attention:selected"}
    assert "d_kv" in of(records, "sparse_attention").reason

    class WrongForward(One):
        def sparse_attention(self, a: Any, topk: Any) -> tuple[Tensor, Tensor]:
            out, lse = super().sparse_attention(a, topk)
            return out * 2, lse

    assert of(judged(Chain(WrongForward(backward=False))), "sparse_attention").verdict == "fail"
    right = of(judged(Chain(WrongForward(backward=True))), "sparse_attention")
    assert (right.verdict, right.metrics["by_torch"]) == ("pass", ["sparse_attention forward"])


def test_a_named_backend_of_kernels_runs_in_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed(Fake):
        absent: str | None = None

        def missing(self) -> str | None:
            return self.absent

        def namespace_for(self, device: torch.device) -> Any:
            return type("Namespace", (), {"version": Version("1.29.1")})

    installed = Installed()
    monkeypatch.setattr(runner, "ordered", lambda: (installed, TorchBackend()))
    found = of(judged("cudnn"), "sparse_attention")
    assert (found.verdict, found.metrics["by_torch"]) == ("pass", ["sparse_attention forward"])
    assert (found.backend, found.simulated, found.release, found.arch) == ("cudnn", False, "1.29.1", None)
    assert found.curves, "a real backend's numbers are kept row by row"
    assert "--backend cudnn --device cpu" in found.command()
    assert "by_torch" not in of(judged("torch"), "sparse_attention").metrics
    monkeypatch.setattr("dsattn.functional.problems.ordered", lambda: (installed, TorchBackend()))
    installed.absent = "no GPU"
    gone = of(judged("cudnn"), "sparse_attention")
    assert (gone.verdict, gone.release) == ("unsupported", None)
    assert "no GPU" in gone.reason


def test_a_backend_given_as_itself_is_what_runs() -> None:
    """The self-test's mutants, whose refusals are no passes of torch."""
    found = of(judged(Fake()), "sparse_attention")
    assert (found.verdict, found.simulated) == ("unsupported", False)
    assert of(judged(OffTorch()), "sparse_attention").verdict == "pass"


def test_records_of_a_release_say_so() -> None:
    found = of(judged(release("1.31.0", "sm100", Off)), "indexer_scores")
    assert (found.verdict, found.simulated, found.release, found.arch) == ("fail", True, "1.31.0", "sm100")
    assert (found.backend, found.device) == ("cudnn", "cpu")
    command = "python -m dsattn verify --suite quick --case bshd-b1/indexer_scores --cudnn-version 1.31.0 --arch sm100"
    assert found.command() == f"{command} --dtype bf16"
    assert found.curves
    right = of(judged(release("1.30.0", "sm100", Off)), "indexer_scores")
    assert (right.verdict, right.simulated, right.curves) == ("pass", True, ())


def test_each_check_has_a_stand_in_of_its_own() -> None:
    made: list[Backend] = []

    def make(version: str, arch: str) -> Backend:
        made.append(Fake(version, arch))
        return made[-1]

    records = judged(release(make=make))
    assert len(made) == len(records) > 5


def test_releases_share_what_they_are_judged_by(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    attention = oracle.attention
    monkeypatch.setattr(oracle, "attention", lambda *a, **o: calls.append(1) or attention(*a, **o))
    judged(release())
    alone = len(calls)
    assert alone > 0
    judged(*(release(version, arch) for version in ("1.29.1", "1.31.0") for arch in ("sm90", "sm100")))
    assert len(calls) == 2 * alone


def told(found: Sequence[Release]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(one.arch, one.version, one.same) for one in found]


def test_releases_of_equal_contracts_run_once() -> None:
    found = chosen(["1.29.1", "1.25.0", "1.29.0"], ["sm90"])
    assert told(found) == [("sm90", "1.25.0", ()), ("sm90", "1.29.1", ("1.29.0",))]
    assert notes(found) == ["1.29.1 stands for 1.29.0 too: the same contract"]
    assert told(chosen(["1.31.0", "1.32.0"], ["sm100"])) == [("sm100", "1.31.0", ()), ("sm100", "1.32.0", ())]
    (twice,) = chosen(["1.25", "1.25.0"], ["sm90"])
    assert (Version(twice.version), twice.same) == (Version("1.25"), ())


def test_all_is_every_release_on_both_architectures() -> None:
    found = chosen(["all"])
    for arch in ("sm90", "sm100"):
        mine = [one for one in found if one.arch == arch]
        names = [name for one in mine for name in (one.version, *one.same)]
        assert sorted(names, key=Version) == [str(version) for version in releases()]
        distinct = {contract(version, arch) for version in releases()}
        assert {contract(Version(one.version), arch) for one in mine} == distinct
        assert len(mine) == len(distinct)
    assert found == chosen(["1.24.0", "all"]), "named twice is one"
    assert chosen([]) == []


def test_a_release_newer_than_the_table_is_told() -> None:
    found = chosen(["1.99.0"], ["sm90"])
    assert [(one.version, one.known) for one in found] == [("1.99.0", False)]
    assert notes(found) == [
        f"1.99.0 is not in the table of contracts, which ends with {releases()[-1]}; it is read by that table"
    ]
    beside = chosen(["1.99.0", "all"], ["sm90"])[-1]
    assert (beside.version, beside.same, beside.known) == (str(releases()[-1]), ("1.99.0",), True)
    assert notes(chosen(["1.32.0"], ["sm90"])) == []


def test_what_differs_by_architecture_is_told_with_it() -> None:
    two = [release("1.30.0", "sm90"), replace(release("1.29.1", "sm100"), same=("1.29.0",))]
    assert notes(two) == ["1.29.1 stands for 1.29.0 too: the same contract (sm100)"]


@pytest.mark.parametrize(
    ("versions", "archs", "kind", "words"),
    [
        (["1.29.x.y"], [], BadInput, "1.29.x.y"),
        (["1.20.0"], [], BackendMissing, "1.24.0 or newer"),
        (["1.29.1"], ["sm80"], BadInput, "sm90, sm100"),
    ],
)
def test_releases_that_are_none_are_refused(versions: list[str], archs: list[str], kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        chosen(versions, archs)


def test_the_plan_of_simulated_releases() -> None:
    two = [release("1.29.1"), release("1.31.0")]
    found, absent = suites.plan(["full"], device=CPU, releases=two)
    assert absent == []
    assert {task.dtype for task in found} == {"bf16"}
    assert {task.release for task in found} == set(two)
    text = [task.subject for task in found if "real-text" in task.subject.case.tags]
    assert {subject.facts["t"] for subject in text} == {512}
    assert {subject.suite for subject in text} == {"full"}
    named = {task.subject.case.name for task in found} - {subject.case.name for subject in text}
    assert named == {case.name for case in CASES}
    for suite in ("quick", "real-text"):
        assert {task.dtype for task in suites.plan([suite], device=CPU, releases=two)[0]} == {"bf16"}
    found, _ = suites.plan(["quick"], cases=["bshd-b1"], backends=["cudnn"], dtype="fp16", device=CPU, releases=two)
    assert {task.dtype for task in found} == {"fp16"}
    assert {task.backend for task in found} == {"cudnn"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backends": ["torch"], "device": CPU}, "'torch' with --cudnn-version"),
        ({"device": torch.device("meta")}, "'meta' with --cudnn-version"),
    ],
)
def test_nothing_else_runs_beside_simulated_releases(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        suites.plan(["quick"], releases=[release()], **options)
