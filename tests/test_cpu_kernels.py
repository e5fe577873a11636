"""What the native kernels compute is what the torch backend computes, at the edges of their blocks and numbers too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from cpu_faults import FUNCTIONS, broken
from cpu_problems import Unchecked, difference, drawn, edges, everything, of, operators, sizes
from hypothesis import given, settings
from problems import random_tensors
from strategies import ALL_LAYOUTS, Problem, random_problem, strategy
from test_edges_views import WAYS
from torch import Tensor

from dsattn import CausalLayout, TopK
from dsattn.backends.cpu import build, kernels
from dsattn.errors import BackendMissing

F32 = torch.float32
DTYPES = (F32, torch.bfloat16, torch.float16)
NAN, INF = math.nan, math.inf
CPU = operators(Unchecked())
PLAIN = operators("torch")

pytestmark = pytest.mark.skipif(Unchecked().missing() is not None, reason="needs a C compiler")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_agree(problem: Problem, dtype: torch.dtype, **ways: Any) -> None:
    got, wanted = everything(problem, dtype, Unchecked(), **ways), everything(problem, dtype, "torch")
    assert difference(got, wanted, dtype) == ""


@dtypes
@pytest.mark.parametrize("problem", [pytest.param(problem, id=name) for name, problem in edges()])
def test_edges(problem: Problem, dtype: torch.dtype) -> None:
    assert_agree(problem, dtype)


@dtypes
def test_every_number_of_heads_and_odd_widths_in_views_of_every_kind(dtype: torch.dtype) -> None:
    for number, (_, problem) in enumerate(sizes()):
        assert_agree(problem, dtype, way=[None, *WAYS][number % (len(WAYS) + 1)])


@settings(max_examples=12)
@given(strategy(lambda rng: random_problem(rng, rng.choice(ALL_LAYOUTS)(rng))))
def test_random_problems(problem: Problem) -> None:
    for dtype in DTYPES:
        assert_agree(problem, dtype)


def below(level: str) -> list[str]:
    names = list(build.LEVELS)
    return names[names.index(level) + 1 :]


@pytest.mark.parametrize("level", below(build.level()))
def test_lower_instruction_sets(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "level", lambda: level)
    for number, (_, problem) in enumerate([*edges(), *sizes(), *drawn(7)]):
        assert_agree(problem, DTYPES[number % 3])


RESULTS = {"attend": 2, "scores_backward": 3, "attend_backward": 3}
"""How many tensors a kernel writes, where it is not one."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_wrong_number_is_seen(name: str) -> None:
    problem = of(CausalLayout.batched(1, 5, 9, q_offset=4), h_i=3, d_i=5, h=5, d_qk=9, d_v=4, top_k=4)
    wanted = everything(problem, F32, "torch")
    for place in range(RESULTS.get(name, 1)):
        with broken(name, place) as changed, pytest.raises(AssertionError):
            assert difference(everything(problem, F32, Unchecked()), wanted, F32) == ""
        assert changed, place


def ranked(scores: list[float], k: int) -> list[int]:
    """The places of the first k: NaN, then by score descending; ties by place."""
    order = sorted(
        range(len(scores)), key=lambda i: (not math.isnan(scores[i]), -scores[i] if scores[i] == scores[i] else 0, i)
    )
    return sorted(order[:k])


