"""The arithmetic of the simulated kernels, in fp32 from the values of their inputs: products, loss gradient, gradients.

Every sum over heads runs in an order that the seed decides, and sums that a GPU makes with atomics in another one at
each call.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsattn.backends.cudnn.simulator.state import Simulated, blocks

# Below this probability the kernels drop the logarithm's term; no target counts as less.
LOG_CLIP = -100.0
CLIP = math.exp(LOG_CLIP)


def relu(x: Tensor) -> Tensor:
    """The positive part as the kernels take it: by a comparison, which turns NaN into 0."""
    return torch.where(x > 0, x, 0.0)


def indexer_scores(sim: Simulated, q: Tensor, k: Tensor, w: Tensor, scale: float) -> Tensor:
    """Scores scale * sum_h w_h relu(q_h . k), fp32 [rows, keys].

    Args:
        sim: the release.
        q: [rows, heads, width].
        k: [keys, width], or a set of keys for each row: [rows, keys, width].
        w: [rows, heads].
        scale: multiplies the sum over the heads.
    """
    heads = sim.order(q.shape[1])
    q, k, w = q[:, heads].float(), k.float(), w[:, heads].float()
    scores = torch.empty(q.shape[0], k.shape[-2], dtype=torch.float32, device="cpu")
    for rows in blocks(q.shape[0], q.shape[1] * k.shape[-2]):
        products = relu(q[rows] @ (k if k.ndim == 2 else k[rows]).mT)
        scores[rows] = torch.bmm(w[rows, None], products)[:, 0] * scale
    # A sum that is exactly 0 may come out as -0 when a weight is negative; which one, no release promises.
    negative = (sim.order(scores.shape[1]) % 2 == 0) & (w < 0).any(1, keepdim=True)
    return torch.where(scores == 0, torch.where(negative, -0.0, 0.0), scores)


def attention_mass(sim: Simulated, q: Tensor, k: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Probabilities exp(scale q_h . k - lse_h) summed over the heads, fp32 [rows, keys]; shapes as `indexer_scores`."""
    heads = sim.order(q.shape[1])
    q, k, lse = q[:, heads].float(), k.float(), lse[:, heads].float()
    mass = torch.empty(q.shape[0], k.shape[-2], dtype=torch.float32, device="cpu")
    for rows in blocks(q.shape[0], q.shape[1] * k.shape[-2]):
        products = q[rows] @ (k if k.ndim == 2 else k[rows]).mT
        mass[rows] = torch.exp(scale * products - lse[rows, :, None]).sum(1)
    return mass


def loss_gradient(target: Tensor, predict: Tensor, counted: Tensor, factor: float) -> Tensor:
    """Gradient of factor * KL(target || predict) with respect to the logits of `predict`, [rows, slots].

    Args:
        target: teacher probabilities.
        predict: student probabilities.
        counted: the slots whose logarithm takes part.
        factor: the divisor and the coefficients of the loss.
    """
    # Written as a comparison, since the kernels give a NaN target the smallest value too.
    teacher = torch.where(target >= CLIP, target, CLIP)
    term = torch.where(counted, -teacher * factor, 0.0)
    return term - predict * term.sum(-1, keepdim=True)


def indexer_gradients(
    sim: Simulated,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    d_scores: Tensor,
    scale: float,
    ids: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, w and k for gradients of the scores scale * sum_h w_h relu(q_h . k), all fp32.

    Args:
        sim: the release.
        q: [rows, heads, width].
        k: [keys, width].
        w: [rows, heads].
        d_scores: [rows, keys], or [rows, slots] with `ids`.
        scale: as in the scores; the gate is that scale * q . k is positive.
        ids: the key of each slot, [rows, slots]; a negative one has no key and no part.
        deterministic: add up the keys in the same order at each call.
    """
    order_of = sim.order if deterministic else sim.shuffled
    q, k, w = q.float(), k.float(), w.float()
    d_q, d_w, d_k = torch.zeros_like(q), torch.zeros_like(w), torch.zeros_like(k)
    if ids is not None:
        d_scores = torch.where(ids >= 0, d_scores, 0.0)
    slots = d_scores.shape[1]
    parts = list(blocks(q.shape[0], slots * (q.shape[1] + k.shape[1])))
    for i in order_of(len(parts)).tolist():
        rows = parts[i]
        keys = k if ids is None else torch.where(ids[rows, :, None] >= 0, k[ids[rows].clamp(min=0)], 0.0)
        scaled = scale * (q[rows] @ keys.mT)
        d_w[rows] = torch.einsum("rhs,rs->rh", relu(scaled), d_scores[rows])
        d_products = torch.where(scaled > 0, scale * w[rows, :, None] * d_scores[rows, None], 0.0)
        d_products = sim.factor(d_products)
        d_q[rows] = d_products @ keys
        if ids is None:
            order = order_of(rows.stop - rows.start)
            d_k += d_products[order].flatten(0, 1).T @ q[rows][order].flatten(0, 1)
        else:
            order = order_of((rows.stop - rows.start) * slots)
            terms = (d_products.mT @ q[rows]).flatten(0, 1)[order]
            at = ids[rows].flatten()[order]
            d_k.index_add_(0, at[at >= 0], terms[at >= 0])
    return d_q, d_w, d_k


def mix_two_rows(sim: Simulated, table: Tensor) -> None:
    """Let the content of one row get into another, as an unguarded staging buffer does."""
    touched = (table != 0).any(1).nonzero()[:, 0]
    if len(touched) > 1:
        first, second = touched[sim.shuffled(len(touched))[:2]]
        table[first] += table[second]
