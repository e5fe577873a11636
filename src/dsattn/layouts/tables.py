"""The segments of each kind of layout, and the windows of its rows, as vectorised integer arithmetic on the CPU.

A table is int64 [n, 5] with the columns q_start, q_len, k_start, k_len, q_offset. There is no loop over documents here:
a batch may hold ten thousand of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from dsattn.errors import BadInput
from dsattn.layouts.checks import (
    LIMIT,
    cumulative_lengths,
    first_true,
    one_of,
    total_rows,
    whole_number,
    whole_numbers,
)
from dsattn.layouts.context_parallel import check_rank, rank_pieces

COLUMNS = ("q_start", "q_len", "k_start", "k_len", "q_offset")


class LayoutData(NamedTuple):
    """What a layout is made of; the table is sorted by q_start and has no segment without query rows."""

    table: Int64[Tensor, "n 5"]
    num_q: int
    num_k: int
    ratio: int


def batched_data(b: Any, q_len: Any, k_len: Any, q_offset: Any, ratio: Any, lengths: Any, side: Any) -> LayoutData:
    """The data of `CausalLayout.batched`, which documents the arguments."""
    b, q_len, ratio = whole_number("b", b), whole_number("q_len", q_len), whole_number("ratio", ratio, low=1)
    one_of("side", side, ("left", "right"))
    if lengths is not None and (k_len is not None or ratio != 1):
        given = f"k_len {k_len} and ratio {ratio}"
        raise BadInput("lengths", given=given, needed="neither k_len nor a ratio: a padded batch is square")
    k_len = q_len // ratio if k_len is None else whole_number("k_len", k_len)
    num_q = whole_number("b * q_len", b * q_len)
    num_k = whole_number("b * k_len", b * k_len)
    sequence = torch.arange(b, device="cpu")
    q_start, k_start = sequence * q_len, sequence * k_len
    q_lens, k_lens = torch.full_like(sequence, q_len), torch.full_like(sequence, k_len)
    if lengths is not None:
        q_lens = k_lens = whole_numbers("lengths", lengths, below=q_len + 1, length=b)
        if side == "left":
            q_start = k_start = q_start + q_len - q_lens
    offsets = _offsets(q_offset, q_lens, k_lens, ratio, "sequence")
    return LayoutData(_table(q_start, q_lens, k_start, k_lens, offsets), num_q, num_k, ratio)


def packed_data(
    cu_seqlens_q: Any, cu_seqlens_k: Any, q_offset: Any, ratio: Any, num_q: Any, num_k: Any, cu_seqlens_padded: Any
) -> LayoutData:
    """The data of `CausalLayout.packed`, which documents the arguments."""
    ratio = whole_number("ratio", ratio, low=1)
    q_end = cumulative_lengths("cu_seqlens_q", cu_seqlens_q)
    q_lens = q_end.diff()
    if cu_seqlens_k is None:
        k_lens = q_lens // ratio
    else:
        k_end = cumulative_lengths("cu_seqlens_k", cu_seqlens_k)
        _same_documents("cu_seqlens_k", k_end, q_end)
        k_lens = k_end.diff()
    if cu_seqlens_padded is None:
        q_start, k_start = q_end[:-1], k_lens.cumsum(0) - k_lens
        q_rows, q_why = int(q_end[-1]), "the end of cu_seqlens_q"
        k_rows, k_why = int(k_lens.sum()), "the keys of all documents"
    else:
        padded = _padded_starts(cu_seqlens_padded, q_end, q_lens, k_lens, ratio)
        q_start, k_start = padded[:-1], padded[:-1] // ratio
        q_rows, k_rows = int(padded[-1]), int(padded[-1]) // ratio
        q_why = k_why = "the end of cu_seqlens_padded"
    offsets = _offsets(q_offset, q_lens, k_lens, ratio, "document")
    num_q, num_k = total_rows("num_q", num_q, q_rows, q_why), total_rows("num_k", num_k, k_rows, k_why)
    return LayoutData(_table(q_start, q_lens, k_start, k_lens, offsets), num_q, num_k, ratio)


def context_parallel_data(
    cu_seqlens: Any, cp_size: Any, cp_rank: Any, scheme: Any, ratio: Any, num_q: Any, num_k: Any
) -> LayoutData:
    """The data of `CausalLayout.context_parallel`, which documents the arguments."""
    ratio = whole_number("ratio", ratio, low=1)
    cp_size, cp_rank = check_rank(cp_size, cp_rank)
    cumulative = cumulative_lengths("cu_seqlens", cu_seqlens)
    document, start, length = rank_pieces(cumulative, cp_size, cp_rank, scheme)
    k_lens = cumulative.diff() // ratio
    k_start = k_lens.cumsum(0) - k_lens
    num_q = total_rows("num_q", num_q, int(length.sum()), "the rows of this rank")
    num_k = total_rows("num_k", num_k, int(k_lens.sum()), "the keys of all documents")
    q_start = length.cumsum(0) - length
    table = _table(q_start, length, k_start[document], k_lens[document], start - cumulative[document])
    return LayoutData(table, num_q, num_k, ratio)


def segments_data(rows: list[tuple[Any, ...]], num_q: Any, num_k: Any, ratio: Any) -> LayoutData:
    """The data of `CausalLayout.from_segments`, from segments in any order, all of them checked."""
    num_q, num_k = whole_number("num_q", num_q), whole_number("num_k", num_k)
    ratio = whole_number("ratio", ratio, low=1)
    values = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
    columns = []
    for name, column in zip(COLUMNS, values, strict=True):
        low = 1 - LIMIT if name == "q_offset" else 0
        columns.append(whole_numbers(name, column, low=low, entry="segments[{}]." + name))
    q_start, q_len, k_start, k_len, q_offset = columns
    _check_end("q_start + q_len", q_start + q_len, "num_q", num_q)
    _check_end("k_start + k_len", k_start + k_len, "num_k", num_k)
    _check_offset_end(q_offset, q_len, "segment")
    _check_overlap(q_start, q_len)
    table = _table(*columns)
    return LayoutData(table[table[:, 0].argsort()], num_q, num_k, ratio)


def sliced_table(table: Int64[Tensor, "n 5"], begin: int, end: int) -> Int64[Tensor, "m 5"]:
    """The segments of the query rows [begin, end), with those rows renumbered from 0."""
    q_start, q_len, k_start, k_len, q_offset = table.unbind(1)
    first = q_start.clamp(min=begin)
    rest = (q_start + q_len).clamp(max=end) - first
    return _table(first - begin, rest.clamp(min=0), k_start, k_len, q_offset + first - q_start)


def row_windows(data: LayoutData) -> tuple[Int32[Tensor, " t"], Int32[Tensor, " t"]]:
    """The window [start, end) of key rows that each query row sees; (0, 0) where it sees nothing."""
    q_start, _, k_start, k_len, q_offset = data.table.unbind(1)
    spread = _RowSpread(data)
    # Row r of the call is row r - q_start of its segment.
    visible = spread(q_offset + 1 - q_start) + torch.arange(data.num_q, device="cpu")
    if data.ratio != 1:
        visible = visible.div_(data.ratio, rounding_mode="floor")
    visible = torch.minimum(visible.clamp_(min=0), spread(k_len)).to(torch.int32)
    start = spread(k_start).to(torch.int32).masked_fill_(visible == 0, 0)
    return start, start + visible


def row_key_ranges(data: LayoutData) -> tuple[Int64[Tensor, " t"], Int64[Tensor, " t"]]:
    """The first key row and the number of keys of each query row's segment, seen or not; (0, 0) outside all."""
    spread = _RowSpread(data)
    return spread(data.table[:, 2]), spread(data.table[:, 3])


