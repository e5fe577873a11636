"""Runs checks: subjects x dtypes x backends x operators, one record each."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dsattn.backends import Backend
from dsattn.errors import BackendMissing, UnsupportedProblem
from dsattn.verify.call import Call
from dsattn.verify.checks import CHECKS
from dsattn.verify.records import Record, Verdict, metrics_of
from dsattn.verify.reference import References
from dsattn.verify.subject import Subject

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""Dtypes by the short name that reports and the command line use."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One check to run.

    Attributes:
        subject: the case and its tensors.
        operator: a name of `CHECKS`.
        backend: a name, or a backend itself, which need not be known to dsattn.
        device: where it runs.
        dtype: a name of `DTYPES`.
    """

    subject: Subject
    operator: str
    backend: str | Backend
    device: torch.device
    dtype: str


def operators_of(subject: Subject) -> list[str]:
    """The checks that a subject's case is run through."""
    return [name for name in CHECKS if name.partition(":")[0] in subject.case.operators]


def tasks(
    subjects: Iterable[Subject], backends: Sequence[str | Backend], device: torch.device, dtypes: Sequence[str]
) -> list[Task]:
    """Every check of the subjects, those that share a reference next to each other."""
    return [
        Task(subject=subject, operator=operator, backend=backend, device=device, dtype=dtype)
        for subject in subjects
        for dtype in dtypes
        for backend in backends
        for operator in operators_of(subject)
    ]


def run(tasks: Iterable[Task], references: References | None = None) -> Iterator[Record]:
    """The record of every task, as it is made.

    Args:
        tasks: what to check.
        references: expected results to use and to add to; with `References(keep=None)` further runs of the same cases
            compute none again.
    """
    references = References() if references is None else references
    for task in tasks:
        yield judge(task, references)


def judge(task: Task, references: References) -> Record:
    """Runs one check.

    A backend that refuses the problem gives "unsupported". Any other exception is a failure, and its traceback is kept.
    """
    reasons: list[str] = []
    metrics, trace = {}, None
    verdict: Verdict = "pass"
    try:
        reference = references.get(task.subject, DTYPES[task.dtype])
        results = CHECKS[task.operator](Call(reference, task.backend, task.device))
        reasons = [found.reason for found in results.values() if not found.verdict]
        metrics = {**task.subject.facts, **metrics_of(results)}
        verdict = "fail" if reasons else "pass"
    except (UnsupportedProblem, BackendMissing) as error:
        verdict, reasons = "unsupported", [str(error)]
    except Exception as error:
        verdict, reasons = "fail", [f"{type(error).__name__}: {error}"]
        trace = traceback.format_exc()
    return Record(
        suite=task.subject.suite,
        case=task.subject.case.name,
        operator=task.operator,
        backend=task.backend.name if isinstance(task.backend, Backend) else task.backend,
        device=str(task.device),
        dtype=task.dtype,
        verdict=verdict,
        reason="; ".join(reasons),
        metrics=metrics,
        traceback=trace,
    )
