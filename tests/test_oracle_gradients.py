"""Every gradient that the oracle writes out by hand, against finite differences of its own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn.spec import oracle

# Row 1 sees nothing, rows 0 and 3 share keys, key 4 is never seen.
SUPPORT = [torch.tensor(keys, dtype=torch.int64) for keys in ([0, 1, 3], [], [2], [0, 2, 3])]
STRICT = {"rtol": 1e-6, "atol": 1e-8}


class Attention(torch.autograd.Function):
    """`out` of the oracle with the oracle's own gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, sink: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, kv, sink)
        return oracle.attention(q, kv, SUPPORT, value_dim=2, softmax_scale=0.7, sink=sink)["out"].value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, kv, sink = ctx.saved_tensors
        got = oracle.attention(q, kv, SUPPORT, value_dim=2, softmax_scale=0.7, sink=sink, d_out=grads[0])
        return got["d_q"].value, got["d_kv"].value, None if sink is None else got["d_sink"].value


class Loss(torch.autograd.Function):
    """The loss of the oracle with the oracle's own gradients."""

    @staticmethod
    def forward(ctx: Any, index_q: Tensor, index_k: Tensor, weights: Tensor, options: dict[str, Any]) -> Tensor:
        got = oracle.indexer_loss(index_q, index_k, weights, **options)
        ctx.save_for_backward(*(got[f"d_{name}"].value for name in ("index_q", "index_k", "weights")))
        return got["loss"].value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *(grads[0] * gradient for gradient in ctx.saved_tensors), None


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("sink", [None, "learned", "-inf"])
def test_attention(sink: str | None) -> None:
    sinks = {None: None, "learned": randn(2), "-inf": torch.full((2,), -torch.inf, dtype=torch.float64)}[sink]
    learned = () if sinks is None or not sinks.requires_grad else (sinks,)

    def out(q: Tensor, kv: Tensor, *learned: Tensor) -> Tensor:
        return Attention.apply(q, kv, learned[0] if learned else sinks)

    assert torch.autograd.gradcheck(out, (randn(4, 2, 3), randn(5, 3), *learned), **STRICT)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"reduction": "sum", "coeff": 0.3},
        {"num_rows": 7, "row_mask": torch.tensor([True, True, False, True])},
        {"teacher": [torch.tensor(row, dtype=torch.float64) for row in ([0.2, 0.0, 3.0], [], [2.0], [1.0, 1.0, 5.0])]},
    ],
    ids=["mean", "sum", "num_rows", "teacher"],
)
def test_loss(relu: bool, extra: dict[str, Any]) -> None:
    options: dict[str, Any] = {
        "q": randn(4, 2, 3).detach(),
        "kv": randn(5, 3).detach(),
        "support": SUPPORT,
        "softmax_scale": 0.7,
    }
    inputs = randn(4, 3, 2), randn(5, 2), randn(4, 3)
    options |= {"scale": 1.3, "relu": relu, **extra}
    assert torch.autograd.gradcheck(lambda *x: Loss.apply(*x, options), inputs, **STRICT)


def test_gradcheck_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    good = oracle.attention

    def scaled(*args: Any, **options: Any) -> dict[str, oracle.Exact]:
        got = good(*args, **options)
        return {
            name: oracle.Exact(exact.value * (1.00001 if name == "d_sink" else 1), exact.terms)
            for name, exact in got.items()
        }

    monkeypatch.setattr(oracle, "attention", scaled)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(Attention.apply, (randn(4, 2, 3), randn(5, 3), randn(2)), **STRICT)
