"""Runs checks: subjects x dtypes x backends x operators, one record each."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dsattn.backends import Backend
from dsattn.errors import BackendMissing, UnsupportedProblem
from dsattn.verify.call import Call
from dsattn.verify.captured import Dump
from dsattn.verify.checks import CHECKS
from dsattn.verify.per_row import Curve, curves
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
        dump: writes the inputs of the check if it fails.
    """

    subject: Subject
    operator: str
    backend: str | Backend
    device: torch.device
    dtype: str
    dump: Dump | None = None


def operators_of(subject: Subject) -> list[str]:
    """The checks that a subject's case is run through."""
    return [name for name in CHECKS if name.partition(":")[0] in subject.case.operators]


def tasks(
    subjects: Iterable[Subject],
    backends: Sequence[str | Backend],
    device: torch.device,
    dtypes: Sequence[str],
    dump: Dump | None = None,
) -> list[Task]:
    """Every check of the subjects, those that share a reference next to each other."""
    return [
        Task(subject=subject, operator=operator, backend=backend, device=device, dtype=dtype, dump=dump)
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
        record = judge(task, references)
        if record.verdict == "fail" and task.dump is not None:
            record = _dumped(record, task, task.dump, references)
        yield record


def judge(task: Task, references: References) -> Record:
    """Runs one check.

    A backend that refuses the problem gives "unsupported". Any other exception is a failure, and its traceback is kept.
    An operator that the subject leaves out is "not run".
    """
    reasons: list[str] = []
    metrics, trace = {}, None
    per_row: tuple[Curve, ...] = ()
    verdict: Verdict = "pass"
    skipped = task.subject.skipped.get(task.operator)
    try:
        if skipped is not None:
            verdict, reasons = "not run", [skipped]
        else:
            reference = references.get(task.subject, DTYPES[task.dtype])
            results = CHECKS[task.operator](Call(reference, task.backend, task.device))
            reasons = [found.reason for found in results.values() if not found.verdict]
            metrics = {**task.subject.facts, **metrics_of(results)}
            per_row = curves(results, reference)
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
        curves=per_row,
        inputs=None if task.subject.file is None else str(task.subject.file),
    )


def _dumped(record: Record, task: Task, dump: Dump, references: References) -> Record:
    """The record of a failed check with the file that its inputs were written to."""
    try:
        file = dump.write(references.get(task.subject, DTYPES[task.dtype]), task.dtype)
    except Exception as error:
        # What went wrong first is not lost for a file that could not be written.
        return replace(record, reason=f"{record.reason}; its inputs could not be written: {error}")
    return replace(record, dumped=str(file))
