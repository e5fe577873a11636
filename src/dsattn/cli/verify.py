"""`dsattn verify`: every operator against the float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dsattn.errors import BadInput
from dsattn.verify import suites
from dsattn.verify.environment import environment
from dsattn.verify.records import Record, Report, write
from dsattn.verify.report import console, show
from dsattn.verify.run import Task, operators_of, run
from dsattn.verify.suites import Suite


def verify(
    *,
    suite: Annotated[list[Suite] | None, Parameter(negative=())] = None,
    case: Annotated[list[str] | None, Parameter(negative=())] = None,
    list_cases: Annotated[bool, Parameter(name="--list", negative=())] = False,
    backend: Annotated[list[str] | None, Parameter(negative=())] = None,
    device: str | None = None,
    dtype: str | None = None,
    verbose: Annotated[bool, Parameter(negative=())] = False,
    json: Path | None = None,
    html: Path | None = None,
) -> int:
    """Compare every operator with the float64 oracle, forward and backward.

    Exit code: 0 all checks hold; 1 a check failed, or none ran; 2 wrong usage.

    Args:
        suite: quick (every named case), real-text (the Python standard library's sources as text) or full (the named
            cases also in fp64, and real text of thousands of rows); repeat it for several. Default: quick.
        case: only this case, or NAME/OPERATOR for one of its operators; * stands for any text; repeat it for several.
        list_cases: list the suites' cases and what each shows, and stop.
        backend: only this backend; repeat it for several. Default: all that are usable here.
        device: where to run, such as cpu or cuda:0. Default: cuda where there is one, else cpu.
        dtype: fp32, bf16, fp16 or fp64 in place of the suite's own.
        verbose: show every check, and the traceback of unexpected errors.
        json: also write the records to this file.
        html: also write a page to this file.
    """
    chosen = list(dict.fromkeys(suite or ["quick"]))
    if list_cases:
        _list(chosen, case or [], dtype)
        return 0
    _check_files(json, html)
    where = _device(device)
    tasks, records = suites.plan(chosen, cases=case or [], backends=backend or [], device=where, dtype=dtype)
    report = Report(environment=environment(), records=[*_with_progress(tasks), *records])
    show(report, console(), verbose=verbose)
    if json is not None:
        write(json, report.as_json())
    if html is not None:
        write(html, import_module("dsattn.verify.page").page(report))
    return 0 if report.holds else 1


def _check_files(json: Path | None, html: Path | None) -> None:
    """Tells what would keep a report from being written before the checks run, not after.

    Raises:
        BadInput: a folder is missing.
    """
    for file in (json, html):
        if file is not None and not file.parent.is_dir():
            raise BadInput(str(file), given="a folder that does not exist", fix=f"make {file.parent} first")
    if html is not None:
        import_module("jinja2")


def _list(chosen: Sequence[Suite], cases: Sequence[str], dtype: str | None) -> None:
    tasks, _ = suites.plan(chosen, cases=cases, backends=["torch"], device=torch.device("cpu"), dtype=dtype)
    subjects = {(task.subject.suite, task.subject.case.name): task.subject for task in tasks}
    width = max(len(name) for _, name in subjects)
    for (suite, name), subject in subjects.items():
        # Plain lines: a pipe may search them, and nothing is folded.
        print(f"{suite:9}  {name:{width}}  {subject.case.shows}  [{', '.join(operators_of(subject))}]")


def _device(name: str | None) -> torch.device:
    """The device to run on.

    Raises:
        BadInput: no such device is here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise BadInput("--device", given=f"{name!r} ({reason})", needed="a device that PyTorch has here") from error
    if device.type == "meta":
        raise BadInput("--device", given="'meta'", needed="a device that computes")
    return device


def _with_progress(tasks: Sequence[Task]) -> list[Record]:
    """The records of all tasks, with a bar on stderr where that is a terminal."""
    err = console(stderr=True)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    bar: AbstractContextManager[Any] = (
        Progress(*columns, console=err, transient=True) if err.is_terminal else nullcontext()
    )
    records: list[Record] = []
    with bar as progress:
        shown = None if progress is None else progress.add_task("", total=len(tasks))
        for record in run(tasks):
            records.append(record)
            if progress is not None and shown is not None:
                progress.update(shown, advance=1, description=record.case)
    return records
