"""Faults in what is read and written, whichever operator does it: strides, rows and gradients left out."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from dsattn.layouts import TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs
from dsattn.verify.mutants import (
    ATTENTION,
    ATTENTION_BACKWARD,
    LOSS_BACKWARD,
    PARTS,
    SCORES,
    SCORES_BACKWARD,
    SELECTION,
    Fault,
    Operation,
    edited,
)

_GRADIENTS = SCORES_BACKWARD + ATTENTION_BACKWARD + LOSS_BACKWARD
_QUERIES, _KEYS, _THIRD = range(3)


def _row_skipped(operation: Operation) -> Any:
    """The middle row of the first result is 0, as a buffer of zeros would leave it."""
    results = operation()
    first = results if isinstance(results, Tensor) else results.indices if isinstance(results, TopK) else results[0]
    first[len(first) // 2 : len(first) // 2 + 1] = 0
    return results


def _later_batches_zero(operation: Operation) -> Any:
    d_queries, d_keys, rest = operation()
    if operation.batch:
        d_keys[len(d_keys) // operation.batch :] = 0
    return d_queries, d_keys, rest


def _unwritten(d_rows: Tensor) -> Tensor:
    """A gradient whose rows without any term keep what the buffer held."""
    return d_rows.masked_fill((d_rows == 0).all(-1, keepdim=True), 1)


def _contiguous(x: Tensor) -> Tensor:
    """What stands where x would be if it were contiguous."""
    strides = torch.empty(x.shape, device="meta").stride()
    return x.as_strided(x.shape, strides)


def _strides_ignored(operation: Operation) -> Any:
    changes: dict[str, Any] = {}
    for name, given in operation.given.items():
        if isinstance(given, IndexerInputs | AttentionInputs):
            values: dict[str, Any] = {f.name: getattr(given, f.name) for f in fields(given)}
            for field, x in values.items():
                values[field] = _contiguous(x) if isinstance(x, Tensor) else x
            changes[name] = type(given)(**values)
        elif name == "d_out":
            changes[name] = _contiguous(given)
    return operation(**changes)


FAULTS = (
    Fault(
        name="strides ignored",
        imitates="a kernel that takes a pointer and sizes, and a tensor that is a view of a larger one",
        parts=PARTS,
        apply=_strides_ignored,
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
        name="gradient of unseen keys unwritten",
        imitates="torch.empty for the key gradient, and no row to write what no query sees",
        parts=_GRADIENTS,
        apply=edited(_KEYS, _unwritten),
    ),
    Fault(
        name="gradient of rows without keys unwritten",
        imitates="torch.empty for the query gradient, and nothing written in padding rows",
        parts=_GRADIENTS,
        apply=edited(_QUERIES, _unwritten),
    ),
)
"""The faults of this module."""
