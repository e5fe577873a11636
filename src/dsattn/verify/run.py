"""Runs checks: subjects x dtypes x backends x operators, one record each."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dsattn.backends import Backend, TorchBackend, ordered
from dsattn.errors import BackendMissing, UnsupportedProblem
from dsattn.verify.call import Call
from dsattn.verify.captured import Dump
from dsattn.verify.checks import CHECKS
from dsattn.verify.non_finite import refuse_swallowed
from dsattn.verify.per_row import Curve, curves
from dsattn.verify.records import Record, Verdict, metrics_of
from dsattn.verify.reference import References
from dsattn.verify.simulated import Chain, Release
from dsattn.verify.subject import Subject

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""Dtypes by the short name that reports and the command line use."""

CUDNN = "cudnn"
"""The backend that a simulated release is for."""


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
        release: the release to simulate, whose backend takes the place of `backend`; None without a stand-in.
    """

    subject: Subject
    operator: str
    backend: str | Backend
    device: torch.device
    dtype: str
    dump: Dump | None = None
    release: Release | None = None


def operators_of(subject: Subject) -> list[str]:
    """The checks that a subject's case is run through."""
    return [name for name in CHECKS if name.partition(":")[0] in subject.case.operators]


def tasks(
    subjects: Iterable[Subject],
    backends: Sequence[str | Backend | Release],
    device: torch.device,
    dtypes: Sequence[str],
    dump: Dump | None = None,
) -> list[Task]:
    """Every check of the subjects, those that share a reference next to each other."""

    def task(subject: Subject, dtype: str, backend: str | Backend | Release, operator: str) -> Task:
        named, release = (CUDNN, backend) if isinstance(backend, Release) else (backend, None)
        where = {"device": device, "dtype": dtype, "dump": dump}
        return Task(subject=subject, operator=operator, backend=named, release=release, **where)

    return [
        task(subject, dtype, backend, operator)
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

    Semantics:
        A backend of kernels that is named runs in a `Chain`, and the record says what torch had to do. A stand-in for
        a release is a new one for each check. Of a simulated release only what fails keeps its numbers row by row,
        since the others are too many.
    """
    references = References() if references is None else references
    for task in tasks:
        backend = _chained(task)
        ready = replace(task, backend=backend)
        if isinstance(backend, Chain):
            backend.by_torch = []
        record = judge(ready, references)
        if isinstance(backend, Chain):
            record = _told(record, backend)
        if record.verdict == "fail" and task.dump is not None:
            record = _dumped(record, ready, task.dump, references)
        yield record


def _chained(task: Task) -> str | Backend:
    """The backend that a check runs on; a chain where a backend of kernels is asked for and usable here."""
    if task.release is not None:
        return task.release.chain()
    if task.backend == TorchBackend.name or isinstance(task.backend, Backend):
        return task.backend
    named = [backend for backend in ordered() if backend.name == task.backend and backend.missing() is None]
    return Chain.of(named[0], task.device) if named else task.backend


def _told(record: Record, chain: Chain) -> Record:
    """The record with what only the chain knows."""
    ran = record.verdict in ("pass", "fail")
    return replace(
        record,
        simulated=chain.simulated,
        release=chain.release,
        arch=chain.arch,
        metrics={**record.metrics, "by_torch": chain.by_torch} if ran and chain.by_torch else record.metrics,
        curves=() if chain.simulated and record.verdict != "fail" else record.curves,
    )


def judge(task: Task, references: References) -> Record:
    """Runs one check.

    A backend that refuses the problem gives "unsupported"; so does one that says of a case with a number that is not
    finite that its kernels swallow such numbers. Any other exception is a failure, and its traceback is kept.
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
            refuse_swallowed(task.operator, reference, task.backend, task.device)
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
