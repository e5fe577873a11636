"""What a backend is: a name, whether it can be used here, whether it takes a problem, and the operators."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.spec.problem import Problem

IndexerGradients = tuple[Tensor, Tensor, Tensor]
AttentionGradients = tuple[Tensor, Tensor, Tensor | None]


class Backend(ABC):
    """One set of kernels, forward and backward, without autograd: that is attached once, for all backends.

    All operators take packed, validated tensors. A backend overrides the operators that it has; its `supports` says no
    to the others, so they are never called.
    """

    name: str

    @abstractmethod
    def missing(self) -> str | None:
        """Why this backend cannot be used on this machine (package, compiler or device absent); None if it can."""

    @abstractmethod
    def supports(self, problem: Problem) -> str | None:
        """Why this backend does not take `problem`; None if it does. A pure function that runs nothing."""

    def indexer_scores(self, x: IndexerInputs, layout: CausalLayout) -> Tensor:
        """Scores [t, s], -inf at unseen keys."""
        raise NotImplementedError

    def indexer_scores_backward(self, x: IndexerInputs, layout: CausalLayout, d_scores: Tensor) -> IndexerGradients:
        """Gradients of index_q, index_k and weights, in their dtypes."""
        raise NotImplementedError

    def indexer_topk(self, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        """The selection of every row."""
        raise NotImplementedError

    def sparse_attention(self, a: AttentionInputs, topk: TopK) -> tuple[Tensor, Tensor]:
        """Output [t, h, d_v] and log-sum-exp [t, h] over the selected keys."""
        raise NotImplementedError

    def sparse_attention_backward(
        self, a: AttentionInputs, topk: TopK, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> AttentionGradients:
        """Gradients of q, kv and sink (None without one), in their dtypes."""
        raise NotImplementedError

    def dense_attention(self, a: AttentionInputs, layout: CausalLayout) -> tuple[Tensor, Tensor]:
        """Output [t, h, d_v] and log-sum-exp [t, h] over all visible keys."""
        raise NotImplementedError

    def dense_attention_backward(
        self, a: AttentionInputs, layout: CausalLayout, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> AttentionGradients:
        """Gradients of q, kv and sink (None without one), in their dtypes."""
        raise NotImplementedError

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
        """The loss over the selected keys if `topk` is given, else over all visible ones; `options.coeff` is not 0.

        `lse` [t, h], if given, is that of the attention over the same keys. With gradients, those of the loss itself
        in the dtypes of index_q, index_k and weights (fp32 for fp16) come beside it.
        """
        raise NotImplementedError
