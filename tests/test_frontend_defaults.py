"""The suite frontend-defaults: its inputs, what naive calls must show, verdicts that can turn red, tables."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from dsattn.backends.cudnn.namespace import Namespace
from dsattn.backends.cudnn.simulator import SimulatedFrontend
from dsattn.errors import BackendMissing, BadInput, UnsupportedProblem
from dsattn.spec import oracle
from dsattn.verify import frontend_defaults
from dsattn.verify.frontend_defaults import RELEASES, SUITE, judge, naive, problems, run, suite, tables
from dsattn.verify.records import Record, Report

CASES = ["indexer-backward-b2", *judge.FIGURES, "dense-b2"]
CHEAP = ("indexer-backward-b2", "recall-one-document-cp1", "dense-b2")


def frontend(version: str, arch: str = "sm100", seed: int = 0) -> SimulatedFrontend:
    return SimulatedFrontend(version, arch, seed, races=False)


def namespace(version: str, arch: str = "sm100", *, called: str | None = None) -> Namespace:
    """The wrappers of a release, which may be called another."""
    return Namespace(frontend(version, arch), Version(called or version), arch)


def check(case: str) -> suite.Check:
    return next(one for one in suite.checks(0) if one.case == case)


def record(one: suite.Check, caller: suite.Caller, of: Namespace, right: str = "1.32.0") -> Record:
    return suite._record(one, caller, of, lambda: one.reference(frontend(right)))


def selected_by_chance(rng: torch.Generator, rows: int, keys: int, offset: int, k: int = 128) -> Tensor:
    """Recall per row when all but row i's first i + 1 scores are lost, and any of the lost keys fill it up."""
    scores = torch.rand(rows, keys, generator=rng, device="cpu")
    column, row = torch.arange(keys, device="cpu"), torch.arange(rows, device="cpu")[:, None]
    seen, kept = column <= row + offset, column <= row
    by_chance = torch.where(kept, scores + 1, torch.rand(rows, keys, generator=rng, device="cpu"))
    recall = []
    for i in range(rows):
        count = min(k, offset + i + 1)
        right, got = (set(x[i].masked_fill(~seen[i], -1).topk(count).indices.tolist()) for x in (scores, by_chance))
        recall.append(len(right & got) / count)
    return torch.tensor(recall, device="cpu")


@pytest.mark.parametrize(
    ("case", "lengths", "cp_size", "rank"),
    [
        ("recall-one-document-cp1", (512,), 1, 0),
        ("recall-one-document-cp2-rank0", (1024,), 2, 0),
        ("recall-one-document-cp2-rank1", (1024,), 2, 1),
        ("recall-documents-cp2-rank0", (1024, 2048), 2, 0),
        ("recall-documents-cp2-rank1", (1024, 2048), 2, 1),
    ],
)
def test_random_scores_explain_the_figures(
    rng: torch.Generator, case: str, lengths: tuple[int, ...], cp_size: int, rank: int
) -> None:
    rows = []
    for length in lengths:
        half = length // (2 * cp_size)
        rows.append(selected_by_chance(rng, half, (rank + 1) * half, rank * half))
        rows.append(selected_by_chance(rng, half, length - rank * half, length - (rank + 1) * half))
    assert float(torch.cat(rows).mean()) == pytest.approx(judge.FIGURES[case], abs=judge.NEAR)


