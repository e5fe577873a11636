"""Every defect of the contract table is avoided: what triggers it comes out right, or is refused with its sentence."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from cudnn_problems import DISTINCT, TORCH, Problem, Recorder, differences, on, outcome, recording, unequal
from packaging.version import Version
from problems import Tensors

import dsattn
from dsattn import CausalLayout, UnsupportedProblem
from dsattn.backends import CudnnBackend, TorchBackend
from dsattn.backends.cudnn.contracts import Contract, contract
from dsattn.backends.cudnn.folding import folds, table_elements
from dsattn.backends.cudnn.simulator import NOT_SHOWN
from dsattn.functional.problems import problem_of
from dsattn.ops.inputs import AttentionInputs

ROWS = CausalLayout.packed([0, 40])
SHORT = Problem(layout=CausalLayout.packed([0, 3, 12]))
ONE = CausalLayout.packed([0, 1], [0, 6], q_offset=5)
OFFSETS = CausalLayout.packed([0, 4, 9], [0, 9, 30], q_offset=[5, 16])
Avoids = Callable[[str, str], None]


def contract_of(version: str, arch: str) -> Contract:
    return contract(Version(version), arch)


def is_right(problem: Problem, operator: str, version: str, arch: str) -> Recorder:
    """The calls that were made for a result that is the torch backend's, for two seeds."""
    recorder = Recorder(None)
    for seed in range(2):
        recorder, backend = recording(version, arch, seed)
        assert differences(problem, operator, on(backend)) == [], (operator, seed)
        assert recorder.calls
    return recorder


def right(problem: Problem, *operators: str, gradients: bool = True, called: str = "") -> Avoids:
    """That operators have the right results; `called` is a wrapper that has to be called on the way."""

    def avoids(version: str, arch: str) -> None:
        for operator in operators:
            recorder = is_right(replace(problem, gradients=gradients), operator, version, arch)
            assert not called or recorder.of(called)

    return avoids


def refused(problem: Problem, operator: str, *named: str) -> Avoids:
    """That an operator with gradients is refused, with the sentence of one of the defects."""

    def avoids(version: str, arch: str) -> None:
        found = [contract_of(version, arch).defect(name) for name in named]
        sentences = [defect.what for defect in found if defect is not None]
        assert sentences
        with pytest.raises(UnsupportedProblem, match="known defect") as caught:
            outcome(problem, operator, recording(version, arch)[1])
        assert any(sentence in str(caught.value) for sentence in sentences)

    return avoids


def both(*ways: Avoids) -> Avoids:
    def avoids(version: str, arch: str) -> None:
        for way in ways:
            way(version, arch)

    return avoids


def leaked_keys_are_masked(version: str, arch: str) -> None:
    """Row 60 sees 62 keys, and with as many slots it selects just these."""
    layout = CausalLayout.packed([0, 64], [0, 65], q_offset=1)
    problem = Problem(layout=layout, h_i=32, d_i=128, top_k=63, grid=True)
    for operator in ("scores", "topk"):
        recorder = is_right(problem, operator, version, arch)
        assert {call["q"].shape[-2] for call in recorder.of("indexer_forward")} == {32}


def far_below(x: Tensors) -> Tensors:
    """Scores that are all below the least number of fp16."""
    return Tensors(x.index_q.abs() + 1, x.index_k.abs() + 1, -x.weights.abs() - 1, x.q, x.kv)


FAR_BELOW = Problem(layout=CausalLayout.packed([0, 64]), d_i=4, grid=True, scale=2.0**15, top_k=8, change=far_below)


def scratch_stays_small(version: str, arch: str) -> None:
    """The selection gets tables whose scratch is far from 2^31 elements, and a table is cut before it is larger."""
    for device in ("cpu", "cuda"):
        elements = table_elements(torch.device(device))
        layout = CausalLayout.batched(1, 100_000)
        for fold in folds(layout, squared=version < "1.26", elements=elements):
            assert fold.q_starts[-1] * fold.max_keys <= elements < 1 << 29
    is_right(SHORT, "topk", version, arch)


def below_all(x: Tensors) -> Tensors:
    """Logits of about -100."""
    return Tensors(x.index_q, x.index_k, x.weights, -4.5 - x.q.abs() / 64, 1 + x.kv.abs() / 8)


