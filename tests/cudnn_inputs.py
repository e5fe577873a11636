"""Inputs of the simulated frontend's backward and attention wrappers, and the gradients that they must give."""

from __future__ import annotations

import math
from typing import Any

import torch
from cudnn_literal import grid, indexer_gradients, loss_gradient, mass, scores, visible_keys
from torch import Tensor

NONE = -math.inf
SLOTS, HEADS, WIDTH, KEYS = 128, 64, 16, 6


def sparse_inputs(batch: int = 2, rows: int = 3, keys: int = KEYS, heads: int = HEADS) -> dict[str, Tensor]:
    """Each row selects four local keys; target and predict are probabilities over them, 0 in unused slots."""
    rng = torch.Generator(device="cpu").manual_seed(5)
    local = torch.full((batch, rows, SLOTS), -1, dtype=torch.int32)
    target, predict = torch.zeros(batch, rows, SLOTS), torch.zeros(batch, rows, SLOTS)
    for b in range(batch):
        for row in range(rows):
            local[b, row, :4] = torch.randperm(keys, generator=rng)[:4]
            target[b, row, :4] = torch.rand(4, generator=rng).softmax(0)
            predict[b, row, :4] = torch.rand(4, generator=rng).softmax(0)
    return {
        "index_q": grid(batch, rows, heads, WIDTH),
        "weights": grid(batch, rows, heads, seed=1) / 8,
        "index_k": grid(batch, keys, WIDTH, seed=2),
        "attn_score": target,
        "index_score": predict,
        "topk_indices": local,
    }


def flat(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same call with ids b * keys + local."""
    begin = torch.arange(x["index_k"].shape[0])[:, None, None] * x["index_k"].shape[1]
    ids = torch.where(x["topk_indices"] >= 0, x["topk_indices"] + begin, -1)
    return {**x, "topk_indices": ids.int()}


def sparse_gradients(x: dict[str, Tensor], factor: float, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Gradients for flat ids, each flat over the batch."""
    x = {name: value.flatten(0, 1) for name, value in x.items()}
    d_scores = torch.stack(
        [loss_gradient(t, p, factor) for t, p in zip(x["attn_score"], x["index_score"], strict=True)]
    )
    d_q, d_w, d_k = indexer_gradients(x["index_q"], x["index_k"], x["weights"], d_scores, x["topk_indices"], scale)
    return d_q, d_w, d_k


ROWS, DENSE_KEYS = 3, 7


def dense_inputs(offset: int, ratio: int = 1) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Raw scores as the recomputation gives them, garbage where they are masked, and the two distributions."""
    q, k, w = grid(1, ROWS, HEADS, WIDTH), grid(1, DENSE_KEYS, WIDTH, seed=1), grid(1, ROWS, HEADS, seed=2) / 8
    raw = scores(q[0], k[0], w[0], offset, ratio)
    attention = torch.zeros(ROWS, DENSE_KEYS)
    for row in range(ROWS):
        for j in range(visible_keys(row, offset, ratio, DENSE_KEYS)):
            attention[row, j] = mass(q[0, row, :2], k[0, j], torch.ones(2), 0.25)
    lse, norm = raw.logsumexp(1), attention.sum(1)
    masked = raw.isinf()
    x = {
        "index_q": q,
        "weights": w,
        "index_k": k,
        "attn_score": attention.masked_fill(masked, math.nan)[None],
        "attn_l1norm": norm[None],
        "index_score": raw.masked_fill(masked, math.nan)[None],
        "index_lse": lse[None],
    }
    return x, attention / norm.clamp(min=1e-30)[:, None], raw.softmax(1).nan_to_num(0.0)


def dense_gradients(x: dict[str, Tensor], target: Tensor, predict: Tensor, factor: float) -> tuple[Tensor, ...]:
    d_scores = torch.stack([loss_gradient(t, p, factor) for t, p in zip(target, predict, strict=True)])
    ids = torch.arange(DENSE_KEYS).expand(ROWS, DENSE_KEYS)
    return indexer_gradients(x["index_q"][0], x["index_k"][0], x["weights"][0], d_scores, ids)


def ids_of(*rows: list[int], width: int = 4) -> Tensor:
    table = torch.full((len(rows), width), -1, dtype=torch.int32, device="cpu")
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return table


def reference(q: Tensor, kv: Tensor, ids: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Output with the sink, log-sum-exp without it, the largest logit; float64, row by row; differentiable."""
    outs, lses, peaks = [], [], []
    for row in range(q.shape[0]):
        keys = kv[ids[row][ids[row] >= 0].long()]
        if len(keys) == 0:
            outs.append(torch.zeros(q.shape[1], 512, dtype=torch.float64))
            lses.append(torch.full((q.shape[1],), NONE, dtype=torch.float64))
            peaks.append(torch.full((q.shape[1],), NONE, dtype=torch.float64))
            continue
        logits = scale * q[row] @ keys.T
        lse = logits.logsumexp(1)
        p = torch.exp(logits - torch.logaddexp(lse, sink)[:, None])
        outs.append(p @ keys[:, :512])
        lses.append(lse)
        peaks.append(logits.amax(1))
    return torch.stack(outs), torch.stack(lses), torch.stack(peaks)


def attention_inputs(
    ids: Tensor, *, heads: int = 64, width: int = 512, keys: int = 7, sink: float | None = 0.5
) -> tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor]]:
    """A call of the backward, and the gradients of q, kv and the sink that it must give."""
    rows = ids.shape[0]
    q, kv = grid(rows, heads, width) / 4, grid(keys, width, seed=1)
    values = torch.full((heads,), NONE if sink is None else sink) + (0 if sink is None else torch.linspace(0, 1, heads))
    leaves = [tensor.double().requires_grad_() for tensor in (q, kv, values)]
    out, lse, _ = reference(leaves[0], leaves[1], ids, leaves[2], width**-0.5)
    d_out = grid(rows, heads, 512, seed=2)
    # The kernels take the output rounded; the gradient is the one for what they are given.
    rounded = out.detach().bfloat16()
    gradients = torch.autograd.grad((out * d_out.double()).sum(), leaves)
    lse = lse.detach().float()
    call = {
        "q": q,
        "kv": kv,
        "out": rounded,
        "dout": d_out,
        "lse": torch.where(lse == NONE, math.inf, lse),
        "attn_sink": values,
        "topk_idxs": ids,
    }
    return call, (gradients[0], gradients[1], gradients[2])
