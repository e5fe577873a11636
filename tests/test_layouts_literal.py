"""Random layouts of every constructor against a slow, literal reading of the definition."""

import random
from itertools import pairwise

import pytest
import torch

from dsattn.layouts import CausalLayout, Segment, context_parallel_positions, gather_order

SEEDS = range(40)


def window(position, k_start, k_len, ratio):
    """The window of the query at an absolute position of a sequence whose keys begin at k_start."""
    visible = min(max((position + 1) // ratio, 0), k_len)
    return (k_start, k_start + visible) if visible else (0, 0)


def windows(layout):
    start, end = layout.bounds()
    return list(zip(start.tolist(), end.tolist(), strict=True))


def cumulative(lengths):
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums


def random_lengths(rng, step=1):
    return [step * rng.choice([0, 1, 1, 2, 3, 5, 8, 13]) for _ in range(rng.randrange(6))]


@pytest.mark.parametrize("seed", SEEDS)
def test_batched(seed):
    rng = random.Random(seed)
    b, q_len, ratio = rng.randrange(4), rng.randrange(7), rng.choice([1, 1, 2, 4])
    k_len = rng.choice([None, rng.randrange(9)])
    offset = rng.choice([rng.randrange(-9, 9), [rng.randrange(-9, 9) for _ in range(b)]])
    layout = CausalLayout.batched(b, q_len, k_len, q_offset=offset, ratio=ratio)
    keys = q_len // ratio if k_len is None else k_len
    expected = []
    for sequence in range(b):
        first = offset if isinstance(offset, int) else offset[sequence]
        expected += [window(first + i, sequence * keys, keys, ratio) for i in range(q_len)]
    assert windows(layout) == expected
    assert (layout.num_q, layout.num_k) == (b * q_len, b * keys)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("seed", SEEDS)
def test_batched_with_padding(seed, side):
    rng = random.Random(seed)
    b, rows = rng.randrange(4), rng.randrange(7)
    lengths = [rng.randint(0, rows) for _ in range(b)]
    expected = []
    for sequence, length in enumerate(lengths):
        first = rows - length if side == "left" else 0
        real = range(first, first + length)
        expected += [
            window(i - first, sequence * rows + first, length, 1) if i in real else (0, 0) for i in range(rows)
        ]
    assert windows(CausalLayout.batched(b, rows, lengths=lengths, side=side)) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_packed(seed):
    rng = random.Random(seed)
    ratio = rng.choice([1, 1, 2, 4])
    q_lens = random_lengths(rng)
    k_lens = [rng.randrange(9) for _ in q_lens] if rng.random() < 0.5 else None
    offset = rng.choice([rng.randrange(-9, 9), [rng.randrange(-9, 9) for _ in q_lens]])
    if k_lens is None and rng.random() < 0.5:
        offset = None
    keys = [length // ratio for length in q_lens] if k_lens is None else k_lens
    arguments = {"q_offset": offset, "ratio": ratio}
    if rng.random() < 0.5:
        # Room for both sides of every document, at starts that divide by the ratio.
        rooms = [ratio * (max(-(-q // ratio), k) + rng.randrange(3)) for q, k in zip(q_lens, keys, strict=True)]
        q_starts = cumulative(rooms)
        k_starts = [start // ratio for start in q_starts]
        arguments["cu_seqlens_padded"] = q_starts
    else:
        q_starts, k_starts = cumulative(q_lens), cumulative(keys)
    num_q, num_k = q_starts[-1] + rng.randrange(3), k_starts[-1] + rng.randrange(3)
    expected = [(0, 0)] * num_q
    for i, (q_len, k_len) in enumerate(zip(q_lens, keys, strict=True)):
        first = offset[i] if isinstance(offset, list) else offset or 0
        for row in range(q_len):
            expected[q_starts[i] + row] = window(first + row, k_starts[i], k_len, ratio)
    cu_k = None if k_lens is None else cumulative(k_lens)
    layout = CausalLayout.packed(cumulative(q_lens), cu_k, num_q=num_q, num_k=num_k, **arguments)
    assert windows(layout) == expected
    defaults = CausalLayout.packed(cumulative(q_lens), cu_k, **arguments)
    assert (defaults.num_q, defaults.num_k) == (q_starts[-1], k_starts[-1])
    assert defaults.segments == layout.segments


@pytest.mark.parametrize("seed", SEEDS)
def test_from_segments(seed):
    rng = random.Random(seed)
    ratio, num_k = rng.choice([1, 2, 3]), rng.randrange(12)
    segments, expected = [], []
    for _ in range(rng.randrange(7)):
        expected += [(0, 0)] * rng.randrange(3)
        q_len, k_start, offset = rng.randrange(5), rng.randint(0, num_k), rng.randrange(-12, 12)
        k_len = rng.randint(0, num_k - k_start)
        segments.append(Segment(len(expected), q_len, k_start, k_len, offset))
        expected += [window(offset + i, k_start, k_len, ratio) for i in range(q_len)]
    rng.shuffle(segments)
    layout = CausalLayout.from_segments(segments, num_q=len(expected), num_k=num_k, ratio=ratio)
    assert windows(layout) == expected
    assert list(layout.segments) == sorted((s for s in segments if s.q_len), key=lambda s: s.q_start)


def rows_of_rank(lengths, cp_size, cp_rank, scheme):
    """(document, position in it, global row) of each local row, by asking every row for its owner."""
    total = sum(lengths)
    rows, row = [], 0
    for document, length in enumerate(lengths):
        for position in range(length):
            if scheme == "zigzag":
                chunk = position // (length // (2 * cp_size))
                owner = min(chunk, 2 * cp_size - 1 - chunk)
            else:
                owner = row // (total // cp_size)
            if owner == cp_rank:
                rows.append((document, position, row))
            row += 1
    return rows


@pytest.mark.parametrize("scheme", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_context_parallel(seed, cp_size, scheme):
    rng = random.Random(seed)
    ratio = rng.choice([1, 1, 2, 4])
    lengths = random_lengths(rng, step=2 * cp_size if scheme == "zigzag" else 1)
    lengths.append(-sum(lengths) % cp_size)
    cu_seqlens = cumulative(lengths)
    keys = [length // ratio for length in lengths]
    key_starts = cumulative(keys)
    tail = rng.randrange(3)
    together = {}
    gathered = []
    for rank in range(cp_size):
        layout = CausalLayout.context_parallel(
            cu_seqlens,
            cp_size=cp_size,
            cp_rank=rank,
            scheme=scheme,
            ratio=ratio,
            num_q=cu_seqlens[-1] // cp_size + tail,
            num_k=key_starts[-1] + tail,
        )
        rows = rows_of_rank(lengths, cp_size, rank, scheme)
        expected = [window(position, key_starts[d], keys[d], ratio) for d, position, _ in rows]
        assert windows(layout) == expected + [(0, 0)] * tail
        positions = context_parallel_positions(cu_seqlens, cp_size=cp_size, cp_rank=rank, scheme=scheme)
        assert positions.tolist() == [row for *_, row in rows]
        together.update(zip(positions.tolist(), windows(layout), strict=False))
        gathered.append(positions)
    one = CausalLayout.packed(cu_seqlens, ratio=ratio, num_k=key_starts[-1] + tail)
    assert [together[row] for row in range(cu_seqlens[-1])] == windows(one)
    assert len(together) == cu_seqlens[-1]
    order = gather_order(cu_seqlens, cp_size=cp_size, scheme=scheme)
    assert torch.cat(gathered).index_select(0, order).tolist() == list(range(cu_seqlens[-1]))


@pytest.mark.parametrize("seed", SEEDS)
def test_slices(seed):
    rng = random.Random(seed)
    lengths = random_lengths(rng, step=4)
    layout = rng.choice(
        [
            CausalLayout.packed(cumulative(lengths), ratio=rng.choice([1, 4]), num_q=sum(lengths) + 3),
            CausalLayout.context_parallel(cumulative(lengths), cp_size=2, cp_rank=rng.randrange(2)),
            CausalLayout.batched(2, 5, 9, q_offset=[3, -2]),
            CausalLayout.batched(3, 5, lengths=[2, 5, 0], side="left"),
        ]
    )
    cuts = sorted({0, layout.num_q, *(rng.randint(0, layout.num_q) for _ in range(4))})
    parts = [layout.slice_queries(begin, end) for begin, end in pairwise(cuts)]
    assert [row for part in parts for row in windows(part)] == windows(layout)
    assert all((part.num_k, part.ratio) == (layout.num_k, layout.ratio) for part in parts)
    begin = rng.randint(0, layout.num_q)
    end = rng.randint(begin, layout.num_q)
    inner_begin = rng.randint(0, end - begin)
    inner_end = rng.randint(inner_begin, end - begin)
    nested = layout.slice_queries(begin, end).slice_queries(inner_begin, inner_end)
    assert nested == layout.slice_queries(begin + inner_begin, begin + inner_end)
    assert layout.slice_queries(0, layout.num_q) == layout


def test_gather_order_of_two_ranks():
    assert context_parallel_positions([0, 4, 12], cp_size=2, cp_rank=0).tolist() == [0, 3, 4, 5, 10, 11]
    assert context_parallel_positions([0, 4, 12], cp_size=2, cp_rank=1).tolist() == [1, 2, 6, 7, 8, 9]
    assert gather_order([0, 4, 12], cp_size=2).tolist() == [0, 6, 7, 1, 2, 3, 8, 9, 10, 11, 4, 5]
    contiguous = context_parallel_positions([0, 3, 8], cp_size=2, cp_rank=1, scheme="contiguous")
    assert contiguous.tolist() == [4, 5, 6, 7]
    assert gather_order([0, 3, 8], cp_size=2, scheme="contiguous").tolist() == list(range(8))
    for positions in (contiguous, gather_order([0], cp_size=2)):
        assert positions.dtype == torch.int64
