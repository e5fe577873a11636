"""Windows, scores and selection of the oracle against numbers worked out by hand from docs/semantics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsattn.layouts import CausalLayout, Segment
from dsattn.spec import oracle

INF, NAN = math.inf, math.nan


def window(q_len: int, k_len: int, q_offset: int, ratio: int) -> list[int]:
    layout = CausalLayout.from_segments([Segment(0, q_len, 0, k_len, q_offset)], num_q=q_len, num_k=k_len, ratio=ratio)
    return [len(keys) for keys in oracle.visible_keys(layout)]


def one_row(num_k: int) -> CausalLayout:
    """One query row that sees all keys."""
    return CausalLayout.from_segments([Segment(0, 1, 0, num_k, num_k - 1)], num_q=1, num_k=num_k)


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(
    ("q_len", "k_len", "q_offset", "ratio", "counts"),
    [
        (3, 3, 0, 1, [1, 2, 3]),
        (2, 5, 3, 1, [4, 5]),
        (4, 3, 1, 1, [2, 3, 3, 3]),
        (9, 2, 0, 4, [0, 0, 0, 1, 1, 1, 1, 2, 2]),
        (6, 2, 2, 4, [0, 1, 1, 1, 1, 2]),
        (10, 2, 0, 4, [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]),
        (4, 4, -2, 1, [0, 0, 1, 2]),
        (5, 4, -3, 2, [0, 0, 0, 0, 1]),
    ],
    ids=["square", "offset", "clamped", "ratio", "ratio-offset", "ratio-tail", "negative", "negative-ratio"],
)
def test_window_sizes(q_len: int, k_len: int, q_offset: int, ratio: int, counts: list[int]) -> None:
    assert window(q_len, k_len, q_offset, ratio) == counts


def test_windows_start_at_their_segment_and_padding_sees_nothing() -> None:
    layout = CausalLayout.from_segments([Segment(1, 2, 3, 2, 0), Segment(4, 1, 3, 3, 2)], num_q=6, num_k=7)
    assert [keys.tolist() for keys in oracle.visible_keys(layout)] == [[], [3], [3, 4], [], [3, 4, 5], []]


def hand_scores(relu: bool, scale: float, **inputs: torch.Tensor) -> oracle.Exact:
    # dots of the one key: 3 and -2.
    index_q = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]], dtype=torch.float64)
    index_k = torch.tensor([[3.0, -1.0]], dtype=torch.float64)
    weights = inputs.get("weights", torch.tensor([[0.5, 2.0]], dtype=torch.float64))
    return oracle.indexer_scores(index_q, index_k, weights, one_row(1), scale=scale, relu=relu)


@pytest.mark.parametrize(("relu", "score"), [(True, 0.5 * 3), (False, 0.5 * 3 - 2 * 2)])
@pytest.mark.parametrize("scale", [1.0, 0.125, -2.0])
def test_score_is_scale_times_the_weighted_sum_over_heads(relu: bool, score: float, scale: float) -> None:
    got = hand_scores(relu, scale)
    assert got.value.item() == scale * score
    assert got.terms.item() == abs(scale) * (0.5 * 3 + 2 * 2)


def test_scale_multiplies_outside_the_relu() -> None:
    # Inside the relu a negative scale would let the other head through: -1 * 2 * 2 = -4 in place of -1.5.
    assert hand_scores(True, -1.0).value.item() == -1.5


def test_negative_zero_is_zero() -> None:
    for scale, weights in [(1.0, [0.0, -2.0]), (-1.0, [0.0, 2.0]), (1.0, [-0.0, -2.0])]:
        got = hand_scores(True, scale, weights=torch.tensor([weights], dtype=torch.float64))
        assert got.value.item() == 0.0
        assert not torch.signbit(got.value).any()


def test_invisible_keys_are_minus_infinity() -> None:
    layout = CausalLayout.from_segments([Segment(0, 2, 1, 2, 0)], num_q=3, num_k=4)
    ones = torch.ones(3, 1, 1, dtype=torch.float64)
    got = oracle.indexer_scores(ones, column(1, 2, 3, 4), ones[:, 0], layout)
    assert got.value.tolist() == [[-INF, 2, -INF, -INF], [-INF, 2, 3, -INF], [-INF] * 4]
    assert got.terms.tolist() == [[0, 2, 0, 0], [0, 2, 3, 0], [0] * 4]


def test_sampled_rows_are_those_rows_of_the_table() -> None:
    torch.manual_seed(0)
    layout = CausalLayout.from_segments([Segment(0, 6, 0, 6, 0)], num_q=6, num_k=6)
    inputs = torch.randn(6, 3, 4), torch.randn(6, 4), torch.randn(6, 3)
    full, some = oracle.indexer_scores(*inputs, layout), oracle.indexer_scores(*inputs, layout, rows=[4, 1])
    assert torch.equal(some.value, full.value[[4, 1]])
    assert torch.equal(some.terms, full.terms[[4, 1]])


def test_low_precision_inputs_are_not_rounded_again() -> None:
    x = 1 + 2.0**-7
    half = torch.full((1, 1, 1), x, dtype=torch.bfloat16)
    weights = torch.tensor([[0.1]], dtype=torch.float32)
    got = oracle.indexer_scores(half, half[0], weights, one_row(1))
    assert got.value.item() == weights.double().item() * x * x


def select(numbers: list[float], top_k: int) -> list[int]:
    table = torch.tensor([numbers], dtype=torch.float64)
    return oracle.indexer_topk(table, [torch.arange(len(numbers))], top_k=top_k)[0].tolist()


@pytest.mark.parametrize(
    ("numbers", "top_k", "keys"),
    [
        ([1, 3, 2], 1, [1]),
        ([3, 1, 2], 2, [0, 2]),
        ([1, 3, 3, 2, 3], 2, [1, 2]),
        ([1, 3, 3, 2, 3], 4, [1, 2, 3, 4]),
        ([-1, 0, 0, 0, 0, 5], 3, [1, 2, 5]),
        ([-0.0, 0.0, -1], 1, [0]),
        ([-1, 0.0, -0.0], 1, [1]),
        ([2, 1], 5, [0, 1]),
        ([INF, NAN, 5, NAN], 1, [1]),
        ([INF, NAN, 5, NAN], 2, [1, 3]),
        ([INF, NAN, 5, NAN], 3, [0, 1, 3]),
        ([-INF, 0, -INF], 2, [0, 1]),
        ([], 3, []),
    ],
)
def test_selection_by_hand(numbers: list[float], top_k: int, keys: list[int]) -> None:
    assert select(numbers, top_k) == keys


def test_selection_looks_at_visible_keys_only() -> None:
    table = torch.tensor([[9.0, 1.0, 2.0, 9.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    visible = [torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)]
    assert [keys.tolist() for keys in oracle.indexer_topk(table, visible, top_k=1)] == [[2], []]


@given(st.lists(st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.0]), max_size=12), st.integers(1, 13))
def test_selection_is_the_head_of_the_sorted_keys(numbers: list[float], top_k: int) -> None:
    order = sorted(range(len(numbers)), key=lambda j: (not math.isnan(numbers[j]), _descending(numbers[j]), j))
    assert select(numbers, top_k) == sorted(order[:top_k])


def _descending(number: float) -> float:
    return 0.0 if math.isnan(number) else -number
