"""Who sees whom: a causal layout is a list of segments, and every query row has one window of key rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from dsattn.errors import BadInput
from dsattn.layouts import tables
from dsattn.layouts.checks import Integer, Integers, Scheme, Side, whole_number


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of query rows of one sequence, and the keys of that sequence.

    Query row i of the segment (row q_start + i of the call) sees the keys k_start + j with

        0 <= j < clamp((q_offset + i + 1) // ratio, 0, k_len)

    The window of `Segment(0, 3, 0, 5, q_offset=1)` at ratio 1, keys from left to right:

        row 0   1 1 0 0 0
        row 1   1 1 1 0 0
        row 2   1 1 1 1 0

    Attributes:
        q_start: first query row.
        q_len: number of query rows.
        k_start: first key row.
        k_len: number of key rows.
        q_offset: absolute, uncompressed position of the first query row inside its sequence; may be negative.
    """

    q_start: int
    q_len: int
    k_start: int
    k_len: int
    q_offset: int


@dataclass(frozen=True, init=False, eq=False, repr=False)
class CausalLayout:
    """The causal segments of a call; built by `batched`, `packed`, `context_parallel`, `from_segments` or `on_device`.

    Layouts are immutable, live on the host, and are equal (and hash equal) if their segments and sizes are. Build one
    for a batch and share it over the layers.

    Semantics:
        Segments are sorted by query row; those without query rows are dropped. Query ranges do not overlap, key
        ranges may. A query row in no segment (padding) sees nothing; a key row in no segment is never seen.

    Attributes:
        num_q: query rows of the whole call.
        num_k: key rows of the whole call.
        ratio: key compression: a key stands for `ratio` positions.
    """

    _table: Int64[Tensor, "n 5"]
    num_q: int
    num_k: int
    ratio: int

    def __init__(self, *_: Any, **__: Any) -> None:
        ways = "CausalLayout.batched, .packed, .context_parallel or .from_segments"
        raise BadInput("CausalLayout(...)", fix=f"build a layout by {ways}")

    @classmethod
    def batched(
        cls,
        b: Integer,
        q_len: Integer,
        k_len: Integer | None = None,
        *,
        q_offset: Integer | Integers | None = None,
        ratio: Integer = 1,
        lengths: Integers | None = None,
        side: Side = "right",
    ) -> CausalLayout:
        """The layout of a BSHD batch: b sequences of q_len query rows and k_len keys each.

        `batched(2, 2, 3, q_offset=1)`, and `batched(2, 2, lengths=[1, 2])` with the padding on either side:

                              side="right"     side="left"
            1 1 0 . . .       1 0 . .          0 0 . .
            1 1 1 . . .       0 0 . .          0 1 . .
            . . . 1 1 0       . . 1 0          . . 1 0
            . . . 1 1 1       . . 1 1          . . 1 1

        Args:
            b: sequences.
            q_len: query rows of each.
            k_len: keys of each; left out, the same tokens compressed: q_len // ratio keys.
            q_offset: position of the first (real) query row, one int or one for each sequence. May be left out where
                k_len is q_len // ratio; it is 0 then.
            ratio: key compression, at least 1.
            lengths: real rows of each sequence of a padded square batch, 0 to q_len; not with k_len or ratio.
            side: where the padding is: "right" (the first lengths[i] rows are real) or "left" (the last are).

        Returns:
            The layout, with num_q = b * q_len and num_k = b * k_len.

        Raises:
            BadInput: a bad argument, or a missing q_offset where two alignments are possible.
        """
        return cls._trusted(*tables.batched_data(b, q_len, k_len, q_offset, ratio, lengths, side))

    @classmethod
    def packed(
        cls,
        cu_seqlens_q: Integers,
        cu_seqlens_k: Integers | None = None,
        *,
        q_offset: Integer | Integers | None = None,
        ratio: Integer = 1,
        num_q: Integer | None = None,
        num_k: Integer | None = None,
        cu_seqlens_padded: Integers | None = None,
    ) -> CausalLayout:
        """The layout of documents packed one after the other (THD), with optional padding.

        `packed([0, 2, 3], num_q=4, num_k=4)`, two documents and a padding row:

            1 0 . 0
            1 1 . 0
            . . 1 0
            0 0 0 0

        Args:
            cu_seqlens_q: cumulative query rows, [0, ...]; a tensor on an accelerator is read once.
            cu_seqlens_k: cumulative keys; left out, each document has floor(length / ratio) keys.
            q_offset: position of the first query row, one int or one for each document. May be left out where every
                document with query rows has floor(length / ratio) keys; it is 0 then.
            ratio: key compression, at least 1.
            num_q: query rows of the buffer, if more than the documents fill.
            num_k: key rows of the buffer, if more than the documents fill.
            cu_seqlens_padded: where each document starts, if there is padding between them: query rows at
                cu_seqlens_padded[i], keys at cu_seqlens_padded[i] // ratio, both with room up to the next document.

        Returns:
            The layout; empty documents leave no segment.

        Raises:
            BadInput: a bad argument, or a missing q_offset where two alignments are possible.
        """
        data = tables.packed_data(cu_seqlens_q, cu_seqlens_k, q_offset, ratio, num_q, num_k, cu_seqlens_padded)
        return cls._trusted(*data)

    @classmethod
    def context_parallel(
        cls,
        cu_seqlens: Integers,
        *,
        cp_size: Integer,
        cp_rank: Integer,
        scheme: Scheme = "zigzag",
        ratio: Integer = 1,
        num_q: Integer | None = None,
        num_k: Integer | None = None,
    ) -> CausalLayout:
        """The layout of one context-parallel rank: its own query rows against all keys in global order.

        Two ranks, one document of four rows, scheme "zigzag":

            rank 0   1 0 0 0        rank 1   1 1 0 0
                     1 1 1 1                 1 1 1 0

        Args:
            cu_seqlens: cumulative lengths of the whole documents, [0, ...].
            cp_size: number of ranks, at least 1.
            cp_rank: this rank, 0 <= cp_rank < cp_size.
            scheme: as in `context_parallel_positions`: "zigzag" (document lengths divide by 2 * cp_size) or
                "contiguous" (the total divides by cp_size).
            ratio: key compression; each document has floor(length / ratio) keys.
            num_q: local query rows, if there are padding rows after the rank's own.
            num_k: key rows, if there are padding rows after the documents' keys.

        Returns:
            The layout; local rows are ordered as `context_parallel_positions` has them.

        Raises:
            BadInput: a bad argument, or lengths that do not divide.
        """
        return cls._trusted(*tables.context_parallel_data(cu_seqlens, cp_size, cp_rank, scheme, ratio, num_q, num_k))

    @classmethod
    def from_segments(
        cls, segments: Iterable[Segment], *, num_q: Integer, num_k: Integer, ratio: Integer = 1
    ) -> CausalLayout:
        """The layout with these segments, given in any order.

        Args:
            segments: the segments; query ranges may not overlap, key ranges may.
            num_q: query rows of the call.
            num_k: key rows of the call.
            ratio: key compression, at least 1.

        Returns:
            The layout.

        Raises:
            BadInput: a segment out of range, or two that share query rows.
        """
        try:
            segments = list(segments)
        except TypeError as cause:
            raise BadInput("segments", given=type(segments).__name__, needed="a sequence of Segment") from cause
        for i, segment in enumerate(segments):
            if not isinstance(segment, Segment):
                raise BadInput(f"segments[{i}]", given=repr(segment), needed="a Segment")
        rows = list(map(attrgetter(*tables.COLUMNS), segments))
        return cls._trusted(*tables.segments_data(rows, num_q, num_k, ratio))

    @classmethod
    def on_device(
        cls, cu_seqlens: Tensor, *, num_q: Integer, num_k: Integer, max_len: Integer, ratio: Integer = 1
    ) -> CausalLayout:
        """The layout of packed documents whose lengths stay on the device: nothing waits for it (CUDA graphs).

        Args:
            cu_seqlens: cumulative lengths [n + 1], int32 or int64, on any device; empty documents may fill it up. Each
                document has floor(length / ratio) keys, packed one after the other.
            num_q: query rows of the buffer, at least the last entry.
            num_k: key rows of the buffer.
            max_len: the longest that a document may be; the nearer to the truth, the fewer keys are looked at in vain.
            ratio: key compression, at least 1.

        Returns:
            A layout without `segments`, `table` and `slice_queries`; a backend that needs them does not take it.

        Raises:
            BadInput: a bad argument. Values on an accelerator are held to the rules by an assertion of the device.
        """
        from dsattn.layouts.device import device_layout

        return device_layout(cu_seqlens, num_q, num_k, max_len, ratio)

    @classmethod
    def _trusted(cls, table: Tensor, num_q: int, num_k: int, ratio: int) -> CausalLayout:
        """The layout of a table that is known to be canonical: nothing is checked. The table is not copied."""
        layout = object.__new__(cls)
        for name, value in (("_table", table), ("num_q", num_q), ("num_k", num_k), ("ratio", ratio)):
            object.__setattr__(layout, name, value)
        return layout

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, sorted by query row."""
        return tuple(Segment(*row) for row in self._table.tolist())

    @property
    def table(self) -> Int64[Tensor, "n 5"]:
        """The segments as a CPU tensor with the columns of `Segment`; a new copy each time."""
        return self._table.clone()

    def bounds(self, device: torch.device | str | None = None) -> tuple[Int32[Tensor, " t"], Int32[Tensor, " t"]]:
        """The window [start, end) of key rows that each query row sees.

        Semantics:
            (0, 0) where a row sees nothing: padding, and rows before the first key.

        Args:
            device: where the tensors go, the CPU if left out. The first call for an accelerator copies to it, which
                waits; later calls do not.

        Returns:
            start and end, new copies each time.
        """
        start, end = self._shared_bounds(device)
        return start.clone(), end.clone()

    def slice_queries(self, begin: Integer, end: Integer) -> CausalLayout:
        """The layout of the query rows [begin, end), renumbered from 0; the keys stay.

        Args:
            begin: first row.
            end: first row after the last, begin <= end <= num_q.

        Returns:
            The layout, with num_q = end - begin.

        Raises:
            BadInput: not a range of query rows.
        """
        end = whole_number("end", end, below=self.num_q + 1)
        begin = whole_number("begin", begin, below=end + 1)
        return self._trusted(tables.sliced_table(self._table, begin, end), end - begin, self.num_k, self.ratio)

    def _shared_bounds(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """`bounds` without the copy: for readers inside the library only."""
        device = torch.device("cpu" if device is None else device)
        if device.type != "cpu" and device.index is None:
            device = torch.empty(0, device=device).device
        if device not in self._bounds_by_device:
            # Made under inference mode, a cached tensor could never be saved for a backward pass.
            with torch.inference_mode(False):
                if device.type == "cpu":
                    bounds = tables.row_windows(self._data)
                else:
                    start, end = self._shared_bounds()
                    bounds = start.to(device), end.to(device)
            self._bounds_by_device[device] = bounds
        return self._bounds_by_device[device]

    def _wire(self) -> tuple[Tensor, list[int]]:
        """What a custom op is given of a layout: a tensor and sizes."""
        return self._table, [self.num_q, self.num_k, self.ratio]

    def _key_ranges(self) -> tuple[Tensor, Tensor]:
        """First key row and number of keys of each query row's segment, on the CPU."""
        return tables.row_key_ranges(self._data)

    @property
    def _data(self) -> tables.LayoutData:
        return tables.LayoutData(self._table, self.num_q, self.num_k, self.ratio)

    @cached_property
    def _bounds_by_device(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def _hash(self) -> int:
        return hash((self.num_q, self.num_k, self.ratio, tuple(self._table.flatten().tolist())))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CausalLayout):
            return NotImplemented
        if self is other:
            return True
        sizes = (self.num_q, self.num_k, self.ratio) == (other.num_q, other.num_k, other.ratio)
        return sizes and torch.equal(self._table, other._table)

    def __repr__(self) -> str:
        sizes = f"num_q={self.num_q}, num_k={self.num_k}, ratio={self.ratio}"
        return f"CausalLayout({len(self._table)} segments, {sizes})"

    def __getstate__(self) -> dict[str, Any]:
        # What is cached stays here: it can be large, and may sit on a device that the reader lacks.
        return {field.name: getattr(self, field.name) for field in fields(self)}
