"""Shows that verify turns red for wrong operators: every mutant is caught, and the control is green."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dsattn.backends import Backend
from dsattn.verify.environment import environment
from dsattn.verify.mutants import Fault, Mutant, attention, cudnn, loss, results, scores, selection, windows
from dsattn.verify.mutants.steps import CudnnMutant, StepFault
from dsattn.verify.records import Record
from dsattn.verify.reference import References
from dsattn.verify.run import Task, run, tasks
from dsattn.verify.simulated import Release
from dsattn.verify.subject import Subject
from dsattn.verify.suites import parts
from dsattn.verify.threads import one_thread

SUITE: Literal["quick"] = "quick"
FAULTS: tuple[Fault | StepFault, ...] = (
    *windows.FAULTS,
    *selection.FAULTS,
    *scores.FAULTS,
    *attention.FAULTS,
    *loss.FAULTS,
    *results.FAULTS,
    *cudnn.FAULTS,
)
"""Every fault; each makes one mutant of each part or place that it may be in."""

AnyMutant = Mutant | CudnnMutant

Outcome = Literal["caught", "not caught", "broken"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of a mutant.

    Attributes:
        mutant: the wrong backend.
        checks: how many checks ran, the last of them included.
        record: the first check that was not green; None where all were.
    """

    mutant: AnyMutant
    checks: int
    record: Record | None

    @property
    def outcome(self) -> Outcome:
        """Whether a comparison caught it; a mutant that raises an error, or refuses, is broken and proves nothing."""
        if self.record is None:
            return "not caught"
        return "caught" if self.record.verdict == "fail" and self.record.traceback is None else "broken"


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """What came of all mutants and of the control.

    Attributes:
        environment: where it was made.
        control: every check of the suite with nothing wrong, and with each simulated release those of its mutants.
        trials: one per mutant.
    """

    environment: dict[str, Any]
    control: Sequence[Record]
    trials: Sequence[Trial]

    @property
    def escaped(self) -> list[Trial]:
        """The mutants that no comparison caught."""
        return [trial for trial in self.trials if trial.outcome != "caught"]

    @property
    def disturbed(self) -> list[Record]:
        """The checks of the control that are not green."""
        return [record for record in self.control if record.verdict != "pass"]

    @property
    def holds(self) -> bool:
        """Whether there were mutants, all were caught, and the control is green."""
        return bool(self.trials and self.control) and not self.escaped and not self.disturbed

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        caught = len(self.trials) - len(self.escaped)
        wrong, checks = len(self.disturbed), len(self.control)
        control = f"control red ({wrong} of {checks} checks)" if wrong else f"control green ({checks} checks)"
        return f"{'PASS' if self.holds else 'FAIL'}: {caught} of {len(self.trials)} mutants caught; {control}"

    def as_json(self) -> str:
        """The result as JSON text."""
        found = {
            "environment": self.environment,
            "holds": self.holds,
            "summary": self.summary,
            "control": {"checks": len(self.control), "not_green": [_place(record) for record in self.disturbed]},
            "mutants": [
                {
                    "fault": trial.mutant.fault.name,
                    "imitates": trial.mutant.fault.imitates,
                    "part": trial.mutant.part,
                    "outcome": trial.outcome,
                    "checks": trial.checks,
                    "by": None if trial.record is None else _place(trial.record),
                }
                for trial in self.trials
            ],
        }
        return json.dumps(found, indent=1, allow_nan=False) + "\n"


def _place(record: Record) -> dict[str, Any]:
    names = "suite", "case", "operator", "device", "release", "arch", "dtype", "verdict", "reason"
    return {name: getattr(record, name) for name in names}


def all_mutants(faults: Iterable[Fault | StepFault] = FAULTS) -> list[AnyMutant]:
    """One mutant for every part or place that each fault may be in."""
    found: list[AnyMutant] = []
    for fault in faults:
        if isinstance(fault, StepFault):
            found += [CudnnMutant(fault, place) for place in fault.places]
        else:
            found += [Mutant(fault, part) for part in fault.parts]
    return found


