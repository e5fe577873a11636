"""Faults in the arithmetic of scores and attention: scales, masks, sinks, precision, rows and gradients left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log
from typing import Any

import torch
from torch import Tensor

from dsattn.backends import TorchBackend
from dsattn.layouts import TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs
from dsattn.verify.mutants import (
    ATTENTION,
    ATTENTION_BACKWARD,
    DENSE_BACKWARD,
    LOSS,
    LOSS_BACKWARD,
    SCORES,
    SCORES_BACKWARD,
    SELECTION,
    SPARSE_BACKWARD,
    Fault,
    Operation,
    changed,
    edited,
)

_INDEXER = SCORES + SCORES_BACKWARD + SELECTION + LOSS + LOSS_BACKWARD
_ATTENDING = ATTENTION + ATTENTION_BACKWARD + LOSS + LOSS_BACKWARD
_GRADIENTS = SCORES_BACKWARD + ATTENTION_BACKWARD + LOSS_BACKWARD
_TORCH = TorchBackend()
_INDEX_HEADS, _HEADS = 32, 64
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


def _row_skipped(operation: Operation) -> Any:
    """The middle row of the first result is 0, as a buffer of zeros would leave it."""
    results = operation()
    first = results if isinstance(results, Tensor) else results.indices if isinstance(results, TopK) else results[0]
    first[len(first) // 2 : len(first) // 2 + 1] = 0
    return results


def _empty_rows_nan(operation: Operation) -> Any:
    """The first result of rows without keys is 0 / 0."""
    results = operation()
    empty = _attend(replace(operation.a, sink=None), operation)[1][:, :1, None] == -torch.inf
    return results[0].masked_fill(empty, torch.nan), *results[1:]


def _masked_as_0(operation: Operation) -> Tensor:
    scores = operation()
    return scores.masked_fill(scores == -torch.inf, 0)


def _later_batches_zero(operation: Operation) -> Any:
    d_queries, d_keys, rest = operation()
    if operation.batch:
        d_keys[len(d_keys) // operation.batch :] = 0
    return d_queries, d_keys, rest


def _gate_missing(operation: Operation) -> Any:
    d_index_q, d_index_k, _ = operation(x=replace(operation.x, relu=False))
    return d_index_q, d_index_k, operation()[_THIRD]


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


def _indexer(change: Callable[[IndexerInputs], IndexerInputs]) -> Callable[[Operation], Any]:
    return changed("x", change)


def _attention(change: Callable[[AttentionInputs], AttentionInputs]) -> Callable[[Operation], Any]:
    return changed("a", change)


def _first_heads(x: IndexerInputs) -> IndexerInputs:
    weights = x.weights.clone()
    weights[:, _INDEX_HEADS:] = 0
    return replace(x, weights=weights)


def _zero_behind(result: Tensor) -> Tensor:
    result[:, _HEADS:] = 0
    return result


def _tf32(x: Tensor) -> Tensor:
    """x with the ten bits of mantissa that TF32 keeps, rounded to nearest."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


FAULTS = (
    Fault(
        name="indexer scale dropped",
        imitates="the head sum is not multiplied by scale",
        parts=_INDEXER,
        apply=_indexer(lambda x: replace(x, scale=1.0)),
    ),
    Fault(
        name="indexer relu missing",
        imitates="negative dots count against a key",
        parts=_INDEXER,
        apply=_indexer(lambda x: replace(x, relu=False)),
    ),
    Fault(
        name="indexer relu always on",
        imitates="relu=False ignored",
        parts=_INDEXER,
        apply=_indexer(lambda x: replace(x, relu=True)),
    ),
    Fault(
        name="relu gate missing",
        imitates="the backward of the indexer lets gradients through heads whose dot the relu cut off",
        parts=SCORES_BACKWARD,
        apply=_gate_missing,
    ),
    Fault(
        name="indexer heads past a tile skipped",
        imitates=f"a kernel that is right up to {_INDEX_HEADS} indexer heads and stops there",
        parts=_INDEXER,
        apply=_indexer(_first_heads),
    ),
    Fault(
        name="weights rounded to bf16",
        imitates="fp32 head weights cast to the dtype of index_q",
        parts=_INDEXER,
        apply=_indexer(lambda x: replace(x, weights=x.weights.bfloat16().to(x.weights.dtype))),
        dtype="bf16",
    ),
    Fault(
        name="indexer products in TF32",
        imitates="torch.backends.cuda.matmul.allow_tf32 = True",
        parts=_INDEXER,
        apply=_indexer(lambda x: replace(x, index_q=_tf32(x.index_q), index_k=_tf32(x.index_k))),
    ),
    Fault(
        name="scores rounded to bf16",
        imitates="scores stored in the inputs' dtype",
        parts=SCORES,
        apply=lambda operation: operation().bfloat16().float(),
        dtype="bf16",
    ),
    Fault(
        name="mask fill 0",
        imitates="unseen keys score 0 instead of -inf",
        parts=SCORES,
        apply=_masked_as_0,
    ),
    Fault(
        name="softmax_scale dropped",
        imitates="logits are not multiplied by softmax_scale",
        parts=_ATTENDING,
        apply=_attention(lambda a: replace(a, softmax_scale=1.0)),
    ),
    Fault(
        name="attention products in TF32",
        imitates="torch.backends.cuda.matmul.allow_tf32 = True",
        parts=_ATTENDING,
        apply=_attention(lambda a: replace(a, q=_tf32(a.q), kv=_tf32(a.kv))),
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
        name="one row skipped",
        imitates="one row of the result is never written",
        parts=SCORES + SELECTION + ATTENTION + _GRADIENTS,
        apply=_row_skipped,
    ),
    Fault(
        name="query gradient zero",
        imitates="the first of the three gradients is never computed",
        parts=_GRADIENTS,
        apply=edited(_QUERIES, torch.zeros_like),
    ),
    Fault(
        name="key gradient zero",
        imitates="the second of the three gradients is never computed",
        parts=_GRADIENTS,
        apply=edited(_KEYS, torch.zeros_like),
    ),
    Fault(
        name="weights' or sink's gradient zero",
        imitates="the third of the three gradients is never computed",
        parts=_GRADIENTS,
        apply=edited(_THIRD, torch.zeros_like),
    ),
    Fault(
        name="key gradient of the first batch entry only",
        imitates="d_index_k or d_kv of all sequences but the first stays zero",
        parts=_GRADIENTS,
        apply=_later_batches_zero,
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
        parts=SPARSE_BACKWARD + DENSE_BACKWARD,
        apply=_summed_in_low_precision,
        dtype="bf16",
    ),
)
"""The faults of this module."""
