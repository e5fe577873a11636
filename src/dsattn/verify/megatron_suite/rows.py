"""The suite's records as two tables of text."""

from __future__ import annotations

from collections.abc import Sequence

from dsattn.verify.frontend_defaults.rows import Table
from dsattn.verify.records import Record, Verdict

SUITE = "megatron"
_LOSSES = {"loss-b2": 2, "loss-b3": 3}
_RECALLS = {
    "one document, CP 2": "one-document-cp2",
    "documents, CP 2": "documents-cp2",
    "one document, CP 4": "one-document-cp4",
    "documents, CP 4": "documents-cp4",
    "padding, CP 2": "padding-cp2",
    "slice, CP 2": "slice-cp2",
}
_ORDER: tuple[Verdict, ...] = ("fail", "unsupported", "not run", "pass")
_CALLERS = {"naive": "as released", "dsattn": "after install()"}
_GROUP = tuple[str, str | None, str | None, str]


def tables(records: Sequence[Record]) -> list[Table]:
    """The suite's tables, of gradients and of recalls; those without a record are left out.

    Args:
        records: of any suites; those of others are passed over.
    """
    groups: dict[_GROUP, list[Record]] = {}
    for record in records:
        if record.suite == SUITE:
            megatron = record.metrics.get("megatron", "")
            groups.setdefault((megatron, record.release, record.arch, record.caller), []).append(record)
    rows = list(groups.items())
    if not rows:
        return []
    return [
        Table(
            "indexer loss of a micro-batch: largest relative error of the gradients of each sequence",
            _heads([f"{b} of {count}" for count in _LOSSES.values() for b in range(count)]),
            [_line(group, found, _errors(found)) for group, found in rows],
        ),
        Table(
            "selection of packed context-parallel ranks: recall, mean of the worst rank / least of a row",
            _heads(list(_RECALLS)),
            [_line(group, found, _recalls(found)) for group, found in rows],
        ),
    ]


def _errors(records: Sequence[Record]) -> list[str]:
    cells = []
    for case, count in _LOSSES.items():
        found = next((record.metrics for record in records if record.case == case), {})
        for b in range(count):
            errors = [each[b] for each in found.get("errors", {}).values()]
            zero = [each[b] for each in found.get("zero", {}).values()]
            cells.append("" if not errors else "zero" if all(zero) else _number(max(errors)))
    return cells


def _recalls(records: Sequence[Record]) -> list[str]:
    cells = []
    for prefix in _RECALLS.values():
        found = [record.metrics for record in records if record.case.startswith(f"{prefix}-rank")]
        found = [metrics for metrics in found if "recall_mean" in metrics]
        least = [min((metrics[name] for metrics in found), default=0.0) for name in ("recall_mean", "recall_min")]
        cells.append(" / ".join(f"{recall:.3f}" for recall in least) if found else "")
    return cells


def _heads(columns: Sequence[str]) -> tuple[str, ...]:
    return ("megatron-core", "frontend", "arch", "calls", *columns, "verdict")


def _line(group: _GROUP, records: Sequence[Record], cells: Sequence[str]) -> tuple[str, ...]:
    """A row: which Megatron calls what, its numbers, and the worst verdict of the group."""
    megatron, release, arch, caller = group
    worst = min((record.verdict for record in records), key=_ORDER.index)
    return (megatron, release or "", arch or "", _CALLERS[caller], *cells, worst)


def _number(error: float) -> str:
    return "0" if error == 0 else f"{error:.3f}" if error >= 1e-3 else f"{error:.0e}"