def test_a_layout_says_what_the_naive_segments_say() -> None:
    for problem in problems.selections(0):
        halves = [length // (2 * problem.cp_size) for length in problem.documents]
        starts = [sum(problem.documents[:i]) for i in range(len(halves))]
        ends = []
        for start, length, half in zip(starts, problem.documents, halves, strict=True):
            front, back = problem.cp_rank * half, length - (problem.cp_rank + 1) * half
            ends += [start + p + i + 1 for p in (front, back) for i in range(half)]
        assert problem.layout.bounds()[1].tolist() == ends
        assert problem.index_q.shape[0] == len(ends)


def test_the_suite() -> None:
    """All releases: naive calls show the faults from 1.26 on and none before; dsattn shows none."""
    told: list[tuple[str, int, int]] = []
    records = run(advance=lambda case, done, steps: told.append((case, done, steps)))
    assert [one.reason for one in records if one.verdict != "pass"] == []
    assert len(records) == len(RELEASES) * len(CASES) * 2
    assert {(one.suite, one.simulated, one.arch, one.backend) for one in records} == {(SUITE, True, "sm100", "cudnn")}
    found = {(one.release, one.caller, one.case): one.metrics for one in records}
    for release in RELEASES:
        for caller in ("naive", "dsattn"):
            right = caller == "dsattn" or release == "1.25.0"
            mine = {case: found[release, caller, case] for case in CASES}
            wrong = {case for case, metrics in mine.items() if judge.is_right(metrics)}
            assert wrong == (set() if right else set(CASES)), (release, caller)
    lost = found["1.29.1", "naive", "indexer-backward-b2"]
    assert lost["zero"] == {name: [False, True] for name in ("d_index_q", "d_weights", "d_index_k")}
    assert lost["errors"]["d_index_q"] == [0.0, 1.0]
    for case, figure in judge.FIGURES.items():
        assert found["1.26.0", "naive", case]["recall_mean"] < figure
        assert found["1.31.0", "naive", case]["recall_mean"] == pytest.approx(figure, abs=0.01)
    assert told[-1] == ("dense-b2", len(records), len(records))
    assert [done for _, done, _ in told] == list(range(2, len(records) + 1, 2))
    assert Report(environment={}, records=records).holds
    titled = tables(records)
    assert [len(table.rows) for table in titled] == [10, 10, 10]
    assert all(len(row) == len(table.columns) for table in titled for row in table.rows)
    json.loads(Report(environment={}, records=records).as_json())


def test_hopper_shows_the_same() -> None:
    cases = [check(case) for case in CHEAP]
    for version in ("1.25.0", "1.29.1"):
        for one in cases:
            for got in suite._records("sm90", 0, (version, one)):
                assert (got.verdict, got.reason) == ("pass", ""), (version, one.case, got.caller)


@pytest.mark.parametrize("case", CHEAP)
def test_a_naive_call_that_shows_nothing_is_red(case: str) -> None:
    got = record(check(case), "naive", namespace("1.25.0", called="1.29.1"))
    assert got.verdict == "fail"
    assert got.reason


@pytest.mark.parametrize("case", CHEAP)
def test_a_caller_who_trusts_the_defaults_is_red(case: str) -> None:
    one = check(case)
    trusting = replace(one, callers={**one.callers, "dsattn": one.callers["naive"]})
    assert record(trusting, "dsattn", namespace("1.29.1")).verdict == "fail"
    assert record(one, "naive", namespace("1.29.1", called="1.25.0")).verdict == "fail"
    assert record(one, "dsattn", namespace("1.29.1")).verdict == "pass"


def test_a_recall_elsewhere_than_the_figures_is_red() -> None:
    rule = judge.loses_keys("recall-one-document-cp1")
    assert rule({"recall_mean": 0.715}, (1, 27)) == []
    assert "0.01 of 0.706" in rule({"recall_mean": 0.717}, (1, 27))[0]
    assert rule({"recall_mean": 0.695}, (1, 32)) != []
    assert rule({"recall_mean": 0.65}, (1, 26)) == []
    assert "not below" in rule({"recall_mean": 0.707}, (1, 26))[0]


def test_a_lost_batch_must_be_exactly_zero_and_the_other_right() -> None:
    def metrics(first: float, zero: bool) -> judge.Metrics:
        return {"errors": {"d_weights": [first, 1.0]}, "zero": {"d_weights": [False, zero]}}

    assert judge.loses_a_batch(metrics(0.0, True), (1, 29)) == []
    assert judge.loses_a_batch(metrics(0.0, False), (1, 29)) == ["d_weights of batch 1 is not zero"]
    assert judge.loses_a_batch(metrics(2e-5, True), (1, 29)) == ["d_weights of batch 0 is off by 2.0e-05"]
    assert judge.sees_other_keys({"errors": {"d_weights": [0.9, 0.05]}}, (1, 29)) != []


def test_relative_errors_are_taken_per_batch_entry() -> None:
    right = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    assert judge.relative_errors(right, right) == [0.0, 0.0]
    assert judge.relative_errors(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), right) == [0.0, 1.0]
    assert judge.relative_errors(torch.tensor([[3.0, -math.inf], [1.0, 2.0]]), right) == [0.8, 2.0]
    assert judge.is_right({"errors": {"x": [0.0, 9e-6]}, "non_finite": 0}) == []
    assert judge.is_right({"errors": {"x": [0.0, 1e-5]}, "non_finite": 0}) == ["x of batch 1 is off by 1.0e-05"]
    assert judge.is_right({"errors": {"x": [math.nan]}, "non_finite": 0}) != []
    assert judge.is_right({"errors": {"x": [0.0]}, "non_finite": 2}) == ["2 numbers are not finite"]
    assert judge.for_json({"errors": {"x": [math.nan, 0.5]}})["errors"] == {"x": [None, 0.5]}


