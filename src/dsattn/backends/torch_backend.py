"""The `torch` backend: the operators of `dsattn.ops`, for every problem on every device that PyTorch has."""

from __future__ import annotations

from torch import Tensor

from dsattn.backends.base import AttentionGradients, Backend, IndexerGradients
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.attention import attend, attend_backward
from dsattn.ops.indexer import all_scores, all_scores_backward
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.ops.loss import indexer_kl
from dsattn.ops.support import Selected, Support, Visible
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
        return all_scores(x, Visible.of(layout, x.index_q.device))

    def indexer_scores_backward(self, x: IndexerInputs, layout: CausalLayout, d_scores: Tensor) -> IndexerGradients:
        """See `Backend.indexer_scores_backward`."""
        return all_scores_backward(x, Visible.of(layout, x.index_q.device), d_scores)

    def indexer_topk(self, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        """See `Backend.indexer_topk`."""
        ids, lengths, scores = select(x, Visible.of(layout, x.index_q.device), top_k, return_scores)
        return TopK._trusted(ids, lengths, scores, num_q=layout.num_q, num_k=layout.num_k)

    def sparse_attention(self, a: AttentionInputs, topk: TopK) -> tuple[Tensor, Tensor]:
        """See `Backend.sparse_attention`."""
        return attend(a, _selected(topk))

    def sparse_attention_backward(
        self, a: AttentionInputs, topk: TopK, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> AttentionGradients:
        """See `Backend.sparse_attention_backward`; the softmax is computed again, out and lse are not read."""
        return attend_backward(a, _selected(topk), d_out)

    def dense_attention(self, a: AttentionInputs, layout: CausalLayout) -> tuple[Tensor, Tensor]:
        """See `Backend.dense_attention`."""
        return attend(a, Visible.of(layout, a.kv.device))

    def dense_attention_backward(
        self, a: AttentionInputs, layout: CausalLayout, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> AttentionGradients:
        """See `Backend.dense_attention_backward`; the softmax is computed again, out and lse are not read."""
        return attend_backward(a, Visible.of(layout, a.kv.device), d_out)

    def indexer_loss(
        self,
        x: IndexerInputs,
        a: AttentionInputs,
        layout: CausalLayout,
        topk: TopK | None,
        lse: Tensor | None,
        options: LossOptions,
        with_gradients: bool,
    ) -> tuple[Tensor, IndexerGradients | None]:
        """See `Backend.indexer_loss`; the softmax is computed again, lse is not read."""
        support: Support = Visible.of(layout, a.kv.device) if topk is None else _selected(topk)
        return indexer_kl(x, a, support, options, with_gradients)


def _selected(topk: TopK) -> Selected:
    return Selected(topk.indices, topk.lengths, topk.num_k)
