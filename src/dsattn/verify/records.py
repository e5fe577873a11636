"""What a verification leaves: one record per check, and the verdict on all of them."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from dsattn.errors import BadInput
from dsattn.spec.metrics import Comparison, TopKComparison
from dsattn.verify.per_row import Curve

Verdict = Literal["pass", "fail", "unsupported", "not run"]

OWN_TABLES = ("frontend-defaults", "megatron")
"""Suites whose records are shown in tables of their own."""
_NOT_IN_JSON = ("traceback", "curves", "inputs", "dumped")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One check: an operator on one case, backend, device and dtype.

    Attributes:
        suite: the suite that asked for it.
        case: the case's name.
        operator: the operator; where its keys may be chosen, that follows a colon.
        backend: the backend's name.
        device: where it ran.
        dtype: short name of the inputs' dtype.
        verdict: what came of it.
        reason: what is wrong, or why nothing was computed; "" for a pass.
        metrics: numbers by name; those of each compared result under "results"; under "by_torch" the parts that the
            backend lacks and torch ran.
        simulated: whether a stand-in for a kernel library ran.
        release: release of the kernel library, None where there is none.
        arch: the architecture stood in for, None without a stand-in.
        caller: "dsattn", or "naive" for a call that must go wrong.
        traceback: of an unexpected exception; not part of the JSON.
        curves: what was found row by row; not part of the JSON.
        inputs: the file of captured inputs that was checked; not part of the JSON.
        dumped: the file that the inputs were written to after a failure; not part of the JSON.
    """

    suite: str
    case: str
    operator: str
    backend: str
    device: str
    dtype: str
    verdict: Verdict
    reason: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    simulated: bool = False
    release: str | None = None
    arch: str | None = None
    caller: Literal["dsattn", "naive"] = "dsattn"
    traceback: str | None = None
    curves: tuple[Curve, ...] = field(default=(), repr=False)
    inputs: str | None = None
    dumped: str | None = None

    @property
    def where(self) -> str:
        """Where it ran: the device, or the simulated release and its architecture."""
        return f"a simulated {self.release} for {self.arch}" if self.simulated else self.device

    def command(self) -> str:
        """The command line that repeats the check."""
        source = {"suite": self.suite} if self.inputs is None else {"inputs": self.inputs}
        return self._command(source, self.case)

    def command_for_dump(self) -> str | None:
        """The command line that runs the operator on the dumped inputs; None where there are none."""
        return None if self.dumped is None else self._command({"inputs": self.dumped}, f"{Path(self.dumped).stem}[0]")

    def _command(self, source: dict[str, str], case: str) -> str:
        where = {"backend": self.backend, "device": self.device}
        if self.simulated:
            where = {"cudnn-version": self.release, "arch": self.arch}
        options = {**source, "case": f"{case}/{self.operator}", **where, "dtype": self.dtype}
        if self.suite in OWN_TABLES:
            # Such a suite runs as a whole.
            options = {**source, **where}
        words = [f"--{name} {shlex.quote(value)}" for name, value in options.items() if value is not None]
        return " ".join(["python -m dsattn verify", *words])


@dataclass(frozen=True, kw_only=True)
class Report:
    """All records of a run.

    Attributes:
        environment: where it was made; under "releases" what is to be said of the simulated ones.
        records: what was checked.
    """

    environment: dict[str, Any]
    records: Sequence[Record]

    @property
    def releases(self) -> list[str]:
        """What is to be said of the simulated releases."""
        return self.environment.get("releases", [])

    @property
    def counts(self) -> Counter[str]:
        """How many records have each verdict."""
        return Counter(record.verdict for record in self.records)

    @property
    def holds(self) -> bool:
        """Whether something was checked and nothing failed."""
        return self.counts["pass"] > 0 and self.counts["fail"] == 0

    @property
    def summary(self) -> str:
        """The verdict on the whole run in one line."""
        told = ", ".join(f"{n} {verdict}" for verdict in ("unsupported", "not run") if (n := self.counts[verdict]))
        rest = f" ({told})" if told else ""
        if self.counts["fail"]:
            return f"FAIL: {self.counts['fail']} of {self.counts['fail'] + self.counts['pass']} checks failed{rest}"
        if not self.holds:
            return f"FAIL: no check ran{rest}"
        return f"PASS: {self.counts['pass']} checks hold{rest}"

    def as_json(self) -> str:
        """The report as JSON text."""
        names = [f.name for f in fields(Record) if f.name not in _NOT_IN_JSON]
        records = [{name: getattr(record, name) for name in names} for record in self.records]
        return json.dumps({"environment": self.environment, "records": records}, indent=1, allow_nan=False) + "\n"


def metrics_of(results: dict[str, Comparison | TopKComparison]) -> dict[str, Any]:
    """The numbers of a check as JSON takes them: None for what is not finite."""
    metrics: dict[str, Any] = {}
    errors = {}
    for name, found in results.items():
        if isinstance(found, TopKComparison):
            metrics |= {
                "recall_mean": found.recall_mean,
                "recall_min": found.recall_min,
                "regret": _finite(found.regret),
                "rows_with_boundary_ties": found.rows_with_boundary_ties,
                "worst_row": found.worst_row,
            }
        else:
            errors[name] = {
                "relative_error": _finite(found.relative_error),
                "share_of_budget": _finite(found.excess),
                "worst_row": found.worst_row,
                "worst_batch": found.worst_batch,
            }
    return {**metrics, "results": errors} if errors else metrics


def write(path: Path, text: str) -> None:
    """Writes a report file.

    Raises:
        BadInput: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(
            str(path), given=error.strerror, fix="choose a file in a folder that can be written to"
        ) from error


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
