"""Runs the properties on as many random examples as a time allows: python tests/fuzz.py --minutes 10.

The examples are those of the property tests (`strategies.py`), each made of nothing but the seed, the name of the
property and a number, so that any of them can be run again. Half of the time goes to the comparison with the oracle.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from test_properties_layouts import check_ids, check_windows, random_cut, random_ids
from test_properties_nonfinite import check_bad, random_bad
from test_properties_operators import (
    check_chunked,
    check_full_is_dense,
    check_permuted,
    check_repeated,
    random_chunked,
    random_full,
    random_permuted,
    random_repeated,
)
from test_properties_oracle import check_case, random_case
from test_properties_splits import (
    check_ranks,
    check_split,
    random_micro_batches,
    random_rank_split,
    random_sequences,
)

Property = tuple[Callable[[Random], Any], Callable[[Any], int | None]]

PROPERTIES: dict[str, Property] = {
    "oracle": (random_case, check_case),
    "layouts": (random_cut, check_windows),
    "sequences": (random_sequences, check_split),
    "ranks": (random_rank_split, check_ranks),
    "micro-batches": (random_micro_batches, check_split),
    "permuted-keys": (random_permuted, check_permuted),
    "dense-is-sparse": (random_full, check_full_is_dense),
    "chunks": (random_chunked, check_chunked),
    "ids": (random_ids, check_ids),
    "same-bits": (random_repeated, check_repeated),
    "nan-and-inf": (random_bad, check_bad),
}
"""How an example is made, and how it is checked; a check may return the number of operators that it compared."""

WEIGHTS = {"oracle": len(PROPERTIES) - 1}
"""Shares of the time; 1 for the properties that are not named."""


@dataclass
class Tally:
    """What was run of one property."""

    examples: int = 0
    comparisons: int = 0
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        self.examples += other.examples
        self.comparisons += other.comparisons
        self.seconds += other.seconds


Tallies = dict[str, Tally]


@dataclass(frozen=True)
class Failure:
    """An example that does not hold."""

    name: str
    number: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one process runs: of every property the examples first, first + step, first + 2 * step, ..."""

    names: list[str]
    seed: int
    first: int
    step: int
    seconds: float
    examples: int | None
    tallies: Tallies = field(default_factory=dict)

    def chosen(self) -> str | None:
        """The property that has had the least of its share, None when there is nothing left to do."""
        open_names = [n for n in self.names if self.examples is None or self.number(n) < self.examples]
        return min(open_names, key=lambda n: self.tallies[n].seconds / WEIGHTS.get(n, 1), default=None)

    def number(self, name: str) -> int:
        return self.first + self.step * self.tallies[name].examples


def run_example(name: str, seed: int, number: int) -> int | Failure:
    """Runs one example; the number of comparisons, or what went wrong."""
    make, check = PROPERTIES[name]
    example = None
    try:
        example = make(Random(f"{seed}/{name}/{number}"))
        return check(example) or 1
    except Exception:
        return Failure(name, number, f"{traceback.format_exc()}\nExample: {example!r}")


def explore(plan: Plan) -> Iterator[Tallies | Failure]:
    """What was run since the last time, about every second; ends with the time, or with the first failure."""
    torch.set_num_threads(1)
    end = time.monotonic() + plan.seconds
    plan.tallies.update({name: Tally() for name in plan.names})
    news, told = {name: Tally() for name in plan.names}, time.monotonic()
    while (now := time.monotonic()) < end and (name := plan.chosen()) is not None:
        found = run_example(name, plan.seed, plan.number(name))
        if isinstance(found, Failure):
            yield news
            yield found
            return
        one = Tally(1, found, time.monotonic() - now)
        plan.tallies[name].add(one)
        news[name].add(one)
        if now - told > 1:
            yield news
            news, told = {name: Tally() for name in plan.names}, now
    yield news


def _work(plan: Plan, results: multiprocessing.Queue[Tallies | Failure | None]) -> None:
    for news in explore(plan):
        results.put(news)
    results.put(None)


def explore_together(plans: Sequence[Plan]) -> Iterator[Tallies | Failure]:
    """`explore` in one process for each plan."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_work, args=(plan, results), daemon=True) for plan in plans]
    for worker in workers:
        worker.start()
    try:
        running = len(workers)
        while running:
            try:
                news = results.get(timeout=5)
            except queue.Empty:
                if not any(worker.is_alive() for worker in workers):
                    raise RuntimeError("a process ended without a word") from None
                continue
            if news is None:
                running -= 1
            else:
                yield news
    finally:
        for worker in workers:
            worker.terminate()


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other examples (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    parser.add_argument("--property", action="append", choices=PROPERTIES, help="only this one; may be repeated")
    parser.add_argument("--examples", type=int, help="at most so many examples of each property")
    parser.add_argument("--example", type=int, help="only the example with this number")
    return parser.parse_args(argv)


def table(tallies: Tallies) -> str:
    """The counts as text."""
    lines = [f"{'property':<18}{'examples':>10}{'comparisons':>13}{'per second':>12}"]
    for name, tally in tallies.items():
        rate = tally.comparisons / tally.seconds if tally.seconds else 0.0
        lines.append(f"{name:<18}{tally.examples:>10,}{tally.comparisons:>13,}{rate:>12.1f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """0 where all examples hold; 1 where one does not, or none was run."""
    options = arguments_of(argv)
    names = options.property or list(PROPERTIES)
    total: Tallies = {name: Tally() for name in names}
    first, count = (0, options.examples) if options.example is None else (options.example, options.example + 1)
    jobs = 1 if options.example is not None else max(1, options.jobs)
    plans = [
        Plan(names=names, seed=options.seed, first=first + job, step=jobs, seconds=60 * options.minutes, examples=count)
        for job in range(jobs)
    ]
    started = told = time.monotonic()
    for news in explore(plans[0]) if jobs == 1 else explore_together(plans):
        if isinstance(news, Failure):
            print(table(total))
            print(f"\nMISMATCH in {news.name}\n{news.text}\n\nThe same example again:")
            print(f"  python tests/fuzz.py --seed {options.seed} --property {news.name} --example {news.number}")
            return 1
        for name, tally in news.items():
            total[name].add(tally)
        if (now := time.monotonic()) - told > 10:
            examples, comparisons = (
                sum(getattr(t, key) for t in total.values()) for key in ("examples", "comparisons")
            )
            print(
                f"{now - started:6.0f} s   {examples:,} examples, {comparisons:,} comparisons, 0 mismatches", flush=True
            )
            told = now
    print(table(total))
    examples = sum(tally.examples for tally in total.values())
    print(f"\n0 mismatches in {examples:,} examples; seed {options.seed}, {jobs} process{'es' if jobs > 1 else ''}")
    return 0 if examples else 1


if __name__ == "__main__":
    sys.exit(main())
