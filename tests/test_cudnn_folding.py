"""Folding a layout for the dense kernels: every row once, the windows that a kernel gives it, and sizes that hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import example, given
from strategies import FEW, HOST_LAYOUTS, Drawn, strategy, two_sequences

from dsattn import CausalLayout, Segment
from dsattn.backends.cudnn import folding
from dsattn.backends.cudnn.folding import MAX_COPIES, MIN_ROWS, Fold, Piece, folds

CPU = torch.device("cpu")
ROOM = 1 << 24
ELEMENTS = (1, 4, 17, 60, ROOM)
FORMS = pytest.mark.parametrize("squared", [False, True], ids=["as it is", "squared"])


def drawn(rng: Random) -> Drawn:
    return rng.choice(HOST_LAYOUTS)(rng)


def limit(offset: int, row: int, keys: int, ratio: int) -> int:
    """How many of its sequence's keys a kernel shows to a row."""
    return min(max((offset + row + 1) // ratio, 0), keys)


def pieces_of(layout: CausalLayout, squared: bool, elements: int) -> list[Piece]:
    return [piece for fold in folds(layout, squared=squared, elements=elements) for piece in fold.pieces]


@FORMS
@FEW
@given(strategy(drawn))
@example(two_sequences())
def test_every_row_that_sees_keys_is_in_one_piece_with_its_own_window(squared: bool, problem: Drawn) -> None:
    for elements in ELEMENTS:
        owners: dict[int, Piece] = {}
        for piece in pieces_of(problem.layout, squared, elements):
            for row in range(piece.q_begin, piece.q_end):
                assert row not in owners
                owners[row] = piece
                shown = limit(piece.offset, row - piece.q_begin, piece.keys, problem.ratio)
                real = min(shown, piece.k_end - piece.k_begin)
                assert list(range(piece.k_begin, piece.k_begin + real)) == problem.visible[row]
                # Padded keys come after the last real one, so only rows that see all of them are shown any.
                assert shown == real or squared
        assert [row for row, keys in enumerate(problem.visible) if keys and row not in owners] == []


@FORMS
@FEW
@given(strategy(drawn))
@example(two_sequences())
def test_lengths_and_gathered_rows_belong_to_the_rows_of_the_call(squared: bool, problem: Drawn) -> None:
    layout, elements = problem.layout, 30
    queries = torch.arange(layout.num_q, dtype=torch.int32, device="cpu")
    keys = torch.arange(1, layout.num_k + 1, dtype=torch.int32, device="cpu")
    for fold in folds(layout, squared=squared, elements=elements):
        own, lengths, own_keys = fold.queries(queries, -1), fold.lengths(CPU), fold.keys(keys)
        assert (own.shape, lengths.shape, lengths.dtype) == ((fold.q_starts[-1],), own.shape, torch.int32)
        assert own_keys.shape == (fold.k_starts[-1],)
        for row, length in zip(own.tolist(), lengths.tolist(), strict=True):
            assert length == (len(problem.visible[row]) if row >= 0 else 0)
        for piece, rows, columns in fold.parts():
            assert own[rows].tolist() == list(range(piece.q_begin, piece.q_end))
            assert own_keys[columns].tolist() == list(range(piece.k_begin + 1, piece.k_end + 1))
        assert (own < 0).sum() == fold.q_starts[-1] - sum(p.q_end - p.q_begin for p in fold.pieces)
        assert (own_keys == 0).sum() == fold.k_starts[-1] - sum(p.k_end - p.k_begin for p in fold.pieces)
        seen = fold.seen(CPU)
        assert torch.equal(seen.sum(1), lengths)
        assert seen.shape[1] == fold.max_keys == max(end - begin for begin, end in pairwise(fold.k_starts))


@FEW
@given(strategy(drawn))
@example(two_sequences())
def test_a_squared_piece_has_the_offset_that_bottom_right_gives_it(problem: Drawn) -> None:
    for elements in ELEMENTS:
        for piece in pieces_of(problem.layout, True, elements):
            assert piece.keys * problem.ratio - piece.rows == piece.offset
            # Kernels of old releases refuse more rows than their keys stand for.
            assert piece.rows <= piece.keys * problem.ratio


@FORMS
@FEW
@given(strategy(drawn))
@example(two_sequences())
def test_an_aligned_fold_needs_no_offset_under_any_alignment(squared: bool, problem: Drawn) -> None:
    for fold in folds(problem.layout, squared=squared, elements=ROOM):
        for piece in fold.pieces:
            bottom_right = piece.keys * problem.ratio - piece.rows
            assert piece.aligned(problem.ratio) == (bottom_right == piece.offset == 0)
        assert fold.aligned == all(piece.aligned(problem.ratio) for piece in fold.pieces)


@FORMS
@FEW
@given(strategy(drawn))
@example(two_sequences())
def test_sizes_of_launches(squared: bool, problem: Drawn) -> None:
    for elements in ELEMENTS:
        for fold in folds(problem.layout, squared=squared, elements=elements):
            assert min(piece.rows for piece in fold.pieces) >= MIN_ROWS
            assert len(fold.offsets) < fold.q_starts[-1], "as many offsets as rows may be read as one for each row"
            assert fold.max_rows == max(piece.rows for piece in fold.pieces)
            one_row = len(fold.pieces) == 1 and fold.pieces[0].q_end - fold.pieces[0].q_begin == 1
            assert fold.q_starts[-1] * fold.max_keys <= elements or one_row
            assert fold.k_starts[-1] <= MAX_COPIES * problem.num_k or len(fold.pieces) == 1
            sizes = {(piece.rows, piece.keys) for piece in fold.pieces}
            assert fold.batch == (len(fold.pieces) if len(sizes) == 1 else None)


@FORMS
def test_a_batch_is_one_launch_of_its_own_shape(squared: bool) -> None:
    (fold,) = folds(CausalLayout.batched(3, 8), squared=squared, elements=ROOM)
    assert (fold.batch, fold.q_starts, fold.k_starts, fold.offsets) == (3, [0, 8, 16, 24], [0, 8, 16, 24], [0, 0, 0])
    assert fold.aligned
    rows = torch.arange(24, device="cpu")
    assert fold.queries(rows).data_ptr() == rows.data_ptr(), "nothing is copied where nothing is padded"
    assert [one.pieces for one in fold.alone()] == [(piece,) for piece in fold.pieces]


def test_a_rectangle_is_sent_as_it_is_or_padded_at_its_end() -> None:
    layout = CausalLayout.batched(2, 4, 20, q_offset=[16, 3])
    (fold,) = folds(layout, squared=False, elements=ROOM)
    assert [(p.rows, p.keys, p.offset) for p in fold.pieces] == [(4, 20, 16), (4, 7, 3)]
    (fold,) = folds(layout, squared=True, elements=ROOM)
    assert [(p.rows, p.keys, p.offset) for p in fold.pieces] == [(4, 20, 16), (4, 7, 3)]
    (fold,) = folds(CausalLayout.batched(1, 3, 20, q_offset=5, ratio=4), squared=True, elements=ROOM)
    # Two keys stand for eight positions: three rows from position 5 on.
    assert [(p.rows, p.keys, p.offset, p.k_end) for p in fold.pieces] == [(3, 2, 5, 2)]


@FORMS
@pytest.mark.parametrize("ratio", [1, 4])
def test_a_huge_offset_costs_no_padding(squared: bool, ratio: int) -> None:
    layout = CausalLayout.from_segments([Segment(0, 6, 0, 9, 2**31 - 10)], num_q=6, num_k=9, ratio=ratio)
    (piece,) = pieces_of(layout, squared, ROOM)
    assert piece.k_end == 9
    assert piece.rows <= 6 + ratio
    assert piece.keys <= 9 + 6


@FORMS
def test_many_rows_over_few_keys_stay_within_the_table(squared: bool) -> None:
    """Padded to a square, a thousand rows over ten keys would be a table a hundred times as large."""
    layout = CausalLayout.batched(1, 1000, 10, q_offset=0)
    cut = folds(layout, squared=squared, elements=10_000)
    assert all(fold.q_starts[-1] * fold.max_keys <= 10_000 for fold in cut)
    assert len(cut) <= (1 if not squared else 32)


@FORMS
def test_rows_of_a_launch_are_bounded(squared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "MAX_ROWS", 7)
    folding._folds.cache_clear()
    try:
        layout = CausalLayout.packed([0, 3, 6, 26])
        found = folds(layout, squared=squared, elements=ROOM)
        assert all(fold.q_starts[-1] <= 7 for fold in found)
        assert sorted(piece.q_begin for fold in found for piece in fold.pieces)[:2] == [0, 3]
    finally:
        folding._folds.cache_clear()


@FORMS
def test_sequences_of_a_launch_are_bounded(squared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "MAX_PIECES", 3)
    folding._folds.cache_clear()
    try:
        layout = CausalLayout.batched(8, 2)
        assert [len(fold.pieces) for fold in folds(layout, squared=squared, elements=ROOM)] == [3, 3, 2]
    finally:
        folding._folds.cache_clear()


def test_overlapping_keys_are_copied_up_to_twice() -> None:
    """Slices of one document, each with its whole past: five copies of the keys are three launches."""
    segments = [Segment(4 * i, 4, 0, 40, 36) for i in range(5)]
    layout = CausalLayout.from_segments(segments, num_q=20, num_k=40)
    assert [len(fold.pieces) for fold in folds(layout, squared=False, elements=ROOM)] == [2, 2, 1]


def test_equal_layouts_share_their_plans() -> None:
    first, second = (folds(CausalLayout.batched(2, 6), squared=False, elements=64) for _ in range(2))
    assert first is second
    assert first[0].lengths(CPU) is second[0].lengths(CPU)


def test_a_layout_without_keys_needs_no_launch() -> None:
    nothing = CausalLayout.from_segments([], num_q=4, num_k=3)
    unseen = CausalLayout.from_segments([Segment(0, 4, 0, 3, -9), Segment(4, 2, 3, 0, 5)], num_q=6, num_k=3)
    for layout in (nothing, unseen):
        assert folds(layout, squared=False, elements=ROOM) == folds(layout, squared=True, elements=ROOM) == ()


def test_a_piece_knows_when_it_is_square() -> None:
    piece = Piece(0, 8, 0, 2, 0, 8, 2)
    assert piece.aligned(4)
    assert not piece.aligned(3)
    assert not replace(piece, offset=1).aligned(4)
    assert Fold((piece,), 4).aligned
    assert not Fold((piece, replace(piece, keys=3)), 4).aligned
