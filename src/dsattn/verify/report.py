"""A report on a terminal, by rich."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsattn.verify import matrix, own_suites, summary
from dsattn.verify.records import OWN_TABLES, Record, Report

_STYLES = {"pass": "green", "fail": "bold red", "unsupported": "yellow", "not run": "dim"}
_PIPE_WIDTH = 120
# From here on a matrix of all operators has room for long words; below `_PIPE_WIDTH` it is cut into so many columns.
_WIDE, _COLUMNS = 160, 4


def console(*, stderr: bool = False) -> Console:
    """A console that does not fold a table to 80 columns where no terminal says how wide it is."""
    made = Console(stderr=stderr, highlight=False, markup=False)
    if not made.is_terminal and "COLUMNS" not in made._environ:
        made.width = _PIPE_WIDTH
    return made


def show(report: Report, out: Console, *, verbose: bool = False) -> None:
    """Prints a report: tables, what failed and how to repeat it, what did not run, the verdict.

    Args:
        report: what was checked.
        out: where it goes.
        verbose: every check instead of one row per operator and dtype, and tracebacks.
    """
    for table in summary.tables(report.records, every=verbose):
        out.print(_table(table, out.width, every=verbose), "")
    for found in matrix.matrices(report.records):
        columns = len(found.operators) if out.width >= _PIPE_WIDTH else _COLUMNS
        for begin in range(0, len(found.operators), columns):
            out.print(Text(f"backend {found.backend}, releases simulated on {found.arch}", style="bold"))
            out.print(_matrix(found, slice(begin, begin + columns), out.width), "")
    for found in own_suites.tables(report.records):
        out.print(Text(found.title, style="bold"))
        out.print(_own(found), "")
    texts = summary.texts(report.records)
    if texts:
        out.print(_texts(texts), "")
    calls = summary.captured(report.records)
    if calls:
        out.print(_captured(calls), "")
    for text in report.releases:
        out.print(Text(text))
    _failures(report, out, verbose=verbose)
    for text, count in (*summary.by_torch(report.records), *summary.unsupported(report.records)):
        out.print(Text(f"{text} ({count} checks)" if count > 1 else text, style="yellow"))
    out.print(Text(report.summary, style="bold green" if report.holds else "bold red"))


def _table(table: summary.Table, width: int, *, every: bool) -> Table:
    view = _grid(f"backend {table.title}")
    across = 1 if width < _PIPE_WIDTH else 2 if every else 3
    if every:
        view.add_column("case", overflow="fold")
    view.add_column("operator", no_wrap=True)
    view.add_column("dtype", no_wrap=True)
    view.add_column("verdict" if every else "cases", no_wrap=True)
    view.add_column("errors" if every else "largest errors", no_wrap=True)
    view.add_column("nearest to its budget", overflow="fold", min_width=14)
    for row in table.rows:
        cells = [row.operator, row.dtype, row.verdict if every else row.checks or row.verdict]
        cells += [_results(row, across), row.worst]
        style = _STYLES[row.verdict]
        texts = [Text(cell, style=style if i == 2 or row.verdict != "pass" else "") for i, cell in enumerate(cells)]
        view.add_row(*([Text(row.case)] if every else []), *texts)
    return view


def _matrix(found: matrix.Matrix, shown: slice, width: int) -> Table:
    """Some columns of a matrix."""
    view = _grid()
    dtypes = len(found.dtypes) > 1
    view.add_column("release", no_wrap=True)
    if dtypes:
        view.add_column("dtype", no_wrap=True)
    for operator in found.operators[shown]:
        # Folded where its words end.
        view.add_column(operator.replace("_", "_\n").replace(":", ":\n"))
    short = _PIPE_WIDTH <= width < _WIDE
    for row in found.rows:
        cells = [Text("\n").join(_lines(cell, short)) for cell in row.cells[shown]]
        view.add_row(Text(row.release), *([Text(row.dtype)] if dtypes else []), *cells)
    return view


def _lines(cell: matrix.Cell, short: bool) -> list[Text]:
    told = [(text.replace("unsupported", "unsup.") if short else text, verdict) for text, verdict in cell.told]
    return [Text(text, style=_STYLES[verdict]) for text, verdict in told]


def _own(table: own_suites.Table) -> Table:
    view = _grid()
    for name in table.columns:
        view.add_column(name)
    for *cells, verdict in table.rows:
        view.add_row(*map(Text, cells), Text(verdict, style=_STYLES[verdict]))
    return view


def _results(row: summary.Row, columns: int) -> str:
    """The numbers of a row: its selection first, then the relative errors in columns."""
    cells = [f"{name:<9} {error:<7}" for name, error in row.errors]
    lines = ["  ".join(cells[i : i + columns]).rstrip() for i in range(0, len(cells), columns)]
    if row.recall:
        selection = f"recall    {row.recall}", f"regret    {row.regret}"
        lines = [*selection, *lines] if columns == 1 else ["  ".join(selection), *lines]
    return "\n".join(lines)


def _grid(title: str | None = None) -> Table:
    look = {"box": SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    return Table(title=title, title_justify="left", title_style="bold", **look)


def _texts(texts: list[dict[str, Any]]) -> Table:
    view = _grid("real text")
    for name in ("case", "documents", "rows of documents", "t", "k", "rows that see more", "rows with a tie at k"):
        view.add_column(name, justify="left" if name == "case" else "right")
    for facts in texts:
        t = f"{facts['t']} (from {facts['t_asked']})" if facts["t_asked"] else str(facts["t"])
        ties = facts.get("ties")
        judged = facts["judged_rows"]
        view.add_row(
            facts["case"],
            str(facts["documents"]),
            str(facts["document_rows"]),
            t,
            str(facts["top_k"]),
            f"{facts['share_over_k']:.1%}",
            "" if ties is None else f"{ties} of {judged or facts['document_rows']}",
        )
    return view


def _captured(calls: list[dict[str, Any]]) -> Table:
    view = _grid("captured inputs")
    for name in ("case", "file", "t", "s", "k", "rows judged"):
        text = name in ("case", "file")
        view.add_column(name, justify="left" if text else "right", overflow="fold" if text else "ellipsis")
    for facts in calls:
        view.add_row(*(Text(str(facts[name])) for name in ("case", "file", "t", "s", "top_k", "judged_rows")))
    return view


def _failures(report: Report, out: Console, *, verbose: bool) -> None:
    """What failed: the first check of every operator and dtype, or all of them."""
    for group in summary.failing(report.records):
        shown = group.failures if verbose else group.failures[:1]
        others = len(group.failures) - len(shown)
        for record in shown:
            out.print(Text(f"FAIL {_name(record)}", style="bold red"))
            concerns = f"; they concern {group.releases}" if group.releases else ""
            out.print(Text(f"  {record.reason}" + (f"  (and {others} other cases{concerns})" if others else "")))
            # Never folded, so that it can be copied.
            out.print(Text(f"  repeat: {record.command()}"), soft_wrap=True)
            dumped = record.command_for_dump()
            inputs = "--dump DIR would write them to a file" if dumped is None else dumped
            if record.suite not in OWN_TABLES:
                out.print(Text(f"  inputs: {inputs}"), soft_wrap=True)
            if verbose and record.traceback:
                out.print(Text(record.traceback, style="dim"))


def _name(record: Record) -> str:
    caller = "" if record.caller == "dsattn" else f", called as {record.caller}"
    return f"{record.case}, {record.operator}, {record.dtype}, {record.backend} on {record.where}{caller}"
