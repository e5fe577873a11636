"""Indexer scores and top-k by the native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from dsattn.backends.cpu import blocks as cut
from dsattn.backends.cpu.attention import summed
from dsattn.backends.cpu.build import dtype_for
from dsattn.backends.cpu.kernels import PANEL, Keys, call, operand
from dsattn.ops.blocks import Block, blocks_for, run_blocks
from dsattn.ops.inputs import IndexerInputs
from dsattn.ops.numerics import unscaled_gradient_dtype
from dsattn.ops.support import Visible


class Scorer:
    """Scores of blocks of query rows against the keys that each sees.

    Args:
        x: the indexer's side.
        support: who sees whom.
    """

    def __init__(self, x: IndexerInputs, support: Visible) -> None:
        self.dtype, self.x = dtype_for(x.index_q.dtype), x
        self.index_q, self.index_k = operand(x.index_q, self.dtype), operand(x.index_k, self.dtype)
        self.weights = x.weights.detach().to(x.dtype).contiguous()
        self.keys = Keys.windows(support.start, support.end)
        # A word is two numbers of bf16.
        self.words = self.index_q.shape[2] // (2 if self.dtype == torch.bfloat16 else 1)
        self.panels = self._packed()

    def _packed(self) -> Tensor:
        s, width = self.index_k.shape
        count = -(-s // PANEL)
        panels = torch.empty(count * PANEL * width, dtype=self.dtype, device=self.index_k.device)

        def work(block: Block) -> None:
            call("pack_keys", self.dtype, self.index_k, panels, block.q_begin, block.q_end, s, self.words)

        run_blocks(work, cut.row_blocks(count), panels.device)
        return panels

    def table(self, block: Block) -> Tensor:
        """Scores [c, n] of a block, right where a row sees a key and anything elsewhere."""
        shape = block.q_end - block.q_begin, block.k_end - block.k_begin
        found = torch.empty(shape, dtype=self.x.dtype, device=self.panels.device)
        self.fill(found, block.k_begin, block)
        return found

    def fill(self, table: Tensor, column: int, block: Block) -> None:
        """Writes the scores of a block where its rows see keys to `table`, whose first column is key `column`."""
        heads = self.weights.shape[1]
        where = self.keys.first, self.keys.count, table, table.stride(0), column, block.q_begin, block.q_end
        tensors = self.index_q, self.weights, self.panels
        call("indexer_scores", self.dtype, *tensors, *where, heads, self.words, self.x.scale, self.x.relu)


def select(x: IndexerInputs, support: Visible, top_k: int, return_scores: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids int32 [t, k], lengths int32 [t] and scores [t, k] (None unless asked for) of every row's top-k."""
    device, scorer = x.index_q.device, Scorer(x, support)
    ids = torch.full((support.num_q, top_k), -1, dtype=torch.int32, device=device)
    kept = torch.full((support.num_q, top_k), -torch.inf, dtype=x.dtype, device=device) if return_scores else None

    def work(block: Block) -> None:
        table, windows = scorer.table(block), (scorer.keys.first, scorer.keys.count)
        rows = block.q_begin, block.q_end
        call("topk", scorer.dtype, table, table.stride(0), block.k_begin, *windows, ids, kept, top_k, *rows)

    run_blocks(work, blocks_for(support.layout, x.dtype.itemsize, cut.SCORES_BYTES), device)
    return ids, scorer.keys.count.clamp(max=top_k), kept


def all_scores(x: IndexerInputs, support: Visible) -> Tensor:
    """Every score as one table [t, s], -inf where a row does not see a key."""
    device, scorer = x.index_q.device, Scorer(x, support)
    table = torch.empty(support.num_q, support.num_k, dtype=x.dtype, device=device)

    def work(block: Block) -> None:
        # Here and not for the whole table: memory that is new is slow to touch, and all threads share that.
        scorer.fill(table[block.q_begin : block.q_end].fill_(-torch.inf), 0, block)

    run_blocks(work, cut.row_blocks(support.num_q), device)
    return table


class ScoresBackward:
    """Gradients of index_q, index_k and weights for gradients of scores, block by block.

    All runs in fp32: terms of these gradients may cancel, and what is left would be the rounding of their factors.

    Args:
        x: the indexer's side.
        keys: the keys of each query row.
    """

    def __init__(self, x: IndexerInputs, keys: Keys) -> None:
        self.x, self.keys = x, keys
        self.index_k = operand(x.index_k, x.dtype)
        self.d_index_q = torch.zeros_like(x.index_q, dtype=unscaled_gradient_dtype(x.index_q.dtype))
        # Not zeros_like, which would keep the strides of a view.
        self.d_weights = torch.zeros(x.weights.shape, dtype=x.dtype, device=x.weights.device)

    def add(self, begin: int, end: int, d_scores: Tensor, column: int, total: Tensor) -> None:
        """Writes the rows [begin, end) and adds the gradient of their keys to `total`, [s, padded d_i] fp32.

        `d_scores` [end - begin, n] has key `column` first, or slot 0 of a selection.
        """
        x, keys, rows = self.x, self.keys.rows(begin, end), slice(begin, end)
        index_q, weights = operand(x.index_q[rows], x.dtype), x.weights.detach()[rows].to(x.dtype).contiguous()
        d_scores, d_index_q = d_scores.contiguous(), torch.zeros_like(index_q)
        given = index_q, weights, self.index_k, *keys.arguments, d_scores, d_scores.shape[1], column
        results = d_index_q, total, self.d_weights[rows], 0, end - begin
        call("scores_backward", x.dtype, *given, *results, *index_q.shape[1:], x.scale, x.relu)
        self.d_index_q[rows] = d_index_q[..., : x.index_q.shape[2]]


def all_scores_backward(x: IndexerInputs, support: Visible, d_table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of index_q, index_k and weights for the gradient of the table of `all_scores`."""
    backward = ScoresBackward(x, Keys.windows(support.start, support.end))

    def work(block: Block, total: Tensor) -> None:
        begin, end = block.q_begin, block.q_end
        backward.add(begin, end, d_table[begin:end].to(x.dtype), 0, total)

    shape = support.num_k, backward.index_k.shape[1]
    d_index_k = summed(work, cut.row_blocks(support.num_q), shape, x.dtype)[:, : x.index_k.shape[1]]
    return (
        backward.d_index_q.to(x.index_q.dtype),
        d_index_k.to(x.index_k.dtype).contiguous(),
        backward.d_weights.to(x.weights.dtype),
    )
