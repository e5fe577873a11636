"""A recording run again over the stand-in for its release."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dsattn.backends.cudnn.contracts_table import ARCHS
from dsattn.backends.cudnn.namespace import Namespace
from dsattn.backends.cudnn.simulator import SimulatedFrontend
from dsattn.errors import BadInput, DsattnError
from dsattn.spec.cases import CASES
from dsattn.spec.inputs import inputs
from dsattn.verify.recordings.compare import Outcome, argument, outcomes
from dsattn.verify.recordings.file import Recording
from dsattn.verify.recordings.recorder import facts_of, run_check
from dsattn.verify.reference import References
from dsattn.verify.run import CUDNN, DTYPES, Task, operators_of
from dsattn.verify.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Row:
    """All calls of one wrapper.

    Attributes:
        wrapper: its name.
        calls: how many were recorded.
        agreeing: how many agree.
        following: how many differ as an earlier call of the same check makes them.
        first: the first that differs, or None.
    """

    wrapper: str
    calls: int
    agreeing: int
    following: int
    first: Outcome | None


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What came of a recording.

    Attributes:
        recording: what was recorded.
        known: whether the table of contracts was made from the release.
        outcomes: of every call.
    """

    recording: Recording
    known: bool
    outcomes: list[Outcome]

    @property
    def holds(self) -> bool:
        """Whether some call agrees, and none differs."""
        verdicts = {one.verdict for one in self.outcomes}
        return "agrees" in verdicts and "differs" not in verdicts

    @property
    def rows(self) -> list[Row]:
        """One row for each wrapper, in the order of their first calls."""
        found: dict[str, list[Outcome]] = {}
        for one in self.outcomes:
            found.setdefault(one.wrapper, []).append(one)
        return [_row(wrapper, group) for wrapper, group in found.items()]


def _row(wrapper: str, group: list[Outcome]) -> Row:
    counts = {verdict: sum(one.verdict == verdict for one in group) for verdict in ("agrees", "follows")}
    first = next((one for one in group if one.verdict == "differs"), None)
    return Row(wrapper=wrapper, calls=len(group), agreeing=counts["agrees"], following=counts["follows"], first=first)


def replay(recording: Recording, path: Path) -> Iterator[Replay]:
    """Compares a recording with the stand-in, check by check; after each, what has come of it so far.

    Args:
        recording: what to hold the stand-in to.
        path: its file, for messages.

    Semantics:
        The stand-in's races never strike, and it rounds as matrix units do. Each check gets a new one.

    Raises:
        BadInput: the release, the architecture or a case is not known, or a case has other inputs than when it was
            recorded.
    """
    if recording.arch not in ARCHS:
        raise BadInput(str(path), given=f"architecture {recording.arch!r}", needed=f"one of {', '.join(ARCHS)}")
    made = Replay(recording=recording, known=_stand_in(recording, path).contract.known, outcomes=[])
    references = References()
    for task, check in list(_tasks(recording, path)):
        frontend = _stand_in(recording, path)
        found, _ = run_check(task, Namespace(frontend, frontend.contract.version, recording.arch), references)
        made.outcomes.extend(outcomes(check, found))
        yield made


def _stand_in(recording: Recording, path: Path) -> SimulatedFrontend:
    try:
        return SimulatedFrontend(recording.release, recording.arch, races=False, rounds=True)
    except DsattnError as error:
        given = f"release {recording.release!r} ({error})"
        raise BadInput(str(path), given=given, needed="a release of the cuDNN frontend that has DSA") from error


def _tasks(recording: Recording, path: Path) -> Iterator[tuple[Task, Any]]:
    """The recorded checks as checks of now."""
    known = {case.name: case for case in CASES}
    subjects: dict[str, Subject] = {}
    fix = "record again, or use the dsattn that recorded it"
    for check in recording.checks:
        case, facts = known.get(check.case), recording.cases.get(check.case)
        if case is None or facts is None or facts["dtype"] not in DTYPES:
            raise BadInput(str(path), given=f"case {check.case!r}, which is not known here", fix=fix)
        if check.case not in subjects:
            subjects[check.case] = Subject(suite="quick", case=case, make_inputs=partial(inputs, case))
        subject = subjects[check.case]
        if check.operator not in operators_of(subject):
            raise BadInput(str(path), given=f"operator {check.operator!r} of case {check.case!r}", fix=fix)
        where = {"device": torch.device("cpu"), "dtype": facts["dtype"]}
        yield Task(subject=subject, operator=check.operator, backend=CUDNN, **where), check
    for name, subject in subjects.items():
        _same_inputs(recording, path, name, subject, fix)


def _same_inputs(recording: Recording, path: Path, name: str, subject: Subject, fix: str) -> None:
    was = recording.cases[name]
    task = Task(subject=subject, operator="", backend=CUDNN, device=torch.device("cpu"), dtype=was["dtype"])
    for tensor, now in facts_of(task)["inputs"].items():
        text = argument(was["inputs"].get(tensor), now)
        if text is not None:
            raise BadInput(str(path), given=f"case {name!r} with other inputs ({tensor}: {text})", fix=fix)
