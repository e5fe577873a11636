"""Rows as people read them: tables on a terminal, by rich, and in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsattn.bench.peak import PRODUCTS
from dsattn.bench.records import Row, Spread

Column = tuple[str, Callable[[Row], str]]
_MIB = 2**20
_STYLES = {"refused": "bold red", "failed": "bold red"}


def seconds(found: Spread | None) -> str:
    """A median of seconds with its spread."""
    if found is None:
        return ""
    digits = 3 if found.median < 1 else 2 if found.median < 10 else 1
    return f"{found.median:.{digits}f} ({found.least:.{digits}f} .. {found.most:.{digits}f})"


def mebibytes(found: Spread | None) -> str:
    """A median of bytes in MiB."""
    return "" if found is None else f"{found.median / _MIB:,.0f}"


def share(found: Spread | None) -> str:
    """A median share in per cent."""
    return "" if found is None else f"{found.median:.0%}"


def times(found: Spread | None) -> str:
    """How many times this figure the peer's is, in the median."""
    return "" if found is None else f"{found.median:.2f}" if found.median < 10 else f"{found.median:.0f}"


def short(row: Row) -> str:
    """Why a row has no figures, in the width of a column."""
    return textwrap.shorten(f"{row.verdict}: {row.reason}", 48, placeholder=" ...")


_COMMON: list[Column] = [
    ("work", lambda row: row.work),
    ("tokens", lambda row: f"{row.rows:,}"),
    ("dtype", lambda row: row.dtype),
    ("what", lambda row: row.what),
    ("wall s", lambda row: seconds(row.wall) if row.wall else short(row)),
    ("CPU s", lambda row: "" if row.cpu is None else seconds(row.cpu).partition(" ")[0]),
]
COLUMNS: dict[str, list[Column]] = {
    "cpu": [
        *_COMMON,
        ("MiB above inputs and gradients", lambda row: mebibytes(row.beyond)),
        ("of matrix peak", lambda row: share(row.share)),
    ],
    "peers": [
        *_COMMON,
        ("MiB above inputs", lambda row: mebibytes(row.memory)),
        ("ratio CPU s", lambda row: times(row.times_cpu)),
        ("ratio memory", lambda row: times(row.times_memory)),
    ],
}
"""The columns of each suite."""
_LEFT = {"work", "dtype", "what", "wall s"}


def show(rows: Sequence[Row], out: Console) -> None:
    """Prints the rows of one suite, what was refused or failed, how peers are driven, and what the peak is."""
    if not rows:
        out.print(Text("nothing ran: no backend here takes the work", style="bold red"))
        return
    view = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    columns = COLUMNS[rows[0].suite]
    for name, _ in columns:
        view.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=name in _LEFT)
    for row in rows:
        style = _STYLES.get(row.verdict, "")
        view.add_row(*(Text(cell(row), style=style) for _, cell in columns))
    out.print(view, "")
    for row in rows:
        if row.reason:
            told = f"{row.work}, {row.rows:,} tokens, {row.dtype}, {row.what}: {row.verdict}: {row.reason}"
            out.print(Text(told, style=_STYLES[row.verdict]))
    for note in notes(rows):
        out.print(Text(note, style="dim"))


def notes(rows: Sequence[Row]) -> list[str]:
    """What is to be said of the rows beside their figures."""
    found = []
    for row in rows:
        if row.difference:
            name, apart = max(row.difference.items(), key=lambda one: one[1])
            found.append(f"{row.work}, {row.dtype}: results of {row.what} and the peer differ by {apart:.1e} ({name})")
    if any(row.times_cpu for row in rows):
        found.append("ratio: the peer's figure over this one in the same round, median of the rounds")
    found += [" ".join(row.how.split()) for row in rows if row.how]
    found += _peaks(rows)
    if any(row.exact is False for row in rows):
        found.append("This system cannot begin a peak anew: memory may be that of making the inputs.")
    return list(dict.fromkeys(found))


def _peaks(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        if row.peak:
            before, after = (row.peak[name] / 1e9 for name in ("before", "after"))
            source = row.peak["source"]
            why = ", since there is no compiler" if source == PRODUCTS else ""
            found.append(
                f"matrix peak, {row.dtype}, {row.peak['threads']} threads: {before:.0f} GF/s before, {after:.0f} after "
                f"({source}{why})"
            )
    return found


def markdown(rows: Sequence[Row], columns: Sequence[Column] | None = None) -> str:
    """The rows of one suite as a Markdown table; what has no figures says why.

    Args:
        rows: at least one.
        columns: what is shown; None for the columns of the suite.
    """
    columns = columns or COLUMNS[rows[0].suite]
    lines = [line([name for name, _ in columns]), line(["---" if name in _LEFT else "---:" for name, _ in columns])]
    for row in rows:
        lines.append(line([cell(row) for _, cell in columns]))
    return "\n".join(lines)


def line(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def machine(record: Mapping[str, Any]) -> str:
    """Where a record was made, in words."""
    record = record["environment"]
    commit = f", commit {record['commit'][:12]}" if record.get("commit") else ""
    return (
        f"{record['cpu']}, {record['cores']} cores, {record['threads']} threads, torch {record['torch']}, "
        f"Python {record['python']}, dsattn {record['dsattn']}{commit}, {record['date'][:10]}"
    )
