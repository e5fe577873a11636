"""`dsattn verify`: every operator against the float64 oracle."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dsattn.errors import BadInput
from dsattn.verify import captured, self_test_report, suites
from dsattn.verify import self_test as tests
from dsattn.verify.environment import environment
from dsattn.verify.records import Record, Report, write
from dsattn.verify.report import console, show
from dsattn.verify.run import Task, operators_of, run
from dsattn.verify.suites import SUITES, Suite

DESCRIPTION = """\
Compare every operator with the float64 oracle, forward and backward.

Exit code: 0 all checks hold; 1 a check failed, or none ran; 2 wrong usage."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `main`."""
    several = {"action": "append", "default": []}
    parser.add_argument(
        "--suite",
        choices=SUITES,
        help="quick (every named case; the default), real-text (the Python standard library's sources as text) or full "
        "(the named cases also in fp64, and real text of thousands of rows); repeat it for several",
        **several,
    )
    parser.add_argument(
        "--case",
        metavar="NAME",
        help="only this case, or NAME/OPERATOR for one of its operators; * stands for any text; repeat it for several",
        **several,
    )
    parser.add_argument(
        "--inputs",
        type=Path,
        metavar="FILE",
        help="run every operator on the calls that dsattn.capture wrote to this file, in their own dtype; without "
        "--suite nothing else runs; repeat it for several",
        **several,
    )
    parser.add_argument("--list", action="store_true", help="list the suites' cases and what each shows, and stop")
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="only this backend; repeat it for several (default: all that are usable here)",
        **several,
    )
    parser.add_argument(
        "--device", help="where to run, such as cpu or cuda:0 (default: cuda where there is one, else cpu)"
    )
    parser.add_argument("--dtype", help="fp32, bf16, fp16 or fp64 in place of the suite's own")
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="check that wrong operators are found: each of many faults must turn its checks red; takes --device "
        "(default: cpu), --verbose and --json, and no other option",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show every check, and the traceback of unexpected errors"
    )
    parser.add_argument(
        "--dump", type=Path, metavar="DIR", help="write the inputs of checks that fail to files in this folder"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the records to this file")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page to this file")


def main(
    *,
    suite: Sequence[Suite],
    case: Sequence[str],
    inputs: Sequence[Path],
    list: bool,
    backend: Sequence[str],
    device: str | None,
    dtype: str | None,
    self_test: bool,
    verbose: bool,
    dump: Path | None,
    json: Path | None,
    html: Path | None,
) -> int:
    """Runs `dsattn verify`; its exit code."""
    if self_test:
        others = {"suite": suite, "case": case, "list": list, "backend": backend, "dtype": dtype, "html": html}
        for name, value in {**others, "inputs": inputs, "dump": dump}.items():
            if value:
                raise BadInput("--self-test", given=f"with --{name}", needed="only --device, --verbose and --json")
        return _self_test(device, verbose=verbose, json=json)
    chosen: Sequence[Suite] = tuple(dict.fromkeys(suite or ([] if inputs else ["quick"])))
    if list:
        for name, value in {"backend": backend, "json": json, "html": html, "dump": dump}.items():
            if value:
                raise BadInput("--list", given=f"with --{name}", needed="only --suite, --case, --dtype and --inputs")
        _list(chosen, case, dtype, inputs)
        return 0
    _check_files(json, html)
    where = _device(device)
    dumped = None if dump is None else captured.Dump(dump)
    options = {"dtype": dtype, "inputs": inputs, "dump": dumped}
    tasks, records = suites.plan(chosen, cases=case, backends=backend, device=where, **options)
    report = Report(environment=environment(), records=[*_with_progress(tasks), *records])
    show(report, console(), verbose=verbose)
    if json is not None:
        write(json, report.as_json())
    if html is not None:
        write(html, import_module("dsattn.verify.page").page(report))
    return 0 if report.holds else 1


def _self_test(device: str | None, *, verbose: bool, json: Path | None) -> int:
    _check_files(json, None)
    where = _device(device or "cpu")
    with _progress() as advance:
        result = tests.self_test(device=where, advance=advance)
    self_test_report.show(result, console(), verbose=verbose)
    if json is not None:
        write(json, result.as_json())
    return 0 if result.holds else 1


def _check_files(json: Path | None, html: Path | None) -> None:
    """Tells what would keep a report from being written before the checks run, not after.

    Raises:
        BadInput: a folder is missing, or the file cannot be written.
    """
    for file in (json, html):
        if file is None:
            continue
        if not file.parent.is_dir():
            raise BadInput(str(file), given="a folder that does not exist", fix=f"make {file.parent} first")
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise BadInput(str(file), given="a place that cannot be written to", needed="a file")
    if html is not None:
        import_module("jinja2")


def _list(chosen: Sequence[Suite], cases: Sequence[str], dtype: str | None, inputs: Sequence[Path]) -> None:
    options = {"device": torch.device("cpu"), "dtype": dtype, "inputs": inputs}
    tasks, _ = suites.plan(chosen, cases=cases, backends=["torch"], **options)
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
    """The records of all tasks."""
    records: list[Record] = []
    with _progress() as advance:
        for record in run(tasks):
            records.append(record)
            advance(record.case, len(records), len(tasks))
    return records


@contextmanager
def _progress() -> Generator[Callable[[str, int, int], None]]:
    """What is told the thing at hand, the steps done and all steps: a bar on stderr where that is a terminal."""
    err = console(stderr=True)
    if not err.is_terminal:
        yield lambda *_: None
        return
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=err, transient=True) as bar:
        shown = bar.add_task("", total=None)
        yield lambda what, done, steps: bar.update(shown, description=what, completed=done, total=steps)
