"""A self-check leaves everything as it was, and runs where it may: not in fake kernels, not in a capture."""

from __future__ import annotations

import gc
import math
import random
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import made_up
import pytest
import torch
from conftest import ROOT, RunPython
from made_up import release
from torch import Tensor
from trust_calls import CHUNKS, WHOLE, Checked, attention_call, counted_checks, loss_call, tensors, topk_call

from dsattn import (
    BadInput,
    CausalLayout,
    ContractDrift,
    UnsupportedProblem,
    explain,
    indexer_topk,
    sparse_attention,
)
from dsattn.backends import TorchBackend
from dsattn.backends.base import launches_of
from dsattn.backends.cudnn.backend import CudnnBackend
from dsattn.backends.trust import check, gate, refuse, verdicts
from dsattn.backends.trust.keys import key_of
from dsattn.cli import main
from dsattn.cli.doctor import examine, problem
from dsattn.functional.explain import Explanation
from dsattn.spec.problem import OPERATORS, AttentionSizes, IndexerSizes, Operator


def healthy() -> CudnnBackend:
    return release("1.45", "sm100", {})


def wrong() -> CudnnBackend:
    return release("1.41", "sm100", {"sparse_attention_forward": made_up.returns_base_two})


def live_bytes() -> int:
    gc.collect()
    # Some objects warn when they are asked what they are an instance of; sparse tensors have no storage.
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and x.layout == torch.strided]
    return sum(x.untyped_storage().nbytes() for x in tensors)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return counted_checks(monkeypatch)


@pytest.mark.parametrize("operator", OPERATORS)
def test_random_states_stay(operator: Operator) -> None:
    for asked in problem(operator, torch.device("cpu")).directions():
        sizes = {"heads": 2, "dtype": torch.bfloat16}
        small = replace(
            asked,
            indexer=asked.indexer and IndexerSizes(width=16, weights_dtype=torch.float32, **sizes),
            attention=asked.attention and AttentionSizes(key_width=24, value_width=16, sink=True, **sizes),
            top_k=asked.top_k and 40,
        )
        (launch,) = launches_of(small)
        key = key_of(small)
        # Around the check alone: the shape checks of these tests draw random numbers.
        states = torch.get_rng_state(), random.getstate()
        verdict = check.check(Checked(), key, launch, torch.device("cpu"))
        assert random.getstate() == states[1]
        assert torch.equal(torch.get_rng_state(), states[0])
        assert verdict.passed


