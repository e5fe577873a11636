"""Records in the form that people read: a row per operator and dtype, its worst case named. Data only, no layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dsattn.verify.matrix import releases_of, where
from dsattn.verify.records import OWN_TABLES, Record, Verdict
from dsattn.verify.run import DTYPES

_ROUNDING = 1e-14


@dataclass(frozen=True, kw_only=True)
class Row:
    """One or several checks of an operator in a dtype, as text.

    Attributes:
        suite: the suite; "" where the row sums up several.
        case: the case; "" where the row sums up several.
        operator: the operator.
        dtype: short name of the dtype.
        checks: how many hold of how many that ran.
        verdict: "fail" if one failed, else "pass" if one ran, else what there is.
        recall: mean and least recall.
        regret: the largest share of score mass that a row lost.
        errors: result and its largest relative error.
        worst: which case, result, row and batch came nearest to its budget, or broke it.
        failures: the records that failed.
    """

    suite: str
    case: str
    operator: str
    dtype: str
    checks: str
    verdict: Verdict
    recall: str
    regret: str
    errors: list[tuple[str, str]]
    worst: str
    failures: list[Record]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of one backend on one device, or on one simulated release."""

    backend: str
    device: str
    rows: list[Row]
    title: str


@dataclass(frozen=True, kw_only=True)
class Failing:
    """The failed checks of an operator in a dtype on one backend and device, or on one simulated architecture.

    Attributes:
        operator: the operator.
        dtype: short name of the dtype.
        title: the backend and where it ran.
        failures: the records.
        releases: the simulated releases that they concern, in words.
    """

    operator: str
    dtype: str
    title: str
    failures: list[Record]
    releases: str = ""


def tables(records: Sequence[Record], *, every: bool = False) -> list[Table]:
    """One table per backend and device, and with `every` one per simulated release.

    Args:
        records: what was checked; "not run" records have no row, and those of `OWN_TABLES` neither.
        every: a row for every record instead of one for each operator and dtype.
    """
    shown = [record for record in records if record.verdict != "not run" and record.suite not in OWN_TABLES]
    ran = shown if every else [record for record in shown if not record.simulated]
    result = []
    for group in _grouped(ran, "backend", "device", "simulated", "release", "arch"):
        if every:
            rows = [_row([record], every) for record in group]
        else:
            rows = [_row(same, every) for same in _grouped(group, "operator", "dtype")]
            order = list(dict.fromkeys(record.operator for record in group)), list(DTYPES)
            rows.sort(key=lambda row: (order[0].index(row.operator), order[1].index(row.dtype)))
        first = group[0]
        result.append(Table(backend=first.backend, device=first.device, rows=rows, title=_title(first, first.release)))
    return result


def failing(records: Sequence[Record]) -> list[Failing]:
    """What failed, in the order of the tables, then of the simulated architectures."""
    failed = [record for record in records if record.verdict == "fail"]
    real = [
        Failing(operator=row.operator, dtype=row.dtype, title=table.title, failures=row.failures)
        for table in tables(failed)
        for row in table.rows
    ]
    every = releases_of(records)
    rest = [record for record in failed if record.simulated or record.suite in OWN_TABLES]
    return real + [
        Failing(
            operator=group[0].operator,
            dtype=group[0].dtype,
            title=_title(group[0], None),
            failures=group,
            releases=where(releases_of(group), every),
        )
        for group in _grouped(rest, "suite", "backend", "arch", "operator", "dtype")
    ]


def _title(record: Record, release: str | None) -> str:
    """Backend and device; of simulated ones the architecture, and the release if it is one."""
    if not record.simulated:
        return f"{record.backend} on {record.device}"
    return f"{record.backend}{'' if release is None else f' {release}'} on a simulated {record.arch}"


def _grouped(records: Iterable[Record], *names: str) -> list[list[Record]]:
    """The records that agree in some fields together, in the order of the first of each group."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(getattr(record, name) for name in names), []).append(record)
    return list(groups.values())


def texts(records: Iterable[Record]) -> list[dict[str, Any]]:
    """What the report says of each real text: documents, rows, k, share of rows that see more, rows with a tie."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if "documents" in record.metrics:
            facts = found.setdefault(record.case, {"case": record.case, **_facts(record.metrics)})
            if "rows_with_boundary_ties" in record.metrics:
                facts["ties"] = record.metrics["rows_with_boundary_ties"]
    return list(found.values())


