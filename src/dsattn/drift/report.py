"""What was found, on a terminal, by rich."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsattn.drift.findings import NOTHING, Drift, Finding

_STYLES = {
    "breaks": "bold red",
    "silent": "bold red",
    "changed behaviour": "bold red",
    "may refuse": "yellow",
    "read": "yellow",
}
_TITLES = {
    "exports": "exported names",
    "parameters": "signatures",
    "known": "known behaviour, from dsattn's contract table",
    "docstrings": "changed sentences of docstrings",
    "raises": "raise sites added, as far as names in the source tell who reaches them",
    "requirements": "requirements of an installation",
}
# Of the raise sites in one function so many are told; --json has all.
_SITES, _CHARACTERS = 2, 160


def show(drift: Drift, out: Console) -> None:
    """Prints a table for each kind of change, what could not be seen, and the verdict."""
    part = f" ({drift.part})" if drift.part else ""
    out.print(Text(f"{drift.package} {drift.old} -> {drift.new}{part}", style="bold"), "")
    for group, title in _TITLES.items():
        found = [finding for finding in drift.findings if finding.group == group]
        if found:
            out.print(
                _table(title, list(_short(found)) if group == "raises" else found, watched=bool(drift.watched)), ""
            )
    if drift.findings and drift.unchanged:
        out.print(Text(f"{NOTHING}: {', '.join(drift.unchanged)}"), "")
    if drift.findings and drift.watched:
        out.print(_watched(drift), "")
    for note in drift.notes:
        out.print(Text(note, style="dim"))
    out.print(Text(drift.summary, style="bold red" if drift.touched else "bold"))


def _watched(drift: Drift) -> Table:
    view = _grid("watched calls")
    view.add_column("call", overflow="fold")
    view.add_column("touched by", overflow="fold")
    for label in drift.watched:
        counts = drift.touching(label)
        texts = [Text(f"{count} {effect}", _STYLES.get(effect, "dim")) for effect, count in counts.items()]
        view.add_row(Text(label), Text(", ").join(texts) if texts else Text("nothing that was seen", style="dim"))
    return view


def _grid(title: str) -> Table:
    look = {"box": SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    return Table(title=title, title_justify="left", title_style="bold", **look)


def _table(title: str, findings: Sequence[Finding], *, watched: bool) -> Table:
    view = _grid(title)
    view.add_column("change", overflow="fold", ratio=5)
    view.add_column("for a caller", overflow="fold", ratio=4)
    if watched:
        view.add_column("touches", overflow="fold", ratio=2)
    for name, group in groupby(findings, lambda finding: finding.name):
        view.add_row(Text(name, style="bold"))
        for finding in group:
            means = Text.assemble((finding.effect, _STYLES.get(finding.effect, "dim")), ": ", finding.means)
            touches = Text("\n".join(finding.touches), style="bold red")
            view.add_row(Text(_cut(finding.what)), means, *([touches] if watched else []))
    return view


def _short(findings: Sequence[Finding]) -> Iterator[Finding]:
    """The first raise sites of every function, and how many others it has."""
    for name, group in groupby(findings, lambda finding: finding.name):
        sites = list(group)
        yield from sites[:_SITES]
        others = sites[_SITES:]
        if others:
            touches = tuple(dict.fromkeys(label for site in others for label in site.touches))
            worst = next((site for site in others if site.touches), others[0])
            yield Finding("raises", name, f"and {len(others)} more", worst.effect, worst.means, touches)


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS].rstrip()} ..."
