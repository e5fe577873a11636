"""`make fuzz`: examples are counted, made of the seed alone, and a mismatch says how to see it again."""

from __future__ import annotations

from random import Random

import fuzz
import pytest


def numbers_below(limit: int) -> fuzz.Property:
    """A property of random numbers that does not hold for all of them."""

    def make(rng: Random) -> int:
        return rng.randint(0, 9)

    def check(number: int) -> int:
        assert number < limit, f"{number} is too large"
        return 3

    return make, check


def test_examples_and_comparisons_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "PROPERTIES", {"small": numbers_below(10), "other": numbers_below(10)})
    assert fuzz.main(["--jobs", "1", "--examples", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["small", "40", "120"]
    assert lines[2].split()[:3] == ["other", "40", "120"]
    assert lines[-1] == "0 mismatches in 80 examples; seed 0, 1 process"


def test_a_mismatch_ends_the_run_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "PROPERTIES", {"small": numbers_below(9)})
    assert fuzz.main(["--jobs", "1", "--seed", "5"]) == 1
    report = capsys.readouterr().out
    assert "AssertionError: 9 is too large" in report
    assert "Example: 9" in report
    command = report.splitlines()[-1].split()
    assert command[:6] == ["python", "tests/fuzz.py", "--seed", "5", "--property", "small"]
    number = int(command[-1])
    assert number > 0, "the first example was to hold"
    assert fuzz.main(command[2:]) == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == command
    assert fuzz.main(["--jobs", "1", "--seed", "5", "--examples", str(number)]) == 0


def test_an_error_of_any_kind_is_a_mismatch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: Random) -> int:
        raise ValueError("no example")

    monkeypatch.setattr(fuzz, "PROPERTIES", {"small": (fails, lambda _: None)})
    assert fuzz.main(["--jobs", "1"]) == 1
    assert "ValueError: no example" in capsys.readouterr().out


def test_a_run_of_nothing_does_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--jobs", "1", "--minutes", "0"]) == 1
    assert "0 mismatches in 0 examples" in capsys.readouterr().out


def test_several_processes_share_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--property", "layouts", "--property", "ids", "--examples", "30"]
    assert fuzz.main(["--jobs", "2", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["layouts", "30"]
    assert lines[2].split()[:2] == ["ids", "30"]


def test_most_of_the_time_goes_to_properties_of_weight() -> None:
    plan = fuzz.Plan(names=["oracle", "layouts"], seed=0, first=0, step=1, seconds=1, examples=None)
    plan.tallies.update(oracle=fuzz.Tally(seconds=9.0), layouts=fuzz.Tally(seconds=1.0))
    assert fuzz.WEIGHTS["oracle"] == len(fuzz.PROPERTIES) - 1 == 10
    assert plan.chosen() == "oracle"
    plan.tallies["oracle"].add(fuzz.Tally(seconds=2.0))
    assert plan.chosen() == "layouts"