class _RowSpread:
    """Called with a value for each segment, gives the value of each query row, 0 in rows of no segment."""

    def __init__(self, data: LayoutData) -> None:
        q_start, q_len = data.table[:, 0], data.table[:, 1]
        n = len(q_len)
        # Runs of rows in turn: gap, segment, gap, ..., gap. Gaps (mostly of no rows) need no case of their own then.
        counts = q_len.new_zeros(2 * n + 1)
        counts[1::2] = q_len
        counts[0:-1:2] = q_start
        counts[2:-1:2] -= q_start[:-1] + q_len[:-1]
        counts[-1] = data.num_q - counts.sum()
        self._run = torch.repeat_interleave(counts, output_size=data.num_q)
        self._runs = len(counts)

    def __call__(self, of_segment: Tensor) -> Tensor:
        of_run = of_segment.new_zeros(self._runs)
        of_run[1::2] = of_segment
        return of_run.index_select(0, self._run)


def _table(q_start: Tensor, q_len: Tensor, k_start: Tensor, k_len: Tensor, q_offset: Tensor) -> Tensor:
    return torch.stack((q_start, q_len, k_start, k_len, q_offset), 1)[q_len > 0]


def _offsets(q_offset: Any, q_lens: Tensor, k_lens: Tensor, ratio: int, unit: str) -> Tensor:
    """One offset for each sequence or document; left out it is 0, where that is the only reading."""
    if q_offset is None:
        unclear = first_true((q_lens > 0) & (k_lens != q_lens // ratio))
        if unclear is not None:
            q_len, k_len = int(q_lens[unclear]), int(k_lens[unclear])
            raise BadInput(
                "q_offset",
                given=f"None, with {q_len} query rows and {k_len} keys at ratio {ratio} in {unit} {unclear}",
                needed="a value, since the two sides can be aligned in two ways",
                fix=f"pass {k_len * ratio - q_len} (bottom-right) or 0 (top-left)",
            )
        return torch.zeros_like(q_lens)
    many = q_offset.ndim > 0 if hasattr(q_offset, "ndim") else hasattr(q_offset, "__iter__")
    if many:
        offsets = whole_numbers("q_offset", q_offset, low=1 - LIMIT, length=len(q_lens))
    else:
        offsets = torch.full_like(q_lens, whole_number("q_offset", q_offset, low=1 - LIMIT))
    _check_offset_end(offsets, q_lens, unit)
    return offsets


def _padded_starts(value: Any, q_end: Tensor, q_lens: Tensor, k_lens: Tensor, ratio: int) -> Tensor:
    what = "cu_seqlens_padded"
    padded = cumulative_lengths(what, value)
    _same_documents(what, padded, q_end)
    uneven = first_true(padded[:-1] % ratio != 0)
    if uneven is not None:
        given = int(padded[uneven])
        raise BadInput(f"{what}[{uneven}]", given=given, needed=f"document starts that divide by ratio = {ratio}")
    for name, lens, room in (("query rows", q_lens, padded.diff()), ("keys", k_lens, (padded // ratio).diff())):
        tight = first_true(lens > room)
        if tight is not None:
            raise BadInput(
                what,
                given=f"room for {int(room[tight])} {name} in document {tight}",
                needed=f"room for its {int(lens[tight])}",
            )
    return padded


def _same_documents(what: str, cumulative: Tensor, q_end: Tensor) -> None:
    if len(cumulative) != len(q_end):
        needed = f"{len(q_end)} entries, as cu_seqlens_q has"
        raise BadInput(what, given=f"{len(cumulative)} entries", needed=needed)


def _check_end(what: str, end: Tensor, name: str, rows: int) -> None:
    bad = first_true(end > rows)
    if bad is not None:
        raise BadInput(f"segments[{bad}]", given=f"{what} = {int(end[bad])}", needed=f"at most {name} = {rows}")


def _check_offset_end(offsets: Tensor, q_lens: Tensor, unit: str) -> None:
    bad = first_true(offsets.abs() + q_lens >= LIMIT)
    if bad is not None:
        given = f"{int(offsets[bad])} with {int(q_lens[bad])} query rows in {unit} {bad}"
        raise BadInput("q_offset", given=given, needed=f"|q_offset| + q_len < {LIMIT}")


def _check_overlap(q_start: Tensor, q_len: Tensor) -> None:
    used = (q_len > 0).nonzero().flatten()
    order = used[q_start[used].argsort()]
    begin, end = q_start[order], (q_start + q_len)[order]
    bad = first_true(begin[1:] < end[:-1])
    if bad is not None:
        one, other = int(order[bad]), int(order[bad + 1])
        raise BadInput(
            "segments",
            given=f"segments {one} and {other} with query rows [{int(begin[bad])}, {int(end[bad])}) "
            f"and [{int(begin[bad + 1])}, {int(end[bad + 1])})",
            needed="query ranges that do not overlap",
        )
