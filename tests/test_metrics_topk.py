"""Each way in which a selection can be wrong turns a comparison red, and right selections stay green."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn.layouts import CausalLayout, Segment
from dsattn.spec import oracle
from dsattn.spec.metrics import TopKComparison, compare_topk, tau

INF, NAN = math.inf, math.nan
T, TOP_K = 9, 4
LAYOUT = CausalLayout.from_segments([Segment(0, T, 0, T, -1)], num_q=T, num_k=T)


class Selection:
    """A causal problem of nine rows (the first sees nothing), its right selection, and what is compared with what."""

    def __init__(self, scores: list[float] | None = None, tau: float = 0.0, top_k: int = TOP_K) -> None:
        line = torch.randn(T, T) if scores is None else torch.tensor(scores).expand(T, T)
        self.visible = oracle.visible_keys(LAYOUT)
        self.scores = torch.full((T, T), -INF, dtype=torch.float64)
        for row, keys in enumerate(self.visible):
            self.scores[row, keys] = line[row, keys].double()
        self.top_k, self.tau = top_k, torch.full((T,), tau, dtype=torch.float64)
        self.ids = torch.full((T, top_k), -1, dtype=torch.int32)
        self.lengths = torch.zeros(T, dtype=torch.int32)
        for row, keys in enumerate(oracle.indexer_topk(self.scores, self.visible, top_k=top_k)):
            self.ids[row, : len(keys)] = keys.int()
            self.lengths[row] = len(keys)

    def slot_scores(self) -> Tensor:
        slots = self.scores.gather(-1, self.ids.long().clamp(min=0))
        return slots.masked_fill(self.ids < 0, -INF).float()

    def judge(self, **options: Any) -> TopKComparison:
        compared: dict[str, Any] = {"top_k": self.top_k, "tau": self.tau, **options}
        return compare_topk(self.ids, self.lengths, self.scores, self.visible, **compared)


def red(verdict: TopKComparison, row: int, reason: str) -> None:
    assert not verdict.verdict
    assert verdict.worst_row == row
    assert reason in verdict.reason
    assert f"row {row}" in verdict.reason


def test_the_right_selection_is_right() -> None:
    good = Selection(tau=1e-6)
    verdict = good.judge(exact_ids=True, returned_scores=good.slot_scores())
    assert verdict == TopKComparison(1.0, 1.0, 0.0, 0, 0, True, "")
    table = oracle.Exact(good.scores, good.scores.abs())
    assert compare_topk(good.ids, good.lengths, table, good.visible, top_k=TOP_K, tau=good.tau).verdict


def test_swapped_ids_are_not_ascending() -> None:
    bad = Selection()
    bad.ids[6, 1:3] = bad.ids[6, 1:3].flip(0)
    verdict = bad.judge()
    red(verdict, 6, "ascending")
    assert verdict.recall_min == 1.0


def test_a_duplicate_id() -> None:
    bad = Selection()
    bad.ids[6, 1] = bad.ids[6, 0]
    verdict = bad.judge()
    red(verdict, 6, "twice")
    assert verdict.recall_min == 0.75


def test_a_wrong_key_in_place_of_a_right_one() -> None:
    bad = Selection([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    bad.ids[7, 3] = 6
    verdict = bad.judge()
    red(verdict, 7, "wrong or missing")
    assert verdict.recall_min == 0.75
    assert verdict.recall_mean == pytest.approx((7 + 0.75) / 8)
    assert verdict.regret == pytest.approx((5 - 2) / (8 + 7 + 6 + 5))


def test_one_key_is_missing() -> None:
    bad = Selection()
    bad.ids[7, 3], bad.lengths[7] = -1, 3
    verdict = bad.judge()
    red(verdict, 7, "count")
    assert verdict.recall_min == 0.75


def test_a_key_too_many() -> None:
    bad = Selection()
    bad.ids[2, 2], bad.lengths[2] = 8, 3
    verdict = bad.judge()
    red(verdict, 2, "count")
    assert verdict.recall_min == 0.5


@pytest.mark.parametrize("score", [0.0, -INF, NAN])
def test_a_key_that_is_not_visible(score: float) -> None:
    bad = Selection([score] * T)
    bad.ids[5, 3] = 5
    verdict = bad.judge(tau=torch.full((T,), 1e9, dtype=torch.float64))
    red(verdict, 5, "wrong or missing")
    assert verdict.recall_min == 0.75


@pytest.mark.parametrize("number", [-2, T, 2**31 - 1])
def test_an_id_out_of_range(number: int) -> None:
    bad = Selection()
    bad.ids[8, 3] = number
    verdict = bad.judge()
    red(verdict, 8, "range")
    assert verdict.recall_min == 0.75


def test_an_unused_slot_that_is_not_minus_one() -> None:
    bad = Selection()
    bad.ids[1, 3] = 0
    red(bad.judge(), 1, "-1")
    bad = Selection()
    bad.ids[0, 0] = 3
    red(bad.judge(), 0, "-1")


def test_keys_within_tau_of_the_last_score_count_as_right() -> None:
    scores = [9.0, 8.0, 7.0, 5.0, 4.5, 3.0, 1.0, 1.0, 1.0]
    near = Selection(scores, tau=0.5)
    near.ids[8, 3] = 4
    assert near.judge().verdict
    red(near.judge(exact_ids=True), 8, "oracle's")
    red(near.judge(tau=torch.full((T,), 0.49, dtype=torch.float64)), 8, "wrong or missing")
    # A key above the last score by more than tau has to be there, whatever took its place.
    near.ids[8] = torch.tensor([0, 1, 3, 4])
    red(near.judge(), 8, "wrong or missing")


def test_ties_are_right_either_way_unless_ids_must_be_exact() -> None:
    tied = Selection([2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    assert tied.judge(exact_ids=True).verdict
    # Rows 5, 6 and 7, 8 see five equal keys and more, of which three fit.
    assert tied.judge().rows_with_boundary_ties == 4
    tied.ids[8, 3] = 5
    assert tied.judge().verdict
    red(tied.judge(exact_ids=True), 8, "oracle's")


def test_returned_scores() -> None:
    good = Selection(tau=0.01)
    scores = good.slot_scores()
    scores[6, 2] += 0.009
    assert good.judge(returned_scores=scores).verdict
    scores[6, 2] += 0.002
    red(good.judge(returned_scores=scores), 6, "tau")
    scores = good.slot_scores()
    scores[1, 3] = 0.0
    red(good.judge(returned_scores=scores), 1, "-inf")
    scores = good.slot_scores()
    scores[4, 0] = NAN
    red(good.judge(returned_scores=scores), 4, "tau")


def test_nan_scores_come_first_and_are_equal() -> None:
    scores = [1.0, NAN, INF, NAN, NAN, NAN, NAN, -INF, 0.0]
    good = Selection(scores, tau=1.0)
    assert good.ids[8].tolist() == [1, 3, 4, 5]
    verdict = good.judge(exact_ids=True, returned_scores=good.slot_scores())
    assert verdict.verdict, verdict.reason
    # Any four of the five NaN will do, a number above none of them.
    good.ids[8] = torch.tensor([1, 3, 4, 6])
    assert good.judge().verdict
    good.ids[8] = torch.tensor([1, 2, 3, 4])
    red(good.judge(), 8, "wrong or missing")


def test_infinite_scores_are_not_within_tau_of_numbers() -> None:
    scores = [INF, 1.0, -INF, 5.0, 6.0, 7.0, 8.0, 9.0, 0.0]
    good = Selection(scores, tau=1.0, top_k=2)
    assert good.judge(exact_ids=True, returned_scores=good.slot_scores()).verdict
    good.ids[3] = torch.tensor([0, 2])
    red(good.judge(), 3, "wrong or missing")
    good = Selection(scores, tau=1.0, top_k=1)
    good.ids[2] = 1
    verdict = good.judge()
    red(verdict, 2, "wrong or missing")
    assert verdict.regret == 0.0


def test_regret_of_a_row_of_zeros_is_measured_in_tau() -> None:
    bad = Selection([0.0] * 8 + [-1e-9], tau=1e-6)
    assert bad.judge().regret == 0.0
    bad = Selection([0.0] * 4 + [-1e-9] * 5, tau=1e-6)
    bad.ids[8, 3] = 4
    verdict = bad.judge()
    assert verdict.verdict
    assert verdict.regret == pytest.approx(1e-3)


def test_sampled_rows() -> None:
    good = Selection()
    rows = [7, 2, 5]
    compared = {"scores": good.scores[rows], "visible": [good.visible[row] for row in rows], "tau": good.tau[rows]}
    judge = {"top_k": TOP_K, "rows": rows, **compared}
    good.ids[8] = 0
    assert compare_topk(good.ids, good.lengths, exact_ids=True, **judge).verdict
    good.ids[2, 0] = 8
    red(compare_topk(good.ids, good.lengths, **judge), 2, "ascending")


def test_wrong_shapes() -> None:
    good = Selection()
    good.ids = good.ids[:, :-1]
    assert "shapes" in good.judge().reason
    good = Selection()
    assert "shapes" in good.judge(rows=[1]).reason


def test_no_keys_at_all() -> None:
    nothing = torch.zeros(2, 0, dtype=torch.float64)
    empty = [torch.tensor([], dtype=torch.int64)] * 2
    ids, lengths = torch.full((2, 3), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    options = {"top_k": 3, "tau": torch.zeros(2, dtype=torch.float64), "exact_ids": True}
    assert compare_topk(ids, lengths, nothing, empty, **options).verdict
    ids[1, 0], lengths[1] = 0, 1
    assert not compare_topk(ids, lengths, nothing, empty, **options).verdict


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2.0**-24), (torch.float64, 2.0**-53)])
def test_tau_by_hand(dtype: torch.dtype, unit: float) -> None:
    # h_i 2, d_i 4: norms of the queries 2 and 6, of the keys 4 and 8; row 0 sees key 0 only.
    index_q = torch.stack([torch.full((4,), 1.0), torch.full((4,), -3.0)]).expand(3, 2, 4).to(dtype)
    index_k = torch.stack([torch.full((4,), 2.0), torch.full((4,), -4.0)]).to(dtype)
    weights = torch.tensor([[1.0, -0.5]]).expand(3, 2).to(dtype)
    layout = CausalLayout.from_segments([Segment(0, 2, 0, 2, 0)], num_q=3, num_k=2)
    size = 2 * 2 * 2 * unit * 0.25 * (1 * 2 + 0.5 * 6)
    for scale in (0.25, -0.25):
        got = tau(index_q, index_k, weights, layout, scale=scale)
        torch.testing.assert_close(got, torch.tensor([size * 4, size * 8, 0.0]).double())
    assert torch.equal(tau(index_q, index_k, weights, layout, scale=0.25, rows=[1]), got[[1]])


def test_tau_leaves_out_what_is_not_finite() -> None:
    index_q, index_k, weights = torch.ones(2, 1, 1), torch.tensor([[1.0], [NAN]]), torch.ones(2, 1)
    layout = CausalLayout.from_segments([Segment(0, 2, 0, 2, 1)], num_q=2, num_k=2)
    assert torch.equal(tau(index_q, index_k, weights, layout), torch.full((2,), 2 * 2.0**-24, dtype=torch.float64))


def test_tau_covers_fp32_arithmetic() -> None:
    inputs = torch.randn(40, 8, 16), torch.randn(40, 16), torch.randn(40, 8)
    layout = CausalLayout.from_segments([Segment(0, 40, 0, 40, 0)], num_q=40, num_k=40)
    exact = oracle.indexer_scores(*inputs, layout).value
    index_q, index_k, weights = inputs
    fp32 = (torch.relu(index_q @ index_k.T) * weights[..., None]).sum(1)
    error = (fp32.double() - exact).masked_fill(exact.isinf(), 0.0).abs().amax(-1)
    assert (error < tau(*inputs, layout)).all()


def test_it_takes_less_than_a_second() -> None:
    """256 sampled rows over 16384 keys, counted in CPU seconds of this process."""
    scores = torch.randn(256, 16384, dtype=torch.float64)
    visible = [torch.arange(16384)] * 256
    ids = torch.stack(oracle.indexer_topk(scores, visible, top_k=512)).int()
    lengths, allowed = torch.full((256,), 512, dtype=torch.int32), torch.zeros(256, dtype=torch.float64)
    begin = time.process_time()
    assert compare_topk(ids, lengths, scores, visible, top_k=512, tau=allowed).verdict
    assert time.process_time() - begin < 2
