"""The whole of DeepSeek sparse attention in one call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from dsattn.errors import BadInput
from dsattn.functional.call import Choice, run_attention, run_loss, run_topk
from dsattn.functional.problems import last_backend
from dsattn.functional.validation import (
    Rows,
    check_attention,
    check_choice,
    check_flag,
    check_indexer,
    check_integer,
    check_loss,
    check_number,
    check_topk,
    rows_of,
)
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.spec.problem import Operator


@dataclass(frozen=True)
class DSAOutput:
    """What `dsa_attention` gives.

    Attributes:
        out: [t, h, d_v] or [b, sq, h, d_v] in kv's dtype.
        lse: natural log-sum-exp [t, h] or [b, sq, h], sink excluded, not differentiable.
        topk: the selection, None when nothing needed one.
        loss: the indexer loss, None for loss="none".
        backend: which backend ran each operator; empty under `torch.compile`, which runs them later.
    """

    out: Tensor
    lse: Tensor
    topk: TopK | None
    loss: Tensor | None
    backend: dict[str, str]


def dsa_attention(
    q: Float[Tensor, "*rows h d_qk"],
    kv: Float[Tensor, "*keys d_qk"],
    index_q: Float[Tensor, "*rows h_i d_i"] | None,
    index_k: Float[Tensor, "*keys d_i"] | None,
    weights: Float[Tensor, "*rows h_i"] | None,
    layout: CausalLayout,
    *,
    top_k: int | None = None,
    value_dim: int,
    softmax_scale: float,
    scale: float = 1.0,
    relu: bool = True,
    sink: Float[Tensor, " h"] | None = None,
    attend: str = "selected",
    loss: str = "none",
    coeff: float = 1.0,
    reduction: str = "mean",
    num_rows: int | Tensor | None = None,
    row_mask: Bool[Tensor, "*rows"] | None = None,
    tp_group: dist.ProcessGroup | None = None,
    topk: TopK | None = None,
    backend: Choice = "auto",
) -> DSAOutput:
    """Indexer, selection, attention and indexer loss of one layer; each argument means what it means there.

    Args:
        q: see `sparse_attention`.
        kv: see `sparse_attention`.
        index_q: see `indexer_topk`; None where neither a selection nor a loss is to be computed.
        index_k: as index_q.
        weights: as index_q.
        layout: who sees whom.
        top_k: keys per row; None where no selection is to be computed.
        value_dim: d_v.
        softmax_scale: multiplies the attention's dots.
        scale: multiplies the indexer's head sum.
        relu: whether the indexer's dots pass a relu.
        sink: [h] or None.
        attend: attention over the "selected" keys, or over all "visible" ones (dense warm-up).
        loss: "none", or the keys that the indexer loss runs over: "selected" or "visible".
        coeff: see `indexer_loss`.
        reduction: see `indexer_loss`.
        num_rows: see `indexer_loss`.
        row_mask: see `indexer_loss`.
        tp_group: see `indexer_loss`.
        topk: an earlier selection to use instead of a new one (index sharing, replay).
        backend: "auto" or a name of `backends()`, for every operator.

    Returns:
        The output, its log-sum-exp, the selection, the loss, and what ran; see `DSAOutput`.

    Raises:
        BadInput: an argument does not fit.
        UnsupportedProblem: the named backend does not take the problem.
        BackendMissing: the named backend is absent here.
    """
    check_choice("attend", attend, ("selected", "visible"))
    check_choice("loss", loss, ("none", "selected", "visible"))
    selects = "selected" in (attend, loss) and topk is None
    rows = rows_of(layout)
    a = check_attention(rows, q, kv, value_dim, softmax_scale, sink)
    # What is given is held to the rules even if this call has no use for it.
    x = None
    if selects or loss != "none" or any(part is not None for part in (index_q, index_k, weights)):
        x = check_indexer(rows, index_q, index_k, weights, scale, relu)
    check_number("scale", scale)
    check_flag("relu", relu)
    options = check_loss(
        rows, coeff=coeff, reduction=reduction, num_rows=num_rows, row_mask=row_mask, tp_group=tp_group
    )
    if selects or top_k is not None:
        top_k = check_integer("top_k", top_k, 1)
    given = None if topk is None else check_topk(rows, topk)
    if given is not None and top_k not in (None, given.indices.shape[1]):
        raise BadInput("top_k", given=top_k, needed=f"{given.indices.shape[1]}, the slots of topk, or None")
    selection = (top_k if given is None else given) if "selected" in (attend, loss) else None
    return _run(rows, x, a, layout, selection, attend, loss, options, backend)


def _run(
    rows: Rows,
    x: IndexerInputs | None,
    a: AttentionInputs,
    layout: CausalLayout,
    selection: TopK | int | None,
    attend: str,
    loss: str,
    options: LossOptions,
    backend: Choice,
) -> DSAOutput:
    """The operators of a validated call, one after the other; `selection` is a TopK, or the top_k of a new one."""
    topk = selection if isinstance(selection, TopK) else None
    ran: dict[str, str] = {}
    if x is not None and isinstance(selection, int):
        topk = run_topk(rows, x, layout, selection, False, backend)
        _record(ran, "indexer_topk")
    keys = topk if attend == "selected" and topk is not None else layout
    out, lse = run_attention(rows, a, keys, backend)
    _record(ran, "dense_attention" if keys is layout else "sparse_attention")
    value = None
    if x is not None and loss != "none":
        chosen = topk if loss == "selected" else None
        value = run_loss(rows, x, a, layout, chosen, lse if loss == attend else None, options, backend)
        _record(ran, "indexer_loss")
    batched = None if topk is None else rows.unpack_topk(topk)
    return DSAOutput(rows.unpack(out), rows.unpack(lse), batched, value, ran)


def _record(ran: dict[str, str], operator: Operator) -> None:
    # A compiled graph chooses when it runs: what runs is not known while it is traced.
    if not torch.compiler.is_compiling():
        ran[operator] = last_backend()