def test_what_is_not_finite_is_no_right_result() -> None:
    one = check("dense-b2")

    def broken(of: Namespace) -> naive.Dense:
        result = one.callers["dsattn"](of)
        # Where the mass is 0 this changes no error.
        result.attn_out[result.attn_out < 1e-6] = math.nan
        return result

    got = record(replace(one, callers={**one.callers, "dsattn": broken}), "dsattn", namespace("1.32.0"))
    assert got.verdict == "fail"
    assert "not finite" in got.reason


def test_an_error_is_a_failure_and_a_refusal_is_none() -> None:
    one = check("indexer-backward-b2")

    def raises(error: Exception) -> suite.Check:
        def call(_: Namespace) -> Any:
            raise error

        return replace(one, callers={"naive": call, "dsattn": call})

    got = record(raises(RuntimeError("launch")), "dsattn", namespace("1.32.0"))
    assert (got.verdict, got.reason) == ("fail", "RuntimeError: launch")
    assert got.traceback is not None
    got = record(raises(UnsupportedProblem("no kernel")), "dsattn", namespace("1.32.0"))
    assert (got.verdict, got.reason) == ("unsupported", "no kernel")


def test_a_release_without_the_kernel_is_unsupported() -> None:
    for got in suite._records("sm90", 0, ("1.24.1", check("recall-one-document-cp1"))):
        assert (got.verdict, got.reason) == ("unsupported", "1.24.1 does not run indexer_forward on sm90")


def test_releases_and_architectures_that_nothing_has_are_refused() -> None:
    with pytest.raises(BadInput, match="version"):
        run(["1.29.1", "x"])
    with pytest.raises(BackendMissing, match=r"1\.23"):
        run(["1.23.0"])
    with pytest.raises(BadInput, match="arch"):
        run(arch="sm80")


class Recorder:
    """A frontend that keeps the arguments of every call."""

    def __init__(self, inner: SimulatedFrontend) -> None:
        self.inner = inner
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return getattr(self.inner, name)(*args, **kwargs)

        return call


def test_naive_calls_know_release_125_alone() -> None:
    spy = Recorder(frontend("1.32.0"))
    for problem in problems.selections(0)[::3]:
        naive.select(spy, problem)
    naive.sparse_gradients(spy, problems.sparse_loss(0))
    naive.dense(spy, problems.dense_loss(0))
    assert len({name for name, _, _ in spy.calls}) == 6
    for name, args, kwargs in spy.calls:
        known = inspect.signature(getattr(frontend("1.25.0"), name)).parameters
        assert args == ()
        assert set(kwargs) <= set(known), name


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_gradients_do_not_depend_on_any_order(arch: str) -> None:
    """What a release leaves open changes no bit, so errors of right calls are those of nothing at all."""
    sparse, dense = problems.sparse_loss(0), problems.dense_loss(0)
    found = [
        [*naive.sparse_gradients(of, sparse), *naive.dense(of, dense).gradients]
        for of in (frontend("1.25.0", arch, seed) for seed in (1, 2))
    ]
    for one, other in zip(*found, strict=True):
        # Sums of what cancels leave a rest far below every other number.
        assert float((one.double() - other.double()).abs().max()) < 1e-15
        assert bool((one != 0).any())


