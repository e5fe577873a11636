"""A bar on stderr where that is a terminal; nothing in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dsattn.verify.report import console


@contextmanager
def progress() -> Generator[Callable[[str, int, int], None]]:
    """What is told the thing at hand, the steps done and all steps."""
    err = console(stderr=True)
    if not err.is_terminal:
        yield lambda *_: None
        return
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=err, transient=True) as bar:
        shown = bar.add_task("", total=None)
        yield lambda what, done, steps: bar.update(shown, description=what, completed=done, total=steps)
