"""A replay on a terminal, by rich."""

from __future__ import annotations

from collections import Counter

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsattn.backends.cudnn.contracts import releases
from dsattn.verify.recordings.replay import Replay

_FACTS = ("device", "driver", "torch", "nvidia-cutlass-dsl")


def show(result: Replay, out: Console, *, verbose: bool = False) -> None:
    """Prints a replay: where the recording was made, a row for each wrapper, the verdict.

    Args:
        result: what came of it.
        out: where it goes.
        verbose: every call that differs, too.
    """
    recording = result.recording
    where = [f"{name} {recording.environment[name]}" for name in _FACTS if recording.environment.get(name)]
    out.print(Text(f"frontend {recording.release} on {recording.arch}, recorded on {'; '.join(where)}"))
    if not result.known:
        newest = releases()[-1]
        out.print(Text(f"{recording.release} is not in the table of contracts, which ends with {newest}", "yellow"))
    verdicts = Counter(check.verdict for check in recording.checks)
    told = ", ".join(
        f"{verdicts[name]} {name}" for name in ("pass", "fail", "unsupported", "not run") if verdicts[name]
    )
    out.print(Text(f"checks of the recording: {told or 'none'}"), "")
    out.print(_table(result), "")
    differing = [one for one in result.outcomes if one.verdict == "differs"]
    for one in differing if verbose else ():
        out.print(Text(f"{one.wrapper}, {one.case}/{one.operator}, {one.what}: {one.text}"))
    out.print(Text(_summary(result, len(differing)), style="bold green" if result.holds else "bold red"))


def _table(result: Replay) -> Table:
    view = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    view.add_column("wrapper", overflow="fold")
    for name in ("calls", "agree", "follow"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("first difference", overflow="fold", ratio=1)
    for row in result.rows:
        first = row.first
        told = "" if first is None else f"{first.case}/{first.operator}, {first.what}: {first.text}"
        cells = row.wrapper, str(row.calls), str(row.agreeing), str(row.following or ""), told
        view.add_row(*(Text(cell, style="" if first is None else "bold red") for cell in cells))
    return view


def _summary(result: Replay, differing: int) -> str:
    counts = Counter(one.verdict for one in result.outcomes)
    rest = f", {counts['follows']} follow from others" if counts["follows"] else ""
    if differing:
        return f"FAIL: {differing} of {len(result.outcomes)} calls differ from the recording{rest}"
    if not result.holds:
        return "FAIL: no call was compared"
    return f"PASS: the stand-in agrees with {counts['agrees']} recorded calls{rest}"
