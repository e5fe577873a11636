"""What the backend passes to the wrappers of every release: by keyword, nothing that matters left to a default."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from cudnn_problems import DISTINCT, OPERATORS, Call, Problem, on, outcome, recording
from packaging.version import Version
from torch import Tensor

from dsattn import CausalLayout
from dsattn.backends.cudnn.contracts import ARCHS, Wrapper, contract
from dsattn.backends.cudnn.sizes import bucket
from dsattn.errors import UnsupportedProblem

LAYOUTS: dict[str, tuple[CausalLayout, int | None]] = {
    "square": (CausalLayout.batched(3, 8), 3),
    "ratio": (CausalLayout.batched(2, 8, ratio=4), 2),
    "rectangle": (CausalLayout.batched(2, 4, 20, q_offset=[16, 3]), 2),
    "more rows": (CausalLayout.batched(2, 12, 5, q_offset=0), 2),
    "packed": (CausalLayout.packed([0, 0, 1, 9, 15], num_q=17, num_k=18), None),
    "slice": (CausalLayout.packed([0, 9, 20]).slice_queries(4, 13), None),
    "cp": (CausalLayout.context_parallel([0, 8, 32], cp_size=2, cp_rank=1), None),
    "one row": (CausalLayout.packed([0, 1], [0, 6], q_offset=5), None),
}
FOLDED = ("packed", "slice", "cp")
SELECTED = ("sparse_attn_score_recompute", "indexer_backward")
DENSE = ("dense_attn_score_recompute", "dense_indexer_score_recompute")


class Made:
    """Every call that a release gets for every operator and layout; without gradients where those are refused."""

    def __init__(self, version: str, arch: str) -> None:
        self.version, self.arch = version, arch
        self.contract = contract(Version(version), arch)
        self.calls = [(name, call) for name in LAYOUTS for operator in OPERATORS for call in self._made(name, operator)]

    def _made(self, name: str, operator: str) -> list[Call]:
        layout, batch = LAYOUTS[name]
        for gradients in (True, False):
            recorder, backend = recording(self.version, self.arch)
            try:
                outcome(Problem(layout=layout, batch=batch, gradients=gradients, sink=True), operator, on(backend))
            except UnsupportedProblem:
                continue
            return recorder.calls
        return []

    def of(self, *names: str) -> list[tuple[str, Call, Wrapper]]:
        """The calls of some wrappers (of all), each with its layout and its contract."""
        wrapper = self.contract.wrapper
        return [(layout, call, wrapper(call.name)) for layout, call in self.calls if call.name in names or not names]

    def has(self, defect: str) -> bool:
        """Whether the release has a defect."""
        return self.contract.defect(defect) is not None


@pytest.fixture(scope="module", params=DISTINCT, ids=[" ".join(release) for release in DISTINCT])
def release(request: pytest.FixtureRequest) -> Made:
    return Made(*request.param)


def sequences(call: Call) -> list[tuple[int, int]]:
    """Rows and keys of every sequence of a dense call."""
    if call.given.get("cu_seqlens_q") is not None:
        starts = zip(call["cu_seqlens_q"].tolist(), call["cu_seqlens_k"].tolist(), strict=True)
        return [(q1 - q0, k1 - k0) for (q0, k0), (q1, k1) in pairwise(starts)]
    q, k = (call.given.get(names[0], call.given.get(names[1])) for names in (("q", "index_q"), ("k", "index_k")))
    return [(q.shape[1], k.shape[1])] * q.shape[0]


def left_out(call: Call) -> set[str]:
    """Parameters that may be left to their default: an offset where every alignment has the same windows."""
    square = "ratio" in call.given and all(rows == keys * call["ratio"] for rows, keys in sequences(call))
    return {"q_causal_offsets"} if square else set()


def test_every_wrapper_that_a_release_needs_is_called_and_no_other(release: Made) -> None:
    called = {call.name for _, call in release.calls}
    assert called <= {wrapper.name for wrapper in release.contract.wrappers}
    # Flat ids need no conversion; scores and selection are two launches, so that ties can be put right.
    assert not called & {"local_to_global", "compactify", "indexer_forward_top_k", "sparse_indexer_score_recompute"}
    if release.version == "1.32.0":
        forward = {"sparse_attention_forward"} if release.arch == "sm100" else set()
        backward = {"sparse_attention_backward", "dense_indexer_backward"}
        assert called == {"indexer_forward", "indexer_top_k", *SELECTED, *DENSE, *backward, *forward}


def test_arguments_are_keywords_and_none_that_matters_is_left_out(release: Made) -> None:
    for layout, call, wrapper in release.of():
        assert call.positional == ()
        needed = {name for name in wrapper.relies if wrapper.accepts(name)} - left_out(call)
        assert needed <= set(call.given), (layout, call.name)
        assert call["stream"] is None


def test_a_changed_default_of_a_later_parameter_is_not_met(release: Made) -> None:
    """Parameters that came after 1.24 and choose a kernel: precision, tie rule, determinism, backend."""
    chooses = {"precision", "tie_break", "deterministic", "backend", "return_lse", "block_I", "q_cluster_mode"}
    for _, call, wrapper in release.of():
        there = {parameter.name for parameter in wrapper.parameters} & chooses
        assert there <= set(call.given), call.name


def test_offsets_are_int32_one_for_each_sequence_and_only_where_they_are_needed(release: Made) -> None:
    for layout, call, wrapper in release.of():
        offsets: Tensor | None = call.given.get("q_causal_offsets")
        if wrapper.alignment is None:
            continue
        if offsets is None:
            # Both alignments mean the same, or the release's own is the one that is wanted.
            own = wrapper.alignment == "bottom-right"
            assert own or "q_causal_offsets" in left_out(call), (layout, call.name)
            continue
        assert wrapper.accepts("q_causal_offsets")
        count = len(sequences(call))
        assert (offsets.dtype, tuple(offsets.shape)) == (torch.int32, (count,))
        assert count < sum(rows for rows, _ in sequences(call))
        assert call.original["q_causal_offsets"].storage_offset() == 0
        assert not all(rows == keys * call["ratio"] for rows, keys in sequences(call)) or offsets.any()


@pytest.mark.parametrize("layout", ["square", "ratio"])
def test_a_square_batch_is_the_call_that_it_has_always_been(release: Made, layout: str) -> None:
    batch = LAYOUTS[layout][1]
    found = [call for name, call, wrapper in release.of() if name == layout and wrapper.alignment]
    for call in found:
        assert "q_causal_offsets" not in call.given
        assert call["cu_seqlens_q"] is None
        assert [len(sequences(call)), sequences(call)[0][0]] == [batch, 8]
    assert found or (release.version, release.arch) == ("1.24.1", "sm90")


def test_a_batch_keeps_its_entries_and_says_that_ids_are_flat(release: Made) -> None:
    for layout, call, wrapper in release.of(*SELECTED):
        if (call.name == "indexer_backward" and wrapper.recompiles) or release.has("sm100-score-race"):
            continue
        told = call.given.get("topk_indices_global")
        assert told is (True if wrapper.accepts("topk_indices_global") else None)
        if layout == "square":
            ids = call["topk_indices"]
            assert ids.shape[:2] == (3, 8)
            assert int(ids[2].max()) == 23, "a row of the last entry has the last key of all"


def test_packed_sliced_and_context_parallel_calls_are_one_batch_entry(release: Made) -> None:
    for layout, call, _ in release.of(*SELECTED):
        if layout in FOLDED:
            assert call["topk_indices"].shape[0] == 1, (layout, call.name)


def test_the_gradient_that_comes_in_is_one_fp32_element(release: Made) -> None:
    for layout, call, _ in release.of("indexer_backward", "dense_indexer_backward"):
        grad = call["grad_loss"]
        assert isinstance(grad, Tensor)
        assert (grad.dtype, tuple(grad.shape), grad.device.type) == (torch.float32, (1,), "cpu")
        # The wrappers divide by the rows of the call, padded ones too; here every row of the layout sees keys.
        if layout == "square":
            assert float(grad) == pytest.approx(call["index_q"].shape[:-2].numel() / 24)
        assert call["loss_coeff"] == 1.0
        assert call["d_index_k"].dtype == torch.float32
        assert not call["d_index_k"].any(), "a release may add to what the buffer holds"


def test_buffers_that_a_kernel_destroys_are_of_no_further_use(release: Made) -> None:
    """Nothing that one call leaves behind is an argument of another."""
    seen: set[int] = set()
    for layout, call, wrapper in release.of("indexer_backward", "dense_indexer_backward"):
        for name in ("attn_score", "index_score"):
            buffer: Tensor = call.original[name]
            assert buffer.data_ptr() not in seen, (layout, call.name, name)
            seen.add(buffer.data_ptr())
            assert call[name].isfinite().any(), "a kernel used it before"
            assert bool(torch.isnan(buffer).all()) == (name in wrapper.destroys)


def test_tables_have_whole_blocks_of_slots_and_no_buffer_of_ours_to_write_to(release: Made) -> None:
    for _, call, _ in release.of(*SELECTED, *DENSE, "indexer_forward"):
        assert call.given.get("out") is None, "a strided one is not written before 1.32"
        if call.name in SELECTED:
            slots = call["topk_indices"].shape[2]
            assert slots % 128 == 0
            assert not release.has("sm100-score-slots") or slots & (slots - 1) == 0


def test_no_launch_has_a_single_row(release: Made) -> None:
    for layout, call, wrapper in release.of("sparse_attn_score_recompute", *DENSE):
        rows = [rows for rows, _ in sequences(call)] if wrapper.alignment else [call["topk_indices"].shape[1]]
        assert min(rows) > 1, (layout, call.name)


def test_hopper_scores_packed_sequences_one_by_one(release: Made) -> None:
    """The wrapper would read their lengths back to the host, and the release 1.26 breaks on its offsets."""
    for layout, call, _ in release.of(*DENSE):
        if release.arch == "sm90" and layout in FOLDED:
            assert call["cu_seqlens_q"] is call["cu_seqlens_k"] is None
            assert call["q"].shape[0] == 1
    if release.arch == "sm100" and release.contract.wrapper(DENSE[0]).alignment == "top-left":
        packed = [call for layout, call, _ in release.of(DENSE[0]) if layout == "packed"]
        assert packed[0]["cu_seqlens_q"].tolist() == [0, 2, 10, 16]
        assert (packed[0]["max_seqlen_q"], packed[0]["max_seqlen_k"]) == (8, 8)


def test_more_rows_than_keys_stand_for_are_packed_past_a_gate_or_padded(release: Made) -> None:
    for layout, call, wrapper in release.of("indexer_forward"):
        if layout != "more rows":
            continue
        gated = wrapper.gate is not None and wrapper.alignment == "top-left"
        assert set(sequences(call)) == {(12, 12) if wrapper.alignment == "bottom-right" else (12, 5)}
        assert (call["cu_seqlens_q"] is not None) == gated
        if gated:
            assert call["q_causal_offsets"].tolist() == [0, 0]


def test_before_1_26_sequences_are_padded_until_bottom_right_is_right(release: Made) -> None:
    wanted = {"square": {0}, "rectangle": {16, 3}, "more rows": {0}}
    found = {name: set() for name in wanted}
    for layout, call, wrapper in release.of():
        if layout in wanted and wrapper.alignment == "bottom-right":
            found[layout] |= {keys * call["ratio"] - rows for rows, keys in sequences(call)}
    old = Version(release.version) < Version("1.26") and any(wrapper.alignment for _, _, wrapper in release.of())
    assert found == (wanted if old else {name: set() for name in wanted})


@pytest.mark.parametrize(("version", "arch"), [("1.29.1", "sm100"), ("1.30.0", "sm100")])
def test_a_new_packing_compiles_no_kernel_again(version: str, arch: str) -> None:
    """Where sizes are part of the compile key, packings of different rows and keys make calls of the same shapes."""

    def shapes(lengths: list[int]) -> set[Any]:
        cu = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        recorder, backend = recording(version, arch)
        outcome(Problem(layout=CausalLayout.packed(cu)), "selected", on(backend))
        calls = recorder.of("indexer_backward")
        assert len(calls) == 2, "one for each part of the weights"
        return {(name, tuple(x.shape)) for call in calls for name, x in call.given.items() if isinstance(x, Tensor)}

    assert contract(Version(version), arch).wrapper("indexer_backward").recompiles
    assert shapes([5, 9]) == shapes([3, 1, 17]) == shapes([100])


@pytest.mark.parametrize(
    ("operator", "name", "version", "parts"),
    [
        ("topk", "indexer_forward", "1.30.0", 3),
        ("topk", "indexer_forward", "1.31.0", 1),
        ("selected", "indexer_backward", "1.32.0", 2),
        ("visible", "dense_indexer_score_recompute", "1.32.0", 3),
        ("visible", "dense_indexer_backward", "1.32.0", 2),
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_fp32_weights_go_whole_or_in_bf16_parts_that_add_up(
    operator: str, name: str, version: str, parts: int, arch: str
) -> None:
    recorder, backend = recording(version, arch)
    problem = Problem(layout=CausalLayout.packed([0, 6]))
    outcome(problem, operator, on(backend))
    given = [call.given.get("weights", call.given.get("w")) for call in recorder.of(name)]
    assert [part.dtype for part in given] == [torch.float32 if parts == 1 else torch.bfloat16] * parts
    total = sum(part.flatten(0, -2)[:6, :2].float() for part in given)
    torch.testing.assert_close(total, problem.tensors().weights, rtol=2**-16 if parts == 2 else 0, atol=0)
    recorder.calls.clear()
    outcome(replace(problem, weights=torch.bfloat16), operator, on(backend))
    assert len(recorder.of(name)) == 1, "weights in bf16 are one call"


def test_buckets_are_few_and_not_far_above() -> None:
    sizes = {bucket(count) for count in range(1, 1 << 16)}
    assert len(sizes) < 60
    for count in (1, 127, 128, 129, 1000, 4097, 5000, 65_535, 1 << 20, (1 << 20) + 1):
        assert count <= bucket(count) <= max(count + 127, count * 9 // 8)
        assert bucket(count) % 128 == 0
        assert bucket(bucket(count)) == bucket(count)