def captured(records: Iterable[Record]) -> list[dict[str, Any]]:
    """What the report says of each captured call that was checked: its file, sizes, and how many rows were judged."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.inputs is not None and record.metrics:
            names = "t", "s", "top_k", "judged_rows"
            facts = {name: record.metrics[name] for name in names}
            found.setdefault(record.case, {"case": record.case, "file": record.inputs, **facts})
    return list(found.values())


def unsupported(records: Sequence[Record]) -> list[tuple[str, int]]:
    """Why checks were refused or not run, each reason with its count; of simulated releases also which ones."""
    refused = [record for record in records if record.verdict in ("unsupported", "not run")]
    every = releases_of(records)
    found = []
    groups: dict[str, list[Record]] = {}
    for record in refused:
        reason = record.reason
        if record.release is not None:
            # It is named behind, beside the others that refuse for the same reason.
            reason = reason.replace(f"release {record.release}", "the release")
        groups.setdefault(f"{record.verdict}: {record.backend}: {reason}", []).append(record)
    for text, group in groups.items():
        places = where(releases_of(group), every)
        found.append((f"{text} [{places}]" if places else text, len(group)))
    return found


def by_torch(records: Sequence[Record]) -> list[tuple[str, int]]:
    """What torch ran because a backend lacks it, each part with the number of checks that it was in."""
    every = releases_of(records)
    parts: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        for part in record.metrics.get("by_torch", ()):
            parts.setdefault((record.backend, part), []).append(record)
    found = []
    for (backend, part), group in parts.items():
        places = where(releases_of(group), every)
        text = f"torch ran the {part}, which {backend} does not have here"
        found.append((f"{text} [{places}]" if places else text, len(group)))
    return found


def _facts(metrics: dict[str, Any]) -> dict[str, Any]:
    names = "documents", "document_rows", "t", "t_asked", "judged_rows", "top_k", "share_over_k"
    return {name: metrics.get(name) for name in names}


def _row(group: Sequence[Record], every: bool) -> Row:
    ran = [record for record in group if record.verdict in ("pass", "fail")]
    failures = [record for record in group if record.verdict == "fail"]
    verdict: Verdict = "fail" if failures else "pass" if ran else group[0].verdict
    selections = [record.metrics for record in ran if "recall_min" in record.metrics]
    recall = regret = ""
    if selections:
        mean = sum(m["recall_mean"] for m in selections) / len(selections)
        recall = f"{mean:.3f} / {min(m['recall_min'] for m in selections):.3f}"
        largest = max((m["regret"] for m in selections), key=_size)
        # The oracle adds the two sums in different orders, so nothing lost may read as a few float64 roundings.
        regret = "0" if largest is not None and largest < _ROUNDING else _number(largest)
    return Row(
        suite=group[0].suite if every else "",
        case=group[0].case if every else "",
        operator=group[0].operator,
        dtype=group[0].dtype,
        checks=f"{len(ran) - len(failures)} / {len(ran)}" if ran else "",
        verdict=verdict,
        recall=recall,
        regret=regret,
        errors=_errors(ran),
        worst=_worst(ran, failures, named=not every),
        failures=failures,
    )


def _errors(ran: Sequence[Record]) -> list[tuple[str, str]]:
    largest: dict[str, float | None] = {}
    for record in ran:
        for name, numbers in record.metrics.get("results", {}).items():
            error = numbers["relative_error"]
            largest[name] = max(largest.get(name, error), error, key=_size)
    return [(name, _number(error)) for name, error in largest.items()]


def _worst(ran: Sequence[Record], failures: Sequence[Record], *, named: bool) -> str:
    """The result that came nearest to its budget or broke it: a failure first."""
    candidates = [
        (record, name, numbers)
        for record in failures or ran
        for name, numbers in record.metrics.get("results", {}).items()
    ]
    if not candidates:
        if not failures:
            return ""
        place = failures[0].metrics.get("worst_row")
        return ", ".join([failures[0].case] * named + ([f"row {place}"] if place is not None else []))
    record, name, numbers = max(candidates, key=lambda found: _size(found[2]["share_of_budget"]))
    parts = [record.case] if named else []
    parts.append(name)
    for what in ("row", "batch"):
        if numbers[f"worst_{what}"] is not None:
            parts.append(f"{what} {numbers[f'worst_{what}']}")
    return f"{_times(numbers['share_of_budget'])}: {', '.join(parts)}"


def _times(share: float | None) -> str:
    """A share of a budget, as percent while that can be read."""
    if share is None:
        return "wrong"
    if share < 10:
        return f"{share:.0%}"
    return f"{share:,.0f} times" if share < 1e6 else f"{share:.0e} times"


def _size(x: float | None) -> float:
    """For sorting: what is not finite is worst."""
    return float("inf") if x is None else x


def _number(x: float | None) -> str:
    return "not finite" if x is None else "0" if x == 0 else f"{x:.1e}"
