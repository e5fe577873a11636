"""The lightning indexer: score table and selection."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from dsattn.functional.call import Choice, run_scores, run_topk
from dsattn.functional.validation import check_flag, check_indexer, check_integer, rows_of
from dsattn.layouts import CausalLayout, TopK


def indexer_scores(
    index_q: Float[Tensor, "*rows h_i d_i"],
    index_k: Float[Tensor, "*keys d_i"],
    weights: Float[Tensor, "*rows h_i"],
    layout: CausalLayout,
    *,
    scale: float = 1.0,
    relu: bool = True,
    backend: Choice = "auto",
) -> Float[Tensor, "t s"]:
    """The whole table of indexer scores, for debugging and small problems.

        score[i, j] = scale * sum_h weights[i, h] * relu(index_q[i, h] . index_k[j])

    Args:
        index_q: indexer queries [t, h_i, d_i] or [b, sq, h_i, d_i]; bf16, fp16, fp32 or fp64.
        index_k: indexer keys [s, d_i] or [b, sk, d_i], of index_q's dtype.
        weights: head weights [t, h_i] or [b, sq, h_i], of index_q's dtype or fp32.
        layout: who sees whom.
        scale: multiplies the head sum, in fp32.
        relu: whether the dots pass a relu.
        backend: "auto" or a name of `backends()`.

    Returns:
        Scores [t, s], also for BSHD inputs; fp32, or fp64 for fp64 inputs; -inf where a row does not see a key.

    Semantics:
        -0 counts as +0. Products of bf16 inputs are not rounded. Differentiable in all three tensors.

    Raises:
        BadInput: an argument does not fit; nothing was computed.
        UnsupportedProblem: the named backend does not take the problem.
        BackendMissing: the named backend is absent here.
    """
    rows = rows_of(layout)
    x = check_indexer(rows, index_q, index_k, weights, scale, relu)
    return run_scores(rows, x, layout, backend)


def indexer_topk(
    index_q: Float[Tensor, "*rows h_i d_i"],
    index_k: Float[Tensor, "*keys d_i"],
    weights: Float[Tensor, "*rows h_i"],
    layout: CausalLayout,
    *,
    top_k: int,
    scale: float = 1.0,
    relu: bool = True,
    return_scores: bool = False,
    backend: Choice = "auto",
) -> TopK:
    """The `top_k` best visible keys of every query row.

    Args:
        index_q: indexer queries [t, h_i, d_i] or [b, sq, h_i, d_i]; bf16, fp16, fp32 or fp64.
        index_k: indexer keys [s, d_i] or [b, sk, d_i], of index_q's dtype.
        weights: head weights [t, h_i] or [b, sq, h_i], of index_q's dtype or fp32.
        layout: who sees whom.
        top_k: slots per row, at least 1; may exceed the number of keys.
        scale: multiplies the head sum, in fp32.
        relu: whether the dots pass a relu.
        return_scores: also keep the score of each selected key.
        backend: "auto" or a name of `backends()`.

    Returns:
        The selection: indices [t, k] or [b, sq, k], lengths [t] or [b, sq], and scores or None.

    Semantics:
        A row selects the min(top_k, visible) keys that come first in (score descending, key row ascending), exactly
        for the scores that the backend computed; NaN ranks above all numbers. Ids come out ascending. The same call
        gives the same ids bit for bit. Selection carries no gradient.

    Raises:
        BadInput: an argument does not fit; nothing was computed.
        UnsupportedProblem: the named backend does not take the problem.
        BackendMissing: the named backend is absent here.
    """
    rows = rows_of(layout)
    x = check_indexer(rows, index_q, index_k, weights, scale, relu)
    top_k = check_integer("top_k", top_k, 1)
    check_flag("return_scores", return_scores)
    return rows.unpack_topk(run_topk(rows, x, layout, top_k, return_scores, backend))
