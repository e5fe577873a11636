"""The small problem that a kernel has to get right before it is used.

Two batch entries or documents, unequal lengths where the launch allows them, two segments of one document with offsets,
rows that see nothing, more keys than slots, equal keys, weights of both signs, a scale that is no default. The inputs
of the indexer are multiples of 1/8, so every score is exact and ids must be the oracle's.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dsattn.backends.base import Launch
from dsattn.backends.trust.keys import Key
from dsattn.layouts import CausalLayout, Segment, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.spec import oracle
from dsattn.spec.oracle import Rows
from dsattn.spec.problem import AttentionSizes, IndexerSizes, Operator, Support

# Query rows of a problem whose rows have to be as many as its keys are; more of them would be no small problem.
_MAX_ROWS = 8192
# Rows of such a problem that are judged, and from how many on.
_JUDGED, _ALL_JUDGED = 24, 512


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One call with numbers: what a backend is asked, and what the oracle is.

    Attributes:
        operator: which operator.
        backward: whether its backward.
        kind: over which keys a loss or an attention runs.
        layout: the windows of all rows.
        support: the keys of all rows, selected or visible; where few rows are judged, of those.
        x: the indexer's side, None where the operator has none.
        a: the attention's side, None where the operator has none.
        top_k: slots per row of a selection.
        options: of the loss.
        upstream: gradient of `out` or of the scores that comes in.
        gradients: whether the loss computes gradients too.
        judged: int64, the rows that are judged; None for all.
        exact_ids: whether every score is exact, so that ids must be the oracle's.
        row_entries: the batch entry or document of each row, -1 in padding.
        key_entries: the same of each key.
    """

    operator: Operator
    backward: bool
    kind: Support
    layout: CausalLayout
    support: Rows
    x: IndexerInputs | None = None
    a: AttentionInputs | None = None
    top_k: int | None = None
    options: LossOptions
    upstream: Tensor | None = None
    gradients: bool = False
    judged: Tensor | None = None
    exact_ids: bool = True
    row_entries: Tensor
    key_entries: Tensor

    @cached_property
    def topk(self) -> TopK | None:
        """The selection that the call is given."""
        if self.kind == "visible" or self.top_k is None or self.operator == "indexer_topk":
            return None
        device = self._device
        ids = torch.full((len(self.support), self.top_k), -1, dtype=torch.int32, device=device)
        for row, keys in enumerate(self.support):
            ids[row, : len(keys)] = keys
        lengths = torch.tensor([len(keys) for keys in self.support], dtype=torch.int32, device=device)
        return TopK._trusted(ids, lengths, None, self.layout.num_q, self.layout.num_k)

    @property
    def _device(self) -> torch.device:
        """Where the tensors are."""
        if self.a is not None:
            return self.a.kv.device
        return torch.device("cpu") if self.x is None else self.x.index_k.device


def sample_for(key: Key, launch: Launch) -> Sample:
    """The problem that a kernel of this key is held to, on the CPU; the same at each call."""
    draw = torch.Generator(device="cpu").manual_seed(zlib.crc32(key.text(launch).encode()))
    layout = _layout(key, launch)
    rows, keys = _entries(layout)
    x = None if key.indexer is None else _indexer(key.indexer, layout, draw)
    a = None if key.attention is None else _attention(key.attention, layout, draw)
    kind: Support = "visible"
    if key.operator == "sparse_attention" or key.support == "selected":
        kind = "selected"
    visible = oracle.visible_keys(layout)
    judged = _judged(layout, draw) if layout.num_q > _ALL_JUDGED and key.operator == "indexer_topk" else None
    support = _selection(key.top_k or 1, visible, draw) if kind == "selected" else visible
    if judged is not None:
        support = [visible[int(row)] for row in judged]
    return Sample(
        operator=key.operator,
        backward=key.backward,
        kind=kind,
        layout=layout,
        support=support,
        x=x,
        a=a,
        top_k=key.top_k,
        options=LossOptions(row_mask=_row_mask(layout)),
        upstream=_upstream(key, layout, draw),
        gradients=key.gradients,
        judged=judged,
        row_entries=rows,
        key_entries=keys,
    )


