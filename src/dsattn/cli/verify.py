"""`dsattn verify`: every operator against the float64 oracle."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dsattn.backends.cudnn.contracts_table import ARCHS
from dsattn.backends.cudnn.namespace import Absence, open_installed
from dsattn.cli.progress import progress
from dsattn.errors import BadInput
from dsattn.verify import captured, own_suites, recordings, self_test_report, simulated, suites
from dsattn.verify import self_test as tests
from dsattn.verify.environment import environment
from dsattn.verify.pool import Request, WorkerDied, processes_for, run_in_processes
from dsattn.verify.recordings.show import show as show_replay
from dsattn.verify.records import Record, Report, write
from dsattn.verify.report import console, show
from dsattn.verify.run import CUDNN, operators_of, run
from dsattn.verify.suites import SUITES, Suite

Advance = own_suites.Advance
DESCRIPTION = """\
Compare every operator with the float64 oracle, forward and backward.

Exit code: 0 all checks hold; 1 a check failed, or none ran; 2 wrong usage."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `main`."""
    several = {"action": "append", "default": []}
    parser.add_argument(
        "--suite",
        choices=SUITES,
        help="quick (every named case; the default), real-text (the Python standard library's sources as text), full "
        "(the named cases also in fp64, and real text of thousands of rows), frontend-defaults (what the cuDNN "
        "frontend's defaults do to a caller who relies on them) or megatron (a released Megatron-LM before and after "
        "dsattn's repair; downloaded where none is installed); repeat it for several",
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
        "--cudnn-version",
        metavar="VERSION",
        help="run the backend cudnn on a stand-in for this release of the cuDNN frontend, on the CPU and without it: "
        "bf16 unless --dtype says otherwise, and in the suite full small text only, since a stand-in shows what a "
        "kernel means and not its size; 'all' for every known release; repeat it for several",
        **several,
    )
    parser.add_argument(
        "--arch",
        choices=ARCHS,
        help="with --cudnn-version or the suites frontend-defaults and megatron: this architecture, Hopper or "
        "Blackwell; repeat it for both (default: both; of those suites alone sm100)",
        **several,
    )
    _add_recordings(parser)
    _add_outputs(parser)


def _add_recordings(parser: argparse.ArgumentParser) -> None:
    """Declares what is recorded on a GPU, and held against a stand-in anywhere."""
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="run the suite quick in bf16 on the installed cuDNN frontend, and write to this file digests of what its "
        "wrappers were given and returned; takes --case, --device and --verbose, and no other option",
    )
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="repeat the calls of a recording on a stand-in for its release, without a GPU, and compare each; takes "
        "--verbose, and no other option",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    """Declares what is shown and written, and the self-test."""
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
    cudnn_version: Sequence[str],
    arch: Sequence[str],
    record: Path | None,
    replay: Path | None,
    self_test: bool,
    verbose: bool,
    dump: Path | None,
    json: Path | None,
    html: Path | None,
) -> int:
    """Runs `dsattn verify`; its exit code."""
    if self_test or record or replay:
        others = {"suite": suite, "list": list, "backend": backend, "dtype": dtype, "html": html, "inputs": inputs}
        others |= {"dump": dump, "cudnn-version": cudnn_version, "arch": arch, "case": case, "device": device}
        others |= {"json": json, "self-test": self_test, "record": record, "replay": replay}
        return _alone({name: value for name, value in others.items() if value}, verbose=verbose)
    chosen: tuple[Suite, ...] = tuple(dict.fromkeys(suite or ([] if inputs else ["quick"])))
    given = {"case": case, "dtype": dtype, "inputs": inputs, "backend": backend, "device": device, "dump": dump}
    own = [name for name in chosen if name in own_suites.SUITES]
    for name in own:
        needed = "only --suite, --list, --cudnn-version, --arch, --verbose, --json and --html"
        _refuse(f"--suite {name}", given, needed)
    if arch and not cudnn_version and not own:
        raise BadInput("--arch", given="without --cudnn-version", fix="name a release to simulate, or all")
    releases = simulated.chosen(cudnn_version, arch)
    where = torch.device("cpu") if device is None and releases else _device(device)
    options: dict[str, Any] = {"cases": case, "dtype": dtype, "inputs": inputs, "releases": releases}
    if list:
        needed = "only --suite, --case, --dtype, --inputs, --cudnn-version and --arch"
        _refuse("--list", {"backend": backend, "json": json, "html": html, "dump": dump}, needed)
        _list(chosen, options)
        return 0
    _check_files(json, html)
    dumped = None if dump is None else captured.Dump(dump)
    request = Request(chosen, {**options, "backends": backend, "device": where, "dump": dumped})
    try:
        with progress() as advance:
            records = [*_records(request, advance), *own_suites.run(own, _versions(releases, arch), advance)]
    except WorkerDied as error:
        print(f"dsattn: {error}", file=sys.stderr)
        return 1
    report = Report(environment=environment(), records=records)
    if releases:
        report.environment["releases"] = simulated.notes(releases)
    show(report, console(), verbose=verbose)
    if json is not None:
        write(json, report.as_json())
    if html is not None:
        write(html, import_module("dsattn.verify.page").page(report))
    return 0 if report.holds else 1


