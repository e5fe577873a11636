"""A run: rounds in turn, medians and spread, ratios to a peer, and no speed for what verify finds wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bench_fakes import GIGA, SIZES, Launch, Open, bench, measurement, peer_work, small

from dsattn.backends import TorchBackend
from dsattn.bench import sizes
from dsattn.bench.gate import NAMES, Gate
from dsattn.bench.peers.peer import Place
from dsattn.bench.records import Spread
from dsattn.bench.run import items
from dsattn.bench.works import MOST_FLOPS, WORKS, chosen
from dsattn.errors import BadInput
from dsattn.spec.cases import CASES
from dsattn.verify.mutants import Fault, Mutant
from dsattn.verify.records import Record
from dsattn.verify.reference import References
from dsattn.verify.run import Task
from dsattn.verify.self_test import FAULTS

REFERENCES = References(keep=None)


def wrong(part: str) -> Gate:
    """The gate where torch has the first fault that can be in a part."""
    fault = next(fault for fault in FAULTS if isinstance(fault, Fault) and part in fault.parts)
    return Gate({"torch": Mutant(fault, part)}, REFERENCES)


def test_each_round_runs_everything_once_in_turn() -> None:
    launch = Launch()
    rows = bench(launch).run(small("dense-16", "indexer-topk"))
    works = [question.get("work", "peak") for question in launch.asked]
    assert works == ["peak", *["dense-16", "indexer-topk"] * 3, "peak"]
    assert [(row.work, row.rounds, row.verdict) for row in rows] == [
        ("dense-16", 3, "measured"),
        ("indexer-topk", 3, "measured"),
    ]
    assert all(question["threads"] == 2 for question in launch.asked)
    assert set(launch.places) == {Place()}


def test_medians_have_their_spread() -> None:
    figures = [measurement(wall=4, cpu=7, above=900), measurement(wall=1, cpu=2), measurement(wall=2, cpu=3, above=700)]
    (row,) = bench(Launch({"torch": figures})).run(small("dense-16"))
    assert row.wall == Spread(2, 1, 4)
    assert row.cpu == Spread(3, 2, 7)
    assert row.memory == Spread(900, 700, 1000)
    assert row.beyond == Spread(800, 600, 900)
    assert (row.inputs, row.gradients) == (40, 100)
    assert Spread.of([3.0, 1.0]) == Spread(2.0, 1.0, 3.0)


def test_the_share_is_of_the_larger_peak() -> None:
    launch = Launch({"torch": [measurement(wall=2), measurement(wall=1), measurement(wall=4)]})
    launch.peaks = iter([5 * GIGA, 8 * GIGA])
    (row,) = bench(launch).run(small("dense-16"))
    best = row.flops / (8 * GIGA)
    assert row.share is not None
    assert (row.share.median, row.share.least, row.share.most) == pytest.approx((best / 2, best / 4, best))
    assert row.peak == {"before": 5 * GIGA, "after": 8 * GIGA, "source": "registers", "threads": 2}


@pytest.mark.parametrize(
    ("work", "part"),
    [
        ("indexer-scores", "indexer_scores"),
        ("indexer-topk", "indexer_topk"),
        ("sparse-16", "sparse_attention"),
        ("sparse-128-backward", "sparse_attention backward"),
        ("dense-16", "dense_attention"),
        ("loss-selected", "indexer_loss:selected"),
        ("loss-visible", "indexer_loss:visible backward"),
        ("dsa-selected", "indexer_topk"),
        ("dsa-visible", "indexer_loss:visible"),
    ],
)
def test_what_verify_finds_wrong_has_no_speed(work: str, part: str) -> None:
    launch = Launch()
    (row,) = bench(launch, gate=wrong(part)).run(small(work))
    assert row.verdict == "refused"
    assert row.reason.partition("/")[0] in NAMES
    assert row.wall is row.cpu is row.memory is row.share is None
    assert launch.asked == []


def test_only_the_wrong_operator_is_refused() -> None:
    rows = bench(Launch(), gate=wrong("dense_attention")).run(small("dense-16", "sparse-16", "loss-visible"))
    assert [row.verdict for row in rows] == ["refused", "measured", "measured"]


def test_the_right_backend_has_a_speed_and_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def found(tasks: list[Task], _: Any) -> Iterator[Record]:
        for task in tasks:
            judged.append(task.operator)
            fields = {"suite": "quick", "case": "x", "backend": "torch", "device": "cpu", "dtype": "fp32"}
            yield Record(operator=task.operator, verdict="pass", **fields)

    monkeypatch.setattr("dsattn.bench.gate.run", found)
    rows = bench(Launch(), gate=Gate()).run(small("sparse-16", "sparse-16-backward", "sparse-128", rows=[32, 64]))
    assert {row.verdict for row in rows} == {"measured"}
    assert set(judged) == {"sparse_attention"}
    assert len(judged) == len(set(NAMES) & {case.name for case in CASES if "sparse_attention" in case.operators})


def test_the_cases_of_the_gate_cover_every_check() -> None:
    cases = [case for case in CASES if case.name in NAMES]
    assert len(cases) == len(NAMES)
    for work in WORKS.values():
        for check in work.checks:
            assert sum(check.partition(":")[0] in case.operators for case in cases) >= 6


def test_what_a_backend_does_not_take_is_left_out_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = lambda _, problem: "not today" if problem.operator == "dense_attention" else None  # noqa: E731
    monkeypatch.setattr(TorchBackend, "supports", refuses)
    gate = Gate(references=REFERENCES)
    assert bench(Launch(), gate=gate).run(small("dense-16")) == []
    (row,) = bench(Launch(), gate=gate, named=True).run(small("dense-16"))
    assert row.verdict == "refused"
    assert "not today" in row.reason


def test_a_process_that_dies_is_told_and_not_tried_again() -> None:
    launch = Launch(broken=("torch",))
    (row,) = bench(launch).run(small("dense-16"))
    assert (row.verdict, row.wall) == ("failed", None)
    assert "memory runs out" in row.reason
    assert launch.ran == ["peak", "torch", "peak"]


def test_a_peer_runs_in_turn_and_has_ratios_round_by_round() -> None:
    theirs = [measurement(wall=10, cpu=20, above=8000), measurement(wall=30, cpu=40), measurement(wall=20, cpu=90)]
    mine = [measurement(wall=1, cpu=2, above=2000), measurement(wall=2, cpu=2), measurement(wall=4, cpu=3)]
    launch = Launch({"fast": theirs, "torch": mine})
    peer, row = bench(launch).run(items([peer_work()], backends=["torch"]))
    assert launch.ran == ["fast", "torch"] * 3
    assert (peer.what, row.what) == ("fastpack 1.2.3", "dsattn torch")
    assert row.times_wall == Spread(10, 5, 15)
    assert row.times_cpu == Spread(20, 10, 30)
    assert row.times_memory == Spread(1, 1, 4)
    assert peer.times_cpu is None
    assert (peer.how, row.how) == ("Driven\nby hand.", "")
    assert row.difference == {"out": 0.0}
    assert {place.path[0].name for place in launch.places} == {"fastpack"}


def test_a_peer_that_computes_something_else_is_no_comparison() -> None:
    ones = torch.ones(4)
    results = {"fast": {"out": ones, "d_q": ones + 0}, "torch": {"out": ones, "d_q": ones * 1.2}}
    peer, row = bench(Launch(results=results)).run(items([peer_work()], backends=["torch"]))
    assert (peer.verdict, row.verdict) == ("measured", "failed")
    assert "d_q differs" in row.reason
    assert row.difference == pytest.approx({"out": 0.0, "d_q": 0.2})
    for wrong in ({"out": ones * torch.nan}, {"out": torch.zeros(4), "d_q": ones}, {"out": torch.ones(5)}):
        (row,) = bench(Launch(results={**results, "torch": wrong})).run(items([peer_work()], backends=["torch"]))[1:]
        assert row.verdict == "failed", wrong


def test_a_peer_that_dies_leaves_figures_without_ratios() -> None:
    peer, row = bench(Launch(broken=("fast",))).run(items([peer_work()], backends=["torch"]))
    assert (peer.verdict, row.verdict, row.times_cpu) == ("failed", "measured", None)


def test_a_peer_does_not_run_beside_a_wrong_backend() -> None:
    launch = Launch()
    (row,) = bench(launch, gate=wrong("sparse_attention")).run(items([peer_work()], backends=["torch"]))
    assert (row.what, row.verdict) == ("dsattn torch", "refused")
    assert launch.asked == []


def test_beside_a_peer_the_first_backend_runs_unless_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Open, "unsupported", lambda _, __, backend, ___: "never" if backend == "lazy" else None)
    asked = items([peer_work()], backends=["lazy", "one", "two"])
    assert [row.runner for row in bench(Launch()).run(asked)] == ["fast", "one"]
    assert [row.verdict for row in bench(Launch(), named=True).run(asked)] == ["measured", "refused", *["measured"] * 2]


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    bench(Launch(), advance=lambda *x: told.append(x)).run(small("dense-16"))
    assert told[-3:] == [("dense-16, 64 tokens, fp32, torch", done, 3) for done in range(3)]


def test_default_rows_are_cut_by_flops() -> None:
    for work in chosen("cpu", []):
        rows = work.default_rows()
        assert 1 <= len(rows) <= 3
        assert max(work.flops(work.sizes, count) for count in rows) <= MOST_FLOPS
        assert list(rows) == sorted(rows)
    assert WORKS["indexer-scores"].default_rows()[-1] == 16384
    assert WORKS["dsa-long"].default_rows() == (65536,)


def test_works_are_chosen_by_name_and_pattern() -> None:
    assert "dsa-long" not in {work.name for work in chosen("cpu", [])}
    assert [work.name for work in chosen("cpu", ["dsa-*"])] == ["dsa-selected", "dsa-visible"]
    assert [work.name for work in chosen("cpu", ["dsa-long", "dense-16"])] == ["dense-16", "dsa-long"]
    assert [work.name for work in chosen("peers", [])] == ["megatron", "transformers", "transformers-wide"]
    with pytest.raises(BadInput, match="near to it: megatron"):
        chosen("peers", ["megatrom"])


@pytest.mark.parametrize("rows", [3, 4, 9])
def test_flops_are_those_of_the_pairs(rows: int) -> None:
    seen = [(i, j) for i in range(rows) for j in range(i + 1)]
    kept = [(i, j) for i in range(rows) for j in range(min(i + 1, SIZES.top_k))]
    assert sizes.visible(rows) == len(seen)
    assert sizes.selected(SIZES, rows) == len(kept)
    # h_i 2 x 8, h 2, 12/8.
    assert sizes.scores(SIZES, rows) == len(seen) * 2 * 2 * 8
    assert sizes.sparse(SIZES, rows) == len(kept) * 2 * 2 * (12 + 8)
    assert sizes.dense(SIZES, rows) == len(seen) * 2 * 2 * (12 + 8)
    assert sizes.sparse_backward(SIZES, rows) == len(kept) * 2 * 2 * (12 + 8 + 8 + 12 + 12)
    assert sizes.loss_selected(SIZES, rows) == len(kept) * 2 * (2 * 12 + 3 * 2 * 8)
    whole = sizes.scores(SIZES, rows) + sizes.sparse(SIZES, rows) + sizes.sparse_backward(SIZES, rows)
    assert sizes.layer_selected(SIZES, rows) == whole + sizes.loss_selected(SIZES, rows)
    assert sizes.layer_visible(SIZES, rows) == whole + sizes.loss_visible(SIZES, rows)
