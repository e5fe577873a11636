"""No speed without a verdict: what verify finds of the operators of a work, in a handful of its cases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from dsattn.backends import Backend
from dsattn.bench.works import Work
from dsattn.spec.cases import CASES
from dsattn.spec.inputs import inputs
from dsattn.verify.records import Record
from dsattn.verify.reference import References
from dsattn.verify.run import Task, run
from dsattn.verify.subject import Subject

NAMES = (
    "bshd-b3",
    "padded-left",
    "packed-empty-one-tail",
    "negative-offset",
    "slice-middle",
    "many-keys",
    "plateau",
    "k-more",
    "index-heads-64",
    "heads-24",
    "widths-deepseek",
    "loss-num-rows-masked",
)
"""The cases: layouts of all kinds, rows without a key, ties, unused slots, real widths, many heads, masked rows."""


@dataclass
class Gate:
    """Verdicts of verify, each computed once.

    Attributes:
        given: backends by the names that they are called by, where those are not dsattn's own.
        references: the oracle's results.
    """

    given: dict[str, Backend] = field(default_factory=dict)
    references: References = field(default_factory=lambda: References(keep=None))
    _records: dict[tuple[str, str, str], list[Record]] = field(default_factory=dict)

    def reason(self, work: Work, backend: str, dtype: str) -> str | None:
        """Why a work is not timed on a backend: the case and what is wrong in it; None where nothing is."""
        for record in self._all(work, backend, dtype):
            if record.verdict == "fail":
                return f"{record.case}/{record.operator}: {record.reason}"
        return None

    def unsupported(self, work: Work, backend: str, dtype: str) -> str | None:
        """Why a backend has nothing of a work: it refuses all cases of an operator; None where it takes some."""
        for check in work.checks:
            records = self._of(check, backend, dtype)
            if all(record.verdict == "unsupported" for record in records):
                return records[0].reason
        return None

    def _all(self, work: Work, backend: str, dtype: str) -> Iterable[Record]:
        for check in work.checks:
            yield from self._of(check, backend, dtype)

    def _of(self, check: str, backend: str, dtype: str) -> list[Record]:
        key = check, backend, dtype
        if key not in self._records:
            chosen = self.given.get(backend, backend)
            tasks = [
                Task(subject=subject, operator=check, backend=chosen, device=torch.device("cpu"), dtype=dtype)
                for subject in _SUBJECTS
                if check.partition(":")[0] in subject.case.operators
            ]
            self._records[key] = list(run(tasks, self.references))
        return self._records[key]


_SUBJECTS = [
    Subject(suite="quick", case=case, make_inputs=partial(inputs, case)) for case in CASES if case.name in NAMES
]
