"""Records in the form that people read: a row per operator and dtype, its worst case named. Data only, no layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dsattn.verify.records import Record, Verdict
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
    """The rows of one backend on one device."""

    backend: str
    device: str
    rows: list[Row]


def tables(records: Sequence[Record], *, every: bool = False) -> list[Table]:
    """One table per backend and device.

    Args:
        records: what was checked; "not run" records have no row.
        every: a row for every record instead of one for each operator and dtype.
    """
    ran = [record for record in records if record.verdict != "not run"]
    result = []
    for backend, device in dict.fromkeys((record.backend, record.device) for record in ran):
        mine = [record for record in ran if (record.backend, record.device) == (backend, device)]
        if every:
            rows = [_row([record], every) for record in mine]
        else:
            groups: dict[tuple[str, str], list[Record]] = {}
            for record in mine:
                groups.setdefault((record.operator, record.dtype), []).append(record)
            rows = [_row(group, every) for group in groups.values()]
            order = list(dict.fromkeys(record.operator for record in mine)), list(DTYPES)
            rows.sort(key=lambda row: (order[0].index(row.operator), order[1].index(row.dtype)))
        result.append(Table(backend=backend, device=device, rows=rows))
    return result


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


def unsupported(records: Iterable[Record]) -> list[tuple[str, int]]:
    """Why checks were refused or not run, each reason with its count."""
    counts: dict[str, int] = {}
    for record in records:
        if record.verdict in ("unsupported", "not run"):
            text = f"{record.verdict}: {record.backend}: {record.reason}"
            counts[text] = counts.get(text, 0) + 1
    return list(counts.items())


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
