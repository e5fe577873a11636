"""Random layouts and problems, and the slow, literal reading of who sees whom that goes with them.

Everything is drawn from a `random.Random`, whether hypothesis brings it (`strategy`) or `fuzz.py`: so both run the same
examples.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from random import Random
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from problems import Tensors, grid_tensors, random_tensors
from torch import Tensor

from dsattn import CausalLayout, Segment

FEW = settings(max_examples=50)
"""For `make test`; thousands of the same examples run in `fuzz.py`."""

RATIOS = (1, 1, 1, 2, 3, 4, 5)
LENGTHS = (0, 1, 1, 2, 3, 5, 8, 13)
BATCHES = ((0, 3), (2, 0), (1, 1), (1, 6), (1, 13), (2, 4), (2, 8), (3, 1), (3, 5), (4, 6))
LIMIT = 24
"""Rows and keys of the largest problem."""


@dataclass(frozen=True)
class Place:
    """Where a query row stands: its position in its own sequence, and where the keys of that sequence are."""

    position: int
    k_start: int
    k_len: int


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A layout, the call that made it, and for each of its query rows what the arguments of that call say.

    Attributes:
        made_by: the call as Python text.
        layout: what it gave.
        places: one for each query row, None for padding.
        num_k: key rows.
        ratio: key compression.
        batch: b, if the rows are those of a BSHD batch.
        host: the same problem with segments, where `layout` has none.
    """

    made_by: str
    layout: CausalLayout
    places: tuple[Place | None, ...]
    num_k: int
    ratio: int
    batch: int | None = None
    host: CausalLayout | None = None

    def __repr__(self) -> str:
        return self.made_by

    @cached_property
    def visible(self) -> list[list[int]]:
        """The key rows that each query row sees: a key stands for `ratio` positions, and is seen from the last on."""
        return [[] if place is None else seen_from(place, self.ratio) for place in self.places]

    @property
    def segmented(self) -> CausalLayout:
        """A layout of the same problem that has segments."""
        return self.layout if self.host is None else self.host


def seen_from(place: Place, ratio: int) -> list[int]:
    return [place.k_start + j for j in range(place.k_len) if (j + 1) * ratio - 1 <= place.position]


