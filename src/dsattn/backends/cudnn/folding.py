"""A layout as the dense kernels take it: sequences of one launch, with offsets or in a shape that needs none.

The kernels know one causal offset per sequence at best. So a layout is cut into pieces, one per sequence of a launch,
in one of two forms: as it is, with its offset beside it; or squared, with rows and keys padded at their ends until
both alignments (top-left and bottom-right) show every row the same keys, so that no offset and no default matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dsattn.backends.cudnn.sizes import INDEXABLE, KEY_WIDTHS, SCORE_HEADS
from dsattn.layouts import CausalLayout
from dsattn.ops.blocks import buffer_bytes

# The first call of a kernel with one row breaks on Hopper, and as many offsets as rows may be read as per-row ones.
MIN_ROWS = 2
# Sequences of one launch: they are a dimension of its grid.
MAX_PIECES = 65_535
# Query rows of one launch: with the most heads and the widest key rows a 32-bit index reaches no further.
MAX_ROWS = INDEXABLE // (SCORE_HEADS[-1] * KEY_WIDTHS[-1])
# Keys that one launch may hold copies of, times the keys of the call.
MAX_COPIES = 2


@dataclass(frozen=True)
class Piece:
    """One sequence of a launch: rows [q_begin, q_end) and keys [k_begin, k_end) of the call, padded at the ends.

    Attributes:
        q_begin: first query row.
        q_end: first query row after the last.
        k_begin: first key row.
        k_end: first key row after the last that any of the rows sees.
        offset: causal offset of the first row, at least 0.
        rows: query rows of the launch, at least q_end - q_begin.
        keys: key rows of the launch, at least k_end - k_begin.
    """

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    offset: int
    rows: int
    keys: int

    def aligned(self, ratio: int) -> bool:
        """Whether both alignments give the piece its own offset."""
        return self.offset == 0 and self.rows == self.keys * ratio


@dataclass(frozen=True)
class Fold:
    """The sequences of one launch. Folded rows and keys stand one piece after the other.

    Attributes:
        pieces: the sequences.
        ratio: key compression.
    """

    pieces: tuple[Piece, ...]
    ratio: int

    @property
    def aligned(self) -> bool:
        """Whether every alignment that a release may take for granted is the right one."""
        return all(piece.aligned(self.ratio) for piece in self.pieces)

    @property
    def offsets(self) -> list[int]:
        """The causal offset of every piece."""
        return [piece.offset for piece in self.pieces]

    @cached_property
    def q_starts(self) -> list[int]:
        """Where each piece begins in the folded rows, and where the last one ends."""
        return _starts([piece.rows for piece in self.pieces])

    @cached_property
    def k_starts(self) -> list[int]:
        """Where each piece begins in the folded keys, and where the last one ends."""
        return _starts([piece.keys for piece in self.pieces])

    @property
    def max_rows(self) -> int:
        """Rows of the longest piece."""
        return max(piece.rows for piece in self.pieces)

    @property
    def max_keys(self) -> int:
        """Keys of the longest piece: the columns of a table of scores."""
        return max(piece.keys for piece in self.pieces)

    @property
    def batch(self) -> int | None:
        """The number of pieces where all are of one size, so that the launch is a BSHD one; else None."""
        sizes = {(piece.rows, piece.keys) for piece in self.pieces}
        return len(self.pieces) if len(sizes) == 1 else None

    def alone(self) -> Iterator[Fold]:
        """Every piece as a launch of its own."""
        return (Fold((piece,), self.ratio) for piece in self.pieces)

    def queries(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """The folded rows of a per-row tensor x [t, ...]; `fill` in padding."""
        return _gathered(x, self, "queries", fill)

    def keys(self, x: Tensor) -> Tensor:
        """The folded keys of a per-key tensor x [s, ...]; 0 in padding."""
        return _gathered(x, self, "keys", 0.0)

    def lengths(self, device: torch.device) -> Tensor:
        """How many of its piece's keys each folded row sees, int32 [T]; 0 in padding."""
        return _lengths(self, device)

    def first_keys(self, device: torch.device) -> Tensor:
        """The key row of the call that is column 0 of each folded row, int32 [T]."""
        return _places(self, "queries", device).first_key

    def place_queries(self, folded: Tensor, whole: Tensor) -> None:
        """Writes folded rows to the rows of a per-row tensor [t, ...] of the call."""
        places = _places(self, "queries", folded.device)
        whole.index_copy_(0, places.own, folded.index_select(0, places.folded).to(whole.dtype))

    def add_keys(self, folded: Tensor, whole: Tensor) -> None:
        """Adds folded keys to the rows of a per-key tensor [s, ...] of the call; keys may be there more than once."""
        places = _places(self, "keys", folded.device)
        whole.index_add_(0, places.own, folded.index_select(0, places.folded).to(whole.dtype))

    def seen(self, device: torch.device) -> Tensor:
        """Which columns of a table of scores each folded row sees, bool [T, max_keys]."""
        columns = torch.arange(self.max_keys, dtype=torch.int32, device=device)
        return columns < self.lengths(device)[:, None]

    def parts(self) -> Iterator[tuple[Piece, slice, slice]]:
        """Each piece with its rows (without padding) among the folded rows, and its keys among the folded keys."""
        for piece, q, k in zip(self.pieces, self.q_starts, self.k_starts, strict=False):
            yield piece, slice(q, q + piece.q_end - piece.q_begin), slice(k, k + piece.k_end - piece.k_begin)