@one_thread()
def self_test(
    *,
    device: torch.device,
    mutants: Sequence[AnyMutant] | None = None,
    control: Backend | None = None,
    subjects: Sequence[Subject] | None = None,
    advance: Callable[[str, int, int], None] = lambda *_: None,
) -> SelfTest:
    """What verify says of wrong backends, and of a right one in the same run.

    Runner, cases and budgets are those of the suite. A mutant is judged by the checks of the operator that it gets
    wrong, case after case, until one is not green; the control by all checks. Of a simulated release both get the
    cases and checks in which its faults have to show. Expected results are shared.

    Args:
        device: where the operators run; simulated releases run on the CPU.
        mutants: the wrong backends; None for `all_mutants()`.
        control: the right backend; None for the mutants' own backend without a fault.
        subjects: the cases; None for those of the quick suite.
        advance: called after every step with what is at hand, the steps done and the steps there are.
    """
    mutants = all_mutants() if mutants is None else mutants
    subjects = parts(SUITE)[0].subjects if subjects is None else subjects
    control = Mutant() if control is None else control
    todo = {
        dtype: _controls([m for m in mutants if m.fault.dtype == dtype], subjects, control, device)
        for dtype in dict.fromkeys(m.fault.dtype for m in mutants)
    }
    steps = sum(map(len, todo.values())) + len(mutants)
    records: list[Record] = []
    trials: list[Trial] = []
    caught_by: dict[str, str] = {}
    for dtype, checks in todo.items():
        references = References(keep=None)
        for record in run(checks, references):
            records.append(record)
            advance(f"control: {record.case}", len(records) + len(trials), steps)
        for mutant in (mutant for mutant in mutants if mutant.fault.dtype == dtype):
            trial = hunt(mutant, subjects, device, references, first=caught_by.get(mutant.fault.name))
            if trial.record is not None:
                caught_by[mutant.fault.name] = trial.record.case
            trials.append(trial)
            advance(mutant.name, len(records) + len(trials), steps)
    return SelfTest(environment=environment(), control=records, trials=trials)


def _controls(
    mutants: Sequence[AnyMutant], subjects: Sequence[Subject], control: Backend, device: torch.device
) -> list[Task]:
    """The checks of mutants of one dtype with nothing wrong."""
    found: list[Task] = []
    if any(isinstance(mutant, Mutant) for mutant in mutants):
        found += tasks(subjects, [control], device, [mutants[0].fault.dtype])
    simulated = [
        _tasks(mutant, mutant.control, subjects, device) for mutant in mutants if isinstance(mutant, CudnnMutant)
    ]
    once = {(task.release, task.subject.case.name, task.operator): task for tasks in simulated for task in tasks}
    return [*found, *once.values()]


def _tasks(
    mutant: AnyMutant, backend: Backend | Release, subjects: Sequence[Subject], device: torch.device
) -> list[Task]:
    """The checks that may catch a mutant, with a backend that need not be wrong."""
    mine = [subject for subject in subjects if mutant.cases is None or subject.case.name in mutant.cases]
    where = torch.device("cpu") if isinstance(backend, Release) else device
    return [task for task in tasks(mine, [backend], where, [mutant.fault.dtype]) if task.operator in mutant.checks]


def hunt(
    mutant: AnyMutant,
    subjects: Sequence[Subject],
    device: torch.device,
    references: References,
    *,
    first: str | None = None,
) -> Trial:
    """Runs the checks that may catch a mutant until one is not green.

    Args:
        mutant: the wrong backend.
        subjects: the cases.
        device: where the operators run.
        references: expected results.
        first: a case to begin with: what caught a fault in one part is likely to catch it in the next.
    """
    todo = _tasks(mutant, mutant.backend, subjects, device)
    todo.sort(key=lambda task: (task.subject.case.name != first, mutant.checks.index(task.operator)))
    for checks, record in enumerate(run(todo, references), 1):
        if record.verdict != "pass":
            return Trial(mutant=mutant, checks=checks, record=record)
    return Trial(mutant=mutant, checks=len(todo), record=None)
