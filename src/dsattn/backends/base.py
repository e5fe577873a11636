"""What a backend is: a name, whether it can be used here, whether it takes a problem, and the operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from dsattn.layouts import CausalLayout, DeviceLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.spec.problem import Problem

IndexerGradients = tuple[Tensor, Tensor, Tensor]
AttentionGradients = tuple[Tensor, Tensor, Tensor | None]


class Launch(NamedTuple):
    """What kernels are told of the sequences of a launch, which may decide what is compiled.

    Attributes:
        batched: all sequences are of one size and make a batch; else their ends are told.
        offsets: causal offsets are needed; else every sequence is a square from its first position on.
    """

    batched: bool
    offsets: bool


class Backend(ABC):
    """One set of kernels, forward and backward, without autograd: that is attached once, for all backends.

    All operators take packed, validated tensors. A backend overrides the operators that it has; its `supports` says no
    to the others, so they are never called.
    """

    name: str
    checked: bool = False
    """Whether a kernel is used only after it was shown right on this machine; see `dsattn.backends.trust`."""
    package: str | None = None
    """The importable package whose files decide what the kernels compute; None where none alone does."""

    @abstractmethod
    def missing(self) -> str | None:
        """Why this backend cannot be used on this machine (package, compiler or device absent); None if it can."""

    def about(self) -> str:
        """What was found where the backend can be used, as release and device, in a few words, or ""."""
        return ""

    @abstractmethod
    def supports(self, problem: Problem) -> str | None:
        """Why this backend does not take `problem`; None if it does. A pure function that runs no kernel.

        A problem has a direction: with `problem.backward` the operator's backward is asked for, else its forward. Each
        may be taken without the other: a backward gets `out` and `lse` of whichever backend ran the forward.
        """

    def non_finite(self, problem: Problem) -> str | None:
        """Why NaN and infinities in the inputs do not come out as docs/semantics says; None if they do.

        A pure function, asked of problems that this backend takes, in either direction.
        """
        return None

    def rounds(self, problem: Problem) -> str | None:
        """Why what is left of gradients whose terms nearly cancel is rounding; None if it is not.

        Matrix units take factors of 16 bits: what enters a second product is rounded first. Asked only of problems that
        the backend takes.
        """
        return None

    def launches(self, problem: Problem) -> frozenset[Launch]:
        """The kinds of launches that the problem needs, each of which is checked by itself; none where nothing runs.

        A pure function, asked at every call of problems that a checked backend takes.
        """
        return launches_of(problem)

    def identity(self, device: torch.device) -> dict[str, str] | None:
        """What the numbers of the kernels on `device` hang on: versions and digests by name.

        None for a stand-in, and for what cannot be told: a verdict on it is kept in memory only.
        """
        from dsattn.backends.trust.keys import package_identity

        return None if self.package is None else package_identity(self.package)

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


def launches_of(problem: Problem) -> frozenset[Launch]:
    """The launches of a backend that hands the layout of a problem to its kernels as it is."""
    layout = problem.layout
    if problem.num_q == 0 or problem.num_k == 0:
        return frozenset()
    if layout is None:
        return frozenset({Launch(batched=False, offsets=False)})
    if isinstance(layout, DeviceLayout):
        return frozenset({Launch(batched=False, offsets=True)})
    sizes = {(segment.q_len, segment.k_len) for segment in layout.segments}
    offsets = any(s.q_offset != 0 or s.q_len != s.k_len * layout.ratio for s in layout.segments)
    return frozenset({Launch(len(sizes) == 1, offsets)}) if sizes else frozenset()
