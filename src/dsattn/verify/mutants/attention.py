"""Faults in the arithmetic of attention: scale, softmax, sink, values, precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log
from typing import Any

import torch
from torch import Tensor

from dsattn.backends import TorchBackend
from dsattn.ops.inputs import AttentionInputs
from dsattn.verify.mutants import (
    ATTENTION,
    ATTENTION_BACKWARD,
    LOSS,
    LOSS_BACKWARD,
    Fault,
    Operation,
    changed,
    edited,
    to_tf32,
)

_PARTS = ATTENTION + ATTENTION_BACKWARD + LOSS + LOSS_BACKWARD
_TORCH = TorchBackend()
_HEADS, _COLUMNS, _VALUES = 64, 512, 256
_QUERIES, _KEYS, _THIRD = range(3)


def _attend(a: AttentionInputs, operation: Operation) -> tuple[Tensor, Tensor]:
    """The right output and log-sum-exp over the keys of the operation, whichever part it is of."""
    if "topk" in operation.given:
        return _TORCH.sparse_attention(a, operation.topk)
    return _TORCH.dense_attention(a, operation.layout)


def _whole_width(a: AttentionInputs) -> AttentionInputs:
    """Values as wide as keys."""
    return replace(a, value_dim=a.kv.shape[1])


def _values_at_end(operation: Operation) -> tuple[Tensor, Tensor]:
    out, lse = operation(a=_whole_width(operation.a))
    return out[..., -operation.a.value_dim :].contiguous(), lse


def _empty_rows_nan(operation: Operation) -> Any:
    """The first result of rows without keys is 0 / 0."""
    results = operation()
    empty = _attend(replace(operation.a, sink=None), operation)[1][:, :1, None] == -torch.inf
    return results[0].masked_fill(empty, torch.nan), *results[1:]


def _sink_missing(operation: Operation) -> Any:
    if "d_out" not in operation.given:
        return operation(a=replace(operation.a, sink=None))
    d_q, d_kv, _ = operation(a=replace(operation.a, sink=None))
    return d_q, d_kv, operation()[_THIRD]


def _sink_in_lse(operation: Operation) -> tuple[Tensor, Tensor]:
    out, lse = operation()
    sink = operation.a.sink
    return out, lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype))


def _delta_missing(operation: Operation) -> Any:
    """d_q without the term that a softmax's backward subtracts: delta * sum_j prob * kv, times the scale."""
    d_q, d_kv, d_sink = operation()
    a = operation.a
    mean_key, _ = _attend(_whole_width(a), operation)
    delta = (operation.d_out.double() * operation.out.double()).sum(-1, keepdim=True)
    return (d_q.double() + a.softmax_scale * delta * mean_key.double()).to(d_q.dtype), d_kv, d_sink


def _part_of_d_kv(as_value: bool) -> Callable[[Operation], Any]:
    """kv is key and value: its gradient without the share of one of the two, told apart by a buffer that has both."""

    def apply(operation: Operation) -> Any:
        d_q, _, d_sink = operation()
        a = operation.a
        values = a.kv[:, : a.value_dim]
        q = torch.cat([a.q.new_zeros(*a.q.shape[:2], a.value_dim), a.q], -1)
        d_both = operation(a=replace(a, q=q, kv=torch.cat([values, a.kv], -1)))[_KEYS]
        if not as_value:
            return d_q, d_both[:, a.value_dim :].contiguous(), d_sink
        d_values = torch.zeros_like(a.kv)
        d_values[:, : a.value_dim] = d_both[:, : a.value_dim]
        return d_q, d_values, d_sink

    return apply


def _summed_in_low_precision(operation: Operation) -> Any:
    """Key gradients added row by row in the inputs' dtype."""
    d_q, d_kv, d_sink = operation()
    total = torch.zeros_like(d_kv)
    for row in range(len(d_q)):
        alone = torch.zeros_like(operation.d_out)
        alone[row] = operation.d_out[row]
        total += operation(d_out=alone)[_KEYS]
    return d_q, total, d_sink


def _first_columns(a: AttentionInputs) -> AttentionInputs:
    q = a.q.clone()
    q[..., _COLUMNS:] = 0
    return replace(a, q=q)


def _scaled_sink(a: AttentionInputs) -> AttentionInputs:
    return a if a.sink is None else replace(a, sink=a.sink * a.softmax_scale)


def _without_maximum(operation: Operation) -> tuple[Tensor, Tensor]:
    out, lse = operation()
    total = lse.exp()
    lost = total.isinf() | ((total == 0) & (lse != -torch.inf))
    return out.masked_fill(lost[..., None], torch.nan), total.log()


