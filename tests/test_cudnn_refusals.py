"""What the cuDNN backend does not take, and the sentence that says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cudnn_problems import Problem, differences, on, outcome, recording, tried

import dsattn
from dsattn import CausalLayout, UnsupportedProblem
from dsattn.backends import CudnnBackend
from dsattn.functional.problems import problem_of
from dsattn.ops.inputs import AttentionInputs, IndexerInputs
from dsattn.spec.problem import Operator

SMALL = Problem(layout=CausalLayout.packed([0, 2, 5]))
NEW, HOPPER = ("1.32.0", "sm100"), ("1.32.0", "sm90")
WIDE = {"softmax_scale": 0.04}

REFUSED: dict[str, tuple[dict[str, Any], str, tuple[str, str], str]] = {
    "fp32 indexer": (
        {"dtype": torch.float32},
        "topk",
        NEW,
        "torch.float32 index_q and index_k; the kernels take bfloat16",
    ),
    "fp16 indexer": ({"dtype": torch.float16}, "visible", NEW, "float16"),
    "wide indexer": ({"d_i": 129}, "topk", NEW, "indexer width 129; the kernels take 128"),
    "indexer heads": ({"h_i": 65}, "topk", NEW, "65 indexer heads; indexer_forward takes one of 4, 8, 16, 32, 64"),
    "heads of a loss": ({"h_i": 65}, "selected", HOPPER, "65 indexer heads; indexer_backward takes one of 64"),
    "slots": ({"top_k": 2049}, "topk", NEW, "top_k 2049; the kernel takes at least 1, at most 2048"),
    "attention heads": ({"h": 129}, "attention", HOPPER, "sparse_attention_forward on sm90"),
    "teacher heads": ({"h": 257}, "selected", NEW, "257 heads; the kernel was written for at most 256"),
    "key width": (
        {"d_qk": 577, **WIDE},
        "attention",
        NEW,
        "key rows of 577, values of 24; the kernel takes at most 576",
    ),
    "value width": ({"d_qk": 576, "d_v": 513, **WIDE}, "attention", NEW, "values of 513"),
    "teacher width": ({"d_qk": 577, **WIDE}, "visible", NEW, "key rows of 577; the kernel was written for at most 576"),
    "fp32 attention": (
        {"dtype": torch.float32},
        "attention",
        NEW,
        "torch.float32; the kernel takes bfloat16 and float16",
    ),
    "too old for Hopper": ({}, "topk", ("1.24.1", "sm90"), "release 1.24.1 has no indexer_forward on sm90"),
    "no forward yet": (
        {"gradients": False},
        "attention",
        ("1.28.0", "sm100"),
        "1.28.0 has no sparse_attention_forward",
    ),
    "no forward": ({"gradients": False}, "attention", HOPPER, "release 1.32.0 has no sparse_attention_forward on sm90"),
    "device": (
        {"layout": CausalLayout.on_device(torch.tensor([0, 2, 5]), num_q=5, num_k=5, max_len=3)},
        "topk",
        NEW,
        "device layout: the calls need the segments on the host",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_takes_is_refused_in_words(name: str) -> None:
    changes, operator, release, sentence = REFUSED[name]
    refused = tried(replace(SMALL, **changes), operator, recording(*release)[1])
    assert isinstance(refused, str)
    assert sentence in refused


@pytest.mark.parametrize(("version", "arch"), [NEW, HOPPER])
def test_the_largest_that_the_kernels_take(version: str, arch: str) -> None:
    largest = (
        replace(SMALL, d_i=128, h_i=64),
        replace(SMALL, h=128),
        replace(SMALL, d_qk=576, d_v=512, softmax_scale=0.04),
        replace(SMALL, top_k=2048),
    )
    for problem in largest:
        for operator in ("topk", "attention", "selected"):
            assert differences(problem, operator, on(recording(version, arch)[1])) == []
    assert differences(replace(SMALL, h=256), "selected", on(recording(version, arch)[1])) == []


def test_operators_without_a_kernel() -> None:
    backend, x = recording(*NEW)[1], SMALL.tensors()
    with pytest.raises(UnsupportedProblem, match="no attention over all keys"):
        dsattn.dense_attention(x.q, x.kv, SMALL.layout, value_dim=4, softmax_scale=1.0, backend=backend)
    with pytest.raises(UnsupportedProblem, match="no gradient of raw scores"):
        dsattn.indexer_scores(x.index_q.requires_grad_(), x.index_k, x.weights, SMALL.layout, backend=backend)
    with pytest.raises(UnsupportedProblem, match="always apply the relu"):
        dsattn.indexer_topk(*x.index(), SMALL.layout, top_k=2, relu=False, backend=backend)


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_heads_of_the_attention_backward(arch: str) -> None:
    """Its forward has other limits, so it is asked on its own."""
    backend = recording("1.32.0", arch)[1]
    for heads, sentence in ((128, None), (129, "129 heads; the kernel was written for at most 128")):
        x = replace(SMALL, h=heads).tensors()
        asked = problem_of(
            "sparse_attention",
            None,
            AttentionInputs(x.q, x.kv, 24, 1.0),
            batch=None,
            top_k=4,
            requires_grad=True,
            backward=True,
        )
        assert backend.supports(asked) == sentence


@pytest.mark.parametrize("operator", ["indexer_scores", "indexer_topk"])
def test_without_a_frontend_given_the_tensors_have_to_be_on_a_gpu(operator: Operator) -> None:
    x = SMALL.tensors()
    asked = problem_of(operator, IndexerInputs(*x.index(), 1.0, True), None, batch=None, layout=SMALL.layout, top_k=2)
    assert CudnnBackend().supports(asked) == "tensors on cpu; the kernels run on CUDA devices"


def test_a_loss_without_gradients_asks_for_no_backward_kernel() -> None:
    """Sixty-five indexer heads and the race of Hopper's key gradient stand in the way of the gradients alone."""
    problem = replace(SMALL, h_i=65, gradients=False)
    assert differences(problem, "selected", on(recording("1.26.0", "sm90")[1])) == []
    with pytest.raises(UnsupportedProblem, match="65 indexer heads"):
        outcome(replace(problem, gradients=True), "selected", recording("1.26.0", "sm90")[1])
