"""The `torch` backend: the operators of `dsattn.ops`, for every problem on every device that PyTorch has."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from dsattn.backends.base import Backend
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops import functions
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.ops.topk import select
from dsattn.spec.problem import Problem


class TorchBackend(Backend):
    """Plain PyTorch: exact, bounded in memory, takes everything; it is what the other backends fall back to."""

    name = "torch"

    def missing(self) -> str | None:
        """None: PyTorch is a dependency."""
        return None

    def supports(self, problem: Problem) -> str | None:
        """None: every problem that passes validation is taken."""
        return None

    def indexer_scores(self, x: IndexerInputs, layout: CausalLayout) -> Tensor:
        """See `Backend.indexer_scores`."""
        return functions.indexer_scores(x, layout)

    def indexer_topk(self, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        """See `Backend.indexer_topk`."""
        x = replace(x, index_q=x.index_q.detach(), index_k=x.index_k.detach(), weights=x.weights.detach())
        ids, lengths, scores = select(x, layout, top_k, return_scores)
        return TopK._trusted(ids, lengths, scores, num_q=layout.num_q, num_k=layout.num_k)

    def sparse_attention(self, a: AttentionInputs, topk: TopK) -> tuple[Tensor, Tensor]:
        """See `Backend.sparse_attention`."""
        return functions.attention(a, (topk.indices, topk.lengths))

    def dense_attention(self, a: AttentionInputs, layout: CausalLayout) -> tuple[Tensor, Tensor]:
        """See `Backend.dense_attention`."""
        return functions.attention(a, layout)

    def indexer_loss(
        self,
        x: IndexerInputs,
        a: AttentionInputs,
        layout: CausalLayout,
        topk: TopK | None,
        lse: Tensor | None,
        options: LossOptions,
    ) -> Tensor:
        """See `Backend.indexer_loss`; `lse` is not read, since each block's softmax is computed here anyway."""
        return functions.indexer_loss(x, a, layout if topk is None else (topk.indices, topk.lengths), options)
