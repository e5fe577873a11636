"""The self-test of the cuDNN calls: no step can be left out unseen, on the releases that need it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console

from dsattn.backends.cudnn.contracts import contract
from dsattn.backends.cudnn.contracts_table import parsed
from dsattn.backends.cudnn.steps import Steps
from dsattn.spec.cases import CASES
from dsattn.spec.inputs import inputs
from dsattn.verify import self_test_report
from dsattn.verify.checks import CHECKS
from dsattn.verify.mutants.cudnn import FAULTS
from dsattn.verify.mutants.steps import CudnnMutant, Faulty, Place, StepFault
from dsattn.verify.self_test import FAULTS as ALL_FAULTS
from dsattn.verify.self_test import SelfTest, all_mutants, self_test
from dsattn.verify.subject import Subject

CPU = torch.device("cpu")
NAMED = {case.name: case for case in CASES}
BY_NAME = {fault.name.removeprefix("cudnn: "): fault for fault in FAULTS}
STEPS = {name for name in vars(Steps) if not name.startswith("_")}
OFFSETS = Place(wrapper="indexer_forward", release="1.29.1 sm100", check="indexer_topk", case="packed-offset")


def proved(mutants: list[Any], *names: str) -> SelfTest:
    subjects = [Subject(suite="quick", case=NAMED[name], make_inputs=partial(inputs, NAMED[name])) for name in names]
    return self_test(device=CPU, mutants=mutants, subjects=subjects or None)


def fault(step: str, wrong: Callable[..., Any], *places: Place) -> StepFault:
    return StepFault(name="made up", imitates="a test", step=step, wrong=wrong, places=places)


def raises(*_: Any) -> Any:
    raise ZeroDivisionError("told")


def test_every_step_has_a_mutant() -> None:
    assert {each.step for each in FAULTS} == STEPS
    assert len(STEPS) >= 15
    assert len({mutant.name for mutant in all_mutants(FAULTS)}) == sum(len(each.places) for each in FAULTS)
    assert set(FAULTS) <= set(ALL_FAULTS)
    assert len({each.name for each in ALL_FAULTS}) == len(ALL_FAULTS)


@pytest.mark.parametrize("place", [place for each in FAULTS for place in each.places], ids=str)
def test_places_exist(place: Place) -> None:
    version, arch = place.release.split()
    assert contract(parsed(version), arch).wrapper(place.wrapper).runs
    assert place.check in CHECKS
    assert place.check.partition(":")[0] in NAMED[place.case].operators


def test_every_fault_is_caught_by_a_comparison_where_it_has_to_show() -> None:
    result = proved(all_mutants(FAULTS))
    assert [trial.mutant.name for trial in result.escaped] == []
    assert [(record.where, record.case, record.reason) for record in result.disturbed] == []
    assert result.holds
    for trial in result.trials:
        assert isinstance(trial.mutant, CudnnMutant)
        assert trial.record is not None
        place, record = trial.mutant.place, trial.record
        assert (trial.checks, record.case, record.operator) == (1, place.case, place.check)
        assert (record.simulated, f"{record.release} {record.arch}") == (True, place.release)
        assert record.backend == "cudnn"
    # The control ran each check of each release once.
    ran = [(f"{record.release} {record.arch}", record.operator, record.case) for record in result.control]
    assert len(set(ran)) == len(ran)
    places = [place for each in FAULTS for place in each.places]
    assert set(ran) == {(place.release, place.check, place.case) for place in places}


def test_steps_with_nothing_wrong_are_not_caught() -> None:
    """Every step in its place, replaced by itself: so it is the fault that is caught, and not its wrapping."""
    once = {each.step: each.places[0] for each in FAULTS}
    right = [fault(step, getattr(Steps(), step), place) for step, place in once.items()]
    result = proved(all_mutants(right))
    assert [trial.outcome for trial in result.trials] == ["not caught"] * len(STEPS)
    assert not result.holds
    assert result.summary.startswith(f"FAIL: 0 of {len(STEPS)} mutants caught; control green (")


def test_an_error_is_no_catch() -> None:
    result = proved(all_mutants([fault("offsets", raises, OFFSETS)]), "packed-offset")
    (trial,) = result.trials
    assert trial.outcome == "broken"
    assert trial.record is not None
    assert "told" in trial.record.reason
    assert not result.holds


def test_a_step_that_is_wrong_for_all_turns_the_control_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "lse_from_kernel", lambda self, lse, empty: lse)
    result = proved(all_mutants([BY_NAME["lse not converted from the kernel"]]))
    assert result.escaped == []
    assert [(record.release, record.arch, record.operator) for record in result.disturbed] == [
        ("1.29.1", "sm100", "sparse_attention")
    ]
    assert not result.holds
    assert "control red (1 of 1 checks)" in result.summary


def test_a_fault_is_in_the_calls_of_one_wrapper() -> None:
    steps = Faulty(BY_NAME["low weight part dropped"], "indexer_backward")
    weights = torch.tensor([1 + 2.0**-12])
    assert len(steps.weight_parts("indexer_backward", weights, 2)) == 1
    assert len(steps.weight_parts("dense_indexer_backward", weights, 2)) == 2
    steps = Faulty(BY_NAME["sm_scale left to its default"], "indexer_forward")
    given = {"sm_scale": 0.5, "ratio": 2}
    assert steps.invoke("indexer_forward", dict, given) == {"ratio": 2}
    assert steps.invoke("dense_indexer_score_recompute", dict, given) == given


def test_by_position_is_the_order_of_1_25() -> None:
    taken: list[Any] = []
    names = [each.name for each in contract(parsed("1.25.0"), "sm90").wrapper("indexer_backward").parameters]
    given = {**dict.fromkeys(names, 7), "sm_scale": 0.5, "loss_coeff": 1.0, "grad_loss": 3, "topk_indices_global": True}
    steps = Faulty(BY_NAME["arguments by position"], "indexer_backward")
    steps.invoke("indexer_backward", lambda *x: taken.extend(x), given)
    assert taken[:6] == [7] * 6
    assert [float(x) for x in taken[6:10]] == [0.5, 1.0, 3.0, 7.0]
    assert taken[10:] == [None, None, None, 7], "no buffer, and no flag"


def test_both_kinds_of_mutants_in_one_run() -> None:
    rounded = next(each for each in ALL_FAULTS if each.name == "lse rounded to bf16")
    result = proved(all_mutants([rounded, BY_NAME["offsets dropped"]]), "packed-offset")
    assert result.holds
    assert len(result.trials) == len(all_mutants([rounded])) + 4
    simulated = [record for record in result.control if record.simulated]
    assert [record.operator for record in simulated] == ["indexer_topk", "indexer_loss:visible"]
    assert {record.operator for record in result.control if not record.simulated} == set(CHECKS)


def test_report_and_json_say_on_which_release() -> None:
    result = proved(all_mutants([BY_NAME["offsets dropped"]]), "packed-offset")
    out = StringIO()
    self_test_report.show(result, Console(file=out, width=220, highlight=False, markup=False), verbose=True)
    line = next(line for line in out.getvalue().splitlines() if "indexer_forward of 1.29.1 sm100" in line)
    for words in ("cudnn: offsets dropped in", "packed-offset, indexer_topk bf16 on a simulated 1.29.1 for sm100:"):
        assert words in line
    first = json.loads(result.as_json())["mutants"][0]
    assert (first["fault"], first["part"]) == ("cudnn: offsets dropped", "indexer_forward of 1.29.1 sm100")
    assert (first["by"]["release"], first["by"]["arch"], first["by"]["case"]) == ("1.29.1", "sm100", "packed-offset")


def test_releases_are_simulated_on_the_cpu_whatever_the_device() -> None:
    result = self_test(device=torch.device("meta"), mutants=all_mutants([BY_NAME["offsets dropped"]]))
    assert result.holds
    assert {record.device for record in result.control} == {"cpu"}
