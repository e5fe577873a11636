"""The plain operators against the oracle: other formulas, and autograd against gradients made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn.errors import BadInput
from dsattn.layouts import CausalLayout, Segment
from dsattn.spec import oracle, plain

T, S, HEADS, WIDTH, VALUE = 11, 9, 4, 6, 4
SUPPORT = [torch.arange(S)[i % 3 :: 2][: (i * 5) % 7] for i in range(T)]
LAYOUT = CausalLayout.from_segments([Segment(0, 5, 0, 6, 1), Segment(6, 4, 3, 6, -1)], num_q=T, num_k=S)


def make(dtype: torch.dtype = torch.float64, weights: torch.dtype | None = None) -> dict[str, Tensor]:
    return {
        "index_q": torch.randn(T, 3, 5).to(dtype),
        "index_k": torch.randn(S, 5).to(dtype),
        "weights": torch.randn(T, 3).to(weights or dtype),
        "q": torch.randn(T, HEADS, WIDTH).to(dtype),
        "kv": torch.randn(S, WIDTH).to(dtype),
    }


def attend(module: Any, x: dict[str, Tensor], sink: Tensor | None, support: Any = SUPPORT, **options: Any) -> dict:
    d_out = torch.sin(torch.arange(T * HEADS * VALUE)).view(T, HEADS, VALUE).to(x["q"].dtype)
    return module.attention(
        x["q"], x["kv"], support, value_dim=VALUE, softmax_scale=0.7, sink=sink, **{"d_out": d_out, **options}
    )


def lose(module: Any, x: dict[str, Tensor], support: Any = SUPPORT, **options: Any) -> dict:
    return module.indexer_loss(**x, support=support, softmax_scale=0.7, scale=0.6, **options)


def agree(got: dict[str, Tensor], exact: dict[str, oracle.Exact], tolerance: float = 1e-10) -> None:
    assert set(got) == set(exact)
    for name, wanted in exact.items():
        torch.testing.assert_close(got[name].double(), wanted.value, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("sink", [None, [0.0, 1.0, -2.0, 50.0], [-torch.inf] * 4], ids=["none", "some", "-inf"])
def test_attention_in_float64(sink: list[float] | None) -> None:
    x, sinks = make(), None if sink is None else torch.tensor(sink, dtype=torch.float64)
    agree(attend(plain, x, sinks), attend(oracle, x, sinks))
    assert set(attend(plain, x, sinks, d_out=None)) == {"out", "lse"}


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "coeff": 0.3},
        {"num_rows": 5},
        {"num_rows": torch.tensor(5)},
        {"row_mask": torch.arange(T) % 3 > 0},
        {"row_mask": torch.zeros(T, dtype=torch.bool)},
        {"coeff": 0.0},
        {"teacher": [torch.cos(keys.double()).abs() * (keys != 4) for keys in SUPPORT]},
    ],
    ids=["mean", "sum", "num_rows", "num_rows-tensor", "mask", "no-rows", "zero", "teacher"],
)
def test_loss_in_float64(relu: bool, options: dict[str, Any]) -> None:
    x = make()
    agree(lose(plain, x, relu=relu, **options), lose(oracle, x, relu=relu, **options))


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("rows", [None, [7, 0, 5]])
def test_scores_in_float64(relu: bool, rows: list[int] | None) -> None:
    x = make()
    inputs = x["index_q"], x["index_k"], x["weights"], LAYOUT
    got = plain.indexer_scores(*inputs, scale=0.3, relu=relu, rows=rows)
    torch.testing.assert_close(
        got, oracle.indexer_scores(*inputs, scale=0.3, relu=relu, rows=rows).value, rtol=1e-12, atol=1e-12
    )


def test_scores_have_no_negative_zero() -> None:
    x = make()
    for scale in (1.0, -1.0):
        got = plain.indexer_scores(x["index_q"] * 0, x["index_k"], -x["weights"].abs(), LAYOUT, scale=scale)
        assert (got == 0).any()
        assert not torch.signbit(got[got == 0]).any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_low_precision_inputs(dtype: torch.dtype, tolerance: float) -> None:
    x, sink = make(dtype, torch.float32), torch.randn(HEADS)
    attention, loss = attend(plain, x, sink), lose(plain, x)
    agree(attention, attend(oracle, x, sink), tolerance)
    agree(loss, lose(oracle, x), tolerance)
    scores = plain.indexer_scores(x["index_q"], x["index_k"], x["weights"], LAYOUT)
    table = {**attention, **loss, "scores": scores}
    single = {"lse", "d_sink", "loss", "d_weights", "scores"}
    assert {name: x.dtype for name, x in table.items()} == {
        name: torch.float32 if name in single else dtype for name in table
    }


def test_low_precision_products_are_not_rounded() -> None:
    """bf16 inputs: scores, lse and loss are as exact as fp32 makes them."""
    x = make(torch.bfloat16)
    torch.testing.assert_close(lose(plain, x)["loss"].double(), lose(oracle, x)["loss"].value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        attend(plain, x, None)["lse"].double(), attend(oracle, x, None)["lse"].value, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("name", "size"), [("BLOCK_ROWS", 2), ("BLOCK_ELEMENTS", 150)])
def test_blocks_do_not_change_the_result(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, sink = make(), torch.randn(HEADS, dtype=torch.float64)
    inputs = x["index_q"], x["index_k"], x["weights"], LAYOUT
    whole, scores = {**attend(plain, x, sink), **lose(plain, x)}, plain.indexer_scores(*inputs)
    monkeypatch.setattr(plain, name, size)
    parts = {**attend(plain, x, sink), **lose(plain, x)}
    for key, value in whole.items():
        torch.testing.assert_close(parts[key], value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plain.indexer_scores(*inputs), scores, rtol=1e-12, atol=1e-12)


def test_sampled_rows_take_blocks_of_sampled_rows_only() -> None:
    """One row of a thousand, the last: its block holds nothing of the others."""
    support = [torch.tensor([], dtype=torch.int64)] * 1000 + [torch.tensor([1, 2])]
    (rows, ids, mask), *others = plain._blocks(support, 10, torch.device("cpu"))
    assert not others
    assert (rows.tolist(), ids.tolist(), mask.tolist()) == ([1000], [[1, 2]], [[True, True]])


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["q", "kv", "index_q", "index_k"])
def test_bad_numbers_stand_where_the_oracle_has_them(number: float, place: str) -> None:
    x = make()
    x[place].view(-1)[7] = number
    agree(attend(plain, x, None), attend(oracle, x, None))
    # An infinite index makes inf * 0 in gradients; which of them autograd leaves out is its own affair.
    names = {"loss"} if number == torch.inf and place.startswith("index") else set(lose(oracle, x))
    got, exact = lose(plain, x), lose(oracle, x)
    agree({name: got[name] for name in names}, {name: exact[name] for name in names})


def test_coefficient_zero_is_zero_whatever_the_inputs_hold() -> None:
    x = {name: torch.full_like(value, torch.nan) for name, value in make().items()}
    assert not any(value.any() for value in lose(plain, x, coeff=0.0).values())


def test_gradients_are_taken_under_no_grad_too() -> None:
    x = make()
    with torch.no_grad():
        agree(attend(plain, x, None), attend(oracle, x, None))
        agree(lose(plain, x), lose(oracle, x))


def test_unknown_reduction() -> None:
    with pytest.raises(BadInput, match="reduction"):
        lose(plain, make(), reduction="average")
