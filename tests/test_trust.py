"""A release that is wrong for our calls is refused, with the cause; one that is right is used."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import made_up
import pytest
import torch
from flash_mla_fake import FakeFlashMLA
from made_up import DENSE, Change, release
from torch import Tensor
from trust_calls import CHUNKS, WHOLE, attention_call, loss_call, scores_call, tensors, topk_call

from dsattn import (
    CausalLayout,
    ContractDrift,
    TopK,
    sparse_attention,
)
from dsattn.backends import Backend, FlashMLABackend, TorchBackend, dispatch
from dsattn.backends.base import Launch
from dsattn.backends.cudnn import folding
from dsattn.backends.cudnn.backend import CudnnBackend
from dsattn.backends.trust import distrusted
from dsattn.spec.problem import AttentionSizes, IndexerSizes, Problem

CPU = torch.device("cpu")
ARCHS = ("sm90", "sm100")


def changed(name: str | tuple[str, ...], change: Change) -> dict[str, Change]:
    return dict.fromkeys((name,) if isinstance(name, str) else name, change)


def loss_of_300(backend: Backend | str) -> Tensor:
    return loss_call(backend, top_k=300, layout=CausalLayout.batched(2, 4, 330, q_offset=326))


TOP_LEFT, BOTTOM_RIGHT = "matches top-left alignment", "matches bottom-right alignment"
LOCAL, TAIL = "ids were read as local", "tail slots unwritten"
TWO_BATCH_KERNELS = ("sparse_attn_score_recompute", "indexer_backward")

# Release, what is changed, a call of ours that it makes wrong, and what the refusal says.
WRONG: list[tuple[str, dict[str, Change], Callable[[Backend | str], Any], str]] = [
    ("1.40", changed(DENSE, made_up.bottom_right), topk_call, BOTTOM_RIGHT),
    ("1.40", changed(DENSE, made_up.top_left), topk_call, TOP_LEFT),
    ("1.40", changed(DENSE, made_up.bottom_right), scores_call, BOTTOM_RIGHT),
    ("1.40", changed(DENSE, made_up.bottom_right), lambda b: loss_call(b, "visible"), BOTTOM_RIGHT),
    ("1.40", changed(DENSE, made_up.top_left), lambda b: loss_call(b, "visible"), TOP_LEFT),
    ("1.41", changed("sparse_attn_score_recompute", made_up.reads_base_two), loss_call, "lse is base 2"),
    ("1.42", changed("indexer_top_k", made_up.masked_with_zero), topk_call, "masked entries are 0"),
    ("1.43", changed(TWO_BATCH_KERNELS, made_up.local_ids), loss_call, f"batch 1 is wrong in the forward: {LOCAL}"),
    ("1.43", changed("indexer_backward", made_up.local_ids), loss_call, f"batch 1 gradient is zero: {LOCAL}"),
    ("1.44", changed("indexer_top_k", made_up.unwritten_tail("indices", 32, -1)), topk_call, TAIL),
    ("1.44", changed("indexer_top_k", made_up.unwritten_tail("indices", 32, 7)), topk_call, TAIL),
    ("1.44", changed(TWO_BATCH_KERNELS[0], made_up.unwritten_tail("target", 256, math.nan)), loss_of_300, TAIL),
    ("1.44", changed(TWO_BATCH_KERNELS[0], made_up.unwritten_tail("target", 256, 3.0)), loss_of_300, TAIL),
    ("1.46", changed("indexer_top_k", made_up.without("tie_break", 2)), topk_call, "ties go to the highest key row"),
    ("1.46", changed("indexer_forward", made_up.without("sm_scale", 1.0)), scores_call, "scale dropped"),
    ("1.46", changed("indexer_backward", made_up.without("sm_scale", 1.0)), loss_call, "scale dropped"),
    (
        "1.46",
        changed("dense_indexer_backward", made_up.scaled(lambda kwargs: 9.0, "d_index_q", "d_index_k", "d_weights")),
        lambda b: loss_call(b, "visible"),
        "divisor \\(all rows\\): gradients are 9 times",
    ),
]
# Blackwell alone has a forward of the attention.
WRONG_FORWARD: list[tuple[str, Change, str]] = [
    ("1.41", made_up.returns_base_two, "lse is base 2"),
    ("1.44", made_up.unread_tail(32), TAIL),
    ("1.46", made_up.without("attn_sink"), "sink dropped"),
    ("1.46", made_up.without("softmax_scale"), "scale dropped"),
    ("1.46", made_up.scaled(lambda kwargs: 1.3, "out"), "no known cause"),
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("version", "changes", "call", "cause"), WRONG)
def test_a_wrong_release_is_refused_with_its_cause(
    version: str, changes: dict[str, Change], call: Callable[[Backend | str], Any], cause: str, arch: str
) -> None:
    call(release(version, arch, changes, checked=False))  # nothing else would have stopped it
    with pytest.raises(ContractDrift, match=f"on backend 'cudnn': given its self-check failed: {cause}"):
        call(release(version, arch, changes))


@pytest.mark.parametrize(("version", "change", "cause"), WRONG_FORWARD)
def test_a_wrong_attention_is_refused_with_its_cause(version: str, change: Change, cause: str) -> None:
    with pytest.raises(ContractDrift, match=f"self-check failed: {cause}"):
        attention_call(release(version, "sm100", {"sparse_attention_forward": change}))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (made_up.reads_base_two, "lse is base 2"),
        (made_up.without("softmax_scale"), "scale dropped"),
        (made_up.unread_tail(32), TAIL),
    ],
)
def test_a_wrong_backward_is_refused_before_the_forward_runs(change: Change, cause: str) -> None:
    backend = release("1.41", "sm100", {"sparse_attention_backward": change})
    attention_call(backend)
    x, topk = tensors(CHUNKS), topk_call(TorchBackend())
    x["q"].requires_grad_()
    with pytest.raises(ContractDrift, match=f"^the backward of sparse_attention on .*self-check failed: {cause}"):
        sparse_attention(x["q"], x["kv"], topk, value_dim=16, softmax_scale=0.2, backend=backend)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", [CHUNKS, WHOLE, CausalLayout.batched(2, 8, 2, ratio=4)])
def test_a_healthy_release_is_used_for_all_it_has(arch: str, layout: CausalLayout) -> None:
    new = {"indexer_forward": made_up.without("qhead_per_kv_head")}
    backend = release("1.45", arch, new)
    topk_call(backend, layout)
    scores_call(backend, layout)
    loss_call(backend, layout=layout)
    loss_call(backend, "visible", layout=layout)
    if arch == "sm100":
        attention_call(backend)


@pytest.mark.parametrize(
    "changes",
    [
        changed(DENSE, made_up.flipped_default),
        changed(DENSE[:2], made_up.filled_with_zero),
    ],
)
def test_what_no_call_of_ours_can_feel_is_no_reason_to_refuse(changes: dict[str, Change]) -> None:
    """Offsets are passed wherever alignments differ, and tables are masked again."""
    backend = release("1.40", "sm100", changes)
    for layout in (CHUNKS, WHOLE):
        results = []
        for chosen in (backend, TorchBackend()):
            torch.manual_seed(3)
            results.append((topk_call(chosen, layout).indices, loss_call(chosen, "visible", layout=layout)))
        assert torch.equal(results[0][0], results[1][0])
        torch.testing.assert_close(results[0][1], results[1][1])


def test_only_the_launches_that_are_wrong_are_refused() -> None:
    backend = release("1.40", "sm100", changed(DENSE, made_up.bottom_right))
    topk_call(backend, WHOLE)
    with pytest.raises(ContractDrift):
        topk_call(backend, CHUNKS)


def test_a_call_that_fails_or_is_refused_is_not_trusted() -> None:
    def raises(error: Exception) -> Change:
        def change(inner: Any, kwargs: dict[str, Any]) -> Any:
            raise error

        return change

    with pytest.raises(ContractDrift, match=r"self-check failed: the call is refused .*RuntimeError: no"):
        attention_call(release("1.41", "sm100", {"sparse_attention_forward": raises(RuntimeError("no"))}))
    with pytest.raises(torch.OutOfMemoryError):
        attention_call(release("1.41", "sm100", {"sparse_attention_forward": raises(torch.OutOfMemoryError("full"))}))


def test_auto_passes_over_a_wrong_release_and_says_why_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = release("1.41", "sm100", {"sparse_attention_forward": made_up.returns_base_two})
    monkeypatch.setattr(sys.modules["dsattn.functional.problems"], "ordered", lambda: (backend, TorchBackend()))
    monkeypatch.setattr(dispatch, "_PASSED_OVER", set())
    results = []
    for chosen in ("auto", "auto", "torch"):
        torch.manual_seed(5)
        if not results:
            with pytest.warns(
                UserWarning, match="because 'cudnn' does not take it: its self-check.*lse is base 2"
            ) as told:
                results.append(attention_call(chosen))
            assert len(told) == 1
        else:
            results.append(attention_call(chosen))  # a second warning would be an error here
    for got in results[:2]:
        assert torch.equal(got[0], results[2][0])
        assert torch.equal(got[1], results[2][1])


def test_a_check_runs_once_and_a_verdict_is_for_one_size() -> None:
    ran: list[int] = []

    def counted(inner: Any, kwargs: dict[str, Any]) -> Any:
        ran.append(kwargs["topk_idxs"].shape[1])
        return inner(**kwargs)

    backend = release("1.45", "sm100", {"sparse_attention_forward": counted})
    for _ in range(2):
        attention_call(backend, top_k=9)
    assert len(ran) == 3
    attention_call(backend, top_k=10)
    assert ran[3:] == [10, 10]


def test_a_check_does_not_check_itself() -> None:
    """An operator of dsattn inside a check would ask for trust in what is being checked."""

    class Nested(CudnnBackend):
        def sparse_attention(self, a: Any, topk: TopK) -> tuple[Tensor, Tensor]:
            assert distrusted(self, problem) is None
            return super().sparse_attention(a, topk)

    sizes = AttentionSizes(heads=2, key_width=24, value_width=16, dtype=torch.bfloat16)
    problem = Problem(operator="sparse_attention", num_q=8, num_k=90, device=CPU, attention=sizes, top_k=7)
    backend = Nested(release("1.45", "sm100", {}).namespace_for(CPU))
    backend.checked = True
    assert distrusted(backend, problem) is None


def test_flash_mla_is_held_to_the_oracle_too() -> None:
    for defect, wrong in (("", False), ("last slot", True)):
        backend = FlashMLABackend(_DropsLastSlot() if defect else FakeFlashMLA())
        backend.checked = True
        if wrong:
            with pytest.raises(ContractDrift, match="on backend 'flash_mla': given its self-check failed"):
                attention_call(backend)
        else:
            attention_call(backend)


class _DropsLastSlot(FakeFlashMLA):
    """Right in the small calls of the backend's own probe."""

    def _call(self, q: Tensor, kv: Tensor, indices: Tensor, *rest: Any, **options: Any) -> Any:
        if kv.shape[0] > 30:
            indices = torch.where(indices == indices.amax(-1, keepdim=True), -1, indices)
        return super()._call(q, kv, indices, *rest, **options)


