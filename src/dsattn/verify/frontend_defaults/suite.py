"""Runs the suite: releases x callers x checks, one record each, on simulated frontends."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Literal

import torch

from dsattn.backends.cudnn.namespace import Namespace
from dsattn.backends.cudnn.simulator import SimulatedFrontend
from dsattn.errors import BackendMissing, UnsupportedProblem
from dsattn.verify.frontend_defaults import judge, naive, ours
from dsattn.verify.frontend_defaults.judge import Metrics, Rule
from dsattn.verify.frontend_defaults.naive import Gradients
from dsattn.verify.frontend_defaults.problems import (
    DenseLoss,
    Selection,
    SparseLoss,
    dense_loss,
    selections,
    sparse_loss,
)
from dsattn.verify.frontend_defaults.rows import DENSE_CASE, SPARSE_CASE, SUITE
from dsattn.verify.records import Record, Verdict
from dsattn.verify.threads import one_thread

RELEASES = ("1.25.0", "1.26.0", "1.29.1", "1.31.0", "1.32.0")
"""The releases that the suite is about."""
MOST_THREADS = 8
"""More of them would need gigabytes of memory."""
Caller = Literal["naive", "dsattn"]
Advance = Callable[[str, int, int], object]
"""Told the case at hand, the checks done and all checks."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of a release.

    Attributes:
        case: its name.
        operator: the operator that the frontend's calls are part of.
        wrappers: the wrappers that it calls.
        callers: what each caller does; it is given the namespace.
        reference: a right result, from calls of the same frontend in which no default matters.
        measure: the numbers of a result and the reference.
        shows: what a naive result must show from 1.26 on.
    """

    case: str
    operator: str
    wrappers: tuple[str, ...]
    callers: Mapping[Caller, Callable[[Namespace], Any]]
    reference: Callable[[Any], Any]
    measure: Callable[[Any, Any], Metrics]
    shows: Rule


@lru_cache(maxsize=1)
def checks(seed: int = 0) -> tuple[Check, ...]:
    """The checks of one release, the inputs of each drawn from the seed."""
    return (_sparse(sparse_loss(seed)), *map(_selection, selections(seed)), _dense(dense_loss(seed)))


def _sparse(problem: SparseLoss) -> Check:
    def one_by_one(frontend: Any) -> Gradients:
        # In a call for one batch entry local ids are global ones. Its mean is over fewer rows.
        batch = len(problem.index_q)
        alone = [naive.sparse_gradients(frontend, problem.entry(b)) for b in range(batch)]
        return Gradients(*(torch.cat(parts) / batch for parts in zip(*alone, strict=True)))

    return Check(
        case=SPARSE_CASE,
        operator="indexer_loss:selected",
        wrappers=("indexer_backward",),
        callers={
            "naive": lambda namespace: naive.sparse_gradients(namespace.dsa, problem),
            "dsattn": lambda namespace: ours.sparse_gradients(namespace, problem),
        },
        reference=one_by_one,
        measure=judge.gradient_metrics,
        shows=judge.loses_a_batch,
    )


def _selection(problem: Selection) -> Check:
    return Check(
        case=problem.case,
        operator="indexer_topk",
        wrappers=("indexer_forward", "indexer_top_k"),
        callers={
            "naive": lambda namespace: naive.select(namespace.dsa, problem),
            "dsattn": lambda namespace: ours.select(namespace, problem),
        },
        # The oracle's scores are part of the problem.
        reference=lambda _: problem,
        measure=judge.selection_metrics,
        shows=judge.loses_keys(problem.case),
    )


def _dense(problem: DenseLoss) -> Check:
    return Check(
        case=DENSE_CASE,
        operator="indexer_loss:visible",
        wrappers=("dense_indexer_score_recompute", "dense_attn_score_recompute", "dense_indexer_backward"),
        callers={
            "naive": lambda namespace: naive.dense(namespace.dsa, problem),
            "dsattn": lambda namespace: ours.dense(namespace, problem),
        },
        reference=lambda frontend: naive.dense(frontend, problem.squared()),
        measure=partial(judge.dense_metrics, problem=problem),
        shows=judge.sees_other_keys,
    )


def run(
    releases: Sequence[str] = RELEASES, arch: str = "sm100", seed: int = 0, advance: Advance = lambda *_: None
) -> list[Record]:
    """A record for every release, caller and check.

    Args:
        releases: releases to simulate, as "1.29.1".
        arch: "sm90" or "sm100".
        seed: of the inputs and of all that a release leaves open.
        advance: is told the progress.

    Semantics:
        A naive record passes when it shows what it must. Before 1.26 that is no fault. From then on the gradients of
        batch entry 1 are zero, the recall is that of the figures, and dense results are far off. A dsattn record passes
        when everything is right. Race conditions of the releases do not strike, since numbers are compared.

    Raises:
        BadInput: a release that cannot be read, or no such architecture.
        BackendMissing: a release that has no DSA.
    """
    names = list(dict.fromkeys(releases))
    # Names that nothing has are refused before anything is computed.
    for release in names:
        SimulatedFrontend(release, arch)
    units = [(release, check) for release in names for check in checks(seed)]
    records: list[Record] = []
    steps = sum(len(check.callers) for _, check in units)
    # Units side by side, each on one thread: most of the work is on tensors too small for more.
    pool = ThreadPoolExecutor(min(torch.get_num_threads(), MOST_THREADS))
    try:
        with one_thread():
            for found in pool.map(partial(_records, arch, seed), units):
                records += found
                advance(found[-1].case, len(records), steps)
    finally:
        # Nobody waits for the rest who has pressed Ctrl-C.
        pool.shutdown(cancel_futures=True)
    return records


def _records(arch: str, seed: int, unit: tuple[str, Check]) -> list[Record]:
    """A record for each caller."""
    release, check = unit
    reference = cache(lambda: check.reference(_namespace(release, arch, seed).dsa))
    return [_record(check, caller, _namespace(release, arch, seed), reference) for caller in check.callers]


def _namespace(release: str, arch: str, seed: int) -> Namespace:
    frontend = SimulatedFrontend(release, arch, seed, races=False)
    return Namespace(frontend, frontend.contract.version, arch)


def _record(check: Check, caller: Caller, namespace: Namespace, reference: Callable[[], Any]) -> Record:
    verdict: Verdict = "pass"
    metrics: Metrics = {}
    reasons: list[str] = []
    trace, release = None, namespace.version.release[:2]
    absent = [name for name in check.wrappers if not namespace.contract.wrapper(name).runs]
    try:
        if absent:
            verdict, reasons = "unsupported", [f"{namespace.version} does not run {absent[0]} on {namespace.arch}"]
        else:
            metrics = check.measure(check.callers[caller](namespace), reference())
            faulty = caller == "naive" and release >= judge.CHANGED
            reasons = check.shows(metrics, release) if faulty else judge.is_right(metrics)
            verdict = "fail" if reasons else "pass"
    except (UnsupportedProblem, BackendMissing) as error:
        verdict, reasons = "unsupported", [str(error)]
    except Exception as error:
        verdict, reasons = "fail", [f"{type(error).__name__}: {error}"]
        trace = traceback.format_exc()
    return Record(
        suite=SUITE,
        case=check.case,
        operator=check.operator,
        backend="cudnn",
        device="cpu",
        dtype="bf16",
        verdict=verdict,
        reason="; ".join(reasons),
        metrics=judge.for_json(metrics),
        simulated=True,
        release=str(namespace.version),
        arch=namespace.arch,
        caller=caller,
        traceback=trace,
    )
