"""The result of a self-test on a terminal, by rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsattn.verify.records import Record
from dsattn.verify.self_test import SelfTest, Trial


def show(result: SelfTest, out: Console, *, verbose: bool = False) -> None:
    """Prints a self-test: the mutants and what caught them, those that escaped, the verdict.

    Args:
        result: what came of it.
        out: where it goes.
        verbose: a row for every mutant instead of one for each fault, and tracebacks.
    """
    out.print(_table(result.trials, every=verbose))
    for trial in result.escaped:
        name, imitates = trial.mutant.name, trial.mutant.fault.imitates
        out.print(Text(f"{trial.outcome.upper()} after {trial.checks} checks: {name} ({imitates})", style="bold red"))
        if trial.record is not None:
            out.print(Text(f"  {_by(trial.record)}"))
            if verbose and trial.record.traceback:
                out.print(Text(trial.record.traceback, style="dim"))
    for record in result.disturbed:
        out.print(Text(f"CONTROL {record.verdict}: {_by(record)}", style="bold red"))
    out.print(Text(result.summary, style="bold green" if result.holds else "bold red"))


def _table(trials: Sequence[Trial], *, every: bool) -> Table:
    view = Table(title="mutants", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    view.add_column("mutant", overflow="fold", ratio=5)
    view.add_column("imitates", overflow="fold", ratio=6)
    if not every:
        view.add_column("caught", justify="right", no_wrap=True)
    view.add_column("by" if every else "by, the hardest one", overflow="fold", ratio=9)
    view.add_column("checks", justify="right", no_wrap=True)
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.mutant.name if every else trial.mutant.fault.name, []).append(trial)
    for name, group in groups.items():
        caught = sum(trial.outcome == "caught" for trial in group)
        hardest = max(group, key=lambda trial: (trial.outcome != "caught", trial.checks))
        style = "" if caught == len(group) else "bold red"
        cells = [name, hardest.mutant.fault.imitates]
        cells += [] if every else [f"{caught} / {len(group)}"]
        cells += [hardest.outcome if hardest.record is None else _by(hardest.record), str(hardest.checks)]
        view.add_row(*(Text(cell, style=style) for cell in cells))
    return view


def _by(record: Record) -> str:
    """Case, check and the first thing that is wrong."""
    return f"{record.case}, {record.operator}, {record.dtype}: {record.reason.partition('; ')[0]}"
