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
    view = Table(
        title="mutants" if every else "faults, and in how many parts of the operators each was caught",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    view.add_column("mutant" if every else "fault", overflow="fold", ratio=4)
    view.add_column("imitates", overflow="fold", ratio=6)
    if not every:
        view.add_column("caught", justify="right", no_wrap=True)
    view.add_column("by" if every else "the last one by", overflow="fold", ratio=5)
    view.add_column("checks", justify="right", no_wrap=True)
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.mutant.name if every else trial.mutant.fault.name, []).append(trial)
    for name, group in groups.items():
        caught = sum(trial.outcome == "caught" for trial in group)
        # The hardest: one that escaped, else the one that took the most checks.
        hardest = max(group, key=lambda trial: (trial.outcome != "caught", trial.checks))
        style = "" if caught == len(group) else "bold red"
        cells = [name, hardest.mutant.fault.imitates]
        cells += [] if every else [f"{caught} / {len(group)}"]
        cells += [hardest.outcome if hardest.record is None else _by(hardest.record), str(hardest.checks)]
        view.add_row(*(Text(cell, style=style) for cell in cells))
    return view


def _by(record: Record) -> str:
    """The case, the check and the first result that is wrong, with how wrong it is where that is a number."""
    what = record.reason.partition("; ")[0].partition(", first in")[0]
    for name, found in record.metrics.get("results", {}).items():
        share = found["share_of_budget"]
        if what.startswith(f"{name}: ") and share is not None:
            what = f"{name} {share:.1g} times its budget"
    where = f" on {record.where}" if record.simulated else ""
    return f"{record.case}, {record.operator} {record.dtype}{where}: {what}"
