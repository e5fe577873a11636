"""The indexer loss of the oracle against numbers worked out by hand from docs/semantics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dsattn.errors import BadInput
from dsattn.spec import oracle

NAN, LN3 = math.nan, math.log(3)
BOTH = torch.tensor([0, 1])
NONE = torch.tensor([], dtype=torch.int64)


def f64(numbers: object) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# Scores 0 and ln 3: student 1/4 and 3/4. Two heads with logits (0, 0) and (0, ln 3): teacher (3/4 + 5/4) / 2.
INDEX_K, KV = f64([[0.0], [LN3]]), f64([[0.0], [LN3]])
TEACHER = (3 / 8, 5 / 8)
KL = 3 / 8 * math.log(3 / 2) + 5 / 8 * math.log(5 / 6)


def run(rows: int = 1, support: list | None = None, **options: Any) -> dict:
    index_q, weights = torch.ones(rows, 1, 1, dtype=torch.float64), torch.ones(rows, 1, dtype=torch.float64)
    q = f64([[[0.0], [1.0]]]).repeat(rows, 1, 1)
    inputs: dict[str, Any] = {"index_q": index_q, "index_k": INDEX_K, "weights": weights, "q": q, "kv": KV}
    for name in list(options):
        if name in inputs:
            inputs[name] = options.pop(name)
    options["support"] = [BOTH] * rows if support is None else support
    return oracle.indexer_loss(**inputs, **options, softmax_scale=1.0)


def close(got: torch.Tensor, wanted: object) -> None:
    torch.testing.assert_close(got, f64(wanted), rtol=1e-14, atol=1e-15)


def test_loss_is_the_divergence_of_student_from_teacher() -> None:
    close(run()["loss"].value, KL)


def test_teacher_is_summed_over_heads_with_natural_weight_each() -> None:
    q = f64([[[0.0], [1.0]]])
    sums = oracle.head_probabilities(q, KV, [BOTH], softmax_scale=1.0)
    close(sums[0], [0.75, 1.25])
    close(oracle.head_probabilities(2 * q, KV, [BOTH], softmax_scale=0.5)[0], [0.75, 1.25])


def test_teacher_of_a_head_group_adds_over_ranks() -> None:
    q = f64([[[0.0], [1.0]]])
    ranks = [oracle.head_probabilities(q[:, i : i + 1], KV, [BOTH], softmax_scale=1.0)[0] for i in range(2)]
    close(run(q=q[:, :1], teacher=[ranks[0] + ranks[1]])["loss"].value, KL)


def test_teacher_has_no_place_for_a_sink() -> None:
    # With a sink the probabilities of a head would add up to less than 1.
    close(oracle.head_probabilities(f64([[[0.0], [1.0]]]), KV, [BOTH], softmax_scale=1.0)[0].sum(), 2.0)


def test_gradient_of_the_score_is_student_minus_teacher() -> None:
    got = run(relu=False)
    close(got["d_weights"].value, [[LN3 / 8]])
    close(got["d_index_q"].value, [[[LN3 / 8]]])
    close(got["d_index_k"].value, [[-1 / 8], [1 / 8]])


def test_relu_at_exactly_zero_has_no_gradient() -> None:
    close(run(relu=True)["d_index_k"].value, [[0.0], [1 / 8]])


def test_relu_gates_the_gradient_head_by_head() -> None:
    # Head 1 sees dots 0 and -ln 3, both shut; the score is that of head 0.
    index_q, weights = f64([[[1.0], [-1.0]]]), f64([[1.0, 5.0]])
    got = run(index_q=index_q, weights=weights)
    close(got["loss"].value, KL)
    close(got["d_index_q"].value, [[[LN3 / 8], [0.0]]])
    close(got["d_weights"].value, [[LN3 / 8, 0.0]])


def test_scale_multiplies_scores_and_their_gradients() -> None:
    same = run(weights=f64([[2.0]]), scale=0.5)
    close(same["loss"].value, KL)
    close(same["d_weights"].value, [[0.5 * LN3 / 8]])
    close(same["d_index_q"].value, [[[LN3 / 8]]])
    half = run(scale=0.5)
    student = (1 / (1 + 3**0.5), 3**0.5 / (1 + 3**0.5))
    close(half["loss"].value, sum(p * math.log(p / s) for p, s in zip(TEACHER, student, strict=True)))
    close(half["d_index_k"].value, [[0.0], [0.5 * (student[1] - TEACHER[1])]])


def test_loss_is_zero_when_student_and_teacher_agree() -> None:
    got = run(q=f64([[[1.0], [1.0]]]))
    assert abs(got["loss"].value) < 1e-15
    assert all(exact.value.abs().max() < 1e-15 for exact in got.values())


def test_reductions() -> None:
    support = [BOTH, NONE, BOTH, BOTH]
    mean = run(4, support)
    close(mean["loss"].value, KL)
    close(mean["d_index_k"].value, [[0.0], [1 / 8]])
    close(mean["d_weights"].value, [[LN3 / 24], [0.0], [LN3 / 24], [LN3 / 24]])
    total = run(4, support, reduction="sum")
    close(total["loss"].value, 3 * KL)
    close(total["d_index_k"].value, [[0.0], [3 / 8]])
    close(run(4, support, num_rows=6)["loss"].value, KL / 2)
    close(run(4, support, num_rows=torch.tensor(6))["d_index_k"].value, [[0.0], [1 / 16]])


def test_masked_rows_take_no_part_whatever_they_hold() -> None:
    index_q, q = torch.ones(4, 1, 1, dtype=torch.float64), f64([[[0.0], [1.0]]]).repeat(4, 1, 1)
    index_q[1], q[1] = NAN, NAN
    mask = torch.tensor([True, False, True, False])
    got = run(4, index_q=index_q, q=q, row_mask=mask)
    close(got["loss"].value, KL)
    close(got["d_weights"].value, [[LN3 / 16], [0.0], [LN3 / 16], [0.0]])
    close(run(4, reduction="sum", row_mask=mask)["loss"].value, 2 * KL)
    close(run(4, num_rows=4, row_mask=mask)["loss"].value, KL / 2)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_row_that_counts_gives_zero(reduction: str) -> None:
    for got in (run(2, [NONE, NONE], reduction=reduction), run(2, row_mask=torch.tensor([False, False]))):
        assert not any(exact.value.any() for exact in got.values())


def test_coefficient() -> None:
    close(run(coeff=3.0)["loss"].value, 3 * KL)
    close(run(coeff=3.0)["d_index_k"].value, [[0.0], [3 / 8]])
    zero = run(coeff=0.0, q=f64([[[NAN], [1.0]]]), index_q=f64([[[NAN]]]))
    assert set(zero) == {"loss", "d_index_q", "d_index_k", "d_weights"}
    assert not any(exact.value.any() for exact in zero.values())


def test_a_slot_of_tiny_student_probability_keeps_its_gradient() -> None:
    # Student about (e-600, 1): the first slot's gradient is minus its teacher.
    got = run(index_k=f64([[0.0], [600.0]]), relu=False)
    close(got["d_index_k"].value, [[-3 / 8], [3 / 8]])
    close(got["loss"].value, 3 / 8 * (math.log(3 / 8) + 600) + 5 / 8 * math.log(5 / 8))
    # A teacher of exactly 0: 0 log 0 is 0, and the slot's gradient is its student of 1e-22 or so.
    got = run(index_k=f64([[0.0], [50.0]]), relu=False, teacher=[f64([0.0, 2.0])])
    torch.testing.assert_close(got["d_index_k"].value[0, 0], torch.tensor(math.exp(-50)).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(got["loss"].value, torch.tensor(math.exp(-50)).double(), rtol=1, atol=1e-20)


def test_key_gradients_of_overlapping_rows_add() -> None:
    got = run(2, [BOTH, torch.tensor([1])], reduction="sum", relu=False)
    # The row with one key has student = teacher = 1 and adds nothing.
    close(got["d_index_k"].value, [[-1 / 8], [1 / 8]])
    close(run(2, reduction="sum", relu=False)["d_index_k"].value, [[-1 / 4], [1 / 4]])


def test_terms_are_sums_of_absolute_values() -> None:
    got = run(relu=False, weights=f64([[-1.0]]), index_k=-INDEX_K)
    close(got["d_index_k"].value, [[1 / 8], [-1 / 8]])
    close(got["d_index_k"].terms, [[5 / 8], [11 / 8]])
    close(got["d_index_q"].terms, [[[11 / 8 * LN3]]])
    close(got["d_weights"].terms, [[11 / 8 * LN3]])
    lse = math.log(4)
    logs = [abs(math.log(p)) for p in TEACHER]
    close(got["loss"].terms, 3 / 8 * (logs[0] + lse) + 5 / 8 * (logs[1] + LN3 + lse))


def test_a_gate_that_rounding_may_open_widens_the_terms() -> None:
    # 1e-9 beside products of size 1: fp32 cannot tell the sign of this dot product.
    index_q, weights = f64([[[1.0, 1.0]]]), f64([[1.0]])
    sure = run(index_q=index_q, weights=weights, index_k=f64([[1.0, -1.0], [LN3, 0.0]]))
    unsure = run(index_q=index_q, weights=weights, index_k=f64([[1.0, -1.0 - 1e-9], [LN3, 0.0]]))
    floor = oracle.FLOOR_EPS * torch.finfo(torch.float32).eps
    assert not sure["d_index_k"].terms[0].any()
    assert not unsure["d_index_k"].value[0].any()
    close(floor * unsure["d_index_k"].terms[0], [5 / 8, 5 / 8])


@pytest.mark.parametrize("place", ["index_q", "index_k", "q", "kv"])
def test_a_nan_makes_the_loss_nan_and_stays_with_its_row(place: str) -> None:
    torch.manual_seed(0)
    inputs = {
        "index_q": torch.randn(3, 2, 2),
        "index_k": torch.randn(3, 2),
        "weights": torch.randn(3, 2),
        "q": torch.randn(3, 2, 3),
        "kv": torch.randn(3, 3),
    }
    support = [BOTH, torch.tensor([1, 2]), BOTH]
    clean = run(3, support, relu=False, **inputs)
    inputs[place] = inputs[place].clone()
    inputs[place][2 if place in ("index_k", "kv") else 1] = NAN
    got = run(3, support, relu=False, **inputs)
    assert got["loss"].value.isnan()
    for name in ("d_index_q", "d_weights"):
        assert got[name].value[1].isnan().all(), name
        assert torch.equal(got[name].value[[0, 2]], clean[name].value[[0, 2]]), name
    assert got["d_index_k"].value[1:].isnan().all()
    assert torch.equal(got["d_index_k"].value[0], clean["d_index_k"].value[0])


def test_unknown_reduction() -> None:
    with pytest.raises(BadInput, match="reduction"):
        run(reduction="average")