def test_a_kernel_that_draws_random_numbers_does_so_in_vain() -> None:
    def drawing(inner: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs["kv"].shape[0] != CHUNKS.num_k:
            drawn.append(torch.rand(3))
        return inner(**kwargs)

    x, topk = tensors(CHUNKS), topk_call(TorchBackend())
    torch.manual_seed(7)
    state, drawn = torch.get_rng_state(), []
    backend = release("1.45", "sm100", {"sparse_attention_forward": drawing})
    sparse_attention(x["q"], x["kv"], topk, value_dim=16, softmax_scale=0.2, backend=backend)
    assert len(drawn) == 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_modes_are_the_callers_and_caches_can_be_used_in_any(mode: str) -> None:
    backend = healthy()
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with modes[mode]():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        loss_call(backend, "visible")
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    with torch.enable_grad():
        x, topk = tensors(CHUNKS), topk_call(backend)
        q = x["q"].requires_grad_()
        out = sparse_attention(q, x["kv"], topk, value_dim=16, softmax_scale=0.2, backend=backend)
        out.float().square().sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_defaults_and_autocast_change_no_verdict(dtype: torch.dtype) -> None:
    x, before = tensors(CHUNKS), torch.get_default_dtype()
    index = x["index_q"], x["index_k"], x["weights"]
    torch.set_default_dtype(dtype)
    torch.set_default_device("meta")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            indexer_topk(*index, CHUNKS, top_k=40, backend=Checked())
            topk = indexer_topk(*index, CHUNKS, top_k=40, backend="torch")
            assert torch.is_autocast_enabled("cpu")
            options: dict[str, Any] = {"value_dim": 16, "softmax_scale": 0.2}
            sparse_attention(x["q"], x["kv"], topk, backend=Checked(), **options)
            with pytest.raises(ContractDrift, match="lse is base 2"):
                sparse_attention(x["q"], x["kv"], topk, backend=Checked(math.log2(math.e)), **options)
        assert torch.get_default_dtype() == dtype
        assert torch.get_default_device() == torch.device("meta")
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def test_deterministic_algorithms_are_as_they_were() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        attention_call(healthy())
        loss_call(healthy(), "visible")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_is_given_back() -> None:
    attention_call(healthy())
    before = live_bytes()
    for _ in range(3):
        attention_call(healthy())
        with pytest.raises(ContractDrift):
            attention_call(wrong())
    # Layouts and ids of check problems may stay in small caches; their tensors of numbers may not.
    assert live_bytes() - before < 1 << 14


class Capture:
    """A stream that is being captured, as the gate sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gate, "capturing", lambda device: True)


def test_a_capture_without_a_verdict_is_refused(monkeypatch: pytest.MonkeyPatch, checks: list[str]) -> None:
    backend = healthy()
    Capture(monkeypatch)
    for _ in range(2):
        with pytest.raises(UnsupportedProblem, match=r"in a graph capture: .* call dsattn.prepare with the call's arg"):
            attention_call(backend)
    assert checks == []


def test_a_capture_is_refused_to_auto_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """To run on plain PyTorch without a word would be captured for ever."""
    monkeypatch.setattr("dsattn.functional.problems.ordered", lambda: (healthy(), TorchBackend()))
    Capture(monkeypatch)
    with pytest.raises(UnsupportedProblem, match="graph capture"):
        attention_call("auto")


def test_a_capture_with_a_verdict_runs(monkeypatch: pytest.MonkeyPatch, checks: list[str]) -> None:
    backend = healthy()
    attention_call(backend)
    Capture(monkeypatch)
    attention_call(backend)
    assert len(checks) == 1
    bad = wrong()
    monkeypatch.undo()
    with pytest.raises(ContractDrift):
        attention_call(bad)
    Capture(monkeypatch)
    with pytest.raises(ContractDrift):
        attention_call(bad)


TRACED = """
import sys, torch
sys.path[:0] = [sys.argv[1]]
from made_up import release
from dsattn import CausalLayout, explain, indexer_topk
from dsattn.backends import name_of
from dsattn.backends.trust import check

checks, inner, seen = [], check.check, []
check.check = lambda backend, key, *rest: checks.append(key.title) or inner(backend, key, *rest)
backend = release("1.45", "sm100", {})
name, layout = name_of(backend), CausalLayout.batched(1, 12)
index = torch.randn(12, 2, 16).bfloat16(), torch.randn(12, 16).bfloat16(), torch.randn(12, 2)
explain("indexer_topk", *index, layout, top_k=4)

def compiler(graph, _):
    seen.append(len(checks))
    return graph.forward

compiled = torch.compile(
    lambda *x: indexer_topk(*x, layout, top_k=4, backend=name).indices, backend=compiler, fullgraph=True
)
same = torch.equal(compiled(*index), indexer_topk(*index, layout, top_k=4, backend="torch").indices)
print(seen, checks, same)
"""


def test_nothing_is_checked_while_a_call_is_explained_or_traced(run_python: RunPython) -> None:
    done = run_python("-W", "ignore", "-c", TRACED, str(ROOT / "tests"))
    assert done.stdout == "[0] ['indexer_topk'] True\n", done.stderr


def test_off_uses_kernels_unchecked_and_says_so_once(monkeypatch: pytest.MonkeyPatch, checks: list[str]) -> None:
    monkeypatch.setenv("DSATTN_SELF_CHECK", "off")
    monkeypatch.setattr(gate, "_TOLD", set())
    with pytest.warns(UserWarning, match="^DSATTN_SELF_CHECK=off: kernels are used that nothing has shown") as told:
        attention_call(wrong())
    attention_call(wrong())  # a second warning would be an error here
    assert len(told) == 1
    assert checks == []


def test_off_counts_for_a_verdict_that_failed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = wrong()
    with pytest.raises(ContractDrift):
        attention_call(backend)
    monkeypatch.setenv("DSATTN_SELF_CHECK", "off")
    monkeypatch.setattr(gate, "_TOLD", {gate.SWITCH})
    attention_call(backend)


def test_another_word_than_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSATTN_SELF_CHECK", "0")
    with pytest.raises(BadInput, match=r"^DSATTN_SELF_CHECK: given '0'; needed \"off\", or not to be set$"):
        attention_call(healthy())


def explained(backend: CudnnBackend, monkeypatch: pytest.MonkeyPatch) -> Explanation:
    monkeypatch.setattr(sys.modules["dsattn.functional.explain"], "ordered", lambda: (backend, TorchBackend()))
    x = tensors(CHUNKS)
    options: dict[str, Any] = {"value_dim": 16, "softmax_scale": 0.2, "sink": torch.ones(2)}
    return explain("sparse_attention", x["q"], x["kv"], topk_call(TorchBackend()), **options)


def test_explain_shows_what_is_known(monkeypatch: pytest.MonkeyPatch, checks: list[str]) -> None:
    for backend, state, chosen in ((healthy(), "passed", "cudnn"), (wrong(), "failed: lse is base 2", "torch")):
        found = explained(backend, monkeypatch)
        assert found.answers[0].self_check == "not yet run"
        assert checks == []
        if chosen == "cudnn":
            attention_call(backend)
        else:
            with pytest.raises(ContractDrift):
                attention_call(backend)
        checks.clear()
        found = explained(backend, monkeypatch)
        assert found.answers[0].self_check == state
        assert [answer.backend for answer in found.answers if answer.chosen] == [chosen]
        assert found.answers[1].self_check == ""
        assert f"self-check {state}" in str(found)


def test_doctor_shows_what_is_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    backend = Checked()
    monkeypatch.setattr("dsattn.cli.doctor.ordered", lambda: (backend,))
    refuse(backend, problem("sparse_attention", torch.device("cpu")), "lse is base 2")
    answers = {a["operator"]: a for a in examine()["operators"] if not a["backward"] and a["device"] == "cpu"}
    assert (answers["indexer_topk"]["runs"], answers["indexer_topk"]["self_check"]) == (True, "not yet run")
    assert not answers["sparse_attention"]["runs"]
    assert answers["sparse_attention"]["reason"] == "its self-check failed: lse is base 2"
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "yes, self-check not yet run" in told
    assert "no: its self-check failed: lse is base 2" in told


def test_a_backend_takes_its_verdicts_with_it() -> None:
    backend = healthy()
    attention_call(backend)
    assert backend in verdicts._MEMORY
    gone = weakref.ref(backend)
    del backend
    gc.collect()
    assert gone() is None


def test_layouts_of_one_kind_share_a_verdict(checks: list[str]) -> None:
    backend = healthy()
    for layout in (WHOLE, CausalLayout.batched(2, 50), CausalLayout.packed([0, 44])):
        x = tensors(layout) if layout.num_q != 44 else {k: v[0, :44] for k, v in tensors(WHOLE).items()}
        indexer_topk(x["index_q"], x["index_k"], x["weights"], layout, top_k=40, backend=backend)
    assert len(checks) == 1


def test_threads_that_need_a_kernel_at_once_wait_for_one_check(checks: list[str]) -> None:
    backend, at_once = Checked(), threading.Barrier(4)
    topk = topk_call(TorchBackend())
    x = tensors(CHUNKS)

    def call(_: int) -> Tensor:
        at_once.wait()
        return sparse_attention(x["q"], x["kv"], topk, value_dim=16, softmax_scale=0.2, backend=backend)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(call, range(4)))
    assert checks == ["sparse_attention"]
    assert all(torch.equal(results[0], result) for result in results)