def batch_of(layout: CausalLayout) -> int:
    """The number of entries of equal size that hold one segment each, with their own rows and keys; 1 if it is none."""
    count = len(layout.segments)
    if count < 2 or layout.num_q % count or layout.num_k % count:
        return 1
    rows, keys = layout.num_q // count, layout.num_k // count
    own = all(
        s.q_start >= i * rows
        and s.q_start + s.q_len <= (i + 1) * rows
        and s.k_start >= i * keys
        and s.k_start + s.k_len <= (i + 1) * keys
        for i, s in enumerate(layout.segments)
    )
    return count if own else 1


def table_elements(device: torch.device) -> int:
    """Entries that one fp32 table of scores may have on a device."""
    return buffer_bytes(device) // torch.float32.itemsize


def folds(layout: CausalLayout, *, squared: bool, elements: int) -> tuple[Fold, ...]:
    """The launches that cover every row that sees a key, in row order.

    Args:
        layout: who sees whom.
        squared: bring every piece into the form that needs no offset.
        elements: entries that one table of scores may have; a single row may need more.
    """
    return _folds(layout, squared, elements)


@lru_cache(maxsize=64)
def _folds(layout: CausalLayout, squared: bool, elements: int) -> tuple[Fold, ...]:
    found: list[Fold] = []
    held: list[Piece] = []
    rows = keys = longest = 0
    for piece in _pieces(layout, squared, elements):
        rows, keys, longest = rows + piece.rows, keys + piece.keys, max(longest, piece.keys)
        too_large = rows * longest > elements or rows > MAX_ROWS or keys > MAX_COPIES * layout.num_k
        if held and (too_large or len(held) == MAX_PIECES):
            found.append(Fold(tuple(held), layout.ratio))
            held, rows, keys, longest = [], piece.rows, piece.keys, piece.keys
        held.append(piece)
    if held:
        found.append(Fold(tuple(held), layout.ratio))
    return tuple(found)


