"""The suite's records as three tables of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsattn.verify.frontend_defaults.judge import FIGURES
from dsattn.verify.records import Record, Verdict

SUITE = "frontend-defaults"
SPARSE_CASE, DENSE_CASE = "indexer-backward-b2", "dense-b2"
_GRADIENTS = {"dQ": "d_index_q", "dW": "d_weights", "dK": "d_index_k"}
_DENSE = {"out": ("index_out", "attn_out"), "denom": ("index_denom", "attn_denom")}
_ORDER: tuple[Verdict, ...] = ("fail", "unsupported", "not run", "pass")


@dataclass(frozen=True)
class Table:
    """A table as text.

    Attributes:
        title: what it shows.
        columns: the heads of its columns; the last one is the verdict.
        rows: a line per release and caller, a cell per column.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(records: Sequence[Record]) -> list[Table]:
    """The suite's three tables; those without a record are left out.

    Args:
        records: of any suites; those of others are passed over.
    """
    mine = [record for record in records if record.suite == SUITE]
    found = (_sparse(mine), _recall(mine), _dense(mine))
    return [table for table in found if table.rows]


def _sparse(records: Sequence[Record]) -> Table:
    columns = [f"{name} of {b}" for name in _GRADIENTS for b in range(2)]

    def cells(record: Record) -> list[str]:
        errors, zero = record.metrics["errors"], record.metrics["zero"]
        return ["zero" if zero[name][b] else _number(errors[name][b]) for name in _GRADIENTS.values() for b in range(2)]

    rows = [
        _line([record], cells(record) if record.metrics else [""] * len(columns))
        for record in records
        if record.case == SPARSE_CASE
    ]
    title = "sparse indexer backward, 2 batch entries: relative error of the gradients of each"
    return Table(title, _heads(columns), rows)


def _recall(records: Sequence[Record]) -> Table:
    groups: dict[tuple[str | None, str, str | None], dict[str, Record]] = {}
    for record in records:
        if record.case in FIGURES:
            groups.setdefault((record.release, record.caller, record.arch), {})[record.case] = record
    rows = [
        _line(list(group.values()), [_recall_cell(group.get(case)) for case in FIGURES]) for group in groups.values()
    ]
    columns = ["1 document", "CP 2 rank 0", "CP 2 rank 1", "documents, rank 0", "documents, rank 1"]
    return Table("selection: recall, mean / min", _heads(columns), rows)


def _recall_cell(record: Record | None) -> str:
    if record is None or not record.metrics:
        return ""
    return f"{record.metrics['recall_mean']:.3f} / {record.metrics['recall_min']:.3f}"


def _dense(records: Sequence[Record]) -> Table:
    parts = {**_DENSE, **{name: (key,) for name, key in _GRADIENTS.items()}}

    def cells(record: Record) -> list[str]:
        errors = record.metrics["errors"]
        return [_number(*(error for key in keys for error in errors[key])) for keys in parts.values()]

    rows = [
        _line([record], cells(record) if record.metrics else [""] * len(parts))
        for record in records
        if record.case == DENSE_CASE
    ]
    title = "dense scores and indexer backward, 2 x 128 rows, 512 keys: largest relative error"
    return Table(title, _heads(list(parts)), rows)


def _heads(columns: Sequence[str]) -> tuple[str, ...]:
    return ("release", "arch", "caller", *columns, "verdict")


def _line(group: Sequence[Record], cells: Sequence[str]) -> tuple[str, ...]:
    """A row: who called what, its numbers, and the worst verdict of the group."""
    first = group[0]
    worst = min((record.verdict for record in group), key=_ORDER.index)
    return (first.release or "", first.arch or "", first.caller, *cells, worst)


def _number(*errors: float | None) -> str:
    """The largest error, as text."""
    found = [error for error in errors if error is not None]
    if len(found) < len(errors):
        return "not finite"
    largest = max(found)
    return "0" if largest == 0 else f"{largest:.3f}" if largest >= 1e-3 else f"{largest:.0e}"
