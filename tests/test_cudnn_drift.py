"""A release newer than the table whose wrappers changed: an error where that matters, and none where it does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cudnn_problems import Problem, Recorder, differences, on, outcome
from packaging.version import Version

from dsattn import CausalLayout, ContractDrift
from dsattn.backends import Backend, CudnnBackend
from dsattn.backends.cudnn.namespace import Namespace
from dsattn.backends.cudnn.simulator import SimulatedFrontend

NEW = Version("1.40.0")
ARCHS = pytest.mark.parametrize("arch", ["sm90", "sm100"])
Wrap = Callable[[Callable[..., Any]], Callable[..., Any] | None]
SQUARE = Problem(layout=CausalLayout.packed([0, 3, 12]))
OFFSET = Problem(layout=CausalLayout.batched(2, 4, 20, q_offset=[16, 3]), batch=2)
BATCH = Problem(layout=CausalLayout.batched(3, 8), batch=3)
# The operator that calls each wrapper over a layout.
DENSE = {
    "indexer_forward": "topk",
    "dense_attn_score_recompute": "visible",
    "dense_indexer_score_recompute": "visible",
    "dense_indexer_backward": "visible",
}
SELECTED = {"sparse_attn_score_recompute": "selected", "indexer_backward": "selected"}


class NewFrontend:
    """The wrappers of the last known release, one of them changed; None takes it away."""

    def __init__(self, arch: str, name: str, change: Wrap) -> None:
        self._dsa, self._symbol = SimulatedFrontend("1.32.0", arch), f"{name}_wrapper"
        self._changed = change(getattr(self._dsa, self._symbol))

    def __getattr__(self, symbol: str) -> Any:
        if symbol != self._symbol:
            return getattr(self._dsa, symbol)
        if self._changed is None:
            raise AttributeError(f"no {symbol}", name=symbol)
        return self._changed


def newer(arch: str, name: str, change: Wrap) -> tuple[Recorder, Backend]:
    recorder = Recorder(NewFrontend(arch, name, change))
    return recorder, on(CudnnBackend(Namespace(recorder, NEW, arch)))


def without(parameter: str) -> Wrap:
    """A wrapper that takes the parameter no longer."""

    def change(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(wrapper)
        left = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != parameter])

        def call(*args: Any, **kwargs: Any) -> Any:
            return wrapper(**left.bind(*args, **kwargs).arguments)

        call.__signature__ = left  # type: ignore[attr-defined]
        return call

    return change


def raising(error: Exception) -> Wrap:
    """A wrapper that takes everything and refuses every call."""

    def change(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise error

        call.__signature__ = inspect.signature(wrapper)  # type: ignore[attr-defined]
        return call

    return change


def anything(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """The same wrapper behind **kwargs."""
    return lambda **kwargs: wrapper(**kwargs)


def gone(_: Callable[..., Any]) -> None:
    """No such wrapper."""


@ARCHS
def test_a_newer_release_is_taken_for_the_last_known_one(arch: str) -> None:
    for problem in (SQUARE, OFFSET, BATCH):
        for operator in ("topk", "attention", "selected", "visible"):
            assert differences(problem, operator, newer(arch, "indexer_forward", lambda same: same)[1]) == []


@ARCHS
@pytest.mark.parametrize("name", DENSE)
def test_without_offsets_only_layouts_that_need_none_are_called(name: str, arch: str) -> None:
    for problem in (SQUARE, BATCH):
        assert differences(problem, DENSE[name], newer(arch, name, without("q_causal_offsets"))[1]) == []
    with pytest.raises(ContractDrift, match=rf"1\.40\.0: {name}: given no parameter q_causal_offsets"):
        outcome(OFFSET, DENSE[name], newer(arch, name, without("q_causal_offsets"))[1])


@ARCHS
@pytest.mark.parametrize("name", SELECTED)
def test_without_the_flag_only_calls_of_one_batch_entry_are_made(name: str, arch: str) -> None:
    recorder, backend = newer(arch, name, without("topk_indices_global"))
    assert differences(SQUARE, SELECTED[name], backend) == []
    assert recorder.of(name)
    with pytest.raises(ContractDrift, match=rf"1\.40\.0: {name}: given no parameter topk_indices_global"):
        outcome(BATCH, SELECTED[name], newer(arch, name, without("topk_indices_global"))[1])


@ARCHS
@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("indexer_top_k", "tie_break"),
        ("indexer_top_k", "deterministic"),
        ("indexer_forward", "precision"),
        ("indexer_backward", "backend"),
        ("sparse_attention_backward", "q_cluster_mode"),
    ],
)
def test_a_parameter_that_only_settled_a_default_may_go(name: str, parameter: str, arch: str) -> None:
    recorder, backend = newer(arch, name, without(parameter))
    ties = Problem(layout=CausalLayout.packed([0, 3, 12]), grid=True, d_i=1, h_i=1, top_k=3)
    for operator in ("topk", "attention", "selected"):
        assert differences(ties, operator, backend) == []
    assert recorder.of(name)


@ARCHS
@pytest.mark.parametrize("name", [*DENSE, *SELECTED])
@pytest.mark.parametrize("missing", ["stream", "ratio", "sm_scale", "softmax_scale", "grad_loss", "d_index_k"])
def test_without_a_parameter_that_decides_nothing_is_guessed(missing: str, name: str, arch: str) -> None:
    wrapper = SimulatedFrontend("1.32.0", arch).contract.wrapper(name)
    if not wrapper.accepts(missing):
        return
    with pytest.raises(ContractDrift, match=rf"1\.40\.0 on {arch}: {name}: given TypeError: .*{missing}"):
        outcome(SQUARE, {**DENSE, **SELECTED}[name], newer(arch, name, without(missing))[1])


@ARCHS
@pytest.mark.parametrize("name", [*DENSE, *SELECTED, "indexer_top_k", "sparse_attention_backward"])
def test_a_wrapper_that_is_gone_or_refuses_is_drift_and_says_what_it_said(name: str, arch: str) -> None:
    operators = {**DENSE, **SELECTED, "indexer_top_k": "topk", "sparse_attention_backward": "attention"}
    with pytest.raises(ContractDrift, match=rf"{name}: given no such wrapper"):
        outcome(SQUARE, operators[name], newer(arch, name, gone)[1])
    with pytest.raises(ContractDrift, match=rf"{name}: given AssertionError: only 42 rows") as caught:
        outcome(SQUARE, operators[name], newer(arch, name, raising(AssertionError("only 42 rows")))[1])
    assert isinstance(caught.value.__cause__, AssertionError)


@ARCHS
def test_too_little_memory_is_no_drift(arch: str) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"):
        outcome(SQUARE, "topk", newer(arch, "indexer_forward", raising(torch.OutOfMemoryError("tried to allocate")))[1])


@ARCHS
@pytest.mark.parametrize("name", [*DENSE, *SELECTED])
def test_a_wrapper_that_takes_any_keyword_takes_those_that_matter(name: str, arch: str) -> None:
    for problem in (OFFSET, BATCH):
        recorder, backend = newer(arch, name, anything)
        assert differences(problem, {**DENSE, **SELECTED}[name], backend) == []
        told = "q_causal_offsets" if name in DENSE else "topk_indices_global"
        if name in SELECTED or problem is OFFSET:
            assert all(told in call.given for call in recorder.of(name))
            assert recorder.of(name)
