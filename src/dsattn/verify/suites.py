"""Which cases a suite has, and which of them were asked for."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

from dsattn.backends import backends as usable
from dsattn.backends import ordered
from dsattn.errors import BadInput
from dsattn.spec.cases import CASES
from dsattn.spec.inputs import inputs
from dsattn.verify import captured, real_text
from dsattn.verify.records import OWN_TABLES, Record
from dsattn.verify.run import CUDNN, DTYPES, Task, operators_of, tasks
from dsattn.verify.simulated import Release
from dsattn.verify.subject import Subject

Suite = Literal["quick", "real-text", "full", "frontend-defaults", "megatron"]
SUITES: tuple[Suite, ...] = get_args(Suite)

_SIMULATED = ("bf16",)
_FULL_TEXT = {"rows": 4096, "top_k": 512, "sampled": 256}


@dataclass(frozen=True)
class Part:
    """Subjects that run in the same dtypes unless others are asked for."""

    subjects: list[Subject]
    dtypes: tuple[str, ...]


def parts(suite: Suite, *, simulated: bool = False) -> list[Part]:
    """What a suite runs.

    "quick": every named case. "real-text": the standard library's text, small. "full": every named case also in fp64,
    and the text at full size. Simulated releases get bf16, the dtype of their kernels, and "full" the small text: a
    stand-in on the CPU shows what a kernel means, not how large it can get. "frontend-defaults" and "megatron" make
    calls of their own, which are no parts.
    """
    if suite in OWN_TABLES:
        return []
    if suite == "real-text":
        return [Part(real_text.subjects(), _SIMULATED if simulated else ("fp32", "bf16"))]
    named = [Subject(suite=suite, case=case, make_inputs=partial(inputs, case)) for case in CASES]
    if simulated:
        text = real_text.subjects() if suite == "full" else []
        return [Part([*named, *(replace(subject, suite=suite) for subject in text)], _SIMULATED)]
    if suite == "quick":
        return [Part(named, ("fp32", "bf16"))]
    text = [replace(subject, suite=suite) for subject in real_text.subjects(**_FULL_TEXT)]
    return [Part(named, ("fp32", "bf16", "fp64")), Part(text, ("fp32", "bf16"))]


def plan(
    suites: Sequence[Suite],
    *,
    cases: Sequence[str] = (),
    backends: Sequence[str] = (),
    device: torch.device,
    dtype: str | None = None,
    inputs: Sequence[Path] = (),
    dump: captured.Dump | None = None,
    releases: Sequence[Release] = (),
) -> tuple[list[Task], list[Record]]:
    """The checks to run, and a "not run" record for every backend that is absent here and was not named.

    Args:
        suites: names of `SUITES`.
        cases: names to keep, with `*` for any text; `NAME/OPERATOR` keeps one operator. Empty: all.
        backends: names of backends; empty: all that are usable here.
        device: where the checks run.
        dtype: a name of `DTYPES` to run in place of each suite's own.
        inputs: files of captured inputs, which run as the suite "inputs" in their own dtypes.
        dump: writes the inputs of failed checks.
        releases: releases to simulate; where given, nothing else runs.

    Raises:
        BadInput: a name that nothing has, a file that is no good, or a backend or device that is not simulated.
    """
    if releases:
        _check_simulated(backends, device)
    if dtype is not None and dtype not in DTYPES:
        raise BadInput("--dtype", given=repr(dtype), needed=f"one of {', '.join(DTYPES)}")
    known = [backend.name for backend in ordered()]
    for name in backends:
        if name not in known:
            raise BadInput("--backend", given=repr(name), needed=f"one of {', '.join(known)}")
    found: list[Task] = []
    chosen = [part for suite in suites for part in parts(suite, simulated=bool(releases))]
    for part in [*chosen, *_captured(inputs, dtype)]:
        dtypes = part.dtypes if dtype is None else (dtype,)
        found += tasks(part.subjects, releases or backends or usable(), device, dtypes, dump)
    return _chosen(found, cases), [] if backends or releases else _absent(device)


def _check_simulated(backends: Sequence[str], device: torch.device) -> None:
    for name in backends:
        if name != CUDNN:
            raise BadInput("--backend", given=f"{name!r} with --cudnn-version", needed=f"{CUDNN!r} or none")
    if device.type != "cpu":
        raise BadInput("--device", given=f"'{device}' with --cudnn-version", needed="cpu: a release is simulated there")


def _captured(files: Sequence[Path], dtype: str | None) -> list[Part]:
    """One part for every captured call, in its own dtype."""
    names = {value: name for name, value in DTYPES.items()}
    found = captured.subjects(files, None if dtype is None else DTYPES[dtype])
    return [Part([subject], (names[own],)) for subject, own in found]


def _chosen(found: list[Task], patterns: Sequence[str]) -> list[Task]:
    """The tasks that some pattern names."""
    if not patterns:
        return found
    kept: dict[int, Task] = {}
    for pattern in patterns:
        case, _, operator = pattern.partition("/")
        places = [
            place
            for place, task in enumerate(found)
            if _names(case, task.subject.case.name) and fnmatchcase(task.operator, operator or "*")
        ]
        if not places:
            raise _unknown(pattern, found)
        kept |= {place: found[place] for place in places}
    return [kept[place] for place in sorted(kept)]


def _names(pattern: str, case: str) -> bool:
    # Names of captured calls have brackets, which mean something else in a pattern.
    return pattern == case or fnmatchcase(case, pattern)


def _unknown(pattern: str, found: list[Task]) -> BadInput:
    case, _, operator = pattern.partition("/")
    same = next((task.subject for task in found if _names(case, task.subject.case.name)), None)
    if same is not None:
        needed = f"one of {', '.join(operators_of(same))}"
        return BadInput("--case", given=f"{pattern!r}, where {operator!r} is no operator of the case", needed=needed)
    names = sorted({task.subject.case.name for task in found})
    near = difflib.get_close_matches(case, names, n=3)
    fix = f"near to it: {', '.join(near)}" if near else "`dsattn verify --list` shows them"
    return BadInput("--case", given=repr(pattern), needed="a case of the suites that run", fix=fix)


def _absent(device: torch.device) -> list[Record]:
    return [
        Record(
            suite="",
            case="",
            operator="",
            backend=backend.name,
            device=str(device),
            dtype="",
            verdict="not run",
            reason=reason,
        )
        for backend in ordered()
        if (reason := backend.missing()) is not None
    ]
