"""Faults in who sees whom: every operator that takes a layout must turn red when its windows are others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsattn.layouts import CausalLayout
from dsattn.verify.mutants import (
    DENSE,
    DENSE_BACKWARD,
    LOSS_VISIBLE,
    LOSS_VISIBLE_BACKWARD,
    SCORES,
    SCORES_BACKWARD,
    SELECTION,
    Fault,
    Operation,
    changed,
)

_PARTS = SCORES + SCORES_BACKWARD + SELECTION + DENSE + DENSE_BACKWARD + LOSS_VISIBLE + LOSS_VISIBLE_BACKWARD
_TILE = 16
_MANY_KEYS, _MANY_ROWS = 2048, 128


class _Segments(NamedTuple):
    """The columns of a layout's table, int64 [n] each."""

    q_start: Tensor
    q_len: Tensor
    k_start: Tensor
    k_len: Tensor
    q_offset: Tensor


def _with_segments(layout: CausalLayout, segments: _Segments, ratio: int | None = None) -> CausalLayout:
    table = torch.stack(segments, 1)
    return CausalLayout._trusted(table, layout.num_q, layout.num_k, layout.ratio if ratio is None else ratio)


def _windows(change: Callable[[_Segments, CausalLayout], _Segments]) -> Callable[[Operation], Any]:
    """A fault's `apply` that changes the segments of the layout."""
    return changed("layout", lambda layout: _with_segments(layout, change(_segments(layout), layout)))


def _segments(layout: CausalLayout) -> _Segments:
    return _Segments(*layout.table.unbind(1))


def _bottom_right(s: _Segments, layout: CausalLayout) -> _Segments:
    aligned = s.k_len * layout.ratio - s.q_len
    return s._replace(q_offset=torch.where(s.k_len == s.q_len // layout.ratio, s.q_offset, aligned))


def _merged(s: _Segments, layout: CausalLayout) -> _Segments:
    sizes = (0, layout.num_q, 0, layout.num_k, 0)
    return _Segments(*(torch.tensor([size], dtype=torch.int64, device="cpu") for size in sizes))


def _without_first_key(s: _Segments, layout: CausalLayout) -> _Segments:
    some = (s.k_len > 0).long()
    return s._replace(k_start=s.k_start + some, k_len=s.k_len - some, q_offset=s.q_offset - some * layout.ratio)


def _last_of_shared_keys(s: _Segments) -> _Segments:
    """Without the segments whose keys a later segment has too."""
    last = {start: place for place, start in enumerate(s.k_start.tolist())}
    kept = torch.tensor(sorted(last.values()), dtype=torch.int64, device="cpu")
    return _Segments(*(column[kept] for column in s))


def _overwritten(operation: Operation) -> Any:
    d_queries, _, rest = operation()
    last = _with_segments(operation.layout, _last_of_shared_keys(_segments(operation.layout)))
    return d_queries, operation(layout=last)[1], rest


FAULTS = (
    Fault(
        name="offset dropped",
        imitates="a decode step or a later chunk of a prefill attends as if it stood at the start of its sequence",
        parts=_PARTS,
        apply=_windows(lambda s, _: s._replace(q_offset=torch.zeros_like(s.q_offset))),
    ),
    Fault(
        name="bottom-right alignment",
        imitates="with unequal lengths the last query sees the last key, whatever offset was given",
        parts=_PARTS,
        apply=_windows(_bottom_right),
    ),
    Fault(
        name="negative offset taken as 0",
        imitates="rows that stand before the first key see it all the same",
        parts=_PARTS,
        apply=_windows(lambda s, _: s._replace(q_offset=s.q_offset.clamp(min=0))),
    ),
    Fault(
        name="window one position too long",
        imitates="i <= j written for i < j: every row sees one token of its future",
        parts=_PARTS,
        apply=_windows(lambda s, _: s._replace(q_offset=s.q_offset + 1)),
    ),
    Fault(
        name="window one position too short",
        imitates="no row sees itself",
        parts=_PARTS,
        apply=_windows(lambda s, _: s._replace(q_offset=s.q_offset - 1)),
    ),
    Fault(
        name="first key missed",
        imitates="the window begins one key late: the first token of every document is never seen",
        parts=_PARTS,
        apply=_windows(_without_first_key),
    ),
    Fault(
        name="causal mask missing",
        imitates="every row sees its whole document, the future too",
        parts=_PARTS,
        apply=_windows(lambda s, layout: s._replace(q_offset=s.k_len * layout.ratio)),
    ),
    Fault(
        name="documents merged",
        imitates="cu_seqlens ignored: tokens see the documents packed before theirs",
        parts=_PARTS,
        apply=_windows(_merged),
    ),
    Fault(
        name="key start dropped",
        imitates="positions inside a document used as rows of the key buffer: all read the first document's keys",
        parts=_PARTS,
        apply=_windows(lambda s, _: s._replace(k_start=torch.zeros_like(s.k_start))),
    ),
    Fault(
        name="ratio ignored",
        imitates="compressed keys treated as if there were one for every token",
        parts=_PARTS,
        apply=changed("layout", lambda layout: _with_segments(layout, _segments(layout), ratio=1)),
    ),
    Fault(
        name="ratio rounded up",
        imitates="a compressed key is seen before the last of its tokens",
        parts=_PARTS,
        apply=_windows(lambda s, layout: s._replace(q_offset=s.q_offset + layout.ratio - 1)),
    ),
    Fault(
        name="last document skipped",
        imitates="a loop over documents that ends one early",
        parts=_PARTS,
        apply=_windows(lambda s, _: _Segments(*(column[:-1] for column in s))),
    ),
    Fault(
        name="last chunk of keys skipped",
        imitates=f"keys behind the last full tile of {_TILE} are never scored",
        parts=_PARTS,
        apply=_windows(lambda s, _: s._replace(k_len=s.k_len - s.k_len % _TILE)),
    ),
    Fault(
        name="last chunk of rows skipped",
        imitates=f"query rows behind the last full tile of {_TILE} are never computed",
        parts=_PARTS,
        apply=_windows(lambda s, _: s._replace(q_len=s.q_len - s.q_len % _TILE)),
    ),
    Fault(
        name="second tile of keys skipped",
        imitates=f"a kernel that is right up to {_MANY_KEYS} keys and stops there",
        parts=_PARTS,
        apply=_windows(lambda s, _: s._replace(k_len=s.k_len.clamp(max=_MANY_KEYS))),
    ),
    Fault(
        name="second tile of rows skipped",
        imitates=f"a kernel that is right up to {_MANY_ROWS} rows of a document and stops there",
        parts=_PARTS,
        apply=_windows(lambda s, _: s._replace(q_len=s.q_len.clamp(max=_MANY_ROWS))),
    ),
    Fault(
        name="key gradients of a document's halves overwritten",
        imitates="both halves of a document on a context-parallel rank write the gradient of its keys; the last stays",
        parts=SCORES_BACKWARD + DENSE_BACKWARD,
        apply=_overwritten,
    ),
)
"""The faults of this module."""
