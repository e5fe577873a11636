"""Numbers of the cases at the edges: near ties, scores and logits far apart, one number that is not finite."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from dsattn.spec.case import WIDE, Bad


def ranks(keys: int) -> Float64[Tensor, " s"]:
    """The numbers 1/s, 2/s, ..., 1 in an order that is the same for every case."""
    order = torch.randperm(keys, generator=torch.Generator("cpu").manual_seed(keys), device="cpu")
    return (order + 1).double() / max(1, keys)


def near(
    index_q: Float64[Tensor, "t h_i d_i"],
    index_k: Float64[Tensor, "s d_i"],
    weights: Float64[Tensor, "t h_i"],
    *,
    grid: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs whose scores are large in a row and differ little from key to key.

    The first three quarters of the columns are the same in all keys and give every dot most of its value; the rest
    differ. On the grid they differ in steps of 1/8, which one head sees, and that one little: so all is exact still.
    """
    same = index_k.shape[1] * 3 // 4
    if grid:
        index_q[..., :same] = index_k[:, :same] = weights[:, 1:] = 1
        index_q[:, 1:, same:] = 0
        index_q[:, 0, same:] = index_q[:, 0, same:].sign() / 8
        weights[:, 0] = 1 / 8
        return index_q, index_k, weights
    index_k[:, :same] = index_k[:1, :same].abs()
    index_k[:, same:] *= 2.0**-12
    return index_q.abs(), index_k, weights.abs() + 1


def wide_scores(
    index_q: Float64[Tensor, "t h_i d_i"], index_k: Float64[Tensor, "s d_i"], weights: Float64[Tensor, "t h_i"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs whose scores at scale 1 are about minus `ranks`: all dots are positive, all weights negative."""
    index_q, weights = index_q.abs(), weights.abs() + 0.5
    weights /= (index_q.sum(-1) * weights).sum(-1, keepdim=True)
    return index_q, _along_ranks(index_k), -weights


def wide_logits(
    q: Float64[Tensor, "t h d_qk"], kv: Float64[Tensor, "s d_qk"], softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Inputs whose logits are about `WIDE` times `ranks`, with numbers of moderate size on both sides."""
    size = (WIDE / softmax_scale) ** 0.5
    q = q.abs()
    return q / q.sum(-1, keepdim=True) * size, _along_ranks(kv) * size


def _along_ranks(keys: Tensor) -> Tensor:
    """Keys that all point one way, nearly, and are as long as their rank."""
    return ranks(len(keys))[:, None] * (1 + 0.01 * keys)


def spoil(bad: Bad, x: Tensor) -> None:
    """Writes the number that is not finite into its input."""
    x[bad.row].view(-1)[bad.column] = bad.value
