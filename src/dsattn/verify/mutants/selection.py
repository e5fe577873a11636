"""Faults in selections: in what `indexer_topk` writes, and in how the operators read the ids that they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

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
_TILE, _ROWS = 8, 16
_MANY_SLOTS = 256


def _slots(change: Callable[[TopK, Operation], TopK]) -> Callable[[Operation], Any]:
    """A fault's `apply` that changes the selection: the one given to a reader, or the one that comes out."""

    def apply(operation: Operation) -> Any:
        if "topk" in operation.given:
            return operation(topk=change(operation.topk, operation))
        return change(operation(), operation)

    return apply


def _with(topk: TopK, indices: Tensor, lengths: Tensor | None = None, scores: Tensor | None = None) -> TopK:
    lengths = topk.lengths if lengths is None else lengths
    scores = topk.scores if scores is None else scores
    return TopK._trusted(indices.int(), lengths.int(), scores, topk.num_q, topk.num_k)


def _used(topk: TopK, lengths: Tensor) -> Tensor:
    return torch.arange(topk.indices.shape[1], device=lengths.device) < lengths[:, None]


def _moved(topk: TopK, keys: Tensor) -> TopK:
    """Other keys in the used slots."""
    return _with(topk, torch.where(topk.indices < 0, -1, keys))