def top_of(table: Tensor, first: list[int], count: list[int], k: int, column: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and scores that the kernel selects of a table whose first column is key `column`."""
    rows = len(first)
    ids, kept = torch.full((rows, k), -1, dtype=torch.int32), torch.full((rows, k), -INF)
    windows = torch.tensor(first, dtype=torch.int32), torch.tensor(count, dtype=torch.int32)
    kernels.call("topk", F32, table, table.stride(0), column, *windows, ids, kept, k, 0, rows)
    return ids, kept


TINY = 1e-45
ROWS: dict[str, list[float]] = {
    "all equal": [2.0] * 9,
    "zeros": [0.0] * 9,
    "a plateau at the last place": [3, 1, 1, 5, 1, 1, 4, 1, 1],
    "NaN first": [1, NAN, 7, -NAN, 3, NAN, 2, 8, 9],
    "all NaN": [NAN] * 9,
    "infinities": [-INF, INF, 0, -INF, INF, 5, -INF, INF, -5],
    "all -inf": [-INF] * 9,
    "around 0": [TINY, 0, -TINY, 1e-38, -1e-38, 0, TINY, 2 * TINY, -1],
    "the largest": [3.4e38, -3.4e38, INF, 3.3e38, 0, 1, -INF, NAN, 3.4e38],
    "one bit apart": [1.0000001, 1, 0.99999994, 1.0000001, 1, 0.99999994, 1, 1, 1],
    "ascending": list(range(9)),
    "negative, ascending": [i - 20.5 for i in range(9)],
}


@pytest.mark.parametrize("scores", ROWS.values(), ids=ROWS)
def test_topk_of_a_row(scores: list[float]) -> None:
    scores = torch.tensor(scores, dtype=F32).tolist()
    for k in range(1, 12):
        ids, kept = top_of(torch.tensor([scores]), [0], [9], k)
        wanted = ranked(scores, k)
        assert ids[0].tolist() == wanted + [-1] * (k - len(wanted))
        assert torch.equal(kept[0].view(torch.int32)[: len(wanted)], torch.tensor(scores)[wanted].view(torch.int32))
        assert kept[0, len(wanted) :].tolist() == [-INF] * (k - len(wanted))


def tables() -> Iterator[tuple[Tensor, list[int], list[int], int, int]]:
    """Tables with windows anywhere in rows of NaN, few different scores in some."""
    for seed in range(60):
        rng, draw = Random(seed), torch.Generator("cpu").manual_seed(seed)
        rows, width, column = rng.randint(1, 4), rng.choice([1, 7, 64, 100, 700]), rng.choice([0, 64, 1000])
        table = torch.randn(rows, width, generator=draw)
        if seed % 3 == 0:
            table = (table * 2).round() + 0.0
        first = [rng.randint(0, width - 1) for _ in range(rows)]
        count = [rng.randint(0, width - start) for start in first]
        outside = torch.ones(rows, width, dtype=torch.bool)
        for row, (start, n) in enumerate(zip(first, count, strict=True)):
            outside[row, start : start + n] = False
        yield (
            table.masked_fill(outside, NAN),
            [start + column for start in first],
            count,
            rng.choice([1, 2, 31, 64, 800]),
            column,
        )


def test_topk_of_windows() -> None:
    for table, first, count, k, column in tables():
        ids, kept = top_of(table, first, count, k, column)
        for row, (start, n) in enumerate(zip(first, count, strict=True)):
            scores = table[row, start - column :][:n]
            wanted = ranked(scores.tolist(), k)
            assert ids[row, : len(wanted)].tolist() == [start + place for place in wanted]
            assert torch.equal(kept[row, : len(wanted)], scores[wanted])
            assert (ids[row, len(wanted) :] == -1).all()


@dtypes
def test_a_score_of_minus_zero_ties_with_zero(dtype: torch.dtype) -> None:
    layout = CausalLayout.batched(1, 1, 70, q_offset=69)
    index_k = torch.zeros(70, 4, dtype=dtype)
    index_k[::2] = -1
    x = torch.ones(1, 2, 4, dtype=dtype), index_k, -torch.ones(1, 2, dtype=dtype)
    for scale in (1.0, -1.0):
        scores = CPU.indexer_scores(*x, layout, scale=scale)
        topk = CPU.indexer_topk(*x, layout, top_k=67, scale=scale, return_scores=True)
        assert topk.indices[0].tolist() == list(range(67))
        assert not scores.signbit().any()
        assert not topk.scores.signbit().any()


@dtypes
@pytest.mark.parametrize("scale", [-0.7, 0.0, -0.0, 0.3])
def test_scales_of_the_softmax(scale: float, dtype: torch.dtype) -> None:
    layout = CausalLayout.packed([0, 3, 80])
    x = random_tensors(layout, h=3, d_qk=20)
    q, kv = (y.to(dtype).requires_grad_() for y in (x.q, x.kv))
    topk = PLAIN.indexer_topk(*x.index(), layout, top_k=9)
    d_out = torch.randn(layout.num_q, 3, 11).to(dtype)

    def results(ops: Any, keys: CausalLayout | TopK) -> dict[str, Tensor]:
        sink = torch.linspace(-1, 1, 3, requires_grad=True)
        attend = ops.dense_attention if isinstance(keys, CausalLayout) else ops.sparse_attention
        out, lse = attend(q, kv, keys, value_dim=11, softmax_scale=scale, sink=sink, return_lse=True)
        selection = None if isinstance(keys, CausalLayout) else keys
        index = [y.to(dtype).requires_grad_() for y in x.index()]
        loss = ops.indexer_loss(*index, q, kv, layout, topk=selection, softmax_scale=scale)
        gradients = torch.autograd.grad(out, (q, kv, sink), d_out) + torch.autograd.grad(loss, index)
        names = ("d_q", "d_kv", "d_sink", "d_index_q", "d_index_k", "d_weights")
        return dict(zip(("scores", "lse", "loss", *names), (out, lse, loss, *gradients), strict=True))

    for keys in (layout, topk):
        assert difference(results(CPU, keys), results(PLAIN, keys), dtype) == ""


@dtypes
@pytest.mark.parametrize("selected", [True, False])
def test_a_loss_that_is_given_its_log_sum_exp(selected: bool, dtype: torch.dtype) -> None:
    layout = CausalLayout.packed([0, 3, 80], num_q=82)
    x = random_tensors(layout, h=3, d_qk=20)
    tensors = [y.to(dtype) for y in x.all()]
    keys = PLAIN.indexer_topk(*tensors[:3], layout, top_k=9) if selected else layout
    attend = PLAIN.sparse_attention if selected else PLAIN.dense_attention
    _, lse = attend(*tensors[3:], keys, value_dim=11, softmax_scale=0.3, return_lse=True)
    mask = torch.arange(layout.num_q) % 3 != 1

    def results(ops: Any, lse: Tensor | None) -> dict[str, Tensor]:
        index = [y.clone().requires_grad_() for y in tensors[:3]]
        options = {"topk": keys if selected else None, "softmax_scale": 0.3, "row_mask": mask, "lse": lse}
        loss = ops.indexer_loss(*index, *tensors[3:], layout, **options)
        gradients = torch.autograd.grad(loss, index)
        return dict(zip(("scores", "d_index_q", "d_index_k", "d_weights"), (loss, *gradients), strict=True))

    wanted = results(PLAIN, None)
    for given_lse in (None, lse, lse.T.contiguous().T):
        assert difference(results(CPU, given_lse), wanted, dtype) == ""


def test_a_selection_without_slots() -> None:
    topk = TopK(torch.empty(3, 0, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), num_q=3, num_k=5)
    q, kv = torch.ones(3, 2, 8, requires_grad=True), torch.ones(5, 8)
    out, lse = CPU.sparse_attention(q, kv, topk, value_dim=4, softmax_scale=1.0, return_lse=True)
    (d_q,) = torch.autograd.grad(out.sum(), q)
    assert not out.any()
    assert not d_q.any()
    assert (lse == -INF).all()


def test_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_function", lambda *_: lambda *_: 1)
    with pytest.raises(MemoryError, match="attend: no memory"):
        kernels.call("attend", F32)


def test_a_library_that_is_missing_is_an_error_of_dsattn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "level", lambda: "none")
    monkeypatch.setitem(build.LEVELS, "none", ("--no-such-option",))
    with pytest.raises(BackendMissing, match="no-such-option"):
        kernels.call("attend", F32)