def _pieces(layout: CausalLayout, squared: bool, elements: int) -> Iterator[Piece]:
    for segment in layout.segments:
        if segment.k_len == 0:
            continue
        # Rows before the first position see nothing.
        begin = max(0, -segment.q_offset)
        while begin < segment.q_len:
            # Beyond this every row sees all keys: a smaller offset says the same, and is padded to less.
            offset = min(segment.q_offset + begin, segment.k_len * layout.ratio - 1)
            rest = segment.q_len - begin
            count, rows, keys = _that_fit(offset, rest, segment.k_len, layout.ratio, squared, elements)
            seen = min((offset + count) // layout.ratio, segment.k_len)
            if seen > 0:
                yield Piece(
                    q_begin=segment.q_start + begin,
                    q_end=segment.q_start + begin + count,
                    k_begin=segment.k_start,
                    k_end=segment.k_start + seen,
                    offset=offset,
                    rows=rows,
                    keys=keys,
                )
            begin += count


def _that_fit(offset: int, count: int, keys: int, ratio: int, squared: bool, elements: int) -> tuple[int, int, int]:
    """How many of `count` rows make a piece, at least one, and the rows and keys that it is padded to."""
    while True:
        if squared:
            # The least number of keys at which keys * ratio - offset rows are enough.
            padded_keys = -(-(offset + max(count, MIN_ROWS)) // ratio)
            padded_rows = padded_keys * ratio - offset
        else:
            padded_keys, padded_rows = min((offset + count) // ratio, keys), max(count, MIN_ROWS)
        fits = padded_rows * padded_keys <= elements and padded_rows <= MAX_ROWS
        if fits or count == 1:
            return count, padded_rows, padded_keys
        count = -(-count // 2)


def _starts(sizes: list[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


Side = Literal["queries", "keys"]


class _Places(NamedTuple):
    """Where folded rows are in the call: numbers of the real ones there and here, int64, and the key that is column 0.

    `source` is the row of the call that each folded row is, 0 in padding; `padding` says where that is, or is None.
    """

    own: Tensor
    folded: Tensor
    source: Tensor
    padding: Tensor | None
    first_key: Tensor


def _ranges(fold: Fold, side: Side) -> list[tuple[int, int, int]]:
    """Begin, end and padded size of each piece."""
    if side == "queries":
        return [(p.q_begin, p.q_end, p.rows) for p in fold.pieces]
    return [(p.k_begin, p.k_end, p.keys) for p in fold.pieces]


@lru_cache(maxsize=256)
def _places(fold: Fold, side: Side, device: torch.device) -> _Places:
    with torch.inference_mode(False):
        begin, end, size = (torch.tensor(column, device="cpu") for column in zip(*_ranges(fold, side), strict=True))
        piece = torch.repeat_interleave(torch.arange(len(size), device="cpu"), size)
        inside = torch.arange(len(piece), device="cpu") - (size.cumsum(0) - size)[piece]
        real = inside < (end - begin)[piece]
        source = torch.where(real, begin[piece] + inside, 0)
        first = torch.tensor([p.k_begin for p in fold.pieces], dtype=torch.int32, device="cpu")[piece]
        folded = real.nonzero()[:, 0]
        padding = None if real.all() else (~real).to(device)
        return _Places(source[folded].to(device), folded.to(device), source.to(device), padding, first.to(device))


def _gathered(x: Tensor, fold: Fold, side: Side, fill: float) -> Tensor:
    """The folded rows of x, each piece padded at its end to its own length; a view where nothing has to move."""
    ranges = _ranges(fold, side)
    whole = all(end - begin == size for begin, end, size in ranges)
    if whole and all(a[1] == b[0] for a, b in pairwise(ranges)):
        return x[ranges[0][0] : ranges[-1][1]]
    places = _places(fold, side, x.device)
    gathered = x.index_select(0, places.source)
    if places.padding is not None:
        gathered.masked_fill_(places.padding.view(-1, *(1,) * (x.ndim - 1)), fill)
    return gathered


@lru_cache(maxsize=256)
def int32(values: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor that is made once: a copy to an accelerator may not be part of a captured graph."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def _lengths(fold: Fold, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        parts = []
        for piece in fold.pieces:
            rows = torch.arange(piece.rows, dtype=torch.int64, device="cpu")
            seen = ((piece.offset + rows + 1) // fold.ratio).clamp(max=piece.k_end - piece.k_begin)
            parts.append(torch.where(rows < piece.q_end - piece.q_begin, seen, 0))
        return torch.cat(parts).to(torch.int32).to(device)
