"""What a run leaves: one record per work, size, dtype and runner, with medians and their spread, as JSON lines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import dsattn
from dsattn.bench.child import Measurement
from dsattn.errors import BadInput
from dsattn.verify.environment import environment

FORMAT = "dsattn-bench/1"
Verdict = Literal["measured", "refused", "failed"]


@dataclass(frozen=True)
class Spread:
    """A figure of several rounds.

    Attributes:
        median: in the middle.
        least: the smallest.
        most: the largest.
    """

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """That of some figures, at least one."""
        return cls(median(figures), min(figures), max(figures))


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found of one work at one size, in one dtype, by one runner.

    Attributes:
        suite: of the work.
        work: its name.
        what: what ran, in words: a backend of dsattn, or a peer with its release.
        runner: the backend, or the peer.
        peer: whether it is a peer's.
        dtype: short name of the dtype.
        rows: tokens.
        sizes: heads, widths and slots, in words.
        flops: of the matrix products of dsattn's operators.
        verdict: "refused" where verify finds an operator wrong, "failed" where the process ended without a figure.
        reason: why there are no figures; "" where there are some.
        rounds: how often it was measured.
        wall: seconds.
        cpu: seconds of all threads together.
        memory: bytes above what was resident when the inputs were there, gradients included.
        inputs: bytes of the inputs.
        gradients: bytes of the inputs' gradients.
        resident: bytes that the process had at most.
        exact: whether `memory` is of the call alone.
        share: of the matrix peak of all threads, in the suite cpu.
        peak: flop/s of all threads together, before and after all measurements, and where they are from.
        times_wall: seconds of the peer in the same round over those of this row.
        times_cpu: the same of the seconds of all threads.
        times_memory: the same of the memory.
        difference: relative differences of the results to the peer's, by name.
        how: how the peer is driven, in its own row.
    """

    suite: str
    work: str
    what: str
    runner: str
    peer: bool
    dtype: str
    rows: int
    sizes: str
    flops: int
    verdict: Verdict = "measured"
    reason: str = ""
    rounds: int = 0
    wall: Spread | None = None
    cpu: Spread | None = None
    memory: Spread | None = None
    inputs: int | None = None
    gradients: int | None = None
    resident: Spread | None = None
    exact: bool | None = None
    share: Spread | None = None
    peak: Mapping[str, Any] = field(default_factory=dict)
    times_wall: Spread | None = None
    times_cpu: Spread | None = None
    times_memory: Spread | None = None
    difference: Mapping[str, float] = field(default_factory=dict)
    how: str = ""

    @property
    def beyond(self) -> Spread | None:
        """Bytes above inputs and gradients."""
        if self.memory is None or self.gradients is None:
            return None
        figures = self.memory.median, self.memory.least, self.memory.most
        return Spread(*(max(figure - self.gradients, 0) for figure in figures))

    def measured(self, rounds: Sequence[Measurement]) -> Row:
        """The row with the figures of some rounds."""
        return replace(
            self,
            rounds=len(rounds),
            wall=Spread.of([one.wall for one in rounds]),
            cpu=Spread.of([one.cpu for one in rounds]),
            memory=Spread.of([above(one) for one in rounds]),
            inputs=rounds[0].inputs,
            gradients=rounds[0].gradients,
            resident=Spread.of([one.peak for one in rounds]),
            exact=all(one.exact for one in rounds),
        )

    def beside(self, mine: Sequence[Measurement], theirs: Sequence[Measurement]) -> Row:
        """The row with how many times the peer's figures are these, round by round."""
        pairs = list(zip(theirs, mine, strict=False))
        return replace(
            self,
            times_wall=Spread.of([a.wall / b.wall for a, b in pairs]),
            times_cpu=Spread.of([a.cpu / b.cpu for a, b in pairs]),
            times_memory=Spread.of([above(a) / max(above(b), 1) for a, b in pairs]),
        )

    def told_peak(self, before: tuple[float, str], after: tuple[float, str], threads: int) -> Row:
        """The row with the matrix peak that was measured beside it, and the share that it reached."""
        best = max(before[0], after[0])
        told = {"before": before[0], "after": after[0], "source": before[1], "threads": threads}
        if self.wall is None:
            return replace(self, peak=told)
        walls = self.wall.median, self.wall.most, self.wall.least
        return replace(self, peak=told, share=Spread(*(self.flops / (wall * best) for wall in walls)))


_SPREADS = {one.name for one in fields(Row) if "Spread" in str(one.type)}


def above(found: Measurement) -> int:
    """Bytes above what was resident when the inputs were there."""
    return found.peak - found.held


def lines(rows: Iterable[Row], threads: int) -> list[str]:
    """The rows as JSON lines, each with where and on what they were made."""
    where = {**environment(), "threads": threads, "commit": commit()}
    return [json.dumps({"format": FORMAT, **asdict(row), "environment": where}, allow_nan=False) for row in rows]


def append(path: Path, added: Sequence[str]) -> None:
    """Adds lines to a file.

    Raises:
        BadInput: the file cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in added)
    except OSError as error:
        raise BadInput(str(path), given=error.strerror, fix="choose a file that can be written to") from error


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file.

    Raises:
        BadInput: the file is missing, or has something else.
    """
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise BadInput(str(path), given=str(error), needed="JSON lines of `dsattn bench --json-lines`") from error
    for record in found:
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            given = record.get("format") if isinstance(record, dict) else type(record).__name__
            raise BadInput(str(path), given=f"format {given!r}", needed=repr(FORMAT))
    return found


def row_of(record: Mapping[str, Any]) -> Row:
    """The row of a record."""
    told: dict[str, Any] = {one.name: record[one.name] for one in fields(Row)}
    for name in _SPREADS:
        told[name] = None if told[name] is None else Spread(**told[name])
    return Row(**told)


def commit() -> str | None:
    """The commit of the checkout that dsattn is imported from, with "-dirty" where files were changed; None without."""
    root = Path(dsattn.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