def test_a_stand_in_and_plain_pytorch_are_not_checked() -> None:
    sizes = IndexerSizes(heads=2, width=16, dtype=torch.bfloat16, weights_dtype=torch.float32)
    problem = Problem(operator="indexer_topk", num_q=8, num_k=120, device=CPU, layout=CHUNKS, indexer=sizes, top_k=4)
    wrong = {"indexer_top_k": made_up.unwritten_tail("indices", 2, -1)}
    assert CudnnBackend().checked
    assert FlashMLABackend().checked
    for backend in (
        TorchBackend(),
        CudnnBackend.simulated("1.32.0", "sm100"),
        release("1.44", "sm100", wrong, checked=False),
    ):
        assert not backend.checked
        assert distrusted(backend, problem) is None


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (WHOLE, {Launch(batched=True, offsets=False)}),
        (CHUNKS, {Launch(batched=True, offsets=True)}),
        (CausalLayout.packed([0, 5, 19]), {Launch(batched=False, offsets=False)}),
        (CausalLayout.packed([0, 5, 19], [0, 9, 30], q_offset=2), {Launch(batched=False, offsets=True)}),
        (CausalLayout.from_segments([], num_q=3, num_k=5), set()),
    ],
)
def test_launches_are_what_the_kernels_are_told(layout: CausalLayout, expected: set[Launch]) -> None:
    sizes = IndexerSizes(heads=2, width=16, dtype=torch.bfloat16, weights_dtype=torch.float32)
    problem = Problem(
        operator="indexer_topk",
        num_q=layout.num_q,
        num_k=layout.num_k,
        device=CPU,
        layout=layout,
        indexer=sizes,
        top_k=4,
    )
    assert CudnnBackend.simulated("1.32.0", "sm100").launches(problem) == expected
    assert TorchBackend().launches(problem) == expected


def test_a_long_document_is_cut_into_pieces_that_need_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "buffer_bytes", lambda device: 4 * 60 * 30)
    sizes = IndexerSizes(heads=2, width=16, dtype=torch.bfloat16, weights_dtype=torch.float32)
    problem = Problem(operator="indexer_topk", num_q=120, num_k=120, device=CPU, layout=WHOLE, indexer=sizes, top_k=4)
    found = CudnnBackend.simulated("1.32.0", "sm100").launches(problem)
    assert Launch(batched=True, offsets=True) in found
