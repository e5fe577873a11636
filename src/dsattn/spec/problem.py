"""What an operator is asked to compute, as data: the question that `Backend.supports` answers.

Dimension legend (docs/semantics has the mathematics), used in every shape annotation of the package:

| letter | meaning                                                                          |
|--------|----------------------------------------------------------------------------------|
| b      | batch of a BSHD call                                                             |
| sq, sk | query and key rows of one batch entry of a BSHD call                             |
| t, s   | query and key rows of a packed (THD) call; a BSHD call has t = b*sq and s = b*sk |
| h_i    | indexer heads                                                                    |
| d_i    | indexer head width                                                               |
| h      | attention query heads                                                            |
| d_qk   | width of a query or key row                                                      |
| d_v    | width of a value row: the first d_v columns of kv                                |
| k      | keys selected per query row                                                      |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from dsattn.layouts import CausalLayout

Operator = Literal["indexer_scores", "indexer_topk", "sparse_attention", "dense_attention", "indexer_loss"]
Support = Literal["selected", "visible"]

OPERATORS: tuple[Operator, ...] = (
    "indexer_scores",
    "indexer_topk",
    "sparse_attention",
    "dense_attention",
    "indexer_loss",
)
WITH_BACKWARD: tuple[Operator, ...] = ("indexer_scores", "sparse_attention", "dense_attention")
"""The operators whose backward has a kernel of its own; the loss computes its gradients beside itself."""


@dataclass(frozen=True, kw_only=True)
class IndexerSizes:
    """Sizes of the indexer's side: index_q [t, h_i, d_i], index_k [s, d_i], weights [t, h_i]."""

    heads: int
    width: int
    dtype: torch.dtype
    weights_dtype: torch.dtype
    relu: bool = True


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of the attention's side: q [t, h, d_qk], kv [s, d_qk], values kv[:, :d_v]."""

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    sink: bool = False


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One direction of one call without its numbers: everything that a backend may base its answer on.

    Forward and backward of a call are two problems, since they are two kernels: a backend may have one of them alone.

    Attributes:
        operator: which operator is called.
        num_q: t, query rows of the whole call.
        num_k: s, key rows of the whole call.
        device: where the tensors are.
        batch: b of a BSHD call; None for a packed one.
        layout: who sees whom; None where the ids alone say it (`sparse_attention`).
        indexer: sizes of the indexer's side, None where the operator has none.
        attention: sizes of the attention's side, None where the operator has none.
        top_k: slots per row of the selection; None where there is none.
        support: which keys the indexer loss runs over; None for other operators.
        requires_grad: whether a backward may follow; True in the backward too.
        backward: whether the kernel of the backward is asked for, and not that of the forward.
    """

    operator: Operator
    num_q: int
    num_k: int
    device: torch.device
    batch: int | None = None
    layout: CausalLayout | None = None
    indexer: IndexerSizes | None = None
    attention: AttentionSizes | None = None
    top_k: int | None = None
    support: Support | None = None
    requires_grad: bool = False
    backward: bool = False

    @property
    def title(self) -> str:
        """What is asked for, as messages name it: "sparse_attention" or "the backward of sparse_attention"."""
        return f"the backward of {self.operator}" if self.backward else self.operator

    def directions(self) -> tuple[Problem, ...]:
        """This problem, and after a forward that of the backward where one with a kernel of its own may follow."""
        if self.backward or not self.requires_grad or self.operator not in WITH_BACKWARD:
            return (self,)
        return self, replace(self, backward=True)
