"""The cuDNN backend by hand-picked problems: options and sizes at their ends, limits of a launch, odd selections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cudnn_problems import (
    OPERATORS,
    TORCH,
    Problem,
    Recorder,
    compared,
    differences,
    noise,
    on,
    outcome,
    recording,
    unequal,
)
from torch import Tensor

import dsattn
from dsattn import CausalLayout, TopK
from dsattn.backends.cudnn import folding, losses, sparse_calls

PACKED = CausalLayout.packed([0, 3, 12])
BATCH = CausalLayout.batched(3, 8)
RELEASES = [("1.25.0", "sm90"), ("1.30.0", "sm90"), ("1.28.0", "sm100"), ("1.32.0", "sm100")]
EACH = pytest.mark.parametrize(("version", "arch"), RELEASES, ids=[" ".join(release) for release in RELEASES])
ROWS = torch.arange(12, device="cpu")


def selection_of_nothing(k: int) -> TopK:
    ids = torch.full((12, k), -1, dtype=torch.int32, device="cpu")
    return TopK(ids, torch.zeros(12, dtype=torch.int32, device="cpu"), num_q=12, num_k=12)


def chunk(queries: int, keys: int) -> CausalLayout:
    return CausalLayout.from_segments([], num_q=queries, num_k=keys)


PROBLEMS: dict[str, Problem] = {
    "no slot": Problem(layout=PACKED, topk=selection_of_nothing(0), sink=True),
    "nothing selected": Problem(layout=PACKED, topk=selection_of_nothing(3), sink=True),
    "no query": Problem(layout=chunk(0, 5)),
    "no key": Problem(layout=chunk(5, 0)),
    "neither": Problem(layout=chunk(0, 0)),
    "no entry": Problem(layout=CausalLayout.batched(0, 3), batch=0),
    "one row": Problem(layout=CausalLayout.packed([0, 1], [0, 6], q_offset=5)),
    "rows without keys": Problem(
        layout=CausalLayout.packed([0, 6, 12], q_offset=[-3, -1], num_q=14), top_k=2, grid=True
    ),
    "compressed keys": Problem(layout=CausalLayout.packed([0, 21, 40], ratio=4), top_k=2),
    "negative scale": Problem(layout=PACKED, scale=-0.7),
    "scale 0": Problem(layout=PACKED, scale=0.0),
    "far scores": Problem(layout=PACKED, scale=40.0),
    "negative softmax scale": Problem(layout=PACKED, softmax_scale=-0.3),
    "more slots than keys": Problem(layout=PACKED, top_k=50),
    "several blocks of slots": Problem(layout=CausalLayout.packed([0, 3], [0, 150], q_offset=147), top_k=140),
    "one head": Problem(layout=PACKED, h=1, h_i=1),
    "24 heads": Problem(layout=PACKED, h=24, h_i=24),
    "96 heads": Problem(layout=PACKED, h=96, h_i=48),
    "128 heads": Problem(layout=PACKED, h=128, h_i=64, sink=True),
    "width 512": Problem(layout=PACKED, d_qk=512, d_v=512, d_i=128, softmax_scale=0.04),
    "width 576": Problem(layout=PACKED, d_qk=576, d_v=512, h=16, sink=True, softmax_scale=0.04),
    "width 513": Problem(layout=PACKED, d_qk=513, d_v=500, softmax_scale=0.04),
    "bf16 weights": Problem(layout=BATCH, batch=3, weights=torch.bfloat16),
    "some rows": Problem(layout=PACKED, losing={"row_mask": ROWS % 3 > 0}),
    "no row": Problem(layout=PACKED, losing={"row_mask": ROWS < 0}),
    "count": Problem(layout=PACKED, losing={"num_rows": torch.tensor(7)}),
    "count of none": Problem(layout=PACKED, losing={"num_rows": torch.tensor(0), "row_mask": ROWS < 0}),
    "fp64 count": Problem(layout=PACKED, losing={"num_rows": torch.tensor(7.5, dtype=torch.float64)}),
    "coefficient 0": Problem(layout=PACKED, losing={"coeff": 0.0}),
}


@pytest.mark.parametrize(
    ("name", "version", "arch"),
    # Each problem on two of the four.
    [(name, *release) for i, name in enumerate(PROBLEMS) for release in RELEASES[i % 2 :: 2]],
)
def test_sizes_and_options_at_their_ends(name: str, version: str, arch: str) -> None:
    found = {operator: compared(PROBLEMS[name], operator, version, arch)[1] for operator in OPERATORS}
    assert found == {operator: [] for operator in OPERATORS}


@EACH
def test_where_nothing_is_selected_nothing_is_launched(version: str, arch: str) -> None:
    for name in ("no slot", "no query", "no key", "neither", "no entry"):
        for operator in ("topk", "attention", "visible") if name != "no slot" else ("attention",):
            assert compared(PROBLEMS[name], operator, version, arch)[0].calls == [], (name, operator)


@EACH
def test_where_no_row_counts_a_count_of_0_divides_nothing(version: str, arch: str) -> None:
    for operator in ("selected", "visible"):
        for call in compared(PROBLEMS["count of none"], operator, version, arch)[0].calls:
            assert bool(call.given.get("grad_loss", torch.zeros(1)).isfinite().all())


@EACH
def test_attention_in_fp16(version: str, arch: str) -> None:
    problem = Problem(layout=PACKED, dtype=torch.float16, weights=torch.float16, sink=True)
    assert differences(problem, "attention", on(recording(version, arch)[1])) == []
    assert differences(problem, "topk", on(recording(version, arch)[1])) is None


@EACH
def test_a_selection_across_batch_entries_is_called_without_a_batch(version: str, arch: str) -> None:
    """A caller's own selection may hold any keys; a call with its batch would drop those of other entries."""
    rows = torch.arange(24, dtype=torch.int32, device="cpu")
    ids = torch.stack([rows % 5, 6 + rows % 9, torch.full_like(rows, 23)], 1)
    topk = TopK(ids, torch.full((24,), 3, dtype=torch.int32, device="cpu"), num_q=24, num_k=24)
    recorder, found = compared(Problem(layout=BATCH, batch=3, topk=topk), "selected", version, arch)
    assert found == []
    assert {call["topk_indices"].shape[0] for call in recorder.calls} == {1}