def _layout(key: Key, launch: Launch) -> CausalLayout:
    """The layout of the problem: with offsets few rows see many keys, without them there are rows for all keys."""
    selected = key.operator == "sparse_attention" or key.support == "selected"
    # Where ids say who sees whom, no kernel is told of the ratio.
    ratio = 1 if selected else key.ratio
    first, second = (70, 41) if ratio == 1 else (30, 17) if ratio <= 8 else (6, 4)
    if key.top_k is not None:
        first, second = max(key.top_k, 20) + 13, max(key.top_k, 20) + 6
    square = not launch.offsets and not selected
    if square:
        first, second = (min(count, max(2, _MAX_ROWS // ratio)) for count in (first, second))
    if launch.batched:
        return _batched(first, ratio, square=square, equal=not selected)
    if square:
        gap = first * ratio + 1
        segments = [Segment(0, first * ratio, 0, first, 0), Segment(gap, second * ratio, first, second, 0)]
        return CausalLayout.from_segments(
            segments, num_q=gap + second * ratio + 1, num_k=first + second + 1, ratio=ratio
        )
    # (rows, first key, keys, offset), each with the row where it begins in place of the rows below.
    parts = [
        (2 * ratio + 2, 0, first, -1),
        (3 * ratio + 2, 0, first, (first - 2) * ratio),
        (ratio + 1, first, second, second // 2 * ratio),
        (2 * ratio + 1, first, second, (second - 3) * ratio),
    ]
    segments, row = [], 0
    for number, (count, begin, length, offset) in enumerate(parts):
        segments.append(Segment(row, count, begin, length, offset))
        # A row of padding after each document.
        row += count + number % 2
    return CausalLayout.from_segments(segments, num_q=row, num_k=first + second + 1, ratio=ratio)


def _batched(keys: int, ratio: int, *, square: bool, equal: bool) -> CausalLayout:
    """Two entries of equal size with one segment each and a row of padding; the second may be shorter."""
    rows, offset = (keys * ratio, 0) if square else (3 * ratio + 2, (keys - 2) * ratio)
    short = 0 if equal else 1
    second = Segment(rows + 1, rows - short, keys, keys - 4 * short, offset - 4 * short * ratio)
    return CausalLayout.from_segments(
        [Segment(0, rows, 0, keys, offset), second], num_q=2 * (rows + 1), num_k=2 * keys, ratio=ratio
    )


def _entries(layout: CausalLayout) -> tuple[Tensor, Tensor]:
    """The document of each row and of each key: two segments over the same keys are one."""
    rows = torch.full((layout.num_q,), -1, dtype=torch.int64, device="cpu")
    keys = torch.full((layout.num_k,), -1, dtype=torch.int64, device="cpu")
    starts = sorted({segment.k_start for segment in layout.segments})
    for segment in layout.segments:
        entry = starts.index(segment.k_start)
        rows[segment.q_start : segment.q_start + segment.q_len] = entry
        keys[segment.k_start : segment.k_start + segment.k_len] = entry
    return rows, keys


def _grid(draw: torch.Generator, *shape: int) -> Tensor:
    """Multiples of 1/8 in [-1, 1]."""
    return torch.randint(-8, 9, shape, generator=draw, device="cpu").to(torch.float32) / 8


def _normal(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")


def _indexer(sizes: IndexerSizes, layout: CausalLayout, draw: torch.Generator) -> IndexerInputs:
    t, s = layout.num_q, layout.num_k
    # Every key stands there three times on average, so ties lie where the selection ends too.
    different = _grid(draw, max(2, s // 3), sizes.width)
    keys = different[torch.randint(0, len(different), (s,), generator=draw, device="cpu")]
    # A power of two, which leaves scores exact, and not 1, which would not show that it was dropped.
    scale = 2.0 ** -max(1, math.ceil(math.log2(sizes.heads * sizes.width) / 2))
    return IndexerInputs(
        index_q=_grid(draw, t, sizes.heads, sizes.width).to(sizes.dtype),
        index_k=keys.to(sizes.dtype),
        weights=_grid(draw, t, sizes.heads).to(sizes.weights_dtype),
        scale=scale,
        relu=sizes.relu,
    )


def _attention(sizes: AttentionSizes, layout: CausalLayout, draw: torch.Generator) -> AttentionInputs:
    t, s = layout.num_q, layout.num_k
    wide = torch.float64 if sizes.dtype == torch.float64 else torch.float32
    # As large as a usual log-sum-exp, so that it has a part in every row.
    sink = (_normal(draw, sizes.heads) + math.log(s)).to(wide) if sizes.sink else None
    q, kv = _normal(draw, t, sizes.heads, sizes.key_width), _normal(draw, s, sizes.key_width)
    # Not the square root that kernels take by themselves.
    scale = 0.8 * sizes.key_width**-0.5
    return AttentionInputs(q.to(sizes.dtype), kv.to(sizes.dtype), sizes.value_width, scale, sink)


def _selection(top_k: int, visible: Rows, draw: torch.Generator) -> Rows:
    """Some of the visible keys of each row: in every third row for half of the slots, else for all of them."""
    found = []
    for row, keys in enumerate(visible):
        count = max(1, top_k // 2) if row % 3 == 2 else top_k
        found.append(keys[torch.randperm(len(keys), generator=draw, device="cpu")[:count]].sort().values)
    return found


def _row_mask(layout: CausalLayout) -> Tensor:
    """Two rows of three take part, and the last of each segment, by which alignments are told apart."""
    mask = torch.arange(layout.num_q, device="cpu") % 3 != 1
    for segment in layout.segments:
        mask[segment.q_start + segment.q_len - 1] = True
    return mask


def _upstream(key: Key, layout: CausalLayout, draw: torch.Generator) -> Tensor | None:
    if not key.backward:
        return None
    if key.attention is not None:
        sizes = key.attention
        return _normal(draw, layout.num_q, sizes.heads, sizes.value_width).to(sizes.dtype)
    return _normal(draw, layout.num_q, layout.num_k)


def _judged(layout: CausalLayout, draw: torch.Generator) -> Tensor:
    """The first and the last row of each segment, the rows after it, and others at random."""
    edges = [row for s in layout.segments for row in (s.q_start, s.q_start + s.q_len - 1, s.q_start + s.q_len)]
    some = torch.randint(0, layout.num_q, (_JUDGED,), generator=draw, device="cpu").tolist()
    rows = sorted({row for row in (*edges, *some) if row < layout.num_q})
    return torch.tensor(rows, dtype=torch.int64, device="cpu")
