"""Faults in selections: in what `indexer_topk` gives, and in how the operators read the ids that they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsattn.backends import TorchBackend
from dsattn.layouts import TopK
from dsattn.verify.mutants import (
    LOSS_SELECTED,
    LOSS_SELECTED_BACKWARD,
    SELECTION,
    SPARSE,
    SPARSE_BACKWARD,
    Fault,
    Operation,
)

_READERS = SPARSE + SPARSE_BACKWARD + LOSS_SELECTED + LOSS_SELECTED_BACKWARD
_TORCH = TorchBackend()
_TILE = 8
_MANY_SLOTS = 256

# What a fault makes of the ids [t, k] and lengths [t] of an operation.
Change = Callable[[Tensor, Tensor, Operation], tuple[Tensor, Tensor]]


def _reading(change: Change) -> Callable[[Operation], Any]:
    """A fault's `apply`: the selection that an operator is given is read wrongly."""
    return lambda operation: operation(topk=_changed(operation.topk, change, operation))


def _writing(change: Change) -> Callable[[Operation], Any]:
    """A fault's `apply`: the selection comes out wrong."""
    return lambda operation: _changed(operation(), change, operation)


def _changed(topk: TopK, change: Change, operation: Operation) -> TopK:
    indices, lengths = change(topk.indices, topk.lengths, operation)
    return TopK._trusted(indices.int(), lengths.int(), topk.scores, topk.num_q, topk.num_k)


def _used(ids: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]


