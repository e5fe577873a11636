"""One call equals several: one for each sequence, for each context-parallel rank, for each micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from calls import FAULTS, Arguments, Operators, assert_close, assert_same_keys, replaced, results, selection, wrong
from hypothesis import given
from strategies import (
    FEW,
    HOST_LAYOUTS,
    Drawn,
    Problem,
    Ranks,
    batched,
    packed,
    padded_batch,
    random_problem,
    random_ranks,
    strategy,
    two_sequences,
)
from torch import Tensor

import dsattn
from dsattn import CausalLayout, TopK, context_parallel_positions, gather_order

pytestmark = pytest.mark.usefixtures("each_backend")

# What a row has that no part touches.
UNTOUCHED = {"out": 0.0, "lse": -torch.inf, "d_q": 0.0, "d_index_q": 0.0, "d_weights": 0.0}
OF_KEYS = ("d_kv", "d_index_k")


@dataclass(frozen=True)
class Part:
    """A call on some rows of another: its layout, and which rows those are."""

    layout: CausalLayout
    q_rows: Tensor
    k_rows: Tensor


@dataclass(frozen=True, kw_only=True)
class Split:
    """A call and the calls that together must equal it, with the `reduction` or `num_rows` of both."""

    problem: Problem
    parts: list[Part]
    whole_loss: dict[str, Any]
    part_loss: dict[str, Any]
    batch: int | None = None


def check_split(example: Split, ops: Operators = dsattn) -> None:
    problem, layout = example.problem, example.problem.layout
    a = Arguments.of(problem)
    for dtype in (torch.float32, torch.float64):
        rounded = a.to(dtype)
        topk = selection(problem, rounded, layout, ops=ops, batch=example.batch)
        ids, lengths = torch.full_like(topk.indices, -1), torch.zeros_like(topk.lengths)
        for part in example.parts:
            local = selection(problem, rounded.part(part.q_rows, part.k_rows), part.layout, ops=ops)
            ids[part.q_rows], lengths[part.q_rows] = global_ids(local.indices, part.k_rows), local.lengths
        together = TopK(ids, lengths, num_q=topk.num_q, num_k=topk.num_k)
        assert_same_keys(problem, rounded, layout, together, topk)
    whole = results(problem, a, layout, topk, ops=ops, batch=example.batch, **example.whole_loss)
    found = {name: torch.zeros_like(x) for name, x in whole.items()}
    for name, x in found.items():
        x.fill_(-torch.inf if name == "scores" else UNTOUCHED.get(name.split()[-1], 0.0))
    for part in example.parts:
        some = local_selection(topk, part)
        local = a.part(part.q_rows, part.k_rows)
        for name, x in results(problem, local, part.layout, some, ops=ops, **example.part_loss).items():
            if name == "scores":
                found[name][part.q_rows[:, None], part.k_rows] = x
            elif name.split()[-1] in UNTOUCHED:
                found[name][part.q_rows] = x
            elif name.split()[-1] in OF_KEYS:
                found[name].index_add_(0, part.k_rows, x)
            else:
                found[name] += x
    assert_close(found, whole)


def global_ids(ids: Tensor, k_rows: Tensor) -> Tensor:
    """The key rows of a part's ids."""
    padded = torch.cat([k_rows, k_rows.new_tensor([-1])])
    return padded[torch.where(ids < 0, len(k_rows), ids.long())].to(torch.int32)


def local_selection(topk: TopK, part: Part) -> TopK:
    """The rows of a selection as a part has them; its keys must all be the part's."""
    local_row = torch.full((topk.num_k + 1,), -2, dtype=torch.int32)
    local_row[-1] = -1
    local_row[part.k_rows] = torch.arange(len(part.k_rows), dtype=torch.int32)
    ids = local_row[topk.indices[part.q_rows].long()]
    assert (ids != -2).all(), "a row selects a key of another sequence"
    return TopK(ids, topk.lengths[part.q_rows], num_q=len(part.q_rows), num_k=len(part.k_rows))


def sequences(drawn: Drawn) -> list[Part]:
    """The calls with one sequence each: runs of rows that stand one behind the other and have the same keys."""
    runs: list[list[int]] = []
    for row, place in enumerate(drawn.places):
        before = drawn.places[row - 1] if row else None
        if place is None:
            continue
        if before is not None and place == replace(before, position=before.position + 1):
            runs[-1].append(row)
        else:
            runs.append([row])
    parts = []
    for rows in runs:
        place = drawn.places[rows[0]]
        assert place is not None
        layout = CausalLayout.packed([0, len(rows)], [0, place.k_len], q_offset=place.position, ratio=drawn.ratio)
        parts.append(Part(layout, torch.tensor(rows), torch.arange(place.k_start, place.k_start + place.k_len)))
    return parts


def random_sequences(rng: Random) -> Split:
    drawn = rng.choice([batched, batched, padded_batch, packed])(rng)
    reduction = rng.choice([{"reduction": "sum"}, {"num_rows": 7}])
    problem = random_problem(rng, drawn)
    batch = drawn.batch or None
    return Split(problem=problem, parts=sequences(drawn), whole_loss=reduction, part_loss=reduction, batch=batch)


def ranks_split(ranks: Ranks, problem: Problem) -> Split:
    """The calls of all ranks; rows of padding are the same rows on every rank."""
    total, num_k = sum(ranks.lengths), problem.layout.num_k
    parts = []
    for rank in range(ranks.cp_size):
        options: dict[str, Any] = {"cp_size": ranks.cp_size, "cp_rank": rank, "scheme": ranks.scheme}
        positions = context_parallel_positions(ranks.cu_seqlens, **options)
        q_rows = torch.cat([positions, torch.arange(total, total + ranks.tail)])
        parts.append(Part(ranks.layout(rank)[0], q_rows, torch.arange(num_k)))
    return Split(problem=problem, parts=parts, whole_loss={"num_rows": 9}, part_loss={"num_rows": 9})


