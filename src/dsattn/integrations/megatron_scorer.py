"""Selections of packed context-parallel rows by dsattn, from the windows that Megatron gives each row.

Megatron's own scorers infer the windows from the number of rows: they take a document to fill all rows, and a slice of
rows to begin at row 0. Its mask builder knows better, and its windows are right for padding rows and slices too.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from dsattn.functional import indexer_topk
from dsattn.functional.call import Choice
from dsattn.layouts import CausalLayout, Segment

ONE_DOCUMENT_NEEDS = ("q_bshd", "k_bshd", "w_bsh", "topk_k", "return_topk_scores")
MANY_DOCUMENTS_NEEDS = (*ONE_DOCUMENT_NEEDS, "starts", "ends")
SELECT_NEEDS = ("q_bshd", "k_bsd", "w_bsh", "topk", "varlen_starts", "varlen_ends", "key_positions")
"""Parameters by which the functions are known."""

# Every layer of a batch has the same windows: what was made of the last ones is kept.
_RECENT: deque[tuple[Tensor, int, CausalLayout]] = deque(maxlen=8)


def layout_of(starts: Tensor, ends: Tensor, num_k: int) -> CausalLayout:
    """The layout in which row i sees the keys [starts[i], ends[i]).

    The windows are read from their device, which waits for it.

    Args:
        starts: first key of each row, integers [t].
        ends: first key after the last, integers [t]; what lies beyond num_k counts as num_k.
        num_k: key rows.
    """
    windows = torch.stack((starts, ends)).to(device="cpu", dtype=torch.int64)
    for known, keys, layout in tuple(_RECENT):
        if keys == num_k and torch.equal(known, windows):
            return layout
    layout = CausalLayout.from_segments(_segments(windows, num_k), num_q=windows.shape[1], num_k=num_k)
    _RECENT.append((windows, num_k, layout))
    return layout


def select(
    q: Tensor, k: Tensor, weights: Tensor, layout: CausalLayout, top_k: int, return_scores: bool, backend: Choice
) -> tuple[Tensor, Tensor | None]:
    """The selection as Megatron's scorers return it: ids of all keys [1, t, top_k], -1 in unused slots, and scores.

    Args:
        q: indexer queries [1, t, h_i, d_i].
        k: indexer keys [1, s, 1, d_i].
        weights: head weights [1, t, h_i].
        layout: who sees whom.
        top_k: slots per row.
        return_scores: whether the scores are wanted.
        backend: what computes it.
    """
    with torch.no_grad():
        found = indexer_topk(
            q[0], k[0, :, 0], weights[0], layout, top_k=top_k, return_scores=return_scores, backend=backend
        )
    return found.indices[None], None if found.scores is None else found.scores[None]


def _segments(windows: Tensor, num_k: int) -> list[Segment]:
    """Runs of rows whose windows begin at one key and grow by one key per row."""
    starts, ends = windows
    if not len(starts):
        return []
    broken = (starts.diff() != 0) | (ends.diff() != 1)
    firsts = [0, *(broken.nonzero().flatten() + 1).tolist()]
    lasts = [*(first - 1 for first in firsts[1:]), len(starts) - 1]
    found = []
    for first, last in zip(firsts, lasts, strict=True):
        start, keys = int(starts[first]), min(int(ends[last]), num_k) - int(starts[first])
        if keys > 0:
            offset = int(ends[first]) - 1 - start
            found.append(Segment(q_start=first, q_len=last - first + 1, k_start=start, k_len=keys, q_offset=offset))
    return found
