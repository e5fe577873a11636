"""Attention over selected or over all visible keys, forward and backward.

logit[i, h, j] = softmax_scale * q[i, h] . kv[j]          lse[i, h] = log sum_j exp logit
out[i, h] = sum_j exp(logit - logaddexp(lse, sink_h)) * kv[j, :d_v]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from dsattn.ops.blocks import Block, on_one_thread, run_blocks
from dsattn.ops.inputs import AttentionInputs
from dsattn.ops.numerics import exact_products
from dsattn.ops.products import head_dots, mix_keys, mix_queries
from dsattn.ops.softmax import masked_softmax, unseen_or_none
from dsattn.ops.support import Support, accumulate


def attention_probabilities(
    x: AttentionInputs, queries: Float[Tensor, "c h d_qk"], keys: Tensor, seen: Bool[Tensor, "c n"]
) -> tuple[Float[Tensor, "c h n"], Float[Tensor, "c h"]]:
    """Softmax over each row's keys without the sink, and its log-sum-exp."""
    logits = _dots(x, queries, keys).mul_(x.softmax_scale)
    return masked_softmax(logits, seen[:, None, :])


def _dots(x: AttentionInputs, queries: Float[Tensor, "c h d"], keys: Tensor) -> Float[Tensor, "c h n"]:
    return head_dots(queries, keys, short_sums=x.kv.dtype == torch.float32)


def _blocks(x: AttentionInputs, support: Support, tables: int = 1) -> Sequence[Block]:
    """Blocks of rows whose logits [c, h, n], `tables` of them in one buffer, and gathered keys fit the budget."""
    return support.blocks(tables * x.q.shape[1] * x.dtype.itemsize, x.kv.shape[1] * x.dtype.itemsize)


def attend(x: AttentionInputs, support: Support) -> tuple[Float[Tensor, "t h d_v"], Float[Tensor, "t h"]]:
    """Output in kv's dtype and natural log-sum-exp (sink excluded) in the dtype of sums.

    Semantics: a row with no key gives output 0 and log-sum-exp -inf; unused slots read no key row.
    """
    t, heads, _ = x.q.shape
    out = torch.zeros(t, heads, x.value_dim, dtype=x.kv.dtype, device=x.q.device)
    lse = torch.full((t, heads), -torch.inf, dtype=x.dtype, device=x.q.device)

    def work(block: Block) -> None:
        rows = slice(block.q_begin, block.q_end)
        seen, keys = support.seen(block), support.keys(block, x.kv, x.dtype)
        weights, lse[rows] = attention_probabilities(x, x.q[rows].to(x.dtype), keys, seen)
        if x.sink is not None:
            weights *= _kept_by_sink(lse[rows], x.sink)[:, :, None]
        out[rows] = mix_keys(weights, keys, seen, x.value_dim)

    with exact_products(x.q.device):
        run_blocks(work, _blocks(x, support), x.q.device)
    return out, lse


def attend_backward(
    x: AttentionInputs, support: Support, d_out: Float[Tensor, "t h d_v"]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of q, kv and sink (None without one), in their dtypes; logits are computed again."""
    width = x.kv.shape[1]
    d_q = torch.zeros_like(x.q, memory_format=torch.contiguous_format)
    # Summed over rows at the end, so that the order of the sum does not depend on threads.
    d_row_sink = torch.zeros(x.q.shape[:2], dtype=x.dtype, device=x.q.device) if x.sink is not None else None

    def work(block: Block, totals: Sequence[Tensor]) -> None:
        rows = slice(block.q_begin, block.q_end)
        queries, d_block = x.q[rows].to(x.dtype), d_out[rows].to(x.dtype)
        seen, keys = support.seen(block), support.keys(block, x.kv, x.dtype)
        weights, lse = attention_probabilities(x, queries, keys, seen)
        unseen = unseen_or_none(seen[:, None, :])
        # 0 * NaN and 0 * inf are NaN: what a row does not see is set to 0, never multiplied to 0.
        if x.sink is not None:
            weights = _zero(weights.mul_(_kept_by_sink(lse, x.sink)[:, :, None]), unseen)
        d_weights = _zero(_dots(x, d_block, keys[..., : x.value_dim]), unseen)
        delta = (weights * d_weights).sum(-1)
        if d_row_sink is not None and x.sink is not None:
            d_row_sink[rows] = -taken_by_sink(lse, x.sink) * delta
        d_dots = _zero(d_weights.sub_(delta[:, :, None]).mul_(weights).mul_(x.softmax_scale), unseen)
        d_q[rows] = mix_keys(d_dots, keys, seen)
        # One product for both: a key's gradient is written once.
        factors = torch.cat([d_dots, weights], 1)
        sources = torch.cat([queries, pad(d_block, (0, width - x.value_dim))], 1)
        support.add(block, totals[0], mix_queries(factors, sources, seen, support.shared))

    with exact_products(x.q.device):
        blocks = _blocks(x, support, 2)
        (d_kv,) = accumulate(support, blocks, [width], x.dtype, x.q.device, work)
    d_sink = (
        None
        if x.sink is None or d_row_sink is None
        else on_one_thread(lambda: d_row_sink.sum(0), x.q.device).to(x.sink.dtype)
    )
    return d_q, d_kv.to(x.kv.dtype), d_sink


def _zero(x: Tensor, where: Tensor | None) -> Tensor:
    """`x` with 0 in these places; in place."""
    return x if where is None else x.masked_fill_(where, 0)


def _kept_by_sink(lse: Float[Tensor, "c h"], sink: Float[Tensor, " h"]) -> Float[Tensor, "c h"]:
    """exp(lse - logaddexp(lse, sink)): the share of the softmax that the sink leaves; 0 for a row with no key."""
    return torch.sigmoid(lse - sink.to(lse.dtype)).masked_fill_(lse == -torch.inf, 0)


def taken_by_sink(lse: Float[Tensor, "c h"], sink: Float[Tensor, " h"]) -> Float[Tensor, "c h"]:
    """1 - _kept_by_sink without cancellation; 0 for a row with no key, whose output does not depend on the sink."""
    return torch.sigmoid(sink.to(lse.dtype) - lse).masked_fill_(lse == -torch.inf, 0)