def _alone(options: dict[str, Any], *, verbose: bool) -> int:
    """Runs what takes few options beside it, of those that were given; its exit code.

    Raises:
        BadInput: another option was given.
    """
    if "self-test" in options:
        others = {name: value for name, value in options.items() if name not in ("self-test", "device", "json")}
        _refuse("--self-test", others, "only --device, --verbose and --json")
        return _self_test(options.get("device"), verbose=verbose, json=options.get("json"))
    if "replay" in options:
        file = options.pop("replay")
        _refuse("--replay", options, "only --verbose")
        return _replay(file, verbose=verbose)
    others = {name: value for name, value in options.items() if name not in ("record", "case", "device")}
    _refuse("--record", others, "only --case, --device and --verbose")
    return _record(options["record"], options.get("case", ()), options.get("device"), verbose=verbose)


def _refuse(option: str, others: dict[str, Any], needed: str) -> None:
    """That an option has none of the others beside it.

    Raises:
        BadInput: it has.
    """
    for name, value in others.items():
        if value:
            raise BadInput(option, given=f"with --{name}", needed=needed)


def _self_test(device: str | None, *, verbose: bool, json: Path | None) -> int:
    _check_files(json, None)
    where = _device(device or "cpu")
    with progress() as advance:
        result = tests.self_test(device=where, advance=advance)
    self_test_report.show(result, console(), verbose=verbose)
    if json is not None:
        write(json, result.as_json())
    return 0 if result.holds else 1


def _record(file: Path, cases: Sequence[str], device: str | None, *, verbose: bool) -> int:
    _check_files(file, None)
    found = open_installed(None if device is None else _device(device))
    if isinstance(found, Absence):
        raise found.error()
    options: dict[str, Any] = {
        "cases": cases,
        "backends": [CUDNN],
        "device": _device(device or "cuda"),
        "dtype": "bf16",
    }
    tasks, _ = suites.plan(("quick",), **options)
    records: list[Record] = []
    with progress() as advance:
        for made, record in recordings.record(tasks, found, options["device"]):
            records.append(record)
            # Kernels compile slowly, and a fault of one may end the process: what there is, is kept case by case.
            if len(records) == len(tasks) or tasks[len(records)].subject.case.name != record.case:
                recordings.write(file, made)
            advance(record.case, len(records), len(tasks))
    report = Report(environment=environment(), records=records)
    show(report, console(), verbose=verbose)
    return 0 if report.holds else 1


def _replay(file: Path, *, verbose: bool) -> int:
    recording, result = recordings.read(file), None
    with progress() as advance:
        for done, so_far in enumerate(recordings.replay(recording, file), 1):
            result = so_far
            advance(recording.checks[done - 1].case, done, len(recording.checks))
    if result is None:
        raise BadInput(str(file), given="a recording without a check", needed="one that has some")
    show_replay(result, console(), verbose=verbose)
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


def _list(chosen: Sequence[Suite], options: dict[str, Any]) -> None:
    backends = [] if options["releases"] else ["torch"]
    tasks, _ = suites.plan(chosen, **options, backends=backends, device=torch.device("cpu"))
    subjects = {id(task.subject): task.subject for task in tasks}.values()
    lines = [(one.suite, one.case.name, one.case.shows, ", ".join(operators_of(one))) for one in subjects]
    for name in chosen:
        lines += own_suites.SUITES[name].lines() if name in own_suites.SUITES else []
    suite_width, width = (max(len(line[column]) for line in lines) for column in range(2))
    for suite, name, shows, operators in lines:
        # Plain lines: a pipe may search them, and nothing is folded.
        print(f"{suite:{suite_width}}  {name:{width}}  {shows}  [{operators}]")


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


def _records(request: Request, advance: Advance) -> list[Record]:
    """The records of all checks, and of every backend that is absent here and was not named."""
    if request.suites and all(name in own_suites.SUITES for name in request.suites):
        return []
    tasks, absent = suites.plan(request.suites, **request.options)
    processes = processes_for(tasks)
    if processes > 1:
        return [*run_in_processes(request, processes, advance), *absent]
    records: list[Record] = []
    for record in run(tasks):
        records.append(record)
        advance(record.case, len(records), len(tasks))
    return [*records, *absent]


def _versions(releases: Sequence[simulated.Release], archs: Sequence[str]) -> dict[str, list[str]]:
    """The releases of each architecture for suites with tables of their own: sm100 where nothing is asked for."""
    wanted = archs or list(dict.fromkeys(one.arch for one in releases)) or ["sm100"]
    return {arch: [one.version for one in releases if one.arch == arch] for arch in wanted}