@EACH
@pytest.mark.parametrize("operator", ["selected", "visible"])
def test_the_log_sum_exp_of_the_attention_may_be_given(operator: str, version: str, arch: str) -> None:
    problem = Problem(layout=PACKED, gradients=False)
    attend: Any = dsattn.sparse_attention if operator == "selected" else dsattn.dense_attention
    x, keys = problem.tensors(), problem.selection() if operator == "selected" else PACKED
    options = {"value_dim": 24, "softmax_scale": problem.softmax_scale, "return_lse": True, "backend": TORCH}
    _, lse = attend(x.q, x.kv, keys, **options)
    assert not differences(replace(problem, losing={"lse": lse}), operator, on(recording(version, arch)[1]))
    wrong = replace(problem, losing={"lse": lse + 3 * torch.rand(lse.shape)})
    assert differences(wrong, operator, on(recording(version, arch)[1])) != [], "the given one is not read"


def tiny(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Makes one limit so small that every problem meets it."""
    match limit:
        case "table":
            monkeypatch.setattr(folding, "buffer_bytes", lambda device: 4 * 20)
        case "rows":
            monkeypatch.setattr(sparse_calls, "GRID_ROWS", 5)
            monkeypatch.setattr(folding, "MAX_ROWS", 5)
        case "elements":
            # Seven rows of 32 heads of width 512, or fewer of more heads.
            monkeypatch.setattr(sparse_calls, "INDEXABLE", 7 * 32 * 512)
        case "sequences":
            monkeypatch.setattr(folding, "MAX_PIECES", 1)


@EACH
@pytest.mark.parametrize("layout", ["batch", "packed"])
@pytest.mark.parametrize("limit", ["table", "rows", "elements", "sequences"])
def test_launches_at_their_limits_give_the_same(
    limit: str, layout: str, version: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folding._folds.cache_clear()
    tiny(monkeypatch, limit)
    cut = {"table": ("topk", "visible"), "sequences": ("topk", "visible"), "elements": ("attention", "selected")}
    try:
        problem = Problem(layout=BATCH if layout == "batch" else CausalLayout.packed([0, 3, 16], num_q=18), sink=True)
        problem = replace(problem, batch=3 if layout == "batch" else None)
        for operator in cut.get(limit, OPERATORS):
            recorder, found = compared(problem, operator, version, arch)
            assert found == []
            # A launch with no more keys than slots selects without the kernel.
            names = {call.name for call in recorder.calls} - {"indexer_top_k"}
            assert all(len(recorder.of(name)) > 1 for name in names), (operator, names)
    finally:
        folding._folds.cache_clear()


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_a_batch_beyond_the_grid_is_folded(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_calls, "GRID_ROWS", 9)
    layout = CausalLayout.batched(10, 2)
    recorder, backend = recording("1.32.0", arch)
    assert not differences(Problem(layout=layout, batch=10), "selected", on(backend))
    assert {call["topk_indices"].shape[:2] for call in recorder.of("indexer_backward")} == {(1, 9), (1, 2)}


@pytest.fixture
def alone() -> Iterator[Any]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@EACH
def test_a_tensor_parallel_group_of_one_rank_changes_nothing(version: str, arch: str, alone: Any) -> None:
    for operator in ("selected", "visible"):
        assert compared(Problem(layout=PACKED, losing={"tp_group": alone}), operator, version, arch)[1] == []


class TwoRanks:
    """Stands for the other rank of a group of two: adds what that one would to every sum."""

    def __init__(self, others: list[Tensor]) -> None:
        self.others = others

    def __call__(self, tensor: Tensor, group: Any = None) -> None:
        tensor += self.others.pop(0)


@EACH
@pytest.mark.parametrize("operator", ["selected", "visible"])
def test_heads_on_two_ranks_teach_together(
    operator: str, version: str, arch: str, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head here, two on the other rank: sums over heads are added, not means."""
    whole = Problem(layout=PACKED, h=3, gradients=False)
    sums: list[Tensor] = []

    def part(heads: slice) -> Problem:
        def own(x: Any) -> Any:
            return replace(x, q=x.q[:, heads])

        return replace(whole, losing={"tp_group": alone}, change=own)

    other, backend = part(slice(1, 3)), on(recording(version, arch)[1])
    monkeypatch.setattr(losses.dist, "all_reduce", lambda tensor, group=None: sums.append(tensor.clone()))
    try:
        outcome(other, operator, backend)
    except dsattn.UnsupportedProblem:
        return
    assert sums
    monkeypatch.setattr(losses.dist, "all_reduce", TwoRanks(sums))
    assert unequal(outcome(part(slice(1)), operator, backend), outcome(whole, operator, TORCH)) == []


def test_the_default_device_and_inference_mode_do_not_matter() -> None:
    problem = Problem(layout=BATCH, batch=3, sink=True)
    wanted = {operator: outcome(problem, operator, TORCH) for operator in OPERATORS}
    _, backend = recording("1.32.0", "sm100")
    with torch.inference_mode():
        outcome(replace(problem, gradients=False), "visible", on(backend))
    x, topk = problem.tensors(), problem.selection()
    fixed = replace(problem, topk=topk, change=lambda _: x)
    try:
        torch.set_default_device("meta")
        for operator in ("topk", "selected", "visible"):
            got = outcome(replace(fixed, seed=problem.seed), operator, on(backend))
            assert unequal(got, wanted[operator], noise(problem, operator)) == []
    finally:
        torch.set_default_device("cpu")


def test_the_recorder_hides_nothing() -> None:
    """What a namespace lacks is missing in a recorded one, too."""
    recorder, _ = recording("1.25.0", "sm90")
    assert isinstance(recorder, Recorder)
    with pytest.raises(AttributeError):
        _ = recorder.sparse_attention_forward_wrapper
