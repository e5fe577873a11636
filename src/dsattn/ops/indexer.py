"""Indexer scores and their gradients, in tiles of (query rows x keys).

score[i, j] = scale * sum_h weights[i, h] * relu(index_q[i, h] . index_k[j])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dsattn.ops.blocks import Block, buffer_bytes, run_blocks
from dsattn.ops.inputs import IndexerInputs
from dsattn.ops.numerics import exact_products
from dsattn.ops.products import head_dots, mix_keys, mix_queries
from dsattn.ops.softmax import unseen_or_none
from dsattn.ops.support import Visible, accumulate

# The dots of one tile, e.g. 8 rows x 64 heads x 512 keys, should stay in a core's share of the cache.
_TILE_KEYS = 512
_TILE_BYTES = 2**20


def all_scores(x: IndexerInputs, support: Visible) -> Float[Tensor, "t s"]:
    """Every score as one table, -inf where a row does not see a key."""
    device = x.index_q.device
    table = torch.full((support.num_q, support.num_k), -torch.inf, dtype=x.dtype, device=device)

    def work(block: Block) -> None:
        scores = block_scores(x, block, support.keys(block, x.index_k, x.dtype))
        scores.masked_fill_(~support.seen(block), -torch.inf)
        table[block.q_begin : block.q_end, block.k_begin : block.k_end] = scores

    with exact_products(device):
        run_blocks(work, support.blocks(x.dtype.itemsize, 0), device)
    return table


def all_scores_backward(
    x: IndexerInputs, support: Visible, d_table: Float[Tensor, "t s"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of index_q, index_k and weights for the gradient of the table of `all_scores`."""
    d_index_q = torch.zeros_like(x.index_q, memory_format=torch.contiguous_format)
    d_weights = torch.zeros_like(x.weights, memory_format=torch.contiguous_format)

    def work(block: Block, totals: Sequence[Tensor]) -> None:
        rows = slice(block.q_begin, block.q_end)
        seen = support.seen(block)
        d_scores = d_table[rows, block.k_begin : block.k_end].to(x.dtype).masked_fill(~seen, 0)
        keys = support.keys(block, x.index_k, x.dtype)
        d_queries, d_keys, d_row_weights = block_scores_backward(x, block, keys, d_scores, seen)
        d_index_q[rows], d_weights[rows] = d_queries, d_row_weights
        support.add(block, totals[0], d_keys)

    device = x.index_q.device
    with exact_products(device):
        blocks = support.blocks(x.dtype.itemsize, 0)
        (d_index_k,) = accumulate(support, blocks, [x.index_k.shape[1]], x.dtype, device, work)
    return d_index_q, d_index_k.to(x.index_k.dtype), d_weights


def block_scores(x: IndexerInputs, block: Block, keys: Tensor) -> Float[Tensor, "c n"]:
    """Scores of all (row, key) pairs of a block, unmasked, in the dtype of scores; -0 is +0.

    Args:
        x: the indexer's side.
        block: which rows.
        keys: the block's index keys, [n, d_i] or [c, n, d_i] (see `Support.keys`).
    """
    queries, weights = _block_rows(x, block)
    scores = queries.new_empty(len(queries), keys.shape[-2])
    for rows, columns in _tiles(x, scores):
        dots = _dots(x, queries[rows], _tile_keys(keys, rows, columns))
        scores[rows, columns] = torch.bmm(weights[rows, None, :], dots).squeeze(1)
    # 0 + scale * score is +0 where the score is -0.
    return torch.add(scores.new_zeros(()), scores, alpha=x.scale, out=scores)