FAR_LOGITS = Problem(
    layout=CausalLayout.packed([0, 3, 12]), d_qk=512, d_v=64, softmax_scale=512**-0.5, top_k=5, change=below_all
)


def far_logits_are_left_to_torch(version: str, arch: str) -> None:
    recorder, backend = recording(version, arch)
    assert differences(FAR_LOGITS, "attention", on(backend)) == []
    assert not recorder.of("sparse_attention_backward")
    assert is_right(SHORT, "attention", version, arch).of("sparse_attention_backward")


def wide_backward_is_refused(version: str, arch: str) -> None:
    x, backend = replace(SHORT, d_qk=576).tensors(), recording(version, arch)[1]
    a = AttentionInputs(x.q, x.kv, 512, 1.0)
    asked = problem_of("sparse_attention", None, a, batch=None, top_k=4, requires_grad=True, backward=True)
    defect = contract_of(version, arch).defect("sm100-attn-bwd-dkv-race")
    assert defect is not None
    assert defect.what in (backend.supports(asked) or "")
    assert is_right(replace(SHORT, d_qk=512), "attention", version, arch).of("sparse_attention_backward")


def without_supports(version: str, arch: str) -> None:
    """The sink is part of the log-sum-exp that is passed, so that no release has to add it."""
    problem = Problem(layout=SHORT.layout, d_qk=576, d_v=512, h=16, softmax_scale=1 / 24)
    x, topk, sink = problem.tensors(), problem.selection(), torch.linspace(-1, 3, 16)
    options: dict[str, Any] = {"value_dim": 512, "softmax_scale": problem.softmax_scale, "return_lse": True}
    out, lse = dsattn.sparse_attention(x.q, x.kv, topk, sink=sink, backend=TORCH, **options)
    a, d_out = AttentionInputs(x.q, x.kv, 512, problem.softmax_scale, sink), torch.randn(out.shape).bfloat16()
    found: list[dict[str, Any]] = []
    for backend in (recording(version, arch, races=False)[1], TorchBackend()):
        gradients = backend.sparse_attention_backward(a, topk, out, lse, d_out)
        found.append(dict(zip(("d_q", "d_kv", "d_sink"), gradients, strict=True)))
    assert unequal(found[0], found[1], 0.02) == []


def with_slots_of_every_kind(version: str, arch: str) -> None:
    for problem in (replace(SHORT, top_k=300), replace(SHORT, h=24)):
        recorder = is_right(replace(problem, gradients=False), "selected", version, arch)
        for call in recorder.of("sparse_attn_score_recompute"):
            slots, heads = call["topk_indices"].shape[2], call["q_attn"].shape[2]
            assert slots & (slots - 1) == 512 % heads == 0


def no_buffer_of_ours(version: str, arch: str) -> None:
    for operator, gradients in (("selected", False), ("visible", False)):
        recorder, backend = recording(version, arch)
        if differences(replace(SHORT, gradients=gradients), operator, on(backend)) is None:
            assert operator == "visible"
            continue
        assert recorder.calls
        assert all(call.given.get("out") is None is call.given.get("denom_out") for call in recorder.calls)


def fused_selection_is_not_called(version: str, arch: str) -> None:
    for problem in (SHORT, Problem(layout=OFFSETS, top_k=2)):
        recorder = is_right(problem, "topk", version, arch)
        assert {call.name for call in recorder.calls} == {"indexer_forward", "indexer_top_k"}


