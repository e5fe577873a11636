"""Writes the tables of speed into README.md and docs/bench.md from the records of benchmarks/results/bench-*.jsonl.

    dsattn bench --json-lines benchmarks/results/bench-cpu.jsonl
    dsattn bench --suite peers --json-lines benchmarks/results/bench-peers.jsonl
    python benchmarks/bench_tables.py

Where files or lines have the same work, tokens, dtype and runner, the last one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from blocks import ROOT, row, write

from dsattn.bench.records import Row, read, row_of
from dsattn.bench.tables import COLUMNS, machine, markdown, notes, share
from dsattn.bench.works import WORKS

NOTHING = "Nothing has been measured yet."


def main() -> None:
    """Reads the records and replaces the blocks between the marks."""
    write_tables(ROOT / "benchmarks" / "results", ROOT / "README.md", ROOT / "docs" / "bench.md")


def write_tables(results: Path, readme: Path, page: Path) -> None:
    """Writes the tables from the records of a folder into two documents."""
    records = _latest([record for file in sorted(results.glob("bench-*.jsonl")) for record in read(file)])
    suites = {suite: [one for one in records if one["suite"] == suite] for suite in COLUMNS}
    write(readme, {"bench": "\n\n".join(dict.fromkeys([short(suites["peers"]), shares(suites["cpu"])]))})
    write(page, {f"bench-{suite}": whole(found) for suite, found in suites.items()})


def _latest(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last record of each work, size, dtype and runner, in the order of the works."""
    found = {(one["work"], one["rows"], one["dtype"], one["peer"], one["runner"]): one for one in records}
    order = list(WORKS)
    known = [one for one in found.values() if one["work"] in order]
    unknown = [one for one in found.values() if one["work"] not in order]
    known.sort(key=lambda one: (order.index(one["work"]), one["rows"], -_width(one), not one["peer"]))
    return [*known, *unknown]


def _width(record: dict[str, Any]) -> int:
    return {"fp32": 32, "bf16": 16}.get(record["dtype"], 0)


def whole(records: Sequence[dict[str, Any]]) -> str:
    """All rows of a suite, what is to be said of them, and where they were measured."""
    if not records:
        return NOTHING
    rows = [row_of(record) for record in records]
    # The page has in words of its own how peers are driven.
    told = notes([replace(row, how="") for row in rows])
    return "\n".join([markdown(rows), "", *(f"- {note}" for note in [*told, *_machines(records)])])


def short(records: Sequence[dict[str, Any]]) -> str:
    """The rows beside the peers, and where they were measured."""
    if not records:
        return NOTHING
    return "\n\n".join([markdown([row_of(record) for record in records]), *_machines(records)])


def shares(records: Sequence[dict[str, Any]]) -> str:
    """Shares of the matrix peak of each work at its largest number of tokens, a column for each backend and dtype."""
    found: dict[str, dict[int, dict[str, Row]]] = {}
    for one in map(row_of, records):
        if one.share is not None:
            found.setdefault(one.work, {}).setdefault(one.rows, {})[f"{one.runner} {one.dtype}"] = one
    if not found:
        return NOTHING
    names = list(dict.fromkeys(name for sizes in found.values() for cells in sizes.values() for name in cells))
    names.sort(key=lambda name: name.partition(" ")[0])
    lines = [row(["share of matrix peak", "tokens", "sizes", *names]), row(["---"] * (3 + len(names)))]
    for work, sizes in found.items():
        tokens, cells = max(sizes.items())
        told = [share(cells[name].share) if name in cells else "" for name in names]
        lines.append(row([work, f"{tokens:,}", next(iter(cells.values())).sizes, *told]))
    return "\n\n".join(["\n".join(lines), *_machines(records)])


def _machines(records: Sequence[dict[str, Any]]) -> list[str]:
    return [f"Measured on {place}." for place in dict.fromkeys(map(machine, records))]


if __name__ == "__main__":
    main()
