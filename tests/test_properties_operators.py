"""What must not matter: the order of keys, sparse or dense, the size of chunks, and asking twice."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from calls import (
    FAULTS,
    SCALES,
    Arguments,
    Operators,
    assert_close,
    assert_same_keys,
    key_dropped,
    replaced,
    results,
    selection,
    wrong,
)
from hypothesis import given
from strategies import ALL_LAYOUTS, FEW, Drawn, Problem, made, placed, random_problem, strategy, together, two_sequences
from torch import Tensor

import dsattn
from dsattn import TopK
from dsattn.ops import blocks, indexer, support

pytestmark = pytest.mark.usefixtures("each_backend")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Permuted:
    """A problem and an order of its keys in which every key stays among those that the same rows see."""

    problem: Problem
    order: list[int]


def classes(drawn: Drawn) -> list[list[int]]:
    """The keys that the same query rows see."""
    by_rows: dict[tuple[int, ...], list[int]] = {}
    for key in range(drawn.num_k):
        rows = tuple(row for row, keys in enumerate(drawn.visible) if key in keys)
        by_rows.setdefault(rows, []).append(key)
    return list(by_rows.values())


def rectangle(rng: Random) -> Drawn:
    """Decode and prefill steps whose rows see all keys of their sequence."""
    b, q_len, k_len, ratio = rng.randint(1, 3), rng.randint(1, 4), rng.randint(2, 8), rng.choice([1, 1, 2, 4])
    offset = ratio * k_len - 1 + rng.choice([0, 0, 3])
    layout, text = made("batched", b, q_len, k_len, q_offset=offset, ratio=ratio)
    places = placed([q_len] * b, [i * k_len for i in range(b)], [k_len] * b, [offset] * b)
    return Drawn(made_by=text, layout=layout, places=together(places), num_k=b * k_len, ratio=ratio, batch=b)


def random_permuted(rng: Random) -> Permuted:
    drawn = rng.choice([rectangle, rng.choice(ALL_LAYOUTS)])(rng)
    order = list(range(drawn.num_k))
    for keys in classes(drawn):
        for place, key in zip(keys, rng.sample(keys, len(keys)), strict=True):
            order[place] = key
    return Permuted(replace(random_problem(rng, drawn), grid=False), order)


def without_ties(a: Arguments, relu: bool) -> Arguments:
    """Positive keys and queries where there is a relu: no two scores are 0."""
    if not relu:
        return a
    return replace(a, x=replace(a.x, index_q=a.x.index_q.abs(), index_k=a.x.index_k.abs()))


def check_permuted(example: Permuted, ops: Operators = dsattn) -> None:
    problem, order = example.problem, torch.tensor(example.order, dtype=torch.int64)
    layout = problem.layout
    a = without_ties(Arguments.of(problem), problem.relu)
    moved = a.part(torch.arange(layout.num_q), order)
    before, after = selection(problem, a, layout, ops=ops), selection(problem, moved, layout, ops=ops)
    old_keys = torch.cat([order, order.new_tensor([-1])])[after.indices.long()]
    expected = before.indices.long().sort(-1).values
    assert torch.equal(old_keys.sort(-1).values, expected), "other keys are selected where they stand elsewhere"
    assert torch.equal(before.lengths, after.lengths)
    wanted = results(problem, a, layout, before, ops=ops)
    for name, x in wanted.items():
        if name.endswith(("d_kv", "d_index_k")):
            wanted[name] = x[order]
    wanted["scores"] = wanted["scores"][:, order]
    assert_close(results(problem, moved, layout, after, ops=ops), wanted)


@FEW
@given(strategy(random_permuted))
def test_permuting_keys_that_the_same_rows_see_permutes_ids(example: Permuted) -> None:
    check_permuted(example)


@pytest.mark.parametrize("operator", FAULTS)
def test_a_key_that_counts_less_by_its_place_is_found(operator: str) -> None:
    layout, text = made("batched", 1, 3, 4, q_offset=3)
    drawn = Drawn(made_by=text, layout=layout, places=(*placed([3], [0], [4], [3])[0],), num_k=4, ratio=1)
    assert classes(drawn) == [[0, 1, 2, 3]]
    example = Permuted(Problem(drawn=drawn, top_k=3), [1, 2, 3, 0])
    check_permuted(example)
    with pytest.raises(AssertionError):
        check_permuted(example, wrong(operator, key_dropped))


def random_full(rng: Random) -> Problem:
    """A selection that holds all that is visible."""
    drawn = rng.choice(ALL_LAYOUTS)(rng)
    most = max([1, *map(len, drawn.visible)])
    return replace(random_problem(rng, drawn), top_k=most + rng.choice([0, 0, 1, 6]))


def check_full_is_dense(problem: Problem, ops: Operators = dsattn) -> None:
    layout, a = problem.layout, Arguments.of(problem)
    topk = selection(problem, a, layout, ops=ops)
    visible = [keys + [-1] * (problem.top_k - len(keys)) for keys in problem.drawn.visible]
    assert topk.indices.tolist() == visible
    found = results(problem, a, layout, topk, ops=ops)
    for full, dense in (("sparse", "dense"), ("selected", "visible")):
        chosen = {name.replace(full, dense): x for name, x in found.items() if name.startswith(full)}
        assert_close(chosen, {name: x for name, x in found.items() if name.startswith(dense)})
    for support_of, name in (("selected", "sparse"), ("visible", "dense")):
        whole = ops.dsa_attention(
            *a.x.dsa(), layout, top_k=problem.top_k, value_dim=problem.d_v, sink=a.sink, relu=problem.relu,
            attend=support_of, loss=support_of, row_mask=a.row_mask, **SCALES,
        )  # fmt: skip
        got = {f"{name} out": whole.out, f"{name} lse": whole.lse, f"{support_of} loss": whole.loss}
        assert_close(got, {key: found[key] for key in got})


@FEW
@given(strategy(random_full))
def test_a_selection_of_all_visible_keys_is_dense(example: Problem) -> None:
    check_full_is_dense(example)


@pytest.mark.parametrize("operator", [*(name for name in FAULTS if name != "indexer_scores"), "dsa_attention"])
def test_dense_or_sparse_with_another_window_is_found(operator: str) -> None:
    problem = Problem(drawn=two_sequences(), top_k=4)
    check_full_is_dense(problem)
    with pytest.raises(AssertionError):
        check_full_is_dense(problem, wrong(operator, FAULTS.get(operator, key_dropped)))


@dataclass(frozen=True)
class Chunked:
    """A problem and budgets: bytes of one buffer, and accumulators of a backward."""

    problem: Problem
    limit: int
    lanes: int


def random_chunked(rng: Random) -> Chunked:
    problem = random_problem(rng, rng.choice(ALL_LAYOUTS)(rng))
    return Chunked(problem, rng.choice([1, 40, 200, 1000, 5000]), rng.choice([1, 2, 8]))


@contextmanager
def budgets(limit: int, lanes: int = 8) -> Generator[None]:
    """Blocks and tiles of about `limit` bytes."""
    changes = [
        (blocks, "_CPU_BYTES", limit),
        (blocks, "_MERGED_KEYS", limit // 64),
        (blocks, "_MAX_LANES", lanes),
        (indexer, "_TILE_BYTES", limit),
        (indexer, "_TILE_KEYS", max(1, limit // 100)),
    ]
    with ExitStack() as stack:
        for module, name, value in changes:
            stack.enter_context(mock.patch.object(module, name, value))
        blocks.plan_blocks.cache_clear()
        stack.callback(blocks.plan_blocks.cache_clear)
        yield


def check_chunked(example: Chunked) -> None:
    problem, layout = example.problem, example.problem.layout
    a = Arguments.of(problem)
    topk = selection(problem, a, layout)
    whole = results(problem, a, layout, topk)
    with budgets(example.limit, example.lanes):
        for dtype in (torch.float32, torch.float64):
            small = selection(problem, a.to(dtype), layout)
            with budgets(2**24):
                large = selection(problem, a.to(dtype), layout)
            assert_same_keys(problem, a.to(dtype), problem.drawn.segmented, small, large)
        assert_close(results(problem, a, layout, topk), whole)


@FEW
@given(strategy(random_chunked))
def test_the_size_of_chunks_does_not_matter(example: Chunked) -> None:
    check_chunked(example)


def all_but_the_last(plan: Any) -> Any:
    """A plan that leaves the last of several blocks out."""

    def planned(*arguments: Any, **options: Any) -> Any:
        found = plan(*arguments, **options)
        return found[:-1] if len(found) > 1 else found

    planned.cache_clear = lambda: None  # type: ignore[attr-defined]
    return planned


@pytest.mark.parametrize(("module", "name"), [(blocks, "plan_blocks"), (support, "even_blocks")])
def test_a_chunk_left_out_is_found(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Chunked(Problem(drawn=two_sequences()), 1, 8)
    check_chunked(example)
    monkeypatch.setattr(module, name, all_but_the_last(getattr(module, name)))
    with pytest.raises(AssertionError):
        check_chunked(example)


@dataclass(frozen=True)
class Repeated:
    problem: Problem
    dtype: torch.dtype


def random_repeated(rng: Random) -> Repeated:
    return Repeated(random_problem(rng, rng.choice(ALL_LAYOUTS)(rng)), rng.choice(DTYPES))


def check_repeated(example: Repeated, ops: Operators = dsattn) -> None:
    problem, layout = example.problem, example.problem.layout

    def once() -> dict[str, Tensor]:
        # New tensors each time: where in memory they begin must not matter either.
        a = Arguments.of(problem).to(example.dtype)
        topk = selection(problem, a, layout, ops=ops)
        a.x.requires_grad_()
        graded = selection(problem, a, layout, ops=ops)
        assert torch.equal(graded.indices, topk.indices), "ids depend on whether gradients are on"
        return {"ids": topk.indices, "lengths": topk.lengths, **results(problem, a, layout, topk, ops=ops)}

    first, second = once(), once()
    for name, x in first.items():
        assert torch.equal(x, second[name]), f"{name}: other bits the second time"


@FEW
@given(strategy(random_repeated))
def test_the_same_call_twice_gives_the_same_bits(example: Repeated) -> None:
    check_repeated(example)


@pytest.mark.parametrize("operator", FAULTS)
def test_another_last_bit_is_found(operator: str) -> None:
    example = Repeated(Problem(drawn=two_sequences()), torch.float32)
    check_repeated(example)
    calls: list[str] = []
    first = 2 if operator in ("indexer_topk", "indexer_loss") else 1

    def nudged(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        # PyTorch 2.9 has no derivative of nextafter.
        plain = x.detach()
        return x + (torch.nextafter(plain, torch.full_like(plain, 9)) - plain)

    def flaky(*arguments: Any, **options: Any) -> Any:
        result = getattr(dsattn, operator)(*arguments, **options)
        calls.append(operator)
        if len(calls) <= first:
            return result
        if isinstance(result, TopK):
            return key_dropped(result)
        return tuple(map(nudged, result)) if isinstance(result, tuple) else nudged(result)

    with pytest.raises(AssertionError):
        check_repeated(example, replaced(operator, flaky))