AVOIDED: dict[str, Avoids] = {
    "sm90-h32-leak": leaked_keys_are_masked,
    "sm90-dk-race": both(
        refused(SHORT, "selected", "sm90-dk-race"),
        refused(SHORT, "visible", "sm90-dk-race"),
        right(SHORT, "selected", "visible", gradients=False),
    ),
    "sm90-attn-bwd-h64": right(Problem(layout=ROWS, sink=True), "attention", called="sparse_attention_backward"),
    "top-k-lanes-past-row": right(FAR_BELOW, "topk"),
    "top-k-odd": right(Problem(layout=CausalLayout.packed([0, 2], [0, 400], q_offset=398), top_k=301), "topk"),
    "top-k-scratch-overflow": scratch_stays_small,
    "top-k-chunk-off-by-one": scratch_stays_small,
    "sm90-thd-offsets-misaligned": right(Problem(layout=OFFSETS), "visible", gradients=False),
    "sm90-sq1-strides": right(Problem(layout=ONE), "selected", gradients=False),
    "sm90-sq1-strides-dense": right(Problem(layout=ONE), "visible", gradients=False),
    "attn-bwd-ids-unchecked": right(
        Problem(layout=SHORT.layout, top_k=9, sink=True), "attention", called="sparse_attention_backward"
    ),
    "attn-bwd-empty-row": right(
        Problem(layout=CausalLayout.packed([0, 6, 12], q_offset=[-3, -1], num_q=14), sink=True),
        "attention",
        called="sparse_attention_backward",
    ),
    "sm90-attn-bwd-tail": far_logits_are_left_to_torch,
    "sm100-attn-bwd-576-sink": without_supports,
    "sm100-attn-bwd-dkv-race": wide_backward_is_refused,
    "sm100-attn-score-topk-length": right(SHORT, "selected", gradients=False),
    "sm100-dense-score-slots": refused(SHORT, "visible", "sm100-dense-score-slots"),
    "sm100-score-slots": with_slots_of_every_kind,
    "sm100-score-race": right(Problem(layout=CausalLayout.packed([0, 160])), "selected", gradients=False),
    "sm100-score-shared-memory": right(
        replace(SHORT, h=128, d_qk=512, softmax_scale=0.04), "selected", gradients=False
    ),
    "sm100-weights-race": both(
        refused(SHORT, "selected", "sm100-weights-race"), right(SHORT, "selected", gradients=False)
    ),
    # The release that has it cannot compute the scores either, which is said first.
    "sm100-dense-dq-race": refused(SHORT, "visible", "sm100-dense-dq-race", "sm100-dense-score-slots"),
    "score-out-not-written": no_buffer_of_ours,
    "top-k-microbatch-offsets": fused_selection_is_not_called,
}


def affected(defect: str) -> list[tuple[str, str]]:
    """The releases that have a defect, and run one of its wrappers."""
    found = []
    for version, arch in DISTINCT:
        release = contract_of(version, arch)
        held = release.defect(defect)
        if held is not None and any(release.has(name) and release.wrapper(name).runs for name in held.wrappers):
            found.append((version, arch))
    return found


def known() -> set[str]:
    return {defect.id for version, arch in DISTINCT for defect in contract_of(version, arch).defects}


def test_every_defect_of_the_table_is_avoided_or_said_to_need_another_machine() -> None:
    assert set(AVOIDED) | set(NOT_SHOWN) == known()
    assert not set(AVOIDED) & set(NOT_SHOWN)
    assert all(affected(defect) for defect in AVOIDED)


@pytest.mark.parametrize(
    ("defect", "version", "arch"), [(defect, *release) for defect in AVOIDED for release in affected(defect)]
)
def test_a_defect_is_avoided_in_every_release_that_has_it(defect: str, version: str, arch: str) -> None:
    AVOIDED[defect](version, arch)


@pytest.mark.parametrize("defect", ["sm90-dk-race", "sm100-weights-race", "sm100-attn-bwd-dkv-race"])
def test_a_refusal_ends_with_the_release_that_mends_it(defect: str) -> None:
    version, arch = affected(defect)[-1]
    later = DISTINCT[DISTINCT.index((version, arch)) + 1]
    assert later[1] == arch
    problem, operator = (replace(SHORT, d_qk=576), "attention") if "attn" in defect else (SHORT, "selected")
    is_right(problem, operator, *later)


def test_kernels_are_chosen_for_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the simulator cannot show: before 1.30 the current device's architecture chose the kernel."""
    entered: list[torch.device] = []

    @contextmanager
    def current(device: torch.device) -> Generator[None]:
        entered.append(device)
        yield
        entered.remove(device)

    monkeypatch.setattr(torch.cuda, "device", current)
    second, backend = torch.device("cuda", 1), CudnnBackend.simulated("1.29.1", "sm90")
    with backend._on(second):
        assert entered == [second]
    assert entered == []
