"""Hand-written tables and windows of every constructor, and what a layout is as a value."""

import copy
import dataclasses
import pickle

import pytest
import torch

from dsattn.errors import BadInput
from dsattn.layouts import CausalLayout, Segment


def windows(layout):
    start, end = layout.bounds()
    return list(zip(start.tolist(), end.tolist(), strict=True))


def picture(layout):
    """One string of 0 and 1 for each query row."""
    return ["".join("01"[lo <= key < hi] for key in range(layout.num_k)) for lo, hi in windows(layout)]


TABLES = {
    "batched square": (CausalLayout.batched(2, 3), [[0, 3, 0, 3, 0], [3, 3, 3, 3, 0]], (6, 6, 1)),
    "batched compressed": (CausalLayout.batched(2, 5, ratio=2), [[0, 5, 0, 2, 0], [5, 5, 2, 2, 0]], (10, 4, 2)),
    "batched k_len q_len // ratio": (CausalLayout.batched(1, 5, 2, ratio=2), [[0, 5, 0, 2, 0]], (5, 2, 2)),
    "batched one offset": (
        CausalLayout.batched(2, 1, 4, q_offset=3),
        [[0, 1, 0, 4, 3], [1, 1, 4, 4, 3]],
        (2, 8, 1),
    ),
    "batched decode, different pasts": (
        CausalLayout.batched(3, 1, 9, q_offset=[8, 2, -1]),
        [[0, 1, 0, 9, 8], [1, 1, 9, 9, 2], [2, 1, 18, 9, -1]],
        (3, 27, 1),
    ),
    "batched offset without k_len": (CausalLayout.batched(1, 4, q_offset=2), [[0, 4, 0, 4, 2]], (4, 4, 1)),
    "batched padded right": (
        CausalLayout.batched(3, 4, lengths=[2, 0, 4]),
        [[0, 2, 0, 2, 0], [8, 4, 8, 4, 0]],
        (12, 12, 1),
    ),
    "batched padded left": (
        CausalLayout.batched(3, 4, lengths=[2, 0, 4], side="left"),
        [[2, 2, 2, 2, 0], [8, 4, 8, 4, 0]],
        (12, 12, 1),
    ),
    "batched nothing": (CausalLayout.batched(0, 4, 7), [], (0, 0, 1)),
    "batched no rows": (CausalLayout.batched(2, 0, 7), [], (0, 14, 1)),
    "batched no keys": (CausalLayout.batched(2, 3, 0, q_offset=0), [[0, 3, 0, 0, 0], [3, 3, 0, 0, 0]], (6, 0, 1)),
    "packed": (
        CausalLayout.packed([0, 2, 2, 3, 7], num_q=9, num_k=8),
        [[0, 2, 0, 2, 0], [2, 1, 2, 1, 0], [3, 4, 3, 4, 0]],
        (9, 8, 1),
    ),
    "packed compressed": (
        CausalLayout.packed([0, 5, 8, 12], ratio=4),
        [[0, 5, 0, 1, 0], [5, 3, 1, 0, 0], [8, 4, 1, 1, 0]],
        (12, 2, 4),
    ),
    "packed chunked prefill": (
        CausalLayout.packed([0, 2, 3], [0, 6, 7], q_offset=[4, 0]),
        [[0, 2, 0, 6, 4], [2, 1, 6, 1, 0]],
        (3, 7, 1),
    ),
    "packed keys as queries": (
        CausalLayout.packed([0, 2, 5], [0, 2, 5]),
        [[0, 2, 0, 2, 0], [2, 3, 2, 3, 0]],
        (5, 5, 1),
    ),
    "packed keys without queries": (
        CausalLayout.packed([0, 0, 2], [0, 5, 7]),
        [[0, 2, 5, 2, 0]],
        (2, 7, 1),
    ),
    "packed padded": (
        CausalLayout.packed([0, 3, 5], cu_seqlens_padded=[0, 4, 8]),
        [[0, 3, 0, 3, 0], [4, 2, 4, 2, 0]],
        (8, 8, 1),
    ),
    "packed padded compressed": (
        CausalLayout.packed([0, 3, 8], cu_seqlens_padded=[0, 4, 11], ratio=4, num_q=12),
        [[0, 3, 0, 0, 0], [4, 5, 1, 1, 0]],
        (12, 2, 4),
    ),
    "packed padded with keys": (
        CausalLayout.packed([0, 1, 2], [0, 4, 7], cu_seqlens_padded=[0, 4, 8], q_offset=[3, 2], num_k=10),
        [[0, 1, 0, 4, 3], [4, 1, 4, 3, 2]],
        (8, 10, 1),
    ),
    "packed no documents": (CausalLayout.packed([0], num_q=2, num_k=3), [], (2, 3, 1)),
    "zigzag front": (
        CausalLayout.context_parallel([0, 4, 12], cp_size=2, cp_rank=0),
        [[0, 1, 0, 4, 0], [1, 1, 0, 4, 3], [2, 2, 4, 8, 0], [4, 2, 4, 8, 6]],
        (6, 12, 1),
    ),
    "zigzag inner, padding": (
        CausalLayout.context_parallel([0, 4, 12], cp_size=2, cp_rank=1, num_q=8, num_k=16),
        [[0, 1, 0, 4, 1], [1, 1, 0, 4, 2], [2, 2, 4, 8, 2], [4, 2, 4, 8, 4]],
        (8, 16, 1),
    ),
    "zigzag compressed": (
        CausalLayout.context_parallel([0, 4, 12], cp_size=2, cp_rank=1, ratio=3),
        [[0, 1, 0, 1, 1], [1, 1, 0, 1, 2], [2, 2, 1, 2, 2], [4, 2, 1, 2, 4]],
        (6, 3, 3),
    ),
    "contiguous, part that begins in a document": (
        CausalLayout.context_parallel([0, 3, 3, 7, 8], cp_size=2, cp_rank=1, scheme="contiguous"),
        [[0, 3, 3, 4, 1], [3, 1, 7, 1, 0]],
        (4, 8, 1),
    ),
    "contiguous, part inside one document": (
        CausalLayout.context_parallel([0, 1, 9], cp_size=3, cp_rank=1, scheme="contiguous", num_q=4),
        [[0, 3, 1, 8, 2]],
        (4, 9, 1),
    ),
    "segments in any order": (
        CausalLayout.from_segments(
            [Segment(5, 1, 0, 4, 3), Segment(9, 0, 0, 0, 0), Segment(1, 2, 0, 4, -1)], num_q=9, num_k=4, ratio=2
        ),
        [[1, 2, 0, 4, -1], [5, 1, 0, 4, 3]],
        (9, 4, 2),
    ),
    "no segments": (CausalLayout.from_segments([], num_q=2, num_k=0), [], (2, 0, 1)),
    "slice": (
        CausalLayout.packed([0, 2, 2, 3, 7], num_q=9).slice_queries(1, 5),
        [[0, 1, 0, 2, 1], [1, 1, 2, 1, 0], [2, 2, 3, 4, 0]],
        (4, 7, 1),
    ),
    "empty slice": (CausalLayout.packed([0, 2, 5]).slice_queries(3, 3), [], (0, 5, 1)),
}