def whole_of(ranks: Ranks) -> Drawn:
    """The call of one rank that has all rows."""
    keys = sum(n // ranks.ratio for n in ranks.lengths)
    sizes = {"num_q": sum(ranks.lengths) + ranks.tail, "num_k": keys + ranks.tail, "ratio": ranks.ratio}
    layout = CausalLayout.packed(ranks.cu_seqlens, **sizes)
    return Drawn(made_by=repr(ranks), layout=layout, places=(), num_k=layout.num_k, ratio=ranks.ratio)


@dataclass(frozen=True)
class RankSplit:
    ranks: Ranks
    problem: Problem


def random_rank_split(rng: Random) -> RankSplit:
    ranks = random_ranks(rng)
    return RankSplit(ranks, random_problem(rng, whole_of(ranks)))


def check_ranks(example: RankSplit, ops: Operators = dsattn) -> None:
    split = ranks_split(example.ranks, example.problem)
    check_split(split, ops)
    total = sum(example.ranks.lengths)
    stream = torch.arange(total)
    gathered = torch.cat([stream[part.q_rows[part.q_rows < total]] for part in split.parts])
    options: dict[str, Any] = {"cp_size": example.ranks.cp_size, "scheme": example.ranks.scheme}
    assert torch.equal(gathered[ops.gather_order(example.ranks.cu_seqlens, **options)], stream)


def micro_batches(problem: Problem, cuts: list[int]) -> Split:
    """Slices of the query rows; `num_rows` of each is the count of rows that the whole call's mean runs over."""
    layout = problem.layout
    edges = sorted({0, *cuts, layout.num_q})
    parts = [
        Part(layout.slice_queries(begin, end), torch.arange(begin, end), torch.arange(layout.num_k))
        for begin, end in pairwise(edges)
    ]
    counts = torch.tensor([len(keys) > 0 for keys in problem.drawn.visible], dtype=torch.bool)
    counted = counts if problem.row_mask is None else counts & problem.row_mask
    rows: int | Tensor = max(1, int(counted.sum()))
    part_loss = {"num_rows": torch.tensor(rows) if problem.seed % 2 else rows}
    return Split(problem=problem, parts=parts, whole_loss={"reduction": "mean"}, part_loss=part_loss)


def random_micro_batches(rng: Random) -> Split:
    drawn = rng.choice(HOST_LAYOUTS)(rng)
    split = micro_batches(random_problem(rng, drawn), [rng.randint(0, len(drawn.places)) for _ in range(3)])
    return replace(split, parts=sequences(drawn)) if rng.random() < 0.4 else split


@FEW
@given(strategy(random_sequences))
def test_a_batch_is_one_call_for_each_sequence(example: Split) -> None:
    check_split(example)


@FEW
@given(strategy(random_rank_split))
def test_all_ranks_together_are_one_rank(example: RankSplit) -> None:
    check_ranks(example)


@FEW
@given(strategy(random_micro_batches))
def test_micro_batches_with_num_rows_are_one_batch(example: Split) -> None:
    check_split(example)


def split_by_hand(kind: str) -> Split:
    """A call of eight rows and its parts of four rows each."""
    if kind == "ranks":
        ranks = Ranks(lengths=[4, 4], cp_size=2, scheme="zigzag", ratio=1)
        return ranks_split(ranks, Problem(drawn=whole_of(ranks)))
    problem = Problem(drawn=two_sequences())
    if kind == "micro-batches":
        return micro_batches(problem, [4])
    total = {"reduction": "sum"}
    return Split(problem=problem, parts=sequences(problem.drawn), whole_loss=total, part_loss=total, batch=2)


@pytest.mark.parametrize("operator", FAULTS)
@pytest.mark.parametrize("kind", ["sequences", "ranks", "micro-batches"])
def test_an_operator_that_is_wrong_in_the_whole_call_is_found(kind: str, operator: str) -> None:
    example = split_by_hand(kind)
    assert {part.layout.num_q for part in example.parts} == {4}
    check_split(example)
    with pytest.raises(AssertionError):
        check_split(example, wrong(operator, FAULTS[operator], lambda x: x.num_q == 8))


def test_a_mean_over_each_micro_batch_is_found() -> None:
    example = split_by_hand("micro-batches")
    with pytest.raises(AssertionError, match="loss"):
        check_split(replace(example, part_loss={"reduction": "mean"}))


def test_a_gather_order_of_the_other_scheme_is_found() -> None:
    ranks = Ranks(lengths=[4, 4], cp_size=2, scheme="zigzag", ratio=1)
    example = RankSplit(ranks, Problem(drawn=whole_of(ranks)))
    check_ranks(example)

    def other(cu_seqlens: Any, *, cp_size: int, scheme: str) -> Tensor:
        return gather_order(cu_seqlens, cp_size=cp_size, scheme="contiguous")

    with pytest.raises(AssertionError):
        check_ranks(example, replaced("gather_order", other))


def test_a_key_of_another_sequence_is_found() -> None:
    example = split_by_hand("sequences")
    ids = torch.tensor([[0, 5]] * 8, dtype=torch.int32)
    topk = TopK(ids, torch.full((8,), 2, dtype=torch.int32), num_q=8, num_k=8)
    with pytest.raises(AssertionError, match="another sequence"):
        local_selection(topk, example.parts[0])
