"""What each kernel of the releases does, in plain torch from the arguments of its launch.

A kernel is known by its class. Each function gets the kernel's object, whose attributes were set by the release's own
code, and the arguments of the launch under the names that the kernel has for them. It writes to the tensors that it was
given, and to nothing else. Written from the kernels' source; nothing of the simulator is used here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from seam import emulated_attention as attention
from seam import emulated_backward as backward
from seam import emulated_scores as scores
from seam import emulated_selection as selection
from seam.facts import Release

Kernel = Callable[[Release, Any, SimpleNamespace], None]

KERNELS: dict[str, Kernel] = {
    "IndexerForwardSm90": scores.forward,
    "IndexerForwardSm100": scores.forward,
    "IndexerScoreUnifiedSm100": scores.unified,
    "DenseScoreRecomputeSm90": scores.dense_sm90,
    "DenseScoreRecomputeSm100": scores.dense_sm100,
    "SparseScoreRecomputeSm90": scores.sparse_sm90,
    "SparseScoreRecomputeSm100": scores.sparse_sm100,
    "IndexerTopKKernelVarlenDecode": selection.top_k,
    "LocalToGlobalTopK": selection.local_to_global,
    "CompactifyKernel": selection.compactify,
    "CompressTopkStage2": selection.compressed_top_k,
    "ScoreGradSm90": backward.score_gradient,
    "ScoreGradSm100": backward.score_gradient,
    "ScoreGradDenseSm90": backward.dense_score_gradient,
    "ScoreGradDense": backward.dense_score_gradient,
    "IndexerBackwardSm90": backward.products_sm90,
    "IndexerBackwardSm100": backward.products_sm100,
    "DenseIndexerBackward2QGemmSm100": backward.dense_products,
    "_FlashAttentionDSABackwardPreprocessSm90": attention.before_sm90,
    "FlashAttentionDSABackwardSm90": attention.backward_sm90,
    "_FlashAttentionDSABackwardPostprocessSm90": attention.after_sm90,
    "SparseAttentionForwardSm100Head64": attention.forward,
    "SparseAttentionForwardSm100Head128SmallTopKPrefill": attention.forward,
}
# One kernel with a class for each size.
FAMILIES: dict[str, Kernel] = {"FlashAttentionDSABackwardSm100": attention.backward_sm100}


def emulator(release: Release) -> Callable[[Any, SimpleNamespace], None]:
    """Does what a kernel of the release does."""

    def emulate(kernel: Any, a: SimpleNamespace) -> None:
        name = type(kernel).__name__
        found = KERNELS.get(name) or next((each for family, each in FAMILIES.items() if name.startswith(family)), None)
        if found is None:
            raise NotImplementedError(f"no kernel {name} is emulated")
        found(release, kernel, a)

    return emulate