def _overwritten(operation: Operation) -> Any:
    """Keys that rows of the second half use have the gradient of those rows alone."""
    d_q, d_kv, d_sink = operation()
    later = operation.d_out.clone()
    later[: len(later) // 2] = 0
    d_later = operation(d_out=later)[_KEYS]
    return d_q, torch.where((d_later != 0).any(-1, keepdim=True), d_later, d_kv), d_sink


def _zero_behind(result: Tensor) -> Tensor:
    result[:, _HEADS:] = 0
    return result


FAULTS = (
    Fault(
        name="softmax_scale dropped",
        imitates="logits are not multiplied by softmax_scale",
        parts=_PARTS,
        apply=changed("a", lambda a: replace(a, softmax_scale=1.0)),
    ),
    Fault(
        name="attention products in TF32",
        imitates="torch.backends.cuda.matmul.allow_tf32 = True",
        parts=_PARTS,
        apply=changed("a", lambda a: replace(a, q=to_tf32(a.q), kv=to_tf32(a.kv))),
    ),
    Fault(
        name="heads past a tile skipped",
        imitates=f"a kernel that is right up to {_HEADS} heads and stops there",
        parts=ATTENTION + ATTENTION_BACKWARD,
        apply=edited(_QUERIES, _zero_behind),
    ),
    Fault(
        name="values from the end of kv",
        imitates="the value taken as the last d_v columns of a row instead of the first",
        parts=ATTENTION,
        apply=_values_at_end,
    ),
    Fault(
        name="sink ignored",
        imitates="the softmax runs over the keys alone",
        parts=ATTENTION + ATTENTION_BACKWARD,
        apply=_sink_missing,
    ),
    Fault(
        name="sink in lse",
        imitates="the log-sum-exp counts the sink, so what is computed from it is off",
        parts=ATTENTION,
        apply=_sink_in_lse,
    ),
    Fault(
        name="lse in base 2",
        imitates="a kernel on exp2 gives its log-sum-exp as it is",
        parts=ATTENTION,
        apply=edited(1, lambda lse: lse / log(2)),
    ),
    Fault(
        name="rows without keys NaN",
        imitates="0 / 0 in padding rows",
        parts=ATTENTION + ATTENTION_BACKWARD,
        apply=_empty_rows_nan,
    ),
    Fault(
        name="d_sink with the wrong sign",
        imitates="the gradient of the sink raises it where it should fall",
        parts=ATTENTION_BACKWARD,
        apply=edited(_THIRD, torch.neg),
    ),
    Fault(
        name="softmax term missing in d_q",
        imitates="the backward of the softmax does not subtract the row's mean",
        parts=ATTENTION_BACKWARD,
        apply=_delta_missing,
    ),
    Fault(
        name="kv's gradient as value missing",
        imitates="kv taken as key alone in the backward",
        parts=ATTENTION_BACKWARD,
        apply=_part_of_d_kv(as_value=False),
    ),
    Fault(
        name="kv's gradient as key missing",
        imitates="kv taken as value alone in the backward",
        parts=ATTENTION_BACKWARD,
        apply=_part_of_d_kv(as_value=True),
    ),
    Fault(
        name="key gradients summed in bf16",
        imitates="atomic adds into a bf16 buffer",
        parts=ATTENTION_BACKWARD,
        apply=_summed_in_low_precision,
        dtype="bf16",
    ),
    Fault(
        name="columns of kv past a tile skipped",
        imitates=f"logits from the first {_COLUMNS} columns: the position part of a latent row is left out",
        parts=_PARTS,
        apply=changed("a", _first_columns),
    ),
    Fault(
        name="values past a tile skipped",
        imitates=f"a kernel that is right up to {_VALUES} columns of values and stops there",
        parts=ATTENTION,
        apply=edited(0, lambda out: torch.cat([out[..., :_VALUES], torch.zeros_like(out[..., _VALUES:])], -1)),
    ),
    Fault(
        name="softmax without its maximum",
        imitates="exp of the logits themselves, which overflows or leaves a sum of 0",
        parts=ATTENTION,
        apply=_without_maximum,
    ),
    Fault(
        name="NaN swallowed",
        imitates="a maximum that skips NaN, and a result with 0 where a fault should show",
        parts=ATTENTION + ATTENTION_BACKWARD,
        apply=edited(0, lambda result: result.nan_to_num(nan=0.0)),
    ),
    Fault(
        name="NaN of unseen keys spread",
        imitates="masked keys multiplied by 0, which leaves NaN: all rows have what one key holds",
        parts=ATTENTION,
        apply=edited(0, lambda out: torch.full_like(out, torch.nan) if out.isnan().any() else out),
    ),
    Fault(
        name="sink times softmax_scale",
        imitates="the sink put among the dots before they are scaled",
        parts=ATTENTION,
        apply=changed("a", _scaled_sink),
    ),
    Fault(
        name="lse rounded to bf16",
        imitates="the log-sum-exp stored in the inputs' dtype",
        parts=ATTENTION,
        apply=edited(1, lambda lse: lse.bfloat16().to(lse.dtype)),
        dtype="bf16",
    ),
    Fault(
        name="key gradients of rows overwritten",
        imitates="a store where an atomic add is needed: of the rows that share a key the later ones stay",
        parts=ATTENTION_BACKWARD,
        apply=_overwritten,
    ),
)
"""The faults of this module."""
