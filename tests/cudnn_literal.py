"""Literal formulas, by loops over rows, heads and keys, that the simulated frontend is held against."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

RELEASES = ("1.24.0", "1.25.0", "1.26.0", "1.27.0", "1.28.0", "1.29.0", "1.29.1", "1.30.0", "1.31.0", "1.32.0")
ARCHS = ("sm90", "sm100")


def grid(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random multiples of 1/8 in [-1, 1]: their products and sums are exact in fp32."""
    rng = torch.Generator(device="cpu").manual_seed(seed)
    return (torch.randint(-8, 9, shape, generator=rng, device="cpu") / 8).to(dtype)


def score(q: Tensor, key: Tensor, weights: Tensor, scale: float = 1.0) -> float:
    """scale * sum_h w_h relu(q_h . k) of one row (q [heads, width], weights [heads]) and one key [width]."""
    total = 0.0
    for h in range(q.shape[0]):
        total += float(weights[h]) * max(0.0, float(q[h].double() @ key.double()))
    return scale * total


def mass(q: Tensor, key: Tensor, lse: Tensor, scale: float) -> float:
    """sum_h exp(scale q_h . k - lse_h) of one row and one key."""
    return sum(math.exp(scale * float(q[h].double() @ key.double()) - float(lse[h])) for h in range(q.shape[0]))


def visible_keys(row: int, offset: int, ratio: int, keys: int) -> int:
    """How many keys a row sees."""
    return min(max((offset + row + 1) // ratio, 0), keys)


def scores(q: Tensor, k: Tensor, w: Tensor, offset: int, ratio: int = 1, scale: float = 1.0) -> Tensor:
    """Dense scores [rows, keys] of one sequence, -inf where masked; k [keys, width]."""
    table = torch.full((q.shape[0], k.shape[0]), -math.inf, device="cpu")
    for i in range(q.shape[0]):
        for j in range(visible_keys(i, offset, ratio, k.shape[0])):
            table[i, j] = score(q[i], k[j], w[i], scale)
    return table


def loss_gradient(target: Tensor, predict: Tensor, factor: float) -> Tensor:
    """Gradient of factor * KL(target || predict) by the logits of one row, with the kernels' clips."""
    terms = [
        -max(float(t), math.exp(-100)) * factor if float(p) >= math.exp(-100) else 0.0
        for t, p in zip(target, predict, strict=True)
    ]
    return torch.tensor([g - float(p) * sum(terms) for g, p in zip(terms, predict, strict=True)], device="cpu")


def indexer_gradients(
    q: Tensor, k: Tensor, w: Tensor, d_scores: Tensor, ids: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [rows, heads, width], w [rows, heads], k [keys, width] for slots ids [rows, slots], -1 unused."""
    d_q, d_w, d_k = (torch.zeros(x.shape, dtype=torch.float64, device="cpu") for x in (q, w, k))
    q, k, w = q.double(), k.double(), w.double()
    for i in range(q.shape[0]):
        for slot in range(ids.shape[1]):
            key, g = int(ids[i, slot]), float(d_scores[i, slot])
            if key < 0 or g == 0:
                continue
            products = scale * (q[i] @ k[key])
            open_heads = products > 0
            d_w[i] += g * products.clamp(min=0)
            d_q[i] += scale * g * (w[i] * open_heads)[:, None] * k[key]
            d_k[key] += scale * g * ((w[i] * open_heads)[:, None] * q[i]).sum(0)
    return d_q, d_w, d_k


def error(got: Tensor, wanted: Tensor) -> float:
    """Relative error in the norm; 1 for a zero result, infinite for NaN."""
    got, wanted = got.double(), wanted.double()
    if not bool(torch.isfinite(got).all()):
        return math.inf
    return float((got - wanted).norm() / wanted.norm().clamp(min=1e-300))


def parameters(signature: Any) -> dict[str, Any]:
    """Name -> default of a signature, in its order."""
    return {name: parameter.default for name, parameter in signature.parameters.items()}
