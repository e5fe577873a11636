"""The self-test: it catches what is wrong by comparing numbers, and says so when something escapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from dsattn.backends import TorchBackend
from dsattn.cli import main
from dsattn.errors import UnsupportedProblem
from dsattn.layouts import TopK
from dsattn.spec import oracle
from dsattn.spec.cases import CASES
from dsattn.spec.inputs import inputs
from dsattn.spec.metrics import Comparison, TopKComparison
from dsattn.verify import call, self_test_report
from dsattn.verify import self_test as proof
from dsattn.verify.checks import CHECKS
from dsattn.verify.mutants import (
    ATTENTION_BACKWARD,
    BACKWARD,
    LOSS,
    LOSS_BACKWARD,
    PARTS,
    SELECTION,
    Fault,
    Mutant,
    Operation,
    to_tf32,
)
from dsattn.verify.mutants.attention import FAULTS as ATTENTION_FAULTS
from dsattn.verify.mutants.loss import rewritten
from dsattn.verify.mutants.selection import _select
from dsattn.verify.reference import References
from dsattn.verify.run import run, tasks
from dsattn.verify.self_test import FAULTS, SelfTest, all_mutants, hunt, self_test
from dsattn.verify.subject import Subject

CPU = torch.device("cpu")
NAMED = {case.name: case for case in CASES}
# Those of the cuDNN calls are in test_self_test_cudnn.py.
TORCH_FAULTS = [fault for fault in FAULTS if isinstance(fault, Fault)]
BY_NAME = {fault.name: fault for fault in TORCH_FAULTS}


def subjects_of(*names: str) -> list[Subject]:
    return [Subject(suite="quick", case=NAMED[name], make_inputs=partial(inputs, NAMED[name])) for name in names]


def mutants_of(*names: str) -> list[Any]:
    return all_mutants(BY_NAME[name] for name in names)


def proved(mutants: list[Any], *names: str, control: Any = None) -> SelfTest:
    return self_test(device=CPU, mutants=mutants, subjects=subjects_of(*names), control=control)


def fault(apply: Callable[[Operation], Any], *parts: str) -> Fault:
    return Fault(name="made up", imitates="a test", parts=parts, apply=apply)


def right(operation: Operation) -> Any:
    return operation()


def raises(operation: Operation) -> Any:
    raise ZeroDivisionError("told")


def refuses(operation: Operation) -> Any:
    raise UnsupportedProblem("told")


def test_names_are_unique_and_every_part_has_mutants() -> None:
    names = [mutant.name for mutant in all_mutants()]
    assert len(set(names)) == len(names) >= 20
    assert len(BY_NAME) == len(TORCH_FAULTS) >= 20
    for each in TORCH_FAULTS:
        assert each.imitates
        assert each.dtype in ("fp32", "bf16")
        assert 0 < len(set(each.parts)) == len(each.parts)
        assert set(each.parts) <= set(PARTS)
    for part in PARTS:
        assert sum(part in each.parts for each in TORCH_FAULTS) >= 5, part


def test_every_part_has_its_check() -> None:
    own = {Mutant(part=part).checks[0] for part in PARTS}
    assert own == {name for name in CHECKS if not name.startswith("dsa_attention")}
    assert {check for part in PARTS for check in Mutant(part=part).checks} == set(CHECKS)


@pytest.mark.parametrize(
    ("name", "case", "words"),
    [
        ("offset dropped", "decode", "scores: NaN or infinity"),
        ("ids local to the sequence", "bshd-b3", "row 40"),
        ("d_sink with the wrong sign", "bshd-b1", "d_sink"),
        ("teacher of head 0 only", "bshd-b3", "loss"),
    ],
)
def test_mutants_are_caught_by_the_real_runner(name: str, case: str, words: str) -> None:
    result = proved(mutants_of(name), "one-row", case)
    assert result.holds
    assert len(result.trials) == len(BY_NAME[name].parts)
    for trial in result.trials:
        assert trial.outcome == "caught"
        assert trial.record is not None
        assert trial.record.case == case
        assert trial.record.operator == trial.mutant.checks[0]
        assert trial.checks <= 2
    assert result.trials[0].record is not None
    assert words in result.trials[0].record.reason
    count = len(result.trials)
    assert result.summary == f"PASS: {count} of {count} mutants caught; control green ({len(result.control)} checks)"


def test_what_changes_nothing_escapes() -> None:
    harmless = fault(right, "dense_attention")
    result = proved([*mutants_of("lse in base 2"), *all_mutants([harmless])], "packed")
    assert [trial.outcome for trial in result.trials] == ["caught", "caught", "not caught"]
    assert [trial.mutant.fault for trial in result.escaped] == [harmless]
    assert result.escaped[0].checks == 2, "its own check and that of the layer"
    assert not result.holds
    assert result.summary.startswith("FAIL: 2 of 3 mutants caught; control green (")


@pytest.mark.parametrize("apply", [raises, refuses])
def test_an_error_or_a_refusal_is_no_catch(apply: Callable[[Operation], Any]) -> None:
    result = proved(all_mutants([fault(apply, "indexer_topk")]), "packed")
    (trial,) = result.trials
    assert trial.outcome == "broken"
    assert trial.record is not None
    assert "told" in trial.record.reason
    assert not result.holds


def test_a_wrong_control_is_red() -> None:
    result = proved(mutants_of("lse in base 2"), "packed", control=mutants_of("sink ignored")[0])
    assert result.escaped == []
    assert {record.operator for record in result.disturbed} == {"sparse_attention", "dsa_attention:selected"}
    assert not result.holds
    assert result.summary == "FAIL: 2 of 2 mutants caught; control red (2 of 8 checks)"


def test_a_control_that_refuses_is_not_green() -> None:
    class Refuses(Mutant):
        def supports(self, problem: Any) -> str | None:
            return "not today"

    result = proved(mutants_of("lse in base 2"), "packed", control=Refuses())
    assert {record.verdict for record in result.disturbed} == {"unsupported"}
    assert not result.holds


def test_without_mutants_nothing_is_proved() -> None:
    assert not proved([], "packed").holds


def test_a_judge_that_always_passes_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    mutants = mutants_of("mask fill 0", "lse in base 2", "gradient negated", "tail slot unwritten")
    monkeypatch.setattr(call, "compare", lambda *_, **__: Comparison(0.0, 0.0, None, None, True, ""))
    result = proved(mutants, "packed")
    assert [trial.mutant.fault.name for trial in result.trials if trial.outcome == "caught"] == ["tail slot unwritten"]
    monkeypatch.setattr(call, "compare_topk", lambda *_, **__: TopKComparison(1.0, 1.0, 0.0, 0, None, True, ""))
    result = proved(mutants, "packed")
    assert {trial.outcome for trial in result.trials} == {"not caught"}
    assert not result.holds


@pytest.mark.parametrize("part", PARTS)
def test_a_mutant_is_wrong_in_its_part_alone(part: str) -> None:
    """With results that no check would let pass, exactly the checks of the part are red."""

    def spoiled(operation: Operation) -> Any:
        results = operation()
        if isinstance(results, TopK):
            results.indices[50, 1] = results.indices[50, 0]
            return results
        if isinstance(results, Tensor):
            return results + 1
        return tuple(None if x is None else x + 1 for x in results)

    mutant = Mutant(fault(spoiled, part), part)
    records = list(run(tasks(subjects_of("bshd-b1"), [mutant], CPU, ["fp32"])))
    assert {record.operator for record in records if record.verdict == "fail"} == set(mutant.checks)
    for record in records:
        assert record.traceback is None
        if record.verdict == "fail" and "results" in record.metrics:
            # A backward spoils gradients and leaves the forward as it is.
            forward = [x for name, x in record.metrics["results"].items() if not name.startswith("d_")]
            right = [x["share_of_budget"] is not None and x["share_of_budget"] <= 1 for x in forward]
            assert all(right) == (part.endswith(BACKWARD) or part == "indexer_topk")


@pytest.fixture(scope="module")
def references() -> References:
    return References(keep=None)


@pytest.mark.parametrize("name", ["strided", "no-queries", "no-keys"])
def test_faults_leave_their_arguments_alone_and_raise_nothing(name: str, references: References) -> None:
    """Also where a fault does not show: what is caught late has run through many cases."""
    for part in PARTS:
        operations: list[Operation] = []
        keep = Mutant(fault(lambda operation, kept=operations: kept.append(operation) or operation(), part), part)
        assert hunt(keep, subjects_of(name), CPU, references).outcome == "not caught"
        assert len(operations) == len(keep.checks)
        for operation in operations:
            before = [x.clone() for x in _tensors(operation.given)]
            for mutant in mutants_of(*BY_NAME):
                if mutant.part == part:
                    mutant.fault.apply(operation)
                    after = zip(before, _tensors(operation.given), strict=True)
                    assert all(torch.equal(x, y) for x, y in after), mutant.name


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif is_dataclass(value):
        yield from _tensors({f.name: getattr(value, f.name) for f in fields(value)})


@pytest.mark.parametrize("name", ["padded-right", "far-scores", "plateau"])
def test_what_faults_are_built_on_is_right(name: str, references: References) -> None:
    """The loss in tables and the selection by a sort: with nothing changed they are green, so the change is caught."""
    mutants = [Mutant(fault(rewritten(), part), part) for part in LOSS + LOSS_BACKWARD]
    mutants += [Mutant(fault(partial(_select, change=lambda table: table), *SELECTION), *SELECTION)]
    for mutant in mutants:
        trial = hunt(mutant, subjects_of(name), CPU, references)
        assert trial.outcome == "not caught", (mutant.name, trial.record)


def test_both_shares_of_the_kv_gradient_add_up() -> None:
    shares = {each.name: each for each in ATTENTION_FAULTS if each.name.startswith("kv's gradient")}
    assert len(shares) == 2

    def together(operation: Operation) -> Any:
        d_q, one, d_sink = shares["kv's gradient as value missing"].apply(operation)
        _, other, _ = shares["kv's gradient as key missing"].apply(operation)
        return d_q, one + other, d_sink

    for part in ATTENTION_BACKWARD:
        trial = hunt(Mutant(fault(together, part), part), subjects_of("packed"), CPU, References())
        assert trial.outcome == "not caught", trial.record


def test_tf32_keeps_ten_bits() -> None:
    x = torch.tensor([1.0, 1 + 2.0**-10, 1 + 2.0**-11 + 2.0**-20, 1 + 2.0**-12, -3.0 - 2.0**-9])
    assert torch.equal(to_tf32(x), torch.tensor([1.0, 1 + 2.0**-10, 1 + 2.0**-10, 1.0, -3.0 - 2.0**-9]))


def test_no_expected_result_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    attention = oracle.attention
    monkeypatch.setattr(oracle, "attention", lambda *a, **o: calls.append(1) or attention(*a, **o))
    proved(mutants_of("lse in base 2", "sink ignored", "negative offset taken as 0"), "packed", "bshd-b1")
    assert len(calls) == 4, "two cases, selected and visible"


def test_the_case_that_caught_a_fault_comes_first_in_its_next_part() -> None:
    result = proved(mutants_of("negative offset taken as 0"), "one-row", "packed", "negative-offset")
    assert [trial.checks for trial in result.trials] == [3, 1, 1, 1, 1, 1, 1]


def test_threads_and_progress() -> None:
    steps: list[tuple[str, int, int]] = []

    def note(what: str, done: int, every: int) -> None:
        steps.append((what, done, every))

    torch.set_num_threads(2)
    try:
        mutants = mutants_of("lse in base 2")
        self_test(device=CPU, mutants=mutants, subjects=subjects_of("one-row"), advance=note)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert [done for _, done, _ in steps] == list(range(1, 11))
    assert {every for _, _, every in steps} == {10}
    assert steps[0][0] == "control: one-row"
    assert steps[-1][0] == "lse in base 2 in dense_attention"


def shown(result: SelfTest, **options: Any) -> str:
    out = StringIO()
    self_test_report.show(result, Console(file=out, width=200, highlight=False, markup=False), **options)
    return out.getvalue()


def test_report_names_mutants_and_what_caught_them() -> None:
    result = proved([*mutants_of("lse in base 2"), *all_mutants([fault(right, "dense_attention")])], "packed")
    text = shown(result)
    line = next(line for line in text.splitlines() if "lse in base 2" in line)
    for words in ("a kernel on exp2", "2 / 2", "packed, sparse_attention fp32: lse", "times its budget"):
        assert words in line
    assert "NOT CAUGHT after 2 checks: made up in dense_attention (a test)" in text
    assert text.splitlines()[-1].startswith("FAIL: 2 of 3 mutants caught")
    text = shown(result, verbose=True)
    assert "lse in base 2 in sparse_attention" in text
    assert "lse in base 2 in dense_attention" in text
    broken = proved(all_mutants([fault(raises, "dense_attention")]), "packed", control=mutants_of("sink in lse")[0])
    text = shown(broken, verbose=True)
    assert "BROKEN after 1 checks: made up in dense_attention" in text
    assert "ZeroDivisionError: told" in text
    assert "Traceback" in text
    assert "CONTROL fail: packed, sparse_attention fp32: lse" in text
    assert "Traceback" not in shown(broken)


def test_json_of_a_self_test() -> None:
    result = proved([*mutants_of("lse in base 2"), *all_mutants([fault(right, "dense_attention")])], "packed")
    found = json.loads(result.as_json())
    assert set(found) == {"environment", "holds", "summary", "control", "mutants"}
    assert found["holds"] is False
    assert found["control"] == {"checks": 8, "not_green": []}
    caught, _, escaped = found["mutants"]
    assert (caught["fault"], caught["part"], caught["outcome"]) == ("lse in base 2", "sparse_attention", "caught")
    assert (caught["by"]["case"], caught["by"]["operator"], caught["by"]["dtype"]) == (
        "packed",
        "sparse_attention",
        "fp32",
    )
    assert (escaped["outcome"], escaped["checks"], escaped["by"]) == ("not caught", 2, None)


def small(monkeypatch: pytest.MonkeyPatch, *faults: Fault) -> None:
    """Makes the command's self-test one of few mutants and one case."""
    monkeypatch.setattr(proof, "all_mutants", lambda: [Mutant(each, part) for each in faults for part in each.parts])
    monkeypatch.setattr(proof, "parts", lambda _: [type("Part", (), {"subjects": subjects_of("packed")})])


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    small(monkeypatch, BY_NAME["lse in base 2"])
    assert main(["verify", "--self-test", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "PASS: 2 of 2 mutants caught; control green (8 checks)"
    assert err == "", "a bar where there is no terminal"
    assert json.loads(file.read_text())["holds"] is True
    small(monkeypatch, BY_NAME["lse in base 2"], fault(right, "dense_attention"))
    assert main(["verify", "--self-test", "--verbose"]) == 1
    assert "NOT CAUGHT" in capsys.readouterr().out


def test_command_with_a_wrong_control_is_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small(monkeypatch, BY_NAME["lse in base 2"])
    dense = TorchBackend.dense_attention
    monkeypatch.setattr(TorchBackend, "dense_attention", lambda *a: (dense(*a)[0] * 2, dense(*a)[1]))
    assert main(["verify", "--self-test"]) == 1
    assert "control red (2 of 8 checks)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option",
    [["--case", "packed"], ["--suite", "quick"], ["--backend", "torch"], ["--dtype", "bf16"], ["--list"]],
    ids=lambda option: option[0],
)
def test_command_takes_no_other_option(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--self-test", *option]) == 2
    assert option[0] in capsys.readouterr().err


def test_logits_and_scores_of_the_far_cases_are_beyond_fp32() -> None:
    case, beyond = NAMED["far-logits"], torch.finfo(torch.float32).max
    x, visible = inputs(case, torch.float32), oracle.visible_keys(case.layout())
    options = {"value_dim": case.value_width, "softmax_scale": case.softmax_scale}
    total = oracle.attention(x.q, x.kv, visible, **options)["lse"].value.exp()
    assert ((total > beyond) | (total < 1 / beyond)).all()
    assert (total > beyond).any()
    assert (total < 1 / beyond).any()
    case = NAMED["far-scores"]
    x = inputs(case, torch.float32)
    scores = oracle.indexer_scores(x.index_q, x.index_k, x.weights, case.layout(), scale=case.scale)
    assert (scores.value.exp() > beyond).any(-1).sum() > 10


def test_views_are_the_same_numbers_elsewhere() -> None:
    x = inputs(NAMED["strided"], torch.bfloat16)
    views = x.as_views()
    for name in ("index_q", "index_k", "weights", "q", "kv", "d_out", "sink", "row_mask"):
        mine, view = getattr(x, name), getattr(views, name)
        assert torch.equal(mine, view), name
        assert mine.is_contiguous(), name
        assert not view.is_contiguous(), name
    assert views.kv.as_strided(views.kv.shape, x.kv.stride()).isnan().any()