def block_scores_backward(
    x: IndexerInputs,
    block: Block,
    keys: Tensor,
    d_scores: Float[Tensor, "c n"],
    seen: Bool[Tensor, "c n"],
) -> tuple[Float[Tensor, "c h_i d_i"], Tensor, Float[Tensor, "c h_i"]]:
    """Gradients of a block's queries, keys (shaped as `keys`) and weights.

    Args:
        x: the indexer's side.
        block: which rows.
        keys: the block's index keys.
        d_scores: gradient of the scores, 0 where `seen` is False.
        seen: who sees which key.
    """
    queries, weights = _block_rows(x, block)
    d_queries, d_weights, d_keys = torch.zeros_like(queries), torch.zeros_like(weights), torch.zeros_like(keys)
    d_scores = d_scores * x.scale
    for rows, columns in _tiles(x, d_scores):
        tile_keys, tile_seen, d_tile = _tile_keys(keys, rows, columns), seen[rows, columns], d_scores[rows, columns]
        unseen = unseen_or_none(tile_seen[:, None, :])
        dots = _dots(x, queries[rows], tile_keys)
        # 0 * NaN and 0 * inf are NaN: what a row does not see is set to 0, never multiplied to 0.
        if unseen is not None:
            dots.masked_fill_(unseen, 0)
        d_weights[rows] += (dots * d_tile[:, None, :]).sum(2)
        d_dots = d_tile[:, None, :] * weights[rows, :, None]
        if x.relu:
            # 0 where dots <= 0, at unseen keys too: the relu's gradient at 0 is 0, and no NaN hides behind the gate.
            d_dots = torch.ops.aten.threshold_backward(d_dots, dots, 0)
        elif unseen is not None:
            d_dots.masked_fill_(unseen, 0)
        d_queries[rows] += mix_keys(d_dots, tile_keys, tile_seen)
        d_tile_keys = mix_queries(d_dots, queries[rows], tile_seen, keys.ndim == 2)
        _tile_keys(d_keys, rows, columns).add_(d_tile_keys)
    return d_queries, d_keys, d_weights


def block_weights_gradient(
    x: IndexerInputs, block: Block, keys: Tensor, d_scores: Float[Tensor, "c n"], seen: Bool[Tensor, "c n"]
) -> Float[Tensor, "c h_i"]:
    """The gradient of a block's weights alone; arguments as `block_scores_backward`."""
    queries, weights = _block_rows(x, block)
    d_weights = torch.zeros_like(weights)
    for rows, columns in _tiles(x, d_scores):
        dots = _dots(x, queries[rows], _tile_keys(keys, rows, columns))
        unseen = unseen_or_none(seen[rows, None, columns])
        if unseen is not None:
            dots.masked_fill_(unseen, 0)
        d_weights[rows] += (dots * d_scores[rows, None, columns]).sum(2)
    return d_weights.mul_(x.scale)


def _block_rows(x: IndexerInputs, block: Block) -> tuple[Float[Tensor, "c h_i d_i"], Float[Tensor, "c h_i"]]:
    """Queries and weights of a block in the dtype of scores."""
    rows = slice(block.q_begin, block.q_end)
    return x.index_q[rows].to(x.dtype), x.weights[rows].to(x.dtype)


def _dots(x: IndexerInputs, queries: Float[Tensor, "c h_i d_i"], keys: Tensor) -> Float[Tensor, "c h_i n"]:
    dots = head_dots(queries, keys)
    return dots.relu_() if x.relu else dots


def _tile_keys(keys: Tensor, rows: slice, columns: slice) -> Tensor:
    return keys[columns] if keys.ndim == 2 else keys[rows, columns]


def _tiles(x: IndexerInputs, scores: Float[Tensor, "c n"]) -> Iterator[tuple[slice, slice]]:
    """Row and key ranges of the tiles of a block."""
    rows, keys = scores.shape
    on_cpu = scores.device.type == "cpu"
    budget = (_TILE_BYTES if on_cpu else buffer_bytes(scores.device)) // (x.weights.shape[1] * x.dtype.itemsize)
    tile_keys = min(keys, max(_TILE_KEYS, budget // max(1, rows))) if on_cpu else keys
    tile_rows = max(1, min(rows, budget // max(tile_keys, _TILE_KEYS if on_cpu else 1)))
    for key in range(0, keys, tile_keys):
        for row in range(0, rows, tile_rows):
            yield slice(row, min(row + tile_rows, rows)), slice(key, min(key + tile_keys, keys))
