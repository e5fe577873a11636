"""Attention over selected and over all visible keys."""

from __future__ import annotations

from typing import Literal, overload

from jaxtyping import Float
from torch import Tensor

from dsattn.functional.call import Choice, run_attention
from dsattn.functional.validation import check_attention, check_flag, check_topk, rows_of, rows_of_topk
from dsattn.layouts import CausalLayout, TopK


@overload
def sparse_attention(
    q: Tensor,
    kv: Tensor,
    topk: TopK,
    *,
    value_dim: int,
    softmax_scale: float,
    sink: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: Choice = "auto",
) -> Tensor: ...


@overload
def sparse_attention(
    q: Tensor,
    kv: Tensor,
    topk: TopK,
    *,
    value_dim: int,
    softmax_scale: float,
    sink: Tensor | None = None,
    return_lse: Literal[True],
    backend: Choice = "auto",
) -> tuple[Tensor, Tensor]: ...


def sparse_attention(
    q: Float[Tensor, "*rows h d_qk"],
    kv: Float[Tensor, "*keys d_qk"],
    topk: TopK,
    *,
    value_dim: int,
    softmax_scale: float,
    sink: Float[Tensor, " h"] | None = None,
    return_lse: bool = False,
    backend: Choice = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every query row over its selected keys.

        logit[i, h, j] = softmax_scale * q[i, h] . kv[j]        lse[i, h] = log sum_j exp logit
        out[i, h] = sum_j exp(logit - logaddexp(lse, sink_h)) * kv[j, :value_dim]

    Args:
        q: queries [t, h, d_qk] or [b, sq, h, d_qk]; bf16, fp16, fp32 or fp64.
        kv: shared keys and values [s, d_qk] or [b, sk, d_qk], of q's dtype.
        topk: the selection; the mask is in its ids, no other is applied.
        value_dim: d_v, how many leading columns of kv are the value.
        softmax_scale: multiplies the dots.
        sink: [h] logit of a key with value 0; fp32 (fp64 with fp64 kv). None: no sink.
        return_lse: also return the log-sum-exp.
        backend: "auto" or a name of `backends()`.

    Returns:
        out [t, h, d_v] or [b, sq, h, d_v] in kv's dtype; with `return_lse` also lse [t, h] or [b, sq, h], fp32 (fp64
        for fp64 inputs), natural logarithm, sink excluded, not differentiable.

    Semantics:
        A row with no key: out 0, lse -inf, zero gradients. Unused slots read no key row. Differentiable in q, kv, sink.

    Raises:
        BadInput: an argument does not fit; nothing was computed.
        UnsupportedProblem: the named backend does not take the problem.
        BackendMissing: the named backend is absent here.
    """
    rows = rows_of_topk(topk)
    a = check_attention(rows, q, kv, value_dim, softmax_scale, sink)
    check_flag("return_lse", return_lse)
    out, lse = run_attention(rows, a, check_topk(rows, topk), backend)
    return (rows.unpack(out), rows.unpack(lse)) if return_lse else rows.unpack(out)


@overload
def dense_attention(
    q: Tensor,
    kv: Tensor,
    layout: CausalLayout,
    *,
    value_dim: int,
    softmax_scale: float,
    sink: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: Choice = "auto",
) -> Tensor: ...


@overload
def dense_attention(
    q: Tensor,
    kv: Tensor,
    layout: CausalLayout,
    *,
    value_dim: int,
    softmax_scale: float,
    sink: Tensor | None = None,
    return_lse: Literal[True],
    backend: Choice = "auto",
) -> tuple[Tensor, Tensor]: ...


def dense_attention(
    q: Float[Tensor, "*rows h d_qk"],
    kv: Float[Tensor, "*keys d_qk"],
    layout: CausalLayout,
    *,
    value_dim: int,
    softmax_scale: float,
    sink: Float[Tensor, " h"] | None = None,
    return_lse: bool = False,
    backend: Choice = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every query row over all keys that it sees; else as `sparse_attention`.

    Args:
        q: queries [t, h, d_qk] or [b, sq, h, d_qk]; bf16, fp16, fp32 or fp64.
        kv: shared keys and values [s, d_qk] or [b, sk, d_qk], of q's dtype.
        layout: who sees whom.
        value_dim: d_v, how many leading columns of kv are the value.
        softmax_scale: multiplies the dots.
        sink: [h] logit of a key with value 0; fp32 (fp64 with fp64 kv). None: no sink.
        return_lse: also return the log-sum-exp.
        backend: "auto" or a name of `backends()`.

    Returns:
        out [t, h, d_v] or [b, sq, h, d_v] in kv's dtype; with `return_lse` also lse [t, h] or [b, sq, h], fp32 (fp64
        for fp64 inputs), natural logarithm, sink excluded, not differentiable.

    Semantics:
        A row with no key: out 0, lse -inf, zero gradients. Differentiable in q, kv, sink.

    Raises:
        BadInput: an argument does not fit; nothing was computed.
        UnsupportedProblem: the named backend does not take the problem.
        BackendMissing: the named backend is absent here.
    """
    rows = rows_of(layout)
    a = check_attention(rows, q, kv, value_dim, softmax_scale, sink)
    check_flag("return_lse", return_lse)
    out, lse = run_attention(rows, a, layout, backend)
    return (rows.unpack(out), rows.unpack(lse)) if return_lse else rows.unpack(out)
