"""Checks dealt out to processes: those of one subject and dtype stay together, so that they share their references."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import active_children, get_context, parent_process
from typing import Any

import torch

from dsattn.verify import suites
from dsattn.verify.records import Record
from dsattn.verify.run import Task, run
from dsattn.verify.subject import Subject

LEAST = 400
"""Fewer checks than these are done before processes have started."""
MOST_PROCESSES = 16
_POLL = 0.2


class WorkerDied(RuntimeError):
    """A process that ran checks is gone: a crash in native code, or the system took its memory back."""


@dataclass(frozen=True)
class Request:
    """What `suites.plan` is asked, to be sent to processes, since tasks themselves cannot be.

    Attributes:
        suites: names of suites.
        options: the other arguments of `suites.plan`.
    """

    suites: tuple[suites.Suite, ...]
    options: dict[str, Any]

    def tasks(self) -> list[Task]:
        """The checks: the same in every process."""
        return suites.plan(self.suites, **self.options)[0]


def processes_for(tasks: Sequence[Task]) -> int:
    """How many processes are worth their start; 1 for none beside this one.

    As many as PyTorch would use threads, which it reads from `OMP_NUM_THREADS` too. Only checks of simulated releases
    are dealt out: those of a real backend run as a user's calls do, in one process with all threads.
    """
    if len(tasks) < LEAST or any(task.release is None for task in tasks):
        return 1
    return min(torch.get_num_threads(), MOST_PROCESSES, len(_units(tasks)))


def run_in_processes(
    request: Request, processes: int, advance: Callable[[str, int, int], None] = lambda *_: None
) -> list[Record]:
    """The records of all tasks of a request, in the order of the tasks.

    Args:
        request: what to check.
        processes: how many processes run it, with one thread each.
        advance: called while they run with what is at hand, the checks done and the checks there are.

    Raises:
        WorkerDied: a process ended before its checks did. The others are stopped.
    """
    tasks = request.tasks()
    units = _units(tasks)
    # The longest first, so that no process is left with one at the end.
    order = sorted(range(len(units)), key=lambda number: -_cost(units[number][0].subject))
    context = get_context("spawn")
    done = context.Value("q", 0)
    found: dict[int, list[Record]] = {}
    others = set(active_children())
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=(request, done))
    try:
        with _no_interrupts():
            futures = {pool.submit(_work, number): number for number in order}
        pending = set(futures)
        while pending:
            finished, pending = wait(pending, timeout=_POLL, return_when=FIRST_COMPLETED)
            for future in finished:
                found[futures[future]] = pickle.loads(future.result())
            # Without its lock, which a process that died may hold for ever.
            advance(f"{processes} processes", done.get_obj().value, len(tasks))
    except BaseException as error:
        # A check may take seconds, which nobody waits for who has pressed Ctrl-C.
        for child in set(active_children()) - others:
            child.kill()
        if isinstance(error, BrokenProcessPool):
            text = "a process that ran checks died: out of memory, or a crash in native code"
            raise WorkerDied(f"{text}. With OMP_NUM_THREADS=1 all checks run in one process") from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return [record for number in range(len(units)) for record in found[number]]


def _units(tasks: Sequence[Task]) -> list[list[Task]]:
    """Neighbours that share a reference."""
    return [list(unit) for _, unit in groupby(tasks, key=lambda task: (id(task.subject), task.dtype))]


def _cost(subject: Subject) -> int:
    """How long a subject takes, up to a factor: the products of all query rows with all keys."""
    case, layout = subject.case, subject.case.layout()
    return layout.num_q * layout.num_k * (case.heads * case.key_width + case.index_heads * case.index_width)


@contextmanager
def _no_interrupts() -> Generator[None]:
    """Processes that start in here ignore Ctrl-C, from their first instruction on: it is for this one to end them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


class _Worker:
    """What a process that runs checks holds."""

    units: list[list[Task]]
    done: Any


def _start(request: Request, done: Any) -> None:
    faulthandler.enable()
    # A parent that was killed cannot end its processes.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _Worker.units, _Worker.done = _units(request.tasks()), done


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(number: int) -> bytes:
    """The records of a unit, pickled here: what sends results would share each tensor's memory by a file of its own."""
    records = []
    for record in run(_Worker.units[number]):
        records.append(record)
        with _Worker.done.get_lock():
            _Worker.done.value += 1
    return pickle.dumps(records)