def _first_keys(ids: Tensor, operation: Operation) -> Tensor:
    """The first key row of each row's sequence [t, 1]: from the layout, or else from the batch size."""
    rows = torch.arange(len(ids), device=ids.device)
    if "layout" in operation.given:
        return operation.layout._key_ranges()[0].to(ids.device)[:, None]
    if not operation.batch:
        return torch.zeros_like(rows)[:, None]
    per_row, per_key = len(ids) // operation.batch, operation.topk.num_k // operation.batch
    return (rows // max(1, per_row) * per_key)[:, None]


def _local(ids: Tensor, lengths: Tensor, operation: Operation) -> tuple[Tensor, Tensor]:
    return torch.where(ids < 0, ids, ids - _first_keys(ids, operation)), lengths


def _based_twice(ids: Tensor, lengths: Tensor, operation: Operation) -> tuple[Tensor, Tensor]:
    keys = operation.topk.num_k if "topk" in operation.given else operation.layout.num_k
    return torch.where(ids < 0, ids, (ids + _first_keys(ids, operation)).clamp(max=keys - 1)), lengths


def _seq_major(ids: Tensor, lengths: Tensor, operation: Operation) -> tuple[Tensor, Tensor]:
    if not operation.batch:
        return ids, lengths
    keys = operation.topk.num_k if "topk" in operation.given else operation.layout.num_k
    per_sequence = max(1, keys // operation.batch)
    return torch.where(ids < 0, ids, ids % per_sequence * operation.batch + ids // per_sequence), lengths


def _cut(lengths_of: Callable[[Tensor], Tensor]) -> Change:
    """Fewer slots are used: those behind stay -1."""

    def change(ids: Tensor, lengths: Tensor, _: Operation) -> tuple[Tensor, Tensor]:
        lengths = lengths_of(lengths)
        return ids.masked_fill(~_used(ids, lengths), -1), lengths

    return change


def _even(operation: Operation) -> TopK:
    slots = max(1, operation.top_k - operation.top_k % 2)
    topk = operation(top_k=slots)
    indices = topk.indices.new_full((len(topk.indices), operation.top_k), -1)
    indices[:, :slots] = topk.indices
    return TopK._trusted(indices, topk.lengths, None, topk.num_q, topk.num_k)


def _repeated(ids: Tensor, lengths: Tensor, _: Operation) -> tuple[Tensor, Tensor]:
    ids = ids.clone()
    ids[:, 1:2] = torch.where(lengths[:, None] > 1, ids[:, :1], ids[:, 1:2])
    return ids, lengths


def _by_score(operation: Operation) -> TopK:
    topk = operation(return_scores=True)
    scores, order = topk.scores.sort(dim=1, descending=True, stable=True)
    return TopK._trusted(topk.indices.gather(1, order), topk.lengths, scores, topk.num_q, topk.num_k)


def _unused_scores_zero(operation: Operation) -> TopK:
    topk = operation()
    if topk.scores is None:
        return topk
    scores = topk.scores.masked_fill(~_used(topk.indices, topk.lengths), 0)
    return TopK._trusted(topk.indices, topk.lengths, scores, topk.num_q, topk.num_k)


def _select(operation: Operation, change: Callable[[Tensor], Tensor], *, last_key_first: bool = False) -> TopK:
    """A selection by the table of scores [t, s] that `change` makes of the right one."""
    layout = operation.layout
    table = change(_TORCH.indexer_scores(operation.x, layout))
    start, end = layout.bounds(table.device)
    count, slots = (end - start).clamp(max=operation.top_k), min(operation.top_k, table.shape[1])
    if last_key_first:
        order = table.shape[1] - 1 - table.flip(1).sort(dim=1, descending=True, stable=True).indices
    else:
        order = table.sort(dim=1, descending=True, stable=True).indices
    keys = order[:, :slots].masked_fill(~_used(order[:, :slots], count), layout.num_k).sort(1).values
    ids = torch.full((layout.num_q, operation.top_k), -1, dtype=torch.int32, device=table.device)
    ids[:, :slots] = torch.where(keys == layout.num_k, -1, keys).int()
    return TopK._trusted(ids, count, None, layout.num_q, layout.num_k)


FAULTS = (
    Fault(
        name="flat ids read as local",
        imitates="the start of the sequence is missing in the ids: all sequences use the first one's keys",
        parts=_READERS,
        apply=_reading(_local),
    ),
    Fault(
        name="local ids read as flat",
        imitates="the start of the sequence is added to ids that have it already",
        parts=_READERS,
        apply=_reading(_based_twice),
    ),
    Fault(
        name="ids read as sequence-major",
        imitates="key rows taken as j * b + batch, the order of an SBHD buffer",
        parts=_READERS,
        apply=_reading(_seq_major),
    ),
    Fault(
        name="unused slots read",
        imitates="-1 taken as key row 0, and no mask on the slots behind the row's length",
        parts=_READERS,
        apply=_reading(lambda ids, lengths, _: (ids.clamp(min=0), torch.full_like(lengths, ids.shape[1]))),
    ),
    Fault(
        name="last used slot skipped",
        imitates="a loop over a row's keys that ends one early",
        parts=_READERS,
        apply=_reading(_cut(lambda lengths: (lengths - 1).clamp(min=0))),
    ),
    Fault(
        name="last chunk of slots skipped",
        imitates=f"slots behind the last full tile of {_TILE} are never read",
        parts=_READERS,
        apply=_reading(_cut(lambda lengths: lengths - lengths % _TILE)),
    ),
    Fault(
        name="second tile of slots skipped",
        imitates=f"a kernel that is right up to {_MANY_SLOTS} keys per row and stops there",
        parts=SELECTION + _READERS,
        apply=lambda operation: (
            _writing(_cut(_first_tile)) if "top_k" in operation.given else _reading(_cut(_first_tile))
        )(operation),
    ),
    Fault(
        name="local ids written",
        imitates="ids count from the start of each document or sequence instead of the key buffer",
        parts=SELECTION,
        apply=_writing(_local),
    ),
    Fault(
        name="sequence-major ids written",
        imitates="ids come out as j * b + batch",
        parts=SELECTION,
        apply=_writing(_seq_major),
    ),
    Fault(
        name="tail slot unwritten",
        imitates="unused slots hold 0, which is a key, instead of -1",
        parts=SELECTION,
        apply=_writing(lambda ids, lengths, _: (ids.clamp(min=0), lengths)),
    ),
    Fault(
        name="last used slot unwritten",
        imitates="every row comes out one key short",
        parts=SELECTION,
        apply=_writing(_cut(lambda lengths: (lengths - 1).clamp(min=0))),
    ),
    Fault(
        name="lengths all top_k",
        imitates="rows that see fewer keys than there are slots say that all slots are used",
        parts=SELECTION,
        apply=_writing(lambda ids, lengths, _: (ids, torch.full_like(lengths, ids.shape[1]))),
    ),
    Fault(
        name="top_k rounded down to even",
        imitates="a kernel that works on pairs of slots",
        parts=SELECTION,
        apply=_even,
    ),
    Fault(name="a key selected twice", imitates="a merge of partial selections", parts=SELECTION,
          apply=_writing(_repeated)),
    Fault(
        name="ids in order of score",
        imitates="the order of torch.topk instead of ascending ids",
        parts=SELECTION,
        apply=_by_score,
    ),
    Fault(
        name="tie order reversed",
        imitates="of equal scores the highest key row wins",
        parts=SELECTION,
        apply=lambda operation: _select(operation, lambda table: table, last_key_first=True),
    ),
    Fault(
        name="mask fill 0",
        imitates="unseen keys score 0 instead of -inf and beat the seen ones that score less",
        parts=SELECTION,
        apply=lambda operation: _select(operation, lambda table: table.masked_fill(table == -torch.inf, 0)),
    ),
    Fault(
        name="smallest scores selected",
        imitates="the sort runs the other way",
        parts=SELECTION,
        apply=lambda operation: _select(operation, lambda table: torch.where(table == -torch.inf, table, -table)),
    ),
    Fault(
        name="scores rounded to bf16",
        imitates="the scores are stored in the inputs' dtype before they are sorted",
        parts=SELECTION,
        apply=lambda operation: _select(operation, lambda table: table.bfloat16().float()),
        dtype="bf16",
    ),
    Fault(
        name="unused scores 0",
        imitates="the scores of unused slots are left as the buffer had them",
        parts=SELECTION,
        apply=_unused_scores_zero,
    ),
)
"""The faults of this module."""
