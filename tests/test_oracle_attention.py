"""Attention of the oracle against numbers worked out by hand from docs/semantics."""

from __future__ import annotations

import math

import pytest
import torch

from dsattn.spec import oracle

INF, NAN, LN3 = math.inf, math.nan, math.log(3)
BOTH = torch.tensor([0, 1])
NONE = torch.tensor([], dtype=torch.int64)


def f64(numbers: object) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# One row, one head; logits 0 and ln 3 from the second column, values 4 and 8 from the first: probabilities 1/4 and 3/4.
Q, KV = f64([[[0.0, 1.0]]]), f64([[4.0, 0.0], [8.0, LN3]])


def run(sink: float | None = None, q: torch.Tensor = Q, kv: torch.Tensor = KV, scale: float = 1.0) -> dict:
    sinks = None if sink is None else f64([sink])
    return oracle.attention(q, kv, [BOTH], value_dim=1, softmax_scale=scale, sink=sinks, d_out=f64([[[1.0]]]))


def close(got: torch.Tensor, wanted: object) -> None:
    torch.testing.assert_close(got, f64(wanted), rtol=1e-14, atol=1e-14)


def test_forward_without_sink() -> None:
    got = run()
    close(got["out"].value, [[[4 / 4 + 8 * 3 / 4]]])
    close(got["lse"].value, [[math.log(4)]])
    close(got["lse"].terms, [[LN3 + math.log(4)]])


def test_lse_is_a_natural_logarithm() -> None:
    close(run(kv=f64([[4.0, 0.0], [8.0, 0.0]]))["lse"].value, [[0.6931471805599453]])


def test_softmax_scale_multiplies_the_dot_product() -> None:
    close(run(q=2 * Q, scale=0.5)["out"].value, [[[7.0]]])
    close(run(scale=2.0)["out"].value, [[[(4 + 8 * 9) / 10]]])


def test_sink_takes_probability_but_not_part_in_lse() -> None:
    got = run(sink=math.log(4))
    close(got["out"].value, [[[3.5]]])
    close(got["lse"].value, [[math.log(4)]])


def test_a_sink_of_minus_infinity_is_none() -> None:
    none, sunk = run(), run(sink=-INF)
    for name, exact in none.items():
        assert torch.equal(sunk[name].value, exact.value), name
    assert sunk["d_sink"].value.item() == 0
    assert "d_sink" not in none


def test_a_large_sink_takes_everything() -> None:
    got = run(sink=1e4)
    assert got["out"].value.item() == 0
    assert all(exact.value.isfinite().all() for exact in got.values())


def test_a_sink_of_zero_is_one_more_key_of_logit_zero() -> None:
    close(run(sink=0.0)["out"].value, [[[4 / 5 + 8 * 3 / 5]]])


def test_gradients_without_sink() -> None:
    # d_prob = (4, 8), their mean 7, d_logit = (1/4 * -3, 3/4 * 1).
    got = run()
    close(got["d_q"].value, [[[-0.75 * 4 + 0.75 * 8, 0.75 * LN3]]])
    close(got["d_kv"].value, [[0.25, -0.75], [0.75, 0.75]])


def test_gradients_with_sink() -> None:
    # Probabilities 1/8, 3/8 and 1/2 of the sink; mean 3.5, d_logit = (1/8 * 0.5, 3/8 * 4.5).
    got = run(sink=math.log(4))
    close(got["d_q"].value, [[[0.0625 * 4 + 1.6875 * 8, 1.6875 * LN3]]])
    close(got["d_kv"].value, [[0.125, 0.0625], [0.375, 1.6875]])
    close(got["d_sink"].value, [-0.5 * 3.5])
    close(got["d_sink"].terms, [0.5 * 3.5])


def test_gradients_carry_the_softmax_scale() -> None:
    # The same logits from a key twice as long at half the scale: the gradient of q stays, that of the keys halves.
    got = run(kv=f64([[4.0, 0.0], [8.0, 2 * LN3]]), scale=0.5)
    close(got["d_q"].value, [[[0.5 * (-0.75 * 4 + 0.75 * 8), 0.75 * LN3]]])
    close(got["d_q"].terms, [[[0.5 * (11 / 4 * 4 + 45 / 4 * 8), 45 / 4 * LN3]]])
    close(got["d_kv"].terms, [[0.25, 0.5 * 11 / 4], [0.75, 0.5 * 45 / 4]])
    close(got["d_kv"].value, [[0.25, 0.5 * -0.75], [0.75, 0.5 * 0.75]])


def test_terms_are_sums_of_absolute_values() -> None:
    # Values 4 and -8: d_prob = (4, -8), mean -5, |d_prob| = (4, 8), mean of those 7.
    got = run(kv=f64([[4.0, 0.0], [-8.0, LN3]]))
    close(got["out"].value, [[[-5.0]]])
    close(got["out"].terms, [[[7.0]]])
    d_logit, terms = (0.25 * 9, 0.75 * -3), (0.25 * 11, 0.75 * 15)
    close(got["d_q"].value, [[[4 * d_logit[0] - 8 * d_logit[1], LN3 * d_logit[1]]]])
    close(got["d_q"].terms, [[[4 * terms[0] + 8 * terms[1], LN3 * terms[1]]]])
    close(got["d_kv"].terms, [[0.25, terms[0]], [0.75, terms[1]]])


