"""What is kept of every row of a check: which rows are wrong, in numbers and in words."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reports import WrongBatch, judged, report
from torch import Tensor

from dsattn.backends import TorchBackend
from dsattn.spec.cases import CASES
from dsattn.spec.inputs import inputs
from dsattn.spec.metrics import Comparison, TopKComparison
from dsattn.verify.per_row import POINTS, Curve, curves
from dsattn.verify.records import Record
from dsattn.verify.run import run, tasks
from dsattn.verify.subject import Subject


class NoKeyGradient(TorchBackend):
    name = "off"

    def dense_attention_backward(self, *arguments: Any, **options: Any) -> Any:
        d_q, d_kv, d_sink = super().dense_attention_backward(*arguments, **options)
        d_kv[40:80] = 0
        return d_q, d_kv, d_sink


@pytest.fixture(scope="module")
def wrong_batch() -> dict[str, Record]:
    return judged(WrongBatch())


def told(one: Record) -> list[str]:
    return [curve.told for curve in one.curves]


def test_curves_say_which_rows_are_wrong(wrong_batch: dict[str, Record]) -> None:
    dense = wrong_batch["dense_attention"]
    query, key = dense.curves
    assert told(dense) == ["40 of 120 query rows over budget: 40 to 79", "no key row of 120 is over budget"]
    assert (query.axis, query.measure, query.length, query.starts, query.runs) == (
        "query row",
        "share",
        120,
        (40, 80),
        ((40, 79),),
    )
    assert query.worst == pytest.approx(dense.metrics["results"]["out"]["share_of_budget"])
    assert 0 < key.worst < 1
    assert told(wrong_batch["sparse_attention"])[0] == "1 of 120 query rows over budget: 7"
    assert wrong_batch["sparse_attention"].curves[0].worst == float("inf")
    topk = wrong_batch["indexer_topk"].curves
    assert [(curve.measure, curve.told) for curve in topk] == [("recall", "4 of 120 query rows wrong: 100 to 103")]
    assert topk[0].worst == wrong_batch["indexer_topk"].metrics["recall_min"]
    assert told(wrong_batch["indexer_loss:visible"])[-1] == "the loss is over budget"
    assert wrong_batch["indexer_scores"].curves == ()


def test_a_gradient_of_zeros_has_no_size() -> None:
    query, key = judged(NoKeyGradient())["dense_attention"].curves
    assert query.wrong == 0
    assert key.told == "40 of 120 key rows over budget: 40 to 79"
    assert key.worst == float("inf")


def test_a_row_that_should_be_silent_is_in_the_curve() -> None:
    class Loud(TorchBackend):
        name = "off"

        def dense_attention_backward(self, *arguments: Any, **options: Any) -> Any:
            d_q, d_kv, d_sink = super().dense_attention_backward(*arguments, **options)
            d_q[11] = 1.0
            return d_q, d_kv, d_sink

    rows = torch.tensor([3, 5, 90], device="cpu")
    case = next(case for case in CASES if case.name == "bshd-b3")

    def make(dtype: torch.dtype) -> Any:
        made = inputs(case, dtype)
        made.d_out[torch.ones(120, dtype=torch.bool).index_fill(0, rows, False)] = 0
        return made

    subject = Subject(suite="quick", case=replace(case, operators=("dense_attention",)), make_inputs=make, rows=rows)
    (one,) = run(tasks([subject], [Loud()], torch.device("cpu"), ["fp32"]))
    query = one.curves[0]
    assert query.told == "1 of 4 query rows over budget: 11"
    assert query.rows.tolist() == [3, 5, 11, 90]
    assert query.length == 120


def reference(rows: int) -> Any:
    """As much of a reference as curves need: one batch entry."""
    entries = torch.zeros(rows, dtype=torch.int64, device="cpu")
    layout = SimpleNamespace(num_q=rows)
    numbers = torch.arange(rows, device="cpu")
    return SimpleNamespace(rows=numbers, layout=layout, row_batches=entries, key_batches=entries)


def of_shares(shares: Tensor) -> Curve:
    found = Comparison(0.0, float(shares.max()), None, None, bool((shares <= 1).all()), "", shares)
    (one,) = curves({"out": found}, reference(len(shares)))
    return one


@pytest.mark.parametrize("count", [1, POINTS, POINTS + 1, 1000, 5003])
def test_a_long_curve_keeps_what_is_wrong(count: int) -> None:
    shares = torch.linspace(0.1, 0.9, count, dtype=torch.float64)
    bad = sorted({0, count // 3, count - 1})
    shares[bad] = torch.tensor([3.0, 1.5, torch.inf], dtype=torch.float64)[: len(bad)]
    one = of_shares(shares)
    assert len(one.rows) == len(one.values) == len(one.faulty) <= POINTS
    assert one.rows.tolist() == sorted(set(one.rows.tolist()))
    assert one.rows[one.faulty].tolist() == bad
    assert one.values.tolist() == shares.float()[one.rows.long()].tolist()
    assert (one.judged, one.length, one.wrong, one.runs) == (count, count, len(bad), tuple((row, row) for row in bad))


def test_a_missed_key_is_kept_before_a_wrong_order() -> None:
    recall, faulty = torch.ones(3 * POINTS, dtype=torch.float64), torch.zeros(3 * POINTS, dtype=torch.bool)
    recall[4], faulty[3:5], faulty[9] = 0.5, True, True
    found = TopKComparison(1.0, 0.5, 0.0, 0, 3, False, "wrong", recall, faulty)
    (one,) = curves({"topk": found}, reference(3 * POINTS))
    assert one.rows[one.faulty].tolist() == [4, 9]
    assert (one.worst, one.runs) == (0.5, ((3, 4), (9, 9)))


@pytest.mark.parametrize("count", [300, 1001, 4096])
def test_scattered_rows_are_told_as_few_runs(count: int) -> None:
    shares = torch.full((count,), 0.5, dtype=torch.float64)
    shares[: count - 3 : 2] = 2.0
    one = of_shares(shares)
    wrong = shares > 1
    covered = torch.zeros(count, dtype=torch.bool)
    for first, last in one.runs:
        covered[first : last + 1] = True
    assert len(one.runs) <= POINTS // 2
    assert covered[wrong].all()
    assert one.runs[0][0] == 0
    assert one.runs[-1][1] < count
    assert one.wrong == int(wrong.sum())
    assert "..." in of_shares(torch.tensor([2.0, 0.0] * 9, dtype=torch.float64)).told


def test_a_result_without_rows_has_no_part() -> None:
    broken = Comparison(float("inf"), float("inf"), None, None, False, "out: shape (3,), needed (4,)")
    right = Comparison(0.0, 0.5, 0, None, True, "", torch.tensor([0.5, 0.1, 0.2], dtype=torch.float64))
    assert curves({"out": broken}, reference(3)) == ()
    (one,) = curves({"out": broken, "lse": right}, reference(3))
    assert one.told == "no query row of 3 is over budget"
    nothing = replace(right, row_shares=torch.zeros(0, dtype=torch.float64))
    assert curves({"out": nothing}, reference(0)) == ()


def test_curves_are_no_part_of_the_json(wrong_batch: dict[str, Record]) -> None:
    found = json.loads(report(*wrong_batch.values()).as_json())
    assert "curves" not in found["records"][0]
