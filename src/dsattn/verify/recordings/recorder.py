"""A DSA namespace that keeps what passes through it, and the run that fills a recording."""

from __future__ import annotations

import functools
import inspect
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from dsattn.backends.cudnn.backend import CudnnBackend
from dsattn.backends.cudnn.namespace import Namespace
from dsattn.backends.trust.keys import identity
from dsattn.spec.problem import Problem
from dsattn.verify.environment import describe
from dsattn.verify.recordings.digest import bits, digest, selection, short
from dsattn.verify.recordings.file import Check, Recording
from dsattn.verify.records import Record
from dsattn.verify.reference import References
from dsattn.verify.run import DTYPES, Task, run
from dsattn.verify.simulated import Chain

SELECTIONS = {"indexer_top_k": ("indices", "values", "input_values", "seq_lens")}
"""Wrapper -> its ids, their scores, and the arguments with the scores and lengths of the rows."""


class Recorder:
    """The wrappers of another namespace; each returns what it returned, and a note of the call is kept.

    Args:
        dsa: the namespace: `cudnn.DSA`, or a stand-in.

    Attributes:
        calls: the notes, in the order of the calls; see `Check`.
    """

    def __init__(self, dsa: Any) -> None:
        self._dsa, self._wrappers = dsa, {}
        self.calls: list[dict[str, Any]] = []

    def __getattr__(self, symbol: str) -> Callable[..., Any]:
        if symbol.startswith("__"):
            raise AttributeError(symbol, name=symbol, obj=self)
        if symbol not in self._wrappers:
            self._wrappers[symbol] = self._keeping(symbol.removesuffix("_wrapper"), getattr(self._dsa, symbol))
        return self._wrappers[symbol]

    def _keeping(self, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wrapper)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = _named(wrapper, args, kwargs)
            before = {key: bits(x).clone() for key, x in given.items() if isinstance(x, Tensor)}
            note: dict[str, Any] = {"wrapper": name, "arguments": {key: short(x) for key, x in given.items()}}
            self.calls.append(note)
            try:
                result = wrapper(*args, **kwargs)
                note["changed"] = [key for key, was in before.items() if not torch.equal(was, bits(given[key]))]
                note["results"] = _digests(name, given, result)
            except Exception as error:
                note["raises"] = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise
            return result

        return call


def _named(wrapper: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name; by number where a call does not fit, which the wrapper itself will say."""
    try:
        return inspect.signature(wrapper).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {**{str(i): x for i, x in enumerate(args)}, **kwargs}


def _digests(name: str, given: dict[str, Any], result: Any) -> dict[str, Any]:
    """The digest of each result by its name."""
    results: dict[str, Any] = {}
    # The frontend's own kind of dict gives its values where another would give its keys.
    named = dict.items(result) if isinstance(result, dict) else [("result", result)]
    ids, values, scores, lengths = SELECTIONS.get(name, ("", "", "", ""))
    for key, value in named:
        if not isinstance(value, Tensor):
            results[key] = None
        elif key == ids and scores in given and lengths in given:
            results[key] = selection(value, given[scores], given[lengths])
        else:
            # Slots have no order.
            results[key] = digest(value.sort(-1, descending=True).values if key == values else value)
    return results


class _Recorded(CudnnBackend):
    """Says of itself what the real kernels say, over a stand-in too, so that both run the same checks."""

    def rounds(self, problem: Problem) -> str | None:
        """That of the installed frontend's backend."""
        return CudnnBackend().rounds(problem)


def run_check(task: Task, namespace: Namespace, references: References) -> tuple[Check, Record]:
    """A check with all calls that it makes of the namespace's wrappers, and its verdict."""
    recorder = Recorder(namespace.dsa)
    backend = _Recorded(replace(namespace, dsa=recorder))
    with unwritten_is_nan():
        (record,) = run([replace(task, backend=Chain(backend, release=str(namespace.version)))], references)
    check = Check(case=record.case, operator=record.operator, verdict=record.verdict, calls=recorder.calls)
    return check, record


def record(tasks: Iterable[Task], namespace: Namespace, device: torch.device) -> Iterator[tuple[Recording, Record]]:
    """Runs checks over a recording namespace; after each the recording as far as it is, and the check's record.

    Args:
        tasks: the checks.
        namespace: whose wrappers are recorded.
        device: where the checks run.
    """
    known = identity(CudnnBackend(), device) or {"torch": torch.__version__}
    environment = {**known, "frontend": str(namespace.version), "device": describe(device)}
    made = Recording(release=str(namespace.version), arch=namespace.arch, environment=environment)
    references = References()
    for task in tasks:
        check, record = run_check(task, namespace, references)
        if check.case not in made.cases:
            made.cases[check.case] = facts_of(task)
        made.checks.append(check)
        yield made, record


def facts_of(task: Task) -> dict[str, Any]:
    """What makes a case's inputs again, and what they were."""
    case, x = task.subject.case, task.subject.make_inputs(DTYPES[task.dtype])
    tensors = {f.name: short(getattr(x, f.name)) for f in fields(x)}
    return {"seed": zlib.crc32(case.name.encode()) + case.seed, "dtype": task.dtype, "inputs": tensors}


@contextmanager
def unwritten_is_nan() -> Generator[None]:
    """Memory that nothing was written to is NaN meanwhile, as it is in a stand-in, instead of what was there before."""
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    mode, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        # It fills memory for those who ask for determinism, which operators without it complain about.
        warnings.filterwarnings("ignore", message=".*determinis", category=UserWarning)
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            settings.fill_uninitialized_memory = True
            yield
        finally:
            torch.use_deterministic_algorithms(mode, warn_only=warns)
            settings.fill_uninitialized_memory = fills