@pytest.mark.parametrize(("layout", "rows", "sizes"), TABLES.values(), ids=TABLES.keys())
def test_table(layout, rows, sizes):
    assert layout.table.tolist() == rows
    assert layout.table.shape == (len(rows), 5)
    assert layout.table.dtype == torch.int64
    assert layout.table.device.type == "cpu"
    assert layout.segments == tuple(Segment(*row) for row in rows)
    assert (layout.num_q, layout.num_k, layout.ratio) == sizes
    start, end = layout.bounds()
    assert start.shape == end.shape == (layout.num_q,)
    assert start.dtype == end.dtype == torch.int32


PICTURES = {
    "bottom-right": (CausalLayout.batched(1, 2, 4, q_offset=2), ["1110", "1111"]),
    "top-left": (CausalLayout.batched(1, 2, 4, q_offset=0), ["1000", "1100"]),
    "beyond the keys": (CausalLayout.batched(1, 3, 2, q_offset=0), ["10", "11", "11"]),
    "negative offset": (CausalLayout.batched(1, 3, 2, q_offset=-2), ["00", "00", "10"]),
    "compressed": (CausalLayout.batched(1, 5, ratio=2), ["00", "10", "10", "11", "11"]),
    "compressed, negative offset": (CausalLayout.batched(1, 4, 2, ratio=2, q_offset=-2), ["00", "00", "00", "10"]),
    "documents and a tail": (CausalLayout.packed([0, 2, 3], num_q=4, num_k=4), ["1000", "1100", "0010", "0000"]),
    "padded left": (CausalLayout.batched(1, 3, lengths=[2], side="left"), ["000", "010", "011"]),
    "zigzag rank 0": (CausalLayout.context_parallel([0, 4], cp_size=2, cp_rank=0), ["1000", "1111"]),
    "zigzag rank 1": (CausalLayout.context_parallel([0, 4], cp_size=2, cp_rank=1), ["1100", "1110"]),
    "rows before, between and after segments": (
        CausalLayout.from_segments([Segment(1, 1, 1, 2, 0), Segment(3, 1, 0, 3, 9)], num_q=5, num_k=3),
        ["000", "010", "000", "111", "000"],
    ),
}


