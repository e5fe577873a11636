"""`dsattn bench`: how fast the operators are here, and beside other libraries."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import torch

from dsattn.backends import find, ordered
from dsattn.bench import records, tables
from dsattn.bench.children import Children
from dsattn.bench.run import Bench, items
from dsattn.bench.works import DTYPES, MOST_FLOPS, SUITES, WORKS, Suite, Work, chosen
from dsattn.cli.progress import progress
from dsattn.errors import BadInput
from dsattn.verify.report import console

DESCRIPTION = f"""\
Time the operators on the CPU. Every call runs in a process of its own, after one on few tokens; everything runs once in
each round, in turn, and medians are told with their spread. An operator that verify finds wrong is not timed.

Each work runs at up to three numbers of tokens. Calls of more than {MOST_FLOPS / 1e12:g} Tflop run only where --rows
asks for them.

Exit code: 0 everything was measured; 1 something was refused or failed, or nothing ran; 2 wrong usage or no network."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `main`."""
    several = {"action": "append", "default": []}
    parser.add_argument(
        "--suite",
        choices=SUITES,
        default=SUITES[0],
        help="cpu (dsattn's operators and whole layers, on every backend; the default) or peers (a layer of "
        "Megatron-LM and one of transformers as released, and the same work by dsattn; downloaded on first use)",
    )
    parser.add_argument(
        "--work", metavar="NAME", help="only this work; * stands for any text; repeat it for several", **several
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="only this backend; repeat it for several (default: all that are usable here; beside a peer the first)",
        **several,
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="in place of each work's own dtypes; repeat it for both", **several
    )
    parser.add_argument(
        "--rows", type=int, metavar="N", help="tokens in place of each work's own; repeat it for several", **several
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often everything runs (default: 3)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of each process (default: as many as PyTorch would use)"
    )
    parser.add_argument("--list", action="store_true", help="list the works: tokens, dtypes, sizes, and stop")
    parser.add_argument(
        "--json-lines", type=Path, metavar="FILE", help="add one line of JSON for each row of the table to this file"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw time and share of the peak over tokens, as bench.svg; needs matplotlib",
    )


def main(
    *,
    suite: Suite,
    work: Sequence[str],
    backend: Sequence[str],
    dtype: Sequence[str],
    rows: Sequence[int],
    rounds: int,
    threads: int | None,
    list: bool,
    json_lines: Path | None,
    plot: Path | None,
) -> int:
    """Runs `dsattn bench`; its exit code."""
    threads = torch.get_num_threads() if threads is None else threads
    _check({"rows": rows, "rounds": [rounds], "threads": [threads]}, backend)
    if list:
        _list(chosen(suite, work) if work else [one for one in WORKS.values() if one.suite == suite])
        return 0
    for file in (json_lines, plot):
        if file is not None and not file.parent.is_dir():
            raise BadInput(str(file), given="a folder that does not exist", fix=f"make {file.parent} first")
    # Told to be missing before anything runs.
    draw = None if plot is None else import_module("dsattn.bench.plots").plot
    asked = items(chosen(suite, work), rows=rows, dtypes=dtype, backends=backend)
    with progress() as advance, Children() as launch:
        bench = Bench(launch=launch, rounds=rounds, threads=threads, named=bool(backend), advance=advance)
        found = bench.run(asked)
    # Before anything is shown, whose reader may have gone.
    if json_lines is not None:
        records.append(json_lines, records.lines(found, threads))
    tables.show(found, console())
    if draw is not None and any(row.wall for row in found):
        draw(found, plot)
    return 0 if found and all(row.verdict == "measured" for row in found) else 1


def _check(numbers: Mapping[str, Sequence[int]], backends: Sequence[str]) -> None:
    """That numbers are above 0 and backends are usable here.

    Raises:
        BadInput: a number or a name that is none.
        BackendMissing: a backend that is absent here.
    """
    for name, given in numbers.items():
        for number in given:
            if number < 1:
                raise BadInput(f"--{name}", given=number, needed="a number above 0")
    known = [backend.name for backend in ordered()]
    for name in backends:
        if name not in known:
            raise BadInput("--backend", given=repr(name), needed=f"one of {', '.join(known)}")
        find(name, ordered())


def _list(works: Sequence[Work]) -> None:
    lines = [work.line() for work in works]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        # Plain lines: a pipe may search them, and nothing is folded.
        print("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
