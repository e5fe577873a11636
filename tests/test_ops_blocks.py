"""How calls are cut into blocks, and that the cut, the threads and the switches of PyTorch change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from problems import Tensors, grid_tensors, random_tensors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dsattn import CausalLayout, dense_attention, indexer_loss, indexer_scores, indexer_topk, sparse_attention
from dsattn.ops import blocks, indexer
from dsattn.ops.blocks import plan_blocks

# What is counted and broken here is the backend torch alone.
pytestmark = pytest.mark.usefixtures("on_torch")

LAYOUTS = {
    "square": CausalLayout.batched(1, 100),
    "batch": CausalLayout.batched(3, 40),
    "documents": CausalLayout.packed([0, 1, 1, 30, 31, 90], num_q=95, num_k=97),
    "many documents": CausalLayout.packed(list(range(0, 301, 3))),
    "ratio": CausalLayout.packed([0, 17, 60], ratio=4),
    "negative offset": CausalLayout.batched(2, 20, 20, q_offset=-5),
    "ranks": CausalLayout.context_parallel([0, 16, 48], cp_size=2, cp_rank=1),
}


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets how many bytes one buffer of scores may have."""

    def set_bytes(limit: int) -> None:
        monkeypatch.setattr(blocks, "_CPU_BYTES", limit)
        monkeypatch.setattr(blocks, "_MERGED_KEYS", limit // 64)
        monkeypatch.setattr(indexer, "_TILE_BYTES", limit)
        monkeypatch.setattr(indexer, "_TILE_KEYS", max(1, limit // 512))
        plan_blocks.cache_clear()

    yield set_bytes
    plan_blocks.cache_clear()


def everything(x: Tensors, layout: CausalLayout, top_k: int) -> dict[str, Tensor]:
    """Every result and gradient of one problem."""
    topk = indexer_topk(*x.index(), layout, top_k=top_k, scale=0.2, return_scores=True)
    assert topk.scores is not None
    results = {"ids": topk.indices, "lengths": topk.lengths, "slot scores": topk.scores}
    results["scores"] = indexer_scores(*x.index(), layout, scale=0.2)
    sink = torch.linspace(-1, 1, x.q.shape[1], requires_grad=True)
    options: dict[str, Any] = {"value_dim": 16, "softmax_scale": 0.2, "sink": sink, "return_lse": True}
    for name, (out, lse) in (
        ("sparse", sparse_attention(x.q, x.kv, topk, **options)),
        ("dense", dense_attention(x.q, x.kv, layout, **options)),
    ):
        d_out = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
        gradients = torch.autograd.grad(out, [x.q, x.kv, sink], d_out)
        results |= {f"{name} out": out, f"{name} lse": lse}
        results |= {f"{name} {n}": g for n, g in zip(("d_q", "d_kv", "d_sink"), gradients, strict=True)}
    for name, selection in (("selected", topk), ("visible", None)):
        loss = indexer_loss(*x.all(), layout, softmax_scale=0.2, scale=0.2, topk=selection)
        gradients = torch.autograd.grad(loss, x.index())
        results |= {f"{name} loss": loss}
        results |= {f"{name} {n}": g for n, g in zip(("d_index_q", "d_index_k", "d_weights"), gradients, strict=True)}
    return {name: result.detach() for name, result in results.items()}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("budget", [1, 4096, 10**8])
def test_blocks_cover_each_row_that_sees_a_key_once_with_its_window(layout: CausalLayout, budget: int) -> None:
    start, end = layout.bounds()
    covered = torch.zeros(layout.num_q, dtype=torch.int64)
    for block in plan_blocks(layout, 4, budget):
        rows = slice(block.q_begin, block.q_end)
        covered[rows] += 1
        seeing = end[rows] > start[rows]
        assert bool(seeing.any())
        assert block.k_begin <= int(start[rows][seeing].min())
        assert block.k_end == int(end[rows].max()), "the block ends where its last row's window ends"
        pairs = (block.q_end - block.q_begin) * (block.k_end - block.k_begin)
        assert block.q_end - block.q_begin == 1 or pairs * 4 <= budget
    assert int(covered.max()) <= 1
    assert bool((covered[end > start] == 1).all())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("limit", [500, 20000])
def test_the_size_of_blocks_does_not_matter(layout: CausalLayout, limit: int, chunked: Callable[[int], None]) -> None:
    x = grid_tensors(layout).requires_grad_()
    whole = everything(x, layout, top_k=9)
    chunked(limit)
    for name, result in everything(x, layout, top_k=9).items():
        if name in ("ids", "lengths", "slot scores", "scores"):
            assert torch.equal(result, whole[name]), name
        else:
            torch.testing.assert_close(result, whole[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_the_number_of_threads_changes_no_bit(threads: int, chunked: Callable[[int], None]) -> None:
    layout = CausalLayout.packed([0, 130, 170])
    x = random_tensors(layout).requires_grad_()
    chunked(20000)
    one = everything(x, layout, top_k=16)
    torch.set_num_threads(threads)
    try:
        several = everything(x, layout, top_k=16)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)
    for name, result in several.items():
        assert torch.equal(result, one[name]), name


def test_each_lane_runs_its_products_on_one_thread() -> None:
    torch.set_num_threads(3)
    try:
        seen: list[int] = []

        def work(_: int) -> None:
            torch.ones(64, 64) @ torch.ones(64, 64)
            seen.append(torch.get_num_threads())

        blocks.run_lanes(work, 6, torch.device("cpu"))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert seen == [1] * 6


def test_ids_are_the_same_with_gradients_on_and_off() -> None:
    layout = CausalLayout.batched(1, 90)
    x = random_tensors(layout).requires_grad_()
    with_gradients = indexer_topk(*x.index(), layout, top_k=20)
    with torch.no_grad():
        without = indexer_topk(*x.index(), layout, top_k=20)
    with torch.inference_mode():
        inferred = indexer_topk(
            x.index_q.detach() + 0, x.index_k.detach() + 0, x.weights.detach() + 0, layout, top_k=20
        )
    assert not with_gradients.indices.requires_grad
    assert torch.equal(with_gradients.indices, without.indices)
    assert torch.equal(with_gradients.indices, inferred.indices)


@pytest.mark.parametrize("threads", [1, 2])
def test_results_of_inference_mode_can_be_written_to(threads: int) -> None:
    layout = CausalLayout.batched(1, 20)
    x = random_tensors(layout)
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            inferred = dense_attention(x.q, x.kv, layout, value_dim=16, softmax_scale=0.2)
            inferred += 1
    finally:
        torch.set_num_threads(1)
    assert torch.equal(inferred, dense_attention(x.q, x.kv, layout, value_dim=16, softmax_scale=0.2) + 1)


@pytest.mark.parametrize("precision", ["medium", "high"])
def test_the_precision_switches_of_pytorch_and_autocast_change_nothing(precision: str) -> None:
    layout = CausalLayout.batched(1, 70)
    x = random_tensors(layout).requires_grad_()
    expected = everything(x, layout, top_k=9)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results = everything(x, layout, top_k=9)
        assert torch.get_float32_matmul_precision() == precision, "the caller's setting is put back"
    finally:
        torch.set_float32_matmul_precision(before)
    for name, result in results.items():
        assert result.dtype == expected[name].dtype, name
        assert torch.equal(result, expected[name]), name


class _LargestBuffer(TorchDispatchMode):
    """The most bytes that one tensor made under it has."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() > self.largest:
                self.largest = x.untyped_storage().nbytes()
        return result


def test_no_buffer_is_larger_than_a_chunk_or_an_input(chunked: Callable[[int], None]) -> None:
    layout = CausalLayout.batched(1, 400)
    x = random_tensors(layout, h_i=8, h=8).requires_grad_()
    inputs = max(y.nbytes for y in x.all())
    limit = 100_000
    chunked(limit)
    topk = indexer_topk(*x.index(), layout, top_k=40)
    with _LargestBuffer() as seen:
        indexer_topk(*x.index(), layout, top_k=40)
        for out in (
            sparse_attention(x.q, x.kv, topk, value_dim=16, softmax_scale=0.2),
            dense_attention(x.q, x.kv, layout, value_dim=16, softmax_scale=0.2),
        ):
            out.sum().backward()
        for selection in (topk, None):
            indexer_loss(*x.all(), layout, softmax_scale=0.2, topk=selection).backward()
    rows_times_keys = 400 * 400 * 4
    # int64 positions of a chunk of fp32 scores take twice its bytes.
    assert seen.largest <= max(inputs, 2 * limit) < rows_times_keys


def test_keys_behind_a_blocks_causal_end_are_never_scored(chunked: Callable[[int], None]) -> None:
    layout = CausalLayout.batched(1, 512)
    x = random_tensors(layout)
    chunked(100_000)
    with FlopCounterMode(display=False) as counter:
        indexer_topk(*x.index(), layout, top_k=40)
    dots = 2 * 3 * 16 * 512 * 512
    head_sum = 2 * 3 * 512 * 512
    assert counter.get_total_flops() < 0.6 * (dots + head_sum)


def test_a_layout_is_planned_once() -> None:
    layout = CausalLayout.packed([0, 5, 31])
    plan_blocks.cache_clear()
    x = random_tensors(layout)
    for _ in range(3):
        dense_attention(x.q, x.kv, layout, value_dim=16, softmax_scale=0.2)
    assert plan_blocks.cache_info().misses == 1


def test_sums_over_rows_have_the_same_bits_for_any_number_of_threads() -> None:
    values = torch.randn(1_000_000)
    expected = blocks.on_one_thread(values.sum, values.device)
    torch.set_num_threads(4)
    try:
        assert torch.equal(blocks.on_one_thread(values.sum, values.device), expected)
    finally:
        torch.set_num_threads(1)


def test_a_precision_switch_goes_on_following_the_general_one() -> None:
    layout = CausalLayout.batched(1, 20)
    x = random_tensors(layout)
    general: Any = torch.backends
    before = general.fp32_precision
    try:
        general.fp32_precision = "tf32"
        dense_attention(x.q, x.kv, layout, value_dim=16, softmax_scale=0.2)
        general.fp32_precision = "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        general.fp32_precision = before