@pytest.mark.parametrize(("layout", "rows"), PICTURES.values(), ids=PICTURES.keys())
def test_picture(layout, rows):
    assert picture(layout) == rows


def test_rows_that_see_nothing_have_the_window_0_0():
    layout = CausalLayout.packed([0, 3, 4], [0, 2, 4], q_offset=[-1, -1], num_q=6, num_k=9)
    assert windows(layout) == [(0, 0), (0, 1), (0, 2), (0, 0), (0, 0), (0, 0)]


def test_largest_numbers_do_not_overflow():
    top = 2**31 - 1
    layout = CausalLayout.from_segments(
        [Segment(0, 1, top - 1, 1, top - 1), Segment(1, 1, 0, top, 1 - top), Segment(2, 1, 0, top, top - 1)],
        num_q=3,
        num_k=top,
    )
    assert windows(layout) == [(top - 1, top), (0, 0), (0, top)]
    assert CausalLayout.batched(1, 2, top, ratio=top, q_offset=top - 2).bounds()[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    "cu_seqlens",
    [
        (0, 2, 5),
        torch.tensor([0, 2, 5]),
        torch.tensor([0, 2, 5], dtype=torch.int32),
        torch.tensor([0, 2, 5], dtype=torch.uint8),
        [torch.tensor(0), torch.tensor(2), torch.tensor(5)],
    ],
    ids=repr,
)
def test_cu_seqlens_forms(cu_seqlens):
    assert CausalLayout.packed(cu_seqlens) == CausalLayout.packed([0, 2, 5])


def test_numpy_integers():
    numpy = pytest.importorskip("numpy")
    assert CausalLayout.packed(numpy.array([0, 2, 5])) == CausalLayout.packed([0, 2, 5])
    assert CausalLayout.batched(numpy.int32(2), 1, 4, q_offset=numpy.int64(3)) == CausalLayout.batched(
        2, 1, 4, q_offset=3
    )
    assert CausalLayout.batched(2, 1, 4, q_offset=numpy.array([3, 0])) == CausalLayout.batched(2, 1, 4, q_offset=[3, 0])


def test_equality_and_hash_are_by_value():
    one = CausalLayout.packed([0, 3, 6])
    same = CausalLayout.batched(2, 3)
    assert one == same
    assert hash(one) == hash(same)
    others = [
        CausalLayout.packed([0, 2, 6]),
        CausalLayout.packed([0, 3, 6], num_q=7),
        CausalLayout.packed([0, 3, 6], num_k=7),
        CausalLayout.from_segments(one.segments, num_q=6, num_k=6, ratio=2),
        CausalLayout.from_segments(one.segments[:1], num_q=6, num_k=6),
    ]
    assert len({one, same, *others}) == 1 + len(others)
    assert all(one != other for other in others)
    assert one != "a layout"


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda layout: pickle.loads(pickle.dumps(layout))])
def test_copies_are_equal_and_carry_no_cache(clone, used):
    layout = CausalLayout.packed([0, 3, 6], num_q=9)
    if used:
        layout.bounds(), layout.segments, hash(layout)
    twin = clone(layout)
    assert set(vars(twin)) == {"_table", "num_q", "num_k", "ratio"}
    assert twin == layout
    assert hash(twin) == hash(layout)
    assert windows(twin) == windows(layout)
    assert pickle.loads(pickle.dumps(layout.segments[1])) == layout.segments[1]


def test_layouts_cannot_be_changed():
    cu_seqlens = torch.tensor([0, 3, 6])
    layout = CausalLayout.packed(cu_seqlens)
    before = layout.table
    cu_seqlens.zero_()
    layout.table.zero_()
    for bound in layout.bounds():
        bound.zero_()
    assert torch.equal(layout.table, before)
    assert windows(layout) == [(0, 1), (0, 2), (0, 3), (3, 4), (3, 5), (3, 6)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.num_q = 7  # pyrefly: ignore[read-only]
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.segments[0].q_len = 7  # pyrefly: ignore[read-only]


def test_repr_is_short():
    layout = CausalLayout.packed(range(1000))
    assert repr(layout) == "CausalLayout(999 segments, num_q=999, num_k=999, ratio=1)"


def test_layouts_are_not_built_directly():
    with pytest.raises(BadInput, match="packed"):
        CausalLayout([Segment(0, 1, 0, 1, 0)], num_q=1, num_k=1)