def _first_keys(topk: TopK, operation: Operation) -> Tensor:
    """The first key row of each row's sequence [t, 1]: from the layout, or else from the batch size."""
    device = topk.indices.device
    if "layout" in operation.given:
        return operation.layout._key_ranges()[0].to(device)[:, None]
    batch = operation.batch or 1
    return (torch.arange(topk.num_q, device=device) // max(1, topk.num_q // batch) * (topk.num_k // batch))[:, None]


def _seq_major(topk: TopK, operation: Operation) -> TopK:
    batch = operation.batch or 1
    keys = max(1, topk.num_k // batch)
    return _moved(topk, topk.indices % keys * batch + topk.indices // keys)


def _without_last_rows(lengths: Tensor) -> Tensor:
    lengths = lengths.clone()
    lengths[len(lengths) - len(lengths) % _ROWS :] = 0
    return lengths


def _cut(lengths_of: Callable[[Tensor], Tensor]) -> Callable[[TopK, Operation], TopK]:
    """Fewer slots are used; those behind them are -1."""

    def change(topk: TopK, _: Operation) -> TopK:
        lengths = lengths_of(topk.lengths)
        unused = ~_used(topk, lengths)
        scores = None if topk.scores is None else topk.scores.masked_fill(unused, -torch.inf)
        return _with(topk, topk.indices.masked_fill(unused, -1), lengths, scores)

    return change


def _all_read(topk: TopK, _: Operation) -> TopK:
    if not topk.num_k:
        return topk
    return _with(topk, topk.indices.clamp(min=0), torch.full_like(topk.lengths, topk.indices.shape[1]))


def _even(operation: Operation) -> TopK:
    slots = max(1, operation.top_k - operation.top_k % 2)
    topk = operation(top_k=slots)
    padding = 0, operation.top_k - slots
    scores = None if topk.scores is None else pad(topk.scores, padding, value=-torch.inf)
    return _with(topk, pad(topk.indices, padding, value=-1), scores=scores)


def _repeated(topk: TopK, _: Operation) -> TopK:
    indices = topk.indices.clone()
    indices[:, 1:2] = torch.where(topk.lengths[:, None] > 1, indices[:, :1], indices[:, 1:2])
    return _with(topk, indices)


def _unused_scores_0(topk: TopK, _: Operation) -> TopK:
    if topk.scores is None:
        return topk
    return _with(topk, topk.indices, scores=topk.scores.masked_fill(topk.indices < 0, 0))


def _by_score(operation: Operation) -> TopK:
    topk = operation(return_scores=True)
    scores, order = topk.scores.sort(dim=1, descending=True, stable=True)
    return _with(topk, topk.indices.gather(1, order), scores=scores)


def _select(operation: Operation, change: Callable[[Tensor], Tensor], *, last_key_first: bool = False) -> TopK:
    """A selection by the table of scores [t, s] that `change` makes of the right one; the scores given are right."""
    layout = operation.layout
    right = _TORCH.indexer_scores(operation.x, layout)
    table = change(right)
    start, end = layout.bounds(table.device)
    lengths, width = (end - start).clamp(max=operation.top_k), min(operation.top_k, layout.num_k)
    if last_key_first:
        order = layout.num_k - 1 - table.flip(1).sort(dim=1, descending=True, stable=True).indices
    else:
        order = table.sort(dim=1, descending=True, stable=True).indices
    used = torch.arange(width, device=table.device) < lengths[:, None]
    # Unused slots sort behind every key, to a last column of -inf.
    keys = order[:, :width].masked_fill(~used, layout.num_k).sort(1).values
    padding = 0, operation.top_k - width
    scores = pad(pad(right, (0, 1), value=-torch.inf).gather(1, keys), padding, value=-torch.inf)
    indices = pad(keys.masked_fill(keys == layout.num_k, -1), padding, value=-1).int()
    return TopK._trusted(indices, lengths, scores if operation.return_scores else None, layout.num_q, layout.num_k)


FAULTS = (
    Fault(
        name="ids local to the sequence",
        imitates="flat ids taken as local: the start of each sequence is missing, all use the first one's keys",
        parts=SELECTION + _READERS,
        apply=_slots(lambda topk, operation: _moved(topk, topk.indices - _first_keys(topk, operation))),
    ),
    Fault(
        name="sequence start added twice",
        imitates="local ids taken as flat: the start of the sequence is added to ids that have it already",
        parts=SELECTION + _READERS,
        apply=_slots(
            lambda topk, operation: _moved(
                topk, (topk.indices + _first_keys(topk, operation)).clamp(max=topk.num_k - 1)
            )
        ),
    ),
    Fault(
        name="sequence-major ids",
        imitates="key rows counted as j * b + batch, the order of an SBHD buffer",
        parts=SELECTION + _READERS,
        apply=_slots(_seq_major),
    ),
    Fault(
        name="last used slot skipped",
        imitates="a loop over the keys of a row that ends one early",
        parts=SELECTION + _READERS,
        apply=_slots(_cut(lambda lengths: (lengths - 1).clamp(min=0))),
    ),
    Fault(
        name="last chunk of slots skipped",
        imitates=f"slots behind the last full tile of {_TILE} are never written or read",
        parts=SELECTION + _READERS,
        apply=_slots(_cut(lambda lengths: lengths - lengths % _TILE)),
    ),
    Fault(
        name="second tile of slots skipped",
        imitates=f"a kernel that is right up to {_MANY_SLOTS} keys per row and stops there",
        parts=SELECTION + _READERS,
        apply=_slots(_cut(lambda lengths: lengths.clamp(max=_MANY_SLOTS))),
    ),
    Fault(
        name="last chunk of rows without slots",
        imitates=f"query rows behind the last full tile of {_ROWS} are never computed",
        parts=SELECTION + _READERS,
        apply=_slots(_cut(_without_last_rows)),
    ),
    Fault(
        name="unused slots read",
        imitates="-1 taken as key row 0, and no mask on the slots behind the row's length",
        parts=_READERS,
        apply=_slots(_all_read),
    ),
    Fault(
        name="tail slot unwritten",
        imitates="unused slots hold 0, which is a key, instead of -1",
        parts=SELECTION,
        apply=_slots(lambda topk, _: _with(topk, topk.indices.clamp(min=0))),
    ),
    Fault(
        name="lengths all top_k",
        imitates="rows that see fewer keys than there are slots say that all slots are used",
        parts=SELECTION,
        apply=_slots(lambda topk, _: _with(topk, topk.indices, torch.full_like(topk.lengths, topk.indices.shape[1]))),
    ),
    Fault(
        name="unused scores 0",
        imitates="the scores of unused slots are left as the buffer had them",
        parts=SELECTION,
        apply=_slots(_unused_scores_0),
    ),
    Fault(
        name="top_k rounded down to even",
        imitates="a kernel that works on pairs of slots",
        parts=SELECTION,
        apply=_even,
    ),
    Fault(
        name="a key selected twice",
        imitates="partial selections are merged without looking for what both have",
        parts=SELECTION,
        apply=_slots(_repeated),
    ),
    Fault(
        name="ids in order of score",
        imitates="the order of torch.topk instead of ascending ids",
        parts=SELECTION,
        apply=_by_score,
    ),
    Fault(
        name="ids in order of score without scores",
        imitates="ids are put in order only where the scores are asked for",
        parts=SELECTION,
        apply=lambda operation: operation() if operation.return_scores else _by_score(operation),
    ),
    Fault(
        name="tie order reversed",
        imitates="of equal scores the highest key row wins",
        parts=SELECTION,
        apply=lambda operation: _select(operation, lambda table: table, last_key_first=True),
    ),
    Fault(
        name="mask fill 0 before the sort",
        imitates="unseen keys score 0 instead of -inf and beat the seen ones that score less",
        parts=SELECTION,
        apply=lambda operation: _select(operation, lambda table: table.masked_fill(table == -torch.inf, 0)),
    ),
    Fault(
        name="mask fill of fp16",
        imitates="unseen keys score -65504, the least number of fp16, and beat the seen ones that score less",
        parts=SELECTION,
        apply=lambda operation: _select(operation, lambda table: table.masked_fill(table == -torch.inf, -65504.0)),
    ),
    Fault(
        name="NaN scores swallowed",
        imitates="a comparison with NaN is false, so keys with NaN scores are never selected",
        parts=SELECTION,
        apply=lambda operation: _select(operation, lambda table: table.nan_to_num(nan=-3e38, posinf=torch.inf)),
    ),
    Fault(
        name="score 0 taken as masked",
        imitates="keys whose dots the relu cut off in all heads are no candidates",
        parts=SELECTION,
        apply=lambda operation: _select(operation, lambda table: table.masked_fill(table == 0, -torch.inf)),
    ),
    Fault(
        name="smallest scores selected",
        imitates="the sort runs the other way",
        parts=SELECTION,
        apply=lambda operation: _select(operation, lambda table: torch.where(table == -torch.inf, table, -table)),
    ),
    Fault(
        name="scores rounded to bf16 before the sort",
        imitates="scores stored in the inputs' dtype",
        parts=SELECTION,
        apply=lambda operation: _select(operation, lambda table: table.bfloat16().to(table.dtype)),
        dtype="bf16",
    ),
)
"""The faults of this module."""
