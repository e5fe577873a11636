"""The products of the indexer loss by the native kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsattn.backends.cpu import blocks as cut
from dsattn.backends.cpu.attention import scaled
from dsattn.backends.cpu.build import dtype_for
from dsattn.backends.cpu.indexer import Scorer, ScoresBackward
from dsattn.backends.cpu.kernels import Keys, call, operand
from dsattn.ops.blocks import Block
from dsattn.ops.inputs import AttentionInputs, IndexerInputs
from dsattn.ops.loss import LossGradients, LossProducts
from dsattn.ops.support import Selected, Support, Visible

# Tables of a block that live at once, as many as numbers per row and key.
_TABLES = 32


class NativeProducts(LossProducts):
    """See `LossProducts`; `lse` is that of the attention over the same keys, or None."""

    def __init__(
        self, x: IndexerInputs, a: AttentionInputs, support: Support, parallel: bool, lse: Tensor | None
    ) -> None:
        super().__init__(x, a, support, parallel)
        self._dtype, self._attention_dtype = dtype_for(x.index_q.dtype), dtype_for(a.kv.dtype)
        self._kv = operand(a.kv, self._attention_dtype)
        self._q, self._softmax_scale = scaled(operand(a.q, self._attention_dtype), a.softmax_scale)
        self._lse = None if lse is None else lse.detach().to(a.dtype).contiguous()
        self._scorer = Scorer(x, support) if isinstance(support, Visible) else None
        if self._scorer is not None:
            self._keys = self._scorer.keys
        elif isinstance(support, Selected):
            self._keys = Keys.selected(support.ids, support.lengths)
            self._index_q, self._index_k = operand(x.index_q, self._dtype), operand(x.index_k, self._dtype)
            self._weights = x.weights.detach().to(x.dtype).contiguous()
        self._backward = ScoresBackward(x, self._keys)
        self.lanes = cut.lanes(len(self.blocks()), support.num_k * self.key_width * x.dtype.itemsize)

    def blocks(self) -> Sequence[Block]:  # noqa: D102
        return self.support.blocks(_TABLES * self.x.dtype.itemsize, 0)

    def head_sum(self, block: Block, seen: Tensor) -> Tensor:  # noqa: D102
        table = self._table(block, self.a.dtype)
        tensors = self._q, self._kv, *self._keys.arguments, self._lse
        where = table, table.stride(0), block.k_begin, block.q_begin, block.q_end
        call("teacher", self._attention_dtype, *tensors, *where, *self._q.shape[1:], self._softmax_scale)
        return table

    def scores(self, block: Block) -> Tensor:  # noqa: D102
        if self._scorer is not None:
            return self._scorer.table(block)
        table = self._table(block, self.x.dtype)
        tensors = self._index_q, self._weights, self._index_k, *self._keys.arguments
        where = table, table.stride(0), block.k_begin, block.q_begin, block.q_end
        call("gathered_scores", self._dtype, *tensors, *where, *self._index_q.shape[1:], self.x.scale, self.x.relu)
        return table

    def row_buffers(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        return self._backward.d_index_q, self._backward.d_weights

    @property
    def key_width(self) -> int:  # noqa: D102
        return self._backward.index_k.shape[1]

    def add_gradients(self, block: Block, d_scores: Tensor, seen: Tensor, buffers: LossGradients) -> None:  # noqa: D102
        self._backward.add(block.q_begin, block.q_end, d_scores, block.k_begin, buffers[1])

    def _table(self, block: Block, dtype: torch.dtype) -> Tensor:
        rows, columns = block.q_end - block.q_begin, block.k_end - block.k_begin
        return torch.empty(rows, columns, dtype=dtype, device=self._kv.device)
