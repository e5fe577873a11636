"""The `cpu` backend: native kernels, compiled on first use by the system's C compiler."""

from __future__ import annotations

from functools import cached_property, partial

import torch
from torch import Tensor

from dsattn.backends.base import AttentionGradients, Backend, IndexerGradients, Launch
from dsattn.backends.cpu import attention, build, indexer, kernels
from dsattn.backends.cpu.loss import NativeProducts
from dsattn.errors import BackendMissing
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.ops.loss import indexer_kl
from dsattn.ops.support import Selected, Visible
from dsattn.spec.problem import Problem

_SCORES = {
    "indexer_scores": ("indexer_scores",),
    "indexer_topk": ("indexer_scores", "topk"),
    "indexer_loss": ("indexer_scores", "gathered_scores"),
}


def _needed(problem: Problem) -> set[tuple[str, torch.dtype]]:
    """The libraries of a problem: sources and the dtypes that they are built for."""
    x, a, found = problem.indexer, problem.attention, set[tuple[str, torch.dtype]]()

    def add(dtype: torch.dtype, *functions: str) -> None:
        found.update((source, dtype) for source in kernels.sources(*functions))

    if problem.operator.endswith("attention") and a is not None:
        dtype, again = attention.plan(a.dtype, a.heads, a.value_width)
        add(dtype, "attend_backward" if problem.backward else "attend")
        if problem.backward and again:
            add(dtype, "attend")
    if not problem.backward and x is not None:
        add(build.dtype_for(x.dtype), *_SCORES[problem.operator])
    if problem.operator == "indexer_loss" and a is not None:
        add(build.dtype_for(a.dtype), "teacher")
    if problem.operator == "indexer_loss" or (problem.backward and x is not None):
        # All gradients of the indexer run in fp32.
        add(torch.float32, "scores_backward")
    return found


class CpuBackend(Backend):
    """All operators on CPU tensors of bf16, fp16 and fp32, with AVX-512 (bf16 dot products too), AVX2 or plain vectors.

    Semantics:
        The forward is the same bit for bit for any number of threads, gradients for a fixed one. bf16 products run on
        bf16 factors where the CPU has them, as matrix units do: the attention's probabilities and gradients of logits
        are rounded to bf16 before they enter a second product; the indexer's are not. Elsewhere, and for fp16, inputs
        are converted to fp32.
    """

    name = "cpu"
    checked = True

    def missing(self) -> str | None:
        """No compiler, or one that cannot build the smallest of the sources; None if usable."""
        return self._unbuilt({("peak", torch.float32)})

    def about(self) -> str:
        """The compiler and the instruction set."""
        return f"{build.about(tuple(build.compiler()))}, {build.level()}"

    def supports(self, problem: Problem) -> str | None:
        """Why not. The kernels of the problem are compiled to know that, where no process has done so yet."""
        if problem.device.type != "cpu":
            return f"its kernels are for CPU tensors, and these are on {problem.device.type}"
        dtypes = {sizes.dtype for sizes in (problem.indexer, problem.attention) if sizes is not None}
        if torch.float64 in dtypes:
            return "its kernels have no float64"
        return self._unbuilt(_needed(problem))

    def launches(self, problem: Problem) -> frozenset[Launch]:
        """One: rows are told of their keys one by one, so layouts make no difference."""
        empty = 0 in (problem.num_q, problem.num_k, problem.top_k)
        return frozenset() if empty else frozenset({Launch(batched=False, offsets=True)})

    def identity(self, device: torch.device) -> dict[str, str] | None:
        """The compiler, its flags and the sources."""
        command = build.compiler()
        flags = " ".join((*build.FLAGS, *build.LEVELS[build.level()]))
        return {
            "compiler": f"{' '.join(command)}: {build.about(tuple(command))}",
            "flags": flags,
            "sources": self._digest,
        }

    @cached_property
    def _digest(self) -> str:
        return build.sources_digest()

    def _unbuilt(self, needed: set[tuple[str, torch.dtype]]) -> str | None:
        try:
            for source, dtype in needed:
                build.library(source, dtype)
        except BackendMissing as error:
            return f"{error.what}: {error.given}"
        return None

    def indexer_scores(self, x: IndexerInputs, layout: CausalLayout) -> Tensor:
        """See `Backend.indexer_scores`."""
        return indexer.all_scores(x, Visible.of(layout, x.index_q.device))

    def indexer_scores_backward(self, x: IndexerInputs, layout: CausalLayout, d_scores: Tensor) -> IndexerGradients:
        """See `Backend.indexer_scores_backward`."""
        return indexer.all_scores_backward(x, Visible.of(layout, x.index_q.device), d_scores)

    def indexer_topk(self, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        """See `Backend.indexer_topk`."""
        ids, lengths, scores = indexer.select(x, Visible.of(layout, x.index_q.device), top_k, return_scores)
        return TopK._trusted(ids, lengths, scores, num_q=layout.num_q, num_k=layout.num_k)

    def sparse_attention(self, a: AttentionInputs, topk: TopK) -> tuple[Tensor, Tensor]:
        """See `Backend.sparse_attention`."""
        return attention.attend(a, kernels.Keys.selected(topk.indices, topk.lengths))

    def sparse_attention_backward(
        self, a: AttentionInputs, topk: TopK, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> AttentionGradients:
        """See `Backend.sparse_attention_backward`."""
        return attention.attend_backward(a, kernels.Keys.selected(topk.indices, topk.lengths), out, lse, d_out)

    def dense_attention(self, a: AttentionInputs, layout: CausalLayout) -> tuple[Tensor, Tensor]:
        """See `Backend.dense_attention`."""
        return attention.attend(a, kernels.Keys.windows(*layout._shared_bounds(a.kv.device)))

    def dense_attention_backward(
        self, a: AttentionInputs, layout: CausalLayout, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> AttentionGradients:
        """See `Backend.dense_attention_backward`."""
        keys = kernels.Keys.windows(*layout._shared_bounds(a.kv.device))
        return attention.attend_backward(a, keys, out, lse, d_out)

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
        """See `Backend.indexer_loss`; a given lse saves a pass over the keys."""
        visible = Visible.of(layout, a.kv.device)
        support = visible if topk is None else Selected(topk.indices, topk.lengths, topk.num_k)
        return indexer_kl(x, a, support, options, with_gradients, products=partial(NativeProducts, lse=lse))
