"""Runs the measurements: rounds in which everything runs once, in turn, each time in a process of its own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from dsattn.backends import backends as usable
from dsattn.bench.agreement import differences, fault
from dsattn.bench.child import Measurement, Request
from dsattn.bench.children import ChildFailed, Launch
from dsattn.bench.gate import Gate
from dsattn.bench.peers.peer import Peer, Place
from dsattn.bench.records import Row, Verdict
from dsattn.bench.works import Work
from dsattn.errors import ContractDrift

Advance = Callable[[str, int, int], None]
"""Told what is at hand, the steps done and all steps."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A work at one size in one dtype, by one runner.

    Attributes:
        work: what is timed.
        rows: tokens.
        dtype: short name of the dtype.
        runner: a backend of dsattn, or the name of the peer.
    """

    work: Work
    rows: int
    dtype: str
    runner: str

    @property
    def peer(self) -> bool:
        """Whether the peer runs."""
        return self.work.peer is not None and self.runner == self.work.peer.name

    @property
    def group(self) -> tuple[str, int, str]:
        """What it shares with those that it is compared with."""
        return self.work.name, self.rows, self.dtype

    def __str__(self) -> str:
        return f"{self.work.name}, {self.rows} tokens, {self.dtype}, {self.runner}"

    def row(self) -> Row:
        """Its row without figures."""
        work = self.work
        return Row(
            suite=work.suite,
            work=work.name,
            what=str(work.peer) if self.peer else f"dsattn {self.runner}",
            runner=self.runner,
            peer=self.peer,
            dtype=self.dtype,
            rows=self.rows,
            sizes=str(work.sizes),
            flops=work.flops(work.sizes, self.rows),
            how=work.peer.how if self.peer and work.peer is not None else "",
        )


def items(
    works: Sequence[Work], *, rows: Sequence[int] = (), dtypes: Sequence[str] = (), backends: Sequence[str] = ()
) -> list[Item]:
    """What runs in a round, in this order: what is compared stands next to each other, the peer first.

    Args:
        works: what is timed.
        rows: in place of each work's own.
        dtypes: in place of each work's own.
        backends: in place of all that are usable here; beside a peer, of the first that takes the work.
    """
    found: dict[Item, None] = {}
    for work in works:
        runners = [*([work.peer.name] if work.peer else []), *(backends or usable())]
        for count, dtype, runner in product(rows or work.default_rows(), dtypes or work.dtypes, runners):
            found[Item(work=work, rows=count, dtype=dtype, runner=runner)] = None
    return list(found)


@dataclass
class _Run:
    """What has come of an item so far."""

    item: Item
    found: list[Measurement] = field(default_factory=list)
    verdict: Verdict = "measured"
    reason: str = ""
    difference: dict[str, float] = field(default_factory=dict)

    def end(self, verdict: Verdict, reason: str) -> None:
        """Ends it without figures."""
        self.verdict, self.reason = verdict, reason

    @property
    def alive(self) -> bool:
        """Whether it is to have figures."""
        return self.verdict == "measured"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A run.

    Attributes:
        launch: runs a child process.
        rounds: how often everything runs.
        threads: of every process.
        named: whether the backends were asked for by name: what they do not take is then told, and all run beside a
            peer.
        gate: verdicts of verify.
        advance: is told the progress.
    """

    launch: Launch
    rounds: int
    threads: int
    named: bool = False
    gate: Gate = field(default_factory=Gate)
    advance: Advance = lambda *_: None

    def run(self, asked: Sequence[Item]) -> list[Row]:
        """A row for everything that was asked for, in that order.

        Semantics:
            First verify judges the operators: what it finds wrong is refused, and not timed. What a backend does not
            take is left out; where backends were named, refused. Beside a peer only the first backend that takes the
            work runs, unless backends were named. What fails once is not tried again.

        Raises:
            BadInput: a peer cannot be fetched.
            Unreachable: the package index does not answer.
        """
        self.advance("verify", 0, len(asked))
        runs = self._judged(asked)
        alive = [run for run in runs if run.alive]
        places = {work.name: self._place(work.peer) for work in dict.fromkeys(run.item.work for run in alive)}
        dtypes = dict.fromkeys(run.item.dtype for run in alive if run.item.work.peer is None)
        before = {dtype: self._peak(dtype) for dtype in dtypes}
        steps = self.rounds * len(alive)
        with tempfile.TemporaryDirectory() as scratch:
            for step in range(steps):
                number, place = divmod(step, len(alive))
                run = alive[place]
                self.advance(str(run.item), step, steps)
                if run.alive:
                    self._measure(run, places[run.item.work.name], Path(scratch, str(place)) if number == 0 else None)
                if step == len(alive) - 1:
                    _compare(alive, Path(scratch))
        after = {dtype: self._peak(dtype) for dtype in dtypes}
        peaks = {dtype: (before[dtype], after[dtype]) for dtype in dtypes}
        return [self._row(run, runs, peaks.get(run.item.dtype)) for run in runs]

    def _place(self, peer: Peer | None) -> Place:
        if peer is None:
            return Place()
        self.advance(f"fetching {peer}", 0, 1)
        return peer.place()

    def _judged(self, asked: Sequence[Item]) -> list[_Run]:
        """What runs, and what is refused."""
        runs, taken = [], set()
        for item in asked:
            run = _Run(item)
            if not item.peer:
                if item.work.peer is not None and not self.named and item.group in taken:
                    continue
                refusal = self.gate.unsupported(item.work, item.runner, item.dtype)
                if refusal is not None and not self.named:
                    continue
                wrong = refusal or self.gate.reason(item.work, item.runner, item.dtype)
                if wrong is not None:
                    run.end("refused", wrong)
                taken.add(item.group)
            runs.append(run)
        # A peer alone shows nothing.
        mine = {run.item.group for run in runs if run.alive and not run.item.peer}
        return [run for run in runs if not run.item.peer or run.item.group in mine]

    def _measure(self, run: _Run, place: Place, results: Path | None) -> None:
        item = run.item
        written = None if results is None or item.work.peer is None else str(results)
        request = Request(
            work=item.work.name,
            runner=item.runner,
            dtype=item.dtype,
            rows=item.rows,
            threads=self.threads,
            results=written,
        )
        try:
            run.found.append(Measurement(**self.launch(request.as_json(), place)))
        except ChildFailed as error:
            run.end("failed", str(error))

    def _peak(self, dtype: str) -> tuple[float, str]:
        found = self.launch(json.dumps({"peak": dtype, "threads": self.threads}), Place())
        return found["peak"], found["source"]

    def _row(self, run: _Run, runs: Sequence[_Run], peak: tuple[tuple[float, str], tuple[float, str]] | None) -> Row:
        row = replace(run.item.row(), verdict=run.verdict, reason=run.reason, difference=run.difference)
        if not run.alive:
            return row
        row = row.measured(run.found)
        if run.item.work.peer is None and peak is not None:
            return row.told_peak(*peak, self.threads)
        theirs = _peer_of(run, runs)
        return row if theirs is None else row.beside(run.found, theirs.found)


def _peer_of(run: _Run, runs: Sequence[_Run]) -> _Run | None:
    """The peer's run that one of dsattn is compared with, where it has figures."""
    if run.item.peer:
        return None
    fits = (other for other in runs if other.item.peer and other.alive and other.item.group == run.item.group)
    return next(fits, None)


def _compare(alive: Sequence[_Run], scratch: Path) -> None:
    """Holds the results of the first round against the peer's."""
    files = {id(run): scratch / str(place) for place, run in enumerate(alive)}
    for run in alive:
        peer = _peer_of(run, alive)
        if peer is None or not run.alive:
            continue
        try:
            run.difference = differences(files[id(run)], files[id(peer)])
            reason = fault(run.difference)
        except ContractDrift as error:
            reason = str(error)
        if reason is not None:
            run.end("failed", reason)