@pytest.mark.parametrize("case", ["indexer-backward-b2", "dense-b2"])
def test_references_are_the_oracles_gradients(case: str) -> None:
    """The gradients that callers are measured by are right themselves, up to their rounding to bf16."""
    problem = problems.sparse_loss(0) if case == "indexer-backward-b2" else problems.dense_loss(0)
    reference = check(case).reference(frontend("1.29.1"))
    keys = problem.index_k.shape[1]
    if isinstance(problem, problems.SparseLoss):
        support = [row.long() + b * keys for b in range(2) for row in problem.ids[b]]
        got = dict(zip(naive.Gradients._fields, reference, strict=True))
    else:
        support = [seen.nonzero()[:, 0] + b * keys for b in range(2) for seen in problem.visible()]
        d_q, d_w, d_k = reference.gradients
        # The square call has four times as many rows, of which the last ones count.
        got = {"d_index_q": d_q[:, -128:] * 4, "d_weights": d_w[:, -128:] * 4, "d_index_k": d_k * 4}
    inputs = (problem.index_q, problem.index_k, problem.weights, problem.q, problem.kv)
    index_q, index_k, weights, q, kv = (x.flatten(0, 1).double() for x in inputs)
    right = oracle.indexer_loss(index_q, index_k, weights, q, kv, support, softmax_scale=2.0)
    for name, gradient in got.items():
        exact = right[name].value.view(gradient.shape)
        assert judge.relative_errors(gradient, exact) == pytest.approx([0.0, 0.0], abs=2**-8), name


def test_losses_are_what_they_are_said_to_be() -> None:
    sparse, dense = problems.sparse_loss(0), problems.dense_loss(0)
    assert torch.equal(sparse.target * 64, (sparse.target * 64).round())
    assert torch.equal(sparse.target.sum(-1), torch.ones(2, 128))
    assert bool((sparse.predict.amax(-1) == 1.0).all())
    assert float(sparse.predict.sort(-1).values[..., -2].max()) < 1e-10
    assert bool((sparse.predict >= torch.finfo(torch.float32).tiny).all()), "a slot that the kernels drop"
    assert bool((sparse.ids.diff(dim=-1) > 0).all())
    assert bool((sparse.ids <= torch.arange(128, 256)[:, None]).all())
    square = dense.squared()
    assert square.index_q.shape[:2] == square.index_k.shape[:2] == (2, 512)
    assert torch.equal(square.q[:, 384:], dense.q)
    assert not bool(square.weights[:, :384].any())
    assert torch.equal(square.visible()[384:], dense.visible())
    assert dense.visible().sum(1).tolist() == list(range(385, 513))
    assert torch.equal(dense.entry(1).index_k[0], dense.index_k[1])


def line(case: str, metrics: dict[str, Any], caller: suite.Caller = "naive", verdict: Any = "pass") -> Record:
    where = {"backend": "cudnn", "device": "cpu", "dtype": "bf16", "simulated": True}
    return Record(
        suite=SUITE,
        case=case,
        operator="",
        verdict=verdict,
        metrics=metrics,
        release="1.29.1",
        arch="sm90",
        caller=caller,
        **where,
    )


def test_tables_say_what_the_records_say() -> None:
    names = ("d_index_q", "d_weights", "d_index_k")
    sparse = {"errors": {name: [3e-18, 1.0] for name in names}, "zero": {name: [False, True] for name in names}}
    dense = {name: [0.0, 0.25] for name in names}
    dense |= {"index_out": [0.5, 0.125], "attn_out": [None, 0.1]}
    dense |= {"index_denom": [0.0, 0.0], "attn_denom": [0.0, 2e-7]}
    recall = {"recall_mean": 0.70649, "recall_min": 0.25}
    records = [
        line("indexer-backward-b2", sparse),
        line("indexer-backward-b2", {}, "dsattn", "fail"),
        line("recall-one-document-cp1", recall),
        line("recall-documents-cp2-rank1", {}, verdict="unsupported"),
        line("dense-b2", {"errors": dense}),
        replace(line("dense-b2", {}), suite="quick"),
    ]
    first, second, third = tables(records)
    assert first.columns[:4] == ("release", "arch", "caller", "dQ of 0")
    assert first.columns[-1] == "verdict"
    assert first.rows == [
        ("1.29.1", "sm90", "naive", *("3e-18", "zero") * 3, "pass"),
        ("1.29.1", "sm90", "dsattn", *[""] * 6, "fail"),
    ]
    assert second.rows == [("1.29.1", "sm90", "naive", "0.706 / 0.250", "", "", "", "", "unsupported")]
    assert third.rows == [("1.29.1", "sm90", "naive", "not finite", "2e-07", "0.250", "0.250", "0.250", "pass")]
    assert tables(records[5:]) == []
    assert frontend_defaults.Table is type(first)
