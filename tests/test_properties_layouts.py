"""Layouts of every constructor, and the id spaces of selections, against a slow reading of the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from strategies import ALL_LAYOUTS, FEW, HOST_LAYOUTS, Drawn, batched, strategy, two_sequences
from torch import Tensor

from dsattn import CausalLayout, TopK
from dsattn.layouts import DeviceLayout


@dataclass(frozen=True)
class Cut:
    """A layout and where its query rows are cut."""

    drawn: Drawn
    edges: list[int]


def random_cut(rng: Random) -> Cut:
    drawn = rng.choice(ALL_LAYOUTS)(rng)
    rows = len(drawn.places)
    return Cut(drawn, sorted({0, rows, rng.randint(0, rows), rng.randint(0, rows)}))


def windows(layout: CausalLayout) -> list[list[int]]:
    start, end = layout.bounds()
    assert (start.dtype, end.dtype) == (torch.int32, torch.int32)
    assert bool(((start < end) | ((start == 0) & (end == 0))).all()), "a row that sees nothing has the window (0, 0)"
    return [list(range(*window)) for window in zip(start.tolist(), end.tolist(), strict=True)]


def check_windows(example: Cut) -> None:
    drawn = example.drawn
    layout = drawn.layout
    assert (layout.num_q, layout.num_k, layout.ratio) == (len(drawn.places), drawn.num_k, drawn.ratio)
    assert windows(layout) == drawn.visible
    assert windows(drawn.segmented) == drawn.visible
    if isinstance(layout, DeviceLayout):
        return
    assert all(segment.q_len > 0 for segment in layout.segments)
    assert layout.table.tolist() == [[s.q_start, s.q_len, s.k_start, s.k_len, s.q_offset] for s in layout.segments]
    again = CausalLayout.from_segments(layout.segments[::-1], num_q=layout.num_q, num_k=layout.num_k, ratio=drawn.ratio)
    assert again == layout
    assert hash(again) == hash(layout)
    parts = [layout.slice_queries(begin, end) for begin, end in pairwise(example.edges)]
    assert [row for part in parts for row in windows(part)] == (drawn.visible if parts else [])


@FEW
@given(strategy(random_cut))
def test_every_row_sees_what_the_definition_says(example: Cut) -> None:
    check_windows(example)


def test_a_wrong_window_is_found() -> None:
    drawn = two_sequences()
    check_windows(Cut(drawn, [0, 3, 8]))
    place = drawn.places[2]
    assert place is not None
    later, shorter = replace(place, position=place.position + 1), replace(place, k_len=2)
    for other in (later, shorter, replace(place, k_start=1), None):
        with pytest.raises(AssertionError):
            check_windows(Cut(replace(drawn, places=(*drawn.places[:2], other, *drawn.places[3:])), [0, 8]))
    for wrong in (CausalLayout.batched(2, 4, 4, q_offset=1), CausalLayout.batched(2, 4, lengths=[4, 3])):
        with pytest.raises(AssertionError):
            check_windows(Cut(replace(drawn, layout=wrong), [0, 8]))


def test_a_wrong_slice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Cut(two_sequences(), [0, 3, 8])
    right = CausalLayout.slice_queries
    monkeypatch.setattr(CausalLayout, "slice_queries", lambda self, begin, end: right(self, max(0, begin - 1), end))
    with pytest.raises(AssertionError):
        check_windows(example)


@dataclass(frozen=True)
class Ids:
    """A selection as another library may hold it: keys of each row in any order, and what stands in unused slots.

    Attributes:
        drawn: who sees whom.
        keys: the selected key rows of each query row.
        order: for each query row the key or -1 of every slot, shuffled.
        junk: what unused slots hold.
    """

    drawn: Drawn
    keys: list[list[int]]
    order: list[list[int]]
    junk: list[int]

    @property
    def shape(self) -> tuple[int, ...]:
        b, rows = self.drawn.batch, len(self.keys)
        return (b, rows // b) if b else (rows,)


def random_ids(rng: Random) -> Ids:
    drawn = rng.choice([batched, *HOST_LAYOUTS])(rng)
    k = rng.randint(1, 6)
    keys = [sorted(rng.sample(seen, rng.randint(0, min(k, len(seen))))) for seen in drawn.visible]
    order = [row + [-1] * (k - len(row)) for row in keys]
    for row in order:
        rng.shuffle(row)
    return Ids(drawn, keys, order, [rng.choice([-1, -1, -7, -(2**31), 2**31 - 1]) for _ in range(k)])


def in_space(example: Ids, space: str) -> list[list[int]]:
    """The slots of every row as ids of a space, -1 in unused ones, key by key."""
    drawn = example.drawn
    b = drawn.batch or 1
    sk = drawn.num_k // b

    def told(row: int, key: int) -> int:
        place = drawn.places[row]
        if key < 0 or place is None:
            return -1
        local, seq_major = key - place.k_start, key % max(1, sk) * b + key // max(1, sk)
        return {"flat": key, "local": local, "seq_major": seq_major}[space]

    return [[told(row, key) for key in keys] for row, keys in enumerate(example.order)]


def check_ids(
    example: Ids,
    from_ids: Callable[..., TopK] = TopK.from_ids,
    to_ids: Callable[..., Tensor] = TopK.to_ids,
) -> None:
    layout, k = example.drawn.layout, len(example.junk)
    rows = [row + [-1] * (k - len(row)) for row in example.keys]
    indices = torch.tensor(rows, dtype=torch.int32).reshape(*example.shape, k)
    lengths = torch.tensor([len(row) for row in example.keys], dtype=torch.int32).reshape(example.shape)
    spaces = ["flat", "local", "seq_major"] if example.drawn.batch else ["flat", "local"]
    for space in spaces:
        slots = torch.tensor(in_space(example, space), dtype=torch.int64).reshape(*example.shape, k)
        given = torch.where(slots < 0, torch.tensor(example.junk), slots)
        for dtype in (torch.int32, torch.int64):
            topk = from_ids(given.to(dtype), layout, space=space)
            assert torch.equal(topk.indices, indices)
            assert torch.equal(topk.lengths, lengths)
            assert (topk.num_q, topk.num_k) == (layout.num_q, layout.num_k)
        back = to_ids(topk, layout, space=space)
        assert back.dtype == torch.int32
        assert torch.equal(back.sort(-1).values.long(), slots.sort(-1).values)
        again = from_ids(back, layout, space=space)
        assert torch.equal(again.indices, indices)
        assert torch.equal(to_ids(again, layout, space=space), back)


@FEW
@given(strategy(random_ids))
def test_ids_of_every_space_come_back(example: Ids) -> None:
    check_ids(example)


IDS = Ids(two_sequences(), [[0], [0, 1], [], [3], [4], [4, 5], [5], [6, 7]],
          [[-1, 0], [1, 0], [-1, -1], [3, -1], [4, -1], [5, 4], [5, -1], [6, 7]], [-1, 2**31 - 1])  # fmt: skip


def as_flat(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, layout, *, space: right(x, layout, space="flat")


@pytest.mark.parametrize(
    "wrong",
    [
        {"to_ids": as_flat(TopK.to_ids)},
        {"to_ids": lambda topk, layout, *, space: TopK.to_ids(topk, layout, space=space).flip(-1).clamp(min=0)},
        {"to_ids": lambda topk, layout, *, space: TopK.to_ids(topk, CausalLayout.batched(1, 8), space=space)},
        {"from_ids": lambda ids, layout, *, space: TopK.from_ids(ids[..., :1], layout, space=space)},
    ],
    ids=["flat only", "unused slots are key 0", "another layout", "a slot dropped"],
)
def test_a_wrong_conversion_is_found(wrong: dict[str, Callable[..., Any]]) -> None:
    check_ids(IDS)
    with pytest.raises(AssertionError):
        check_ids(IDS, **wrong)