def test_a_row_with_one_key_has_exactly_zero_gradients_of_its_logit() -> None:
    torch.manual_seed(0)
    q, kv, d_out = torch.randn(1, 3, 5), torch.randn(2, 5), torch.randn(1, 3, 4)
    got = oracle.attention(q, kv, [torch.tensor([1])], value_dim=4, softmax_scale=0.3, d_out=d_out)
    assert torch.equal(got["out"].value, kv[1, :4].double().expand(1, 3, 4))
    assert not got["d_q"].value.any()
    torch.testing.assert_close(got["d_kv"].value[1, :4], d_out[0].double().sum(0))
    assert not got["d_kv"].value[0].any()


def test_an_empty_row_is_zero_and_touches_nothing() -> None:
    got = oracle.attention(
        torch.full((2, 1, 2), NAN, dtype=torch.float64),
        KV,
        [NONE, NONE],
        value_dim=1,
        softmax_scale=1.0,
        sink=f64([0.0]),
        d_out=f64([[[1.0]], [[1.0]]]),
    )
    assert got["lse"].value.tolist() == [[-INF], [-INF]]
    for name in ("out", "d_q", "d_kv", "d_sink"):
        assert not got[name].value.any(), name
    assert not any(exact.terms.any() for exact in got.values())


def test_heads_share_the_key_row_and_rows_add_to_its_gradient() -> None:
    q, d_out = Q.expand(3, 2, 2), torch.ones(3, 2, 1, dtype=torch.float64)
    got = oracle.attention(q, KV, [BOTH, NONE, BOTH], value_dim=1, softmax_scale=1.0, d_out=d_out)
    close(got["d_kv"].value, [[4 * 0.25, 4 * -0.75], [4 * 0.75, 4 * 0.75]])
    close(got["out"].value, [[[7.0]] * 2, [[0.0]] * 2, [[7.0]] * 2])


def test_sinks_belong_to_heads_and_rows_add_to_their_gradient() -> None:
    q, d_out = Q.expand(2, 2, 2), torch.ones(2, 2, 1, dtype=torch.float64)
    sink = f64([math.log(4), -INF])
    got = oracle.attention(q, KV, [BOTH, BOTH], value_dim=1, softmax_scale=1.0, sink=sink, d_out=d_out)
    close(got["out"].value, [[[3.5], [7.0]]] * 2)
    close(got["d_sink"].value, [-3.5, 0.0])


def poisoned(place: str, number: float) -> tuple[dict, dict]:
    """Three rows over three keys, row 1 alone with key 2; (clean, with a number in key 2 or in the query of row 1)."""
    torch.manual_seed(0)
    q, kv, d_out = torch.randn(3, 2, 4).double(), torch.randn(3, 4).double(), torch.randn(3, 2, 3).double()
    support = [BOTH, torch.tensor([1, 2]), BOTH]
    clean = oracle.attention(q, kv, support, value_dim=3, softmax_scale=1.0, d_out=d_out)
    {"q": q[1, 0], "kv": kv[2]}[place][0] = number
    return clean, oracle.attention(q, kv, support, value_dim=3, softmax_scale=1.0, d_out=d_out)


@pytest.mark.parametrize("number", [NAN, INF])
@pytest.mark.parametrize("place", ["q", "kv"])
def test_a_bad_number_stays_with_its_rows_and_their_keys(place: str, number: float) -> None:
    clean, got = poisoned(place, number)
    for name in ("out", "lse", "d_q"):
        assert torch.equal(got[name].value[[0, 2]], clean[name].value[[0, 2]]), name
        assert not got[name].value[1].isfinite().all(), name
    assert torch.equal(got["d_kv"].value[0], clean["d_kv"].value[0])
    assert not got["d_kv"].value[1].isfinite().all()
    if place == "q":
        assert torch.equal(got["out"].value[1, 1], clean["out"].value[1, 1])


def test_an_infinite_logit_gives_an_infinite_lse_and_nan_out() -> None:
    got = run(kv=f64([[4.0, 0.0], [8.0, INF]]))
    assert got["lse"].value.item() == INF
    assert got["out"].value.isnan().all()


def test_results_are_float64_for_every_input() -> None:
    got = oracle.attention(
        Q.bfloat16(), KV.bfloat16(), [BOTH], value_dim=1, softmax_scale=1.0, d_out=torch.ones(1, 1, 1).bfloat16()
    )
    assert {exact.value.dtype for exact in got.values()} == {torch.float64}
    third = KV.bfloat16().double()[1, 1].item()
    close(got["lse"].value, [[math.log(1 + math.exp(third))]])
