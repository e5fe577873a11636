"""The indexer loss."""

from __future__ import annotations

import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from dsattn.functional.call import Choice, run_loss
from dsattn.functional.validation import check_attention, check_indexer, check_loss, check_lse, check_topk, rows_of
from dsattn.layouts import CausalLayout, TopK


def indexer_loss(
    index_q: Float[Tensor, "*rows h_i d_i"],
    index_k: Float[Tensor, "*keys d_i"],
    weights: Float[Tensor, "*rows h_i"],
    q: Float[Tensor, "*rows h d_qk"],
    kv: Float[Tensor, "*keys d_qk"],
    layout: CausalLayout,
    *,
    softmax_scale: float,
    scale: float = 1.0,
    relu: bool = True,
    topk: TopK | None = None,
    lse: Float[Tensor, "*rows h"] | None = None,
    coeff: float = 1.0,
    reduction: str = "mean",
    num_rows: int | Tensor | None = None,
    row_mask: Bool[Tensor, "*rows"] | None = None,
    tp_group: dist.ProcessGroup | None = None,
    backend: Choice = "auto",
) -> Float[Tensor, ""]:
    """The KL loss that teaches the indexer where the attention looks.

        teacher[i, j] = sum_h softmax_j(softmax_scale * q[i, h] . kv[j]), over its sum;  sink ignored, detached
        student[i, :] = softmax(score[i, :])
        loss = coeff * sum_i row_weight_i * sum_j teacher * (log teacher - log student)

    Args:
        index_q: indexer queries [t, h_i, d_i] or [b, sq, h_i, d_i]; bf16, fp16, fp32 or fp64.
        index_k: indexer keys [s, d_i] or [b, sk, d_i], of index_q's dtype.
        weights: head weights [t, h_i] or [b, sq, h_i], of index_q's dtype or fp32.
        q: attention queries [t, h, d_qk] or [b, sq, h, d_qk]; they get no gradient.
        kv: attention keys [s, d_qk] or [b, sk, d_qk], of q's dtype; they get no gradient.
        layout: who sees whom.
        softmax_scale: multiplies the attention's dots.
        scale: multiplies the indexer's head sum.
        relu: whether the indexer's dots pass a relu.
        topk: both softmaxes run over these keys (sparse stage); None: over all visible keys (dense warm-up).
        lse: log-sum-exp of the attention over the same keys if at hand; kernels may use it, it never changes the loss.
        coeff: multiplies the loss; 0 gives exact zeros, gradients included, without any work.
        reduction: "mean" over the contributing rows, or "sum".
        num_rows: divide by this count (an int, or a tensor with one number) instead of a reduction: the count over all
            micro-batches and ranks, so that their losses and gradients add up to those of one batch.
        row_mask: bool [t] or [b, sq]; rows with False take no part, whatever they hold.
        tp_group: tensor-parallel ranks over whose heads the teacher is summed.
        backend: "auto" or a name of `backends()`.

    Returns:
        A scalar, fp32 (fp64 for fp64 index inputs).

    Semantics:
        Rows without keys take no part; with no contributing row the loss is 0. Differentiable in index_q, index_k and
        weights. Under `torch.no_grad` no gradient work is done.

    Raises:
        BadInput: an argument does not fit; nothing was computed.
        UnsupportedProblem: the named backend does not take the problem.
        BackendMissing: the named backend is absent here.
    """
    rows = rows_of(layout)
    x = check_indexer(rows, index_q, index_k, weights, scale, relu)
    a = check_attention(rows, q, kv, None, softmax_scale)
    selection = None if topk is None else check_topk(rows, topk)
    options = check_loss(
        rows, coeff=coeff, reduction=reduction, num_rows=num_rows, row_mask=row_mask, tp_group=tp_group
    )
    return run_loss(rows, x, a, layout, selection, check_lse(rows, lse, a), options, backend)
