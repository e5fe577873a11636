"""Validated calls of the operators, packed in and packed out; what public functions share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsattn.backends import Backend, name_of
from dsattn.errors import UnsupportedProblem
from dsattn.functional import custom_ops
from dsattn.functional.validation import Rows
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.spec.problem import Operator

Choice = str | Backend


@dataclass(frozen=True, kw_only=True)
class Call:
    """One validated call of an operator, as observers see it.

    Attributes:
        operator: which operator is called.
        batch: b of a BSHD call, None for a packed one.
        x: the indexer's side, None where the operator has none.
        a: the attention's side, None where the operator has none.
        layout: who sees whom; None for `sparse_attention`.
        topk: the selection that was given.
        top_k: slots per row, where there is a selection.
        options: of the loss.
        requires_grad: whether a backward may follow.
    """

    operator: Operator
    batch: int | None
    x: IndexerInputs | None = None
    a: AttentionInputs | None = None
    layout: CausalLayout | None = None
    topk: TopK | None = None
    top_k: int | None = None
    options: LossOptions | None = None
    requires_grad: bool = False


class _Observers(threading.local):
    """Those of this thread: what other threads call is none of their business."""

    def __init__(self) -> None:
        self.active: list[Callable[[Call], None]] = []


_observers = _Observers()


@contextmanager
def observed(observer: Callable[[Call], None]) -> Generator[None]:
    """Calls `observer` with every call of an operator on this thread, before it runs; not inside compiled graphs."""
    _observers.active.append(observer)
    try:
        yield
    finally:
        _observers.active.remove(observer)


def is_observed() -> bool:
    """Whether anyone on this thread wants to know of calls."""
    return bool(_observers.active)


def tell(call: Call) -> None:
    """Tells the observers of this thread of a call, which may be another library's."""
    for observer in tuple(_observers.active):
        observer(call)


def _tell(operator: Operator, rows: Rows, common: dict[str, Any], **parts: Any) -> None:
    if torch.compiler.is_compiling() or not is_observed():
        return
    requires_grad = common.get("requires_grad", False)
    tell(Call(operator=operator, batch=rows.batch, requires_grad=requires_grad, **parts))


def run_scores(rows: Rows, x: IndexerInputs, layout: CausalLayout, backend: Choice) -> Tensor:
    """Scores [t, s]."""
    tensors = x.index_q, x.index_k, x.weights
    table, sizes = _wired(layout)
    common = _common(rows, tensors, backend)
    _tell("indexer_scores", rows, common, x=x, layout=layout)
    return custom_ops.indexer_scores(*tensors, table, sizes=sizes, **_scoring(x), **common)


def run_topk(
    rows: Rows, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool, backend: Choice
) -> TopK:
    """The selection."""
    table, sizes = _wired(layout)
    _tell("indexer_topk", rows, {}, x=x, layout=layout, top_k=top_k)
    indices, lengths, scores = custom_ops.indexer_topk(
        x.index_q.detach(),
        x.index_k.detach(),
        x.weights.detach(),
        table,
        sizes=sizes,
        top_k=top_k,
        return_scores=return_scores,
        batch=rows.batch,
        backend=name_of(backend),
        **_scoring(x),
    )
    return TopK._trusted(indices, lengths, scores if return_scores else None, layout.num_q, layout.num_k)


def run_attention(rows: Rows, a: AttentionInputs, keys: CausalLayout | TopK, backend: Choice) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over a selection, or over all keys that a layout shows."""
    common = _common(rows, (a.q, a.kv, a.sink), backend)
    if isinstance(keys, TopK):
        _tell("sparse_attention", rows, common, a=a, topk=keys, top_k=keys.indices.shape[1])
        where, sizes = (_savable(keys.indices), _savable(keys.lengths), None), [keys.num_q, keys.num_k, 1]
    else:
        _tell("dense_attention", rows, common, a=a, layout=keys)
        table, sizes = _wired(keys)
        where = (None, None, table)
    options = {"value_dim": a.value_dim, "softmax_scale": float(a.softmax_scale)}
    return custom_ops.attention(a.q, a.kv, a.sink, *where, sizes=sizes, **options, **common)


def run_loss(
    rows: Rows,
    x: IndexerInputs,
    a: AttentionInputs,
    layout: CausalLayout,
    topk: TopK | None,
    lse: Tensor | None,
    options: LossOptions,
    backend: Choice,
) -> Tensor:
    """The loss over a selection, or over all keys that the layout shows."""
    tensors = x.index_q, x.index_k, x.weights
    table, sizes = _wired(layout)
    common = _common(rows, tensors, backend)
    top_k = None if topk is None else topk.indices.shape[1]
    _tell("indexer_loss", rows, common, x=x, a=a, layout=layout, topk=topk, top_k=top_k, options=options)
    counted = isinstance(options.num_rows, Tensor)
    loss, *_ = custom_ops.indexer_loss(
        *tensors,
        a.q.detach(),
        a.kv.detach(),
        table,
        None if topk is None else topk.indices,
        None if topk is None else topk.lengths,
        lse,
        options.row_mask,
        options.num_rows if counted else None,
        sizes=sizes,
        softmax_scale=float(a.softmax_scale),
        coeff=float(options.coeff),
        reduction=options.reduction,
        num_rows=None if counted else options.num_rows,
        tp_group=None if options.tp_group is None else options.tp_group.group_name,
        **_scoring(x),
        **common,
    )
    return loss


def _wired(layout: CausalLayout) -> tuple[Tensor, list[int]]:
    table, sizes = layout._wire()
    return _savable(table), sizes


def _savable(x: Tensor) -> Tensor:
    """x, or a copy that autograd can save where x was made in inference mode."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not x.is_inference():
        return x
    return x.clone()


def _refuse_forward_mode(tensors: tuple[Tensor | None, ...]) -> None:
    """Custom ops know no forward-mode derivatives: PyTorch would take them for zero and say nothing."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise UnsupportedProblem("forward-mode derivatives", given="inputs with tangents", needed="reverse mode")


def _scoring(x: IndexerInputs) -> dict[str, Any]:
    return {"scale": float(x.scale), "relu": x.relu}


def _common(rows: Rows, tensors: tuple[Tensor | None, ...], backend: Choice) -> dict[str, Any]:
    _refuse_forward_mode(tensors)
    requires_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return {"batch": rows.batch, "requires_grad": requires_grad, "backend": name_of(backend)}
