"""The tensors and options of a call, packed and validated: what every backend's operators take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dsattn.ops.numerics import accumulation_dtype


@dataclass(frozen=True)
class IndexerInputs:
    """The indexer's side of a call.

    Attributes:
        index_q: [t, h_i, d_i].
        index_k: [s, d_i].
        weights: [t, h_i], of index_q's dtype or fp32.
        scale: multiplies the head sum.
        relu: whether dots pass a relu.
    """

    index_q: Tensor
    index_k: Tensor
    weights: Tensor
    scale: float
    relu: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scores."""
        return accumulation_dtype(self.index_q.dtype)


@dataclass(frozen=True)
class AttentionInputs:
    """The attention's side of a call.

    Attributes:
        q: [t, h, d_qk].
        kv: [s, d_qk]; a value is the first `value_dim` columns.
        value_dim: d_v.
        softmax_scale: multiplies the dots.
        sink: [h] logits of a key whose value is 0, or None.
    """

    q: Tensor
    kv: Tensor
    value_dim: int
    softmax_scale: float
    sink: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of logits, log-sum-exps and sums."""
        return accumulation_dtype(self.kv.dtype)


@dataclass(frozen=True)
class LossOptions:
    """What turns the KL of rows into the loss.

    Attributes:
        coeff: multiplies the loss.
        reduction: "mean" over contributing rows, or "sum".
        num_rows: divides the sum instead of a reduction, if given.
        row_mask: bool [t], rows with False take no part.
        tp_group: ranks over whose heads the teacher is summed.
    """

    coeff: float = 1.0
    reduction: str = "mean"
    num_rows: int | Tensor | None = None
    row_mask: Tensor | None = None
    tp_group: dist.ProcessGroup | None = None
