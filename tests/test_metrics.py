"""Each way in which a number can be wrong turns a comparison red, and right numbers stay green."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn.spec import metrics
from dsattn.spec.metrics import FORWARD_FACTOR, GRADIENT_FACTOR, Comparison, compare
from dsattn.spec.oracle import Exact

ROWS, WIDTH = 12, 40
BATCHES = torch.tensor([0] * 5 + [-1] + [1] * 6)
EPS = torch.finfo(torch.float32).eps


def reference() -> Exact:
    """Sums of terms of which a good part cancels; the padding row is exactly zero."""
    terms = torch.randn(ROWS, WIDTH, 16, dtype=torch.float64) * (BATCHES >= 0)[:, None, None]
    return Exact(terms.sum(-1), terms.abs().sum(-1))


def rounded(exact: Exact, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return exact.value.to(dtype)


def judge(got: Tensor, exact: Exact, plain: Tensor | None = None, **options: Any) -> Comparison:
    plain = rounded(exact, got.dtype) if plain is None else plain
    judged: dict[str, Any] = {"factor": GRADIENT_FACTOR, "batches": BATCHES, **options}
    return compare("d_q", got, exact, plain, **judged)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_rounded_result_is_right(dtype: torch.dtype) -> None:
    exact = reference()
    verdict = judge(rounded(exact, dtype), exact, dtype=dtype)
    assert verdict.verdict, verdict.reason
    assert verdict.reason == ""
    assert verdict.relative_error <= torch.finfo(dtype).eps
    assert verdict.excess <= 1 / GRADIENT_FACTOR + 1e-9


def test_factors() -> None:
    assert (FORWARD_FACTOR, GRADIENT_FACTOR) == (2.0, 3.0)


def test_a_scaled_result_is_wrong() -> None:
    exact = reference()
    verdict = judge(rounded(exact, torch.float32) * 1.001, exact)
    assert not verdict.verdict
    assert verdict.excess > 10
    assert verdict.relative_error == pytest.approx(1e-3, rel=1e-3)
    assert f"row {verdict.worst_row}" in verdict.reason


def test_the_budget_is_a_multiple_of_the_row_s_own_plain_error() -> None:
    exact = Exact(torch.zeros(3, 4).double(), torch.zeros(3, 4).double())
    plain = torch.zeros(3, 4)
    plain[0, 2], plain[1, 1] = 0.5, -0.25
    for row, column, size, excess in [(0, 0, 1.0, 1.0), (0, 3, -1.25, 1.25), (1, 0, 1.0, 2.0), (2, 0, 1e-9, math.inf)]:
        got = torch.zeros(3, 4)
        got[row, column] = size
        verdict = compare("out", got, exact, plain, factor=FORWARD_FACTOR)
        assert verdict.worst_row == row
        assert verdict.excess == pytest.approx(excess) if excess < math.inf else verdict.excess > 1e9
        assert verdict.verdict == (excess <= 1)


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, EPS), (torch.bfloat16, EPS), (torch.float64, 2.0**-52)])
def test_the_floor_is_eight_eps_of_the_terms(dtype: torch.dtype, eps: float) -> None:
    exact = Exact(torch.zeros(1, 2).double(), torch.tensor([[1.0, 4.0]]).double())
    plain = torch.zeros(1, 2, dtype=dtype)
    for got, right in [([8 * eps, 0], True), ([8.5 * eps, 0], False), ([0, 32 * eps], True), ([0, 34 * eps], False)]:
        result = torch.tensor([got], dtype=dtype)
        assert compare("x", result, exact, plain, factor=2.0).verdict is right, got


def test_a_zeroed_batch_entry_is_told_as_such() -> None:
    exact = reference()
    got = rounded(exact)
    got[BATCHES == 1] = 0
    verdict = judge(got, exact)
    assert not verdict.verdict
    assert verdict.worst_batch == 1
    assert verdict.reason == "d_q: batch 1 is all zero and the reference is not"


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0])
def test_a_zero_result_is_wrong_whatever_the_size_of_the_reference(size: float) -> None:
    # A plain run that is as wrong, and terms far larger than the value: every budget is met.
    exact = Exact(reference().value * size, torch.full((ROWS, WIDTH), 1e9).double() * size)
    zero = torch.zeros(ROWS, WIDTH)
    verdict = judge(zero, exact, zero, batches=None)
    assert not verdict.verdict
    assert verdict.reason == "d_q is all zero and the reference is not"


@pytest.mark.parametrize(("value", "terms"), [(1e-17, 1.0), (1e-60, 1e-60)])
def test_zero_is_right_where_the_reference_is_zero_but_for_rounding(value: float, terms: float) -> None:
    exact = Exact(torch.full((1, 2), value, dtype=torch.float64), torch.full((1, 2), terms, dtype=torch.float64))
    verdict = compare("d_q", torch.zeros(1, 2), exact, torch.zeros(1, 2), factor=3.0)
    assert verdict == Comparison(0.0, verdict.excess, 0, None, True, "")


def test_numbers_below_the_range_of_fp32_may_be_flushed() -> None:
    exact = Exact(torch.tensor([[1e-39, 1.0]]).double(), torch.tensor([[1e-39, 1.0]]).double())
    assert compare("d_kv", torch.tensor([[0.0, 1.0]]), exact, rounded(exact, torch.float32), factor=3.0).verdict


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_stand_in_the_same_places(number: float) -> None:
    exact = reference()
    exact.value[2, 3] = number
    good = rounded(exact)
    assert judge(good, exact).verdict
    moved = good.roll(1, 1)
    moved[2] = good[2].roll(1)
    for got in (
        moved,
        torch.where(good.isfinite(), good, 0.0),
        torch.where(good.isfinite(), good, 1.0 if math.isnan(number) else -number),
    ):
        verdict = judge(got, exact)
        assert not verdict.verdict
        assert verdict.worst_row == 2
        assert "NaN or infinity" in verdict.reason
    extra = good.clone()
    extra[7, 0] = number
    assert judge(extra, exact).worst_row == 7


def test_other_rows_are_judged_beside_a_nan() -> None:
    exact = reference()
    exact.value[2], exact.terms[2] = math.nan, math.nan
    good = rounded(exact, torch.float32)
    assert judge(good, exact).verdict
    good[4, 4] += 1
    assert judge(good, exact).worst_row == 4


def test_terms_that_are_not_finite_give_a_floor_of_the_value() -> None:
    for terms in (math.inf, math.nan):
        exact = Exact(torch.tensor([[4.0]]).double(), torch.tensor([[terms]]).double())
        plain = torch.tensor([[4.0]])
        for error, right in [(28 * EPS, True), (36 * EPS, False)]:
            assert compare("lse", plain + error, exact, plain, factor=FORWARD_FACTOR).verdict is right


def test_shape_and_dtype() -> None:
    exact = reference()
    got = rounded(exact)
    assert "shape" in judge(got[:-1], exact).reason
    assert "dtype" in judge(got, exact, dtype=torch.float32).reason
    assert not judge(got, exact, dtype=torch.float32).verdict
    assert judge(got, exact, dtype=torch.bfloat16).verdict


def test_only_the_chosen_rows_are_compared() -> None:
    exact = reference()
    got = rounded(exact)
    got[3] = 100
    assert judge(got, exact, rows=[0, 7, 11]).verdict
    verdict = judge(got, exact, rows=torch.tensor([11, 3]))
    assert (verdict.worst_row, verdict.worst_batch, verdict.verdict) == (3, 0, False)
    assert not judge(got, exact, rows=[]).verdict


def test_padding_rows_have_a_row_budget_and_no_batch() -> None:
    exact = reference()
    got = rounded(exact)
    got[5, 0] = 1e-20
    verdict = judge(got, exact)
    assert (verdict.worst_row, verdict.verdict) == (5, False)
    assert judge(rounded(exact), exact, rows=[5]) == Comparison(0.0, 0.0, 5, None, True, "")
    exact.value[5] = exact.terms[5] = 1.0
    verdict = judge(got, exact)
    assert (verdict.worst_row, verdict.worst_batch is None, verdict.verdict) == (5, False, False)
    assert verdict.relative_error < 1e-2


def test_relative_error_is_that_of_the_worst_batch_entry() -> None:
    exact = reference()
    exact.value[BATCHES == 1] *= 1e-3
    exact.terms[BATCHES == 1] *= 1e-3
    got = rounded(exact, torch.float32)
    got[BATCHES == 1] *= 1.5
    verdict = judge(got, exact)
    assert verdict.relative_error == pytest.approx(0.5, rel=1e-3)
    assert verdict.worst_batch == 1


def test_scalars_and_empty_tensors() -> None:
    exact = Exact(torch.tensor(2.0).double(), torch.tensor(2.0).double())
    assert compare("loss", torch.tensor(2.0), exact, torch.tensor(2.0), factor=2.0).verdict
    wrong = compare("loss", torch.tensor(2.002), exact, torch.tensor(2.0), factor=2.0)
    assert (wrong.verdict, wrong.worst_row) == (False, 0)
    assert not compare("loss", torch.tensor(0.0), exact, torch.tensor(2.0), factor=2.0).verdict
    nothing = Exact(torch.zeros(0, 3).double(), torch.zeros(0, 3).double())
    assert compare("out", torch.zeros(0, 3), nothing, torch.zeros(0, 3), factor=2.0).verdict


def test_blocks_do_not_change_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = reference()
    got = rounded(exact, torch.float32) * 1.001
    whole = judge(got, exact)
    monkeypatch.setattr(metrics, "_BLOCK_ELEMENTS", 3 * WIDTH)
    parts = judge(got, exact)
    assert parts.relative_error == pytest.approx(whole.relative_error)
    assert replace(parts, relative_error=whole.relative_error) == whole