def cumulative(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def placed(q_lens: list[int], k_starts: list[int], k_lens: list[int], offsets: list[int]) -> list[list[Place]]:
    """The places of the rows of each sequence."""
    columns = zip(q_lens, k_starts, k_lens, offsets, strict=True)
    return [[Place(first + i, start, keys) for i in range(rows)] for rows, start, keys, first in columns]


def together(places: list[list[Place]]) -> tuple[Place, ...]:
    """The places of sequences that follow one another."""
    return tuple(chain.from_iterable(places))


def two_sequences() -> Drawn:
    """A batch of two causal sequences of four rows, for examples by hand."""
    layout, text = made("batched", 2, 4)
    places: list[Place | None] = [Place(i, start, 4) for start in (0, 4) for i in range(4)]
    return Drawn(made_by=text, layout=layout, places=(*places,), num_k=8, ratio=1, batch=2)


def made(name: str, *arguments: Any, **options: Any) -> tuple[CausalLayout, str]:
    """The layout of a constructor, and the call as text; options that are None are left out."""
    options = {key: value for key, value in options.items() if value is not None}
    text = [*map(repr, arguments), *(f"{key}={value!r}" for key, value in options.items())]
    return getattr(CausalLayout, name)(*arguments, **options), f"CausalLayout.{name}({', '.join(text)})"


def random_lengths(rng: Random, *, step: int = 1, limit: int = LIMIT) -> list[int]:
    """Lengths of up to five documents, many of them short or empty, that divide by `step`."""
    lengths: list[int] = []
    for _ in range(rng.choice([0, 1, 2, 3, 4, 5])):
        length = step * rng.choice(LENGTHS)
        if sum(lengths) + length <= limit:
            lengths.append(length)
    return lengths


def random_integers(rng: Random, values: list[int]) -> list[int] | tuple[int, ...] | Tensor:
    """The same integers in one of the forms that are accepted."""
    form = rng.choice([list, tuple, torch.int32, torch.int64])
    return torch.tensor(values, dtype=form) if isinstance(form, torch.dtype) else form(values)


def random_offset(rng: Random, count: int, may_be_none: bool) -> tuple[int | list[int] | None, list[int]]:
    """An argument `q_offset` and what it means for each of `count` sequences."""
    if may_be_none and rng.random() < 0.4:
        return None, [0] * count
    if rng.random() < 0.5:
        one = rng.randint(-9, 12)
        return one, [one] * count
    many = [rng.randint(-9, 12) for _ in range(count)]
    return many, many


def batched(rng: Random) -> Drawn:
    (b, q_len), ratio = rng.choice(BATCHES), rng.choice(RATIOS)
    argument = rng.choice([None, None, rng.randint(0, LIMIT // max(1, b))])
    k_len = q_len // ratio if argument is None else argument
    q_offset, offsets = random_offset(rng, b, may_be_none=k_len == q_len // ratio)
    layout, text = made("batched", b, q_len, argument, q_offset=q_offset, ratio=ratio)
    places = placed([q_len] * b, [i * k_len for i in range(b)], [k_len] * b, offsets)
    return Drawn(made_by=text, layout=layout, places=together(places), num_k=b * k_len, ratio=ratio, batch=b)


def padded_batch(rng: Random) -> Drawn:
    (b, rows), side = rng.choice(BATCHES), rng.choice(["left", "right"])
    lengths = [rng.randint(0, rows) for _ in range(b)]
    q_offset, offsets = random_offset(rng, b, may_be_none=True)
    layout, text = made("batched", b, rows, lengths=random_integers(rng, lengths), side=side, q_offset=q_offset)
    places: list[Place | None] = []
    for i, length in enumerate(lengths):
        padding: list[Place | None] = [None] * (rows - length)
        first = i * rows + (len(padding) if side == "left" else 0)
        real = placed([length], [first], [length], [offsets[i]])[0]
        places += padding + real if side == "left" else real + padding
    return Drawn(made_by=text, layout=layout, places=(*places,), num_k=b * rows, ratio=1, batch=b)


def packed(rng: Random) -> Drawn:
    ratio, q_lens = rng.choice(RATIOS), random_lengths(rng)
    given = [rng.choice(LENGTHS[:-1]) for _ in q_lens] if rng.random() < 0.4 else None
    given = given if given is None or sum(given) <= LIMIT else None
    k_lens = [n // ratio for n in q_lens] if given is None else given
    matches = all(k == q // ratio for q, k in zip(q_lens, k_lens, strict=True) if q)
    q_offset, offsets = random_offset(rng, len(q_lens), may_be_none=matches)
    q_starts, k_starts, padded = cumulative(q_lens), cumulative(k_lens), None
    # Room for both sides of every document, at starts that divide by the ratio.
    rooms = [ratio * (max(-(-q // ratio), k) + rng.randint(0, 1)) for q, k in zip(q_lens, k_lens, strict=True)]
    if rng.random() < 0.4 and sum(rooms) <= LIMIT:
        q_starts = padded = cumulative(rooms)
        k_starts = [start // ratio for start in padded]
    tail_q, tail_k = rng.choice([None, 0, 2]), rng.choice([None, 0, 2])
    layout, text = made(
        "packed",
        random_integers(rng, cumulative(q_lens)),
        None if given is None else random_integers(rng, cumulative(given)),
        q_offset=q_offset,
        ratio=ratio,
        num_q=None if tail_q is None else q_starts[-1] + tail_q,
        num_k=None if tail_k is None else k_starts[-1] + tail_k,
        cu_seqlens_padded=None if padded is None else random_integers(rng, padded),
    )
    rows: list[Place | None] = [None] * (q_starts[-1] + (tail_q or 0))
    for start, document in zip(q_starts, placed(q_lens, k_starts[:-1], k_lens, offsets), strict=False):
        rows[start : start + len(document)] = document
    return Drawn(made_by=text, layout=layout, places=(*rows,), num_k=k_starts[-1] + (tail_k or 0), ratio=ratio)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The documents of a context-parallel group.

    Attributes:
        lengths: of the documents.
        cp_size: ranks.
        scheme: which rank owns which rows.
        ratio: key compression.
        tail: padding rows and keys at the end of every rank.
    """

    lengths: list[int]
    cp_size: int
    scheme: str
    ratio: int
    tail: int = 0

    @property
    def cu_seqlens(self) -> list[int]:
        return cumulative(self.lengths)

    def layout(self, cp_rank: int) -> tuple[CausalLayout, str]:
        keys = sum(n // self.ratio for n in self.lengths)
        sizes = {"num_q": sum(self.lengths) // self.cp_size + self.tail, "num_k": keys + self.tail}
        common = {"cp_size": self.cp_size, "scheme": self.scheme, "ratio": self.ratio, **sizes}
        return made("context_parallel", self.cu_seqlens, cp_rank=cp_rank, **common)

    def rows(self, cp_rank: int) -> list[tuple[int, Place]]:
        """(global row, place) of each row of a rank, by asking every row of the stream for its owner."""
        owned, total, k_start = [], sum(self.lengths), 0
        for start, length in zip(self.cu_seqlens, self.lengths, strict=False):
            keys = length // self.ratio
            for position in range(length):
                if self.scheme == "zigzag":
                    chunk = position // (length // (2 * self.cp_size))
                    owner = min(chunk, 2 * self.cp_size - 1 - chunk)
                else:
                    owner = (start + position) // (total // self.cp_size)
                if owner == cp_rank:
                    owned.append((start + position, Place(position, k_start, keys)))
            k_start += keys
        return owned


def random_ranks(rng: Random) -> Ranks:
    cp_size, scheme = rng.choice([1, 2, 3, 4]), rng.choice(["zigzag", "contiguous"])
    if scheme == "zigzag":
        lengths = random_lengths(rng, step=2 * cp_size)
    else:
        lengths = random_lengths(rng, limit=LIMIT - cp_size)
        lengths.append(-sum(lengths) % cp_size)
    return Ranks(lengths=lengths, cp_size=cp_size, scheme=scheme, ratio=rng.choice(RATIOS), tail=rng.choice([0, 0, 2]))


def context_parallel(rng: Random) -> Drawn:
    ranks = random_ranks(rng)
    cp_rank = rng.randint(0, ranks.cp_size - 1)
    layout, text = ranks.layout(cp_rank)
    places = [place for _, place in ranks.rows(cp_rank)] + [None] * ranks.tail
    num_k = sum(n // ranks.ratio for n in ranks.lengths) + ranks.tail
    return Drawn(made_by=text, layout=layout, places=(*places,), num_k=num_k, ratio=ranks.ratio)


def from_segments(rng: Random) -> Drawn:
    ratio, num_k = rng.choice(RATIOS), rng.choice([0, 1, 6, 12, 20])
    segments: list[Segment] = []
    places: list[Place | None] = []
    for _ in range(rng.randint(0, 5)):
        places += [None] * rng.choice([0, 0, 1, 2])
        q_len, k_start, first = rng.randint(0, 4), rng.randint(0, num_k), rng.randint(-6, 24)
        k_len = rng.choice([rng.randint(0, num_k - k_start), num_k - k_start])
        segments.append(Segment(len(places), q_len, k_start, k_len, first))
        places += placed([q_len], [k_start], [k_len], [first])[0]
    rng.shuffle(segments)
    layout, text = made("from_segments", segments, num_q=len(places), num_k=num_k, ratio=ratio)
    return Drawn(made_by=text, layout=layout, places=(*places,), num_k=num_k, ratio=ratio)


def sliced(rng: Random) -> Drawn:
    whole = rng.choice([batched, padded_batch, packed, context_parallel, from_segments])(rng)
    begin = rng.randint(0, len(whole.places) // 2)
    end = rng.randint(begin, len(whole.places))
    text = f"{whole.made_by}.slice_queries({begin}, {end})"
    layout = whole.layout.slice_queries(begin, end)
    return replace(whole, made_by=text, layout=layout, places=whole.places[begin:end], batch=None)


def on_device(rng: Random) -> Drawn:
    ratio, lengths = rng.choice(RATIOS), random_lengths(rng)
    tail = rng.choice([0, 0, 2])
    keys = [n // ratio for n in lengths]
    cu_seqlens = torch.tensor(cumulative(lengths), dtype=rng.choice([torch.int32, torch.int64]))
    max_len = max(lengths, default=0) + rng.choice([0, 0, 3])
    sizes = {"num_q": sum(lengths) + tail, "num_k": sum(keys) + tail, "ratio": ratio}
    layout, text = made("on_device", cu_seqlens, max_len=max_len, **sizes)
    places = (*together(placed(lengths, cumulative(keys)[:-1], keys, [0] * len(lengths))), *[None] * tail)
    host = CausalLayout.packed(cu_seqlens, **sizes)
    return Drawn(made_by=text, layout=layout, places=places, num_k=sum(keys) + tail, ratio=ratio, host=host)


HOST_LAYOUTS = (batched, padded_batch, packed, context_parallel, from_segments, sliced)
ALL_LAYOUTS = (*HOST_LAYOUTS, on_device)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A layout with sizes, options and the seed of its numbers.

    Attributes:
        drawn: who sees whom.
        h_i: indexer heads; the other sizes are named as in `dsattn.spec.problem`.
        grid: whether inputs are multiples of 1/8 in [-1, 1], on which all scores are exact.
    """

    drawn: Drawn
    h_i: int = 2
    d_i: int = 3
    h: int = 2
    d_qk: int = 5
    d_v: int = 3
    top_k: int = 2
    relu: bool = True
    sink: bool = True
    masked: bool = False
    grid: bool = False
    seed: int = 0

    @property
    def layout(self) -> CausalLayout:
        return self.drawn.layout

    def tensors(self, dtype: torch.dtype = torch.float64) -> Tensors:
        """The inputs: the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            make = grid_tensors if self.grid else random_tensors
            x = make(self.layout, h_i=self.h_i, d_i=self.d_i, h=self.h, d_qk=self.d_qk)
        return Tensors(*(y.to(dtype) for y in x.all()))

    def normal(self, *shape: int, salt: int = 1) -> Tensor:
        """Further numbers, fp64."""
        generator = torch.Generator("cpu").manual_seed(self.seed + salt)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    @property
    def row_mask(self) -> Tensor | None:
        """Which rows count in a loss."""
        return self.normal(self.layout.num_q, salt=2) < 0.5 if self.masked else None


def random_problem(rng: Random, drawn: Drawn) -> Problem:
    d_qk = rng.randint(1, 8)
    return Problem(
        drawn=drawn,
        h_i=rng.randint(1, 3),
        d_i=rng.randint(1, 8),
        h=rng.randint(1, 3),
        d_qk=d_qk,
        d_v=rng.randint(1, d_qk),
        top_k=rng.choice([1, 2, 3, 5, 8, 30]),
        relu=rng.random() < 0.7,
        sink=rng.random() < 0.5,
        masked=rng.random() < 0.3,
        grid=rng.random() < 0.4,
        seed=rng.randint(0, 2**31),
    )


def strategy(make: Callable[[Random], Any]) -> st.SearchStrategy[Any]:
    """The examples of a function of a `random.Random` as a strategy.

    The generator is a true one: with one that hypothesis controls, most of fifty examples are variants of a few.
    """

    def example(rng: Random) -> Any:
        # The shape checks look at random entries of lists, and hypothesis forbids that a strategy touches `random`.
        state = random.getstate()
        try:
            return make(rng)
        finally:
            random.setstate(state)

    return st.builds(example, st.randoms(use_true_random=True))
