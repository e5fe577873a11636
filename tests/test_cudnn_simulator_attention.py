"""The simulated attention kernels: formula with and without a sink, empty rows, ids, overwritten buffers, gates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cudnn_inputs import NONE, attention_inputs, ids_of, reference
from cudnn_literal import ARCHS, error, grid
from torch import Tensor

from dsattn.backends.cudnn.simulator import SimulatedFrontend


def run(version: str, arch: str, call: dict[str, Any], **rest: Any) -> Any:
    frontend = SimulatedFrontend(version, arch, races=False)
    return frontend.sparse_attention_backward_wrapper(**call, **rest)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", ["1.27.0", "1.29.1", "1.32.0"])
@pytest.mark.parametrize(("width", "sink"), [(512, 0.5), (576, 0.5), (512, None)])
def test_the_backward_gives_the_gradients_with_the_sink(
    version: str, arch: str, width: int, sink: float | None
) -> None:
    call, wanted = attention_inputs(ids_of([3, 0, 6], [1], [2, 5, 4, 0]), width=width, sink=sink)
    got = run(version, arch, call)
    assert error(got["dq"], wanted[0]) < 5e-3
    assert error(got["dkv"], wanted[1]) < 5e-3
    assert (got["dq"].dtype, got["d_sink"].dtype) == (torch.bfloat16, torch.float32)
    if sink is None:
        assert got["d_sink"].tolist() == [0.0] * 64
    else:
        assert error(got["d_sink"], wanted[2]) < 5e-3
    buffers = {"dq": torch.full_like(call["q"], 9), "dkv": torch.full_like(call["kv"], 9)}
    again = run(version, arch, call, **buffers)
    assert again["dq"] is buffers["dq"]
    assert torch.equal(again["dq"], got["dq"]), "overwritten, not added to"
    assert error(again["dkv"], got["dkv"]) < 1e-2
    told = run(version, arch, call, topk_length=torch.tensor([3, 1, 4], dtype=torch.int32))
    assert torch.equal(told["dq"], got["dq"])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", ["1.25.0", "1.29.1"])
def test_an_empty_row_has_lse_infinity_and_no_gradient(version: str, arch: str) -> None:
    call, wanted = attention_inputs(ids_of([3, 0], []))
    got = run(version, arch, call)
    assert not got["dq"][1].any()
    assert error(got["dkv"], wanted[1]) < 5e-3
    assert error(got["d_sink"], wanted[2]) < 5e-3
    call["lse"] = torch.where(call["lse"] == math.inf, NONE, call["lse"])
    call["attn_sink"] = torch.full((64,), NONE)
    wrong = run("1.25.0", "sm100", call)
    assert wrong["dq"][1].isnan().any() or wrong["d_sink"].isnan().any(), "-inf is no empty row"


def test_ids_are_flat_and_the_value_is_the_first_512_columns() -> None:
    call, wanted = attention_inputs(ids_of([6, 0], [5]), width=576)
    got = run("1.32.0", "sm100", call)
    assert not got["dkv"][[1, 2, 3, 4]].any()
    assert error(got["dkv"][:, 512:], wanted[1][:, 512:]) < 5e-3


def test_the_backward_can_be_repeated_bit_by_bit_where_it_says_so() -> None:
    ids = torch.randint(0, 20, (30, 8), dtype=torch.int32)
    call, _ = attention_inputs(ids.sort(1).values, keys=20)
    call["kv"] = torch.randn(20, 512).half()
    call |= {name: call[name].half() for name in ("q", "out", "dout")}
    frontend = SimulatedFrontend("1.29.1", "sm100")
    loose = [frontend.sparse_attention_backward_wrapper(**call)["dkv"] for _ in range(4)]
    strict = [frontend.sparse_attention_backward_wrapper(**call, deterministic=True)["dkv"] for _ in range(4)]
    assert not all(torch.equal(loose[0], other) for other in loose)
    assert all(torch.equal(strict[0], other) for other in strict)


def test_gates_of_the_backward() -> None:
    call, _ = attention_inputs(ids_of([1]))
    with pytest.raises(ValueError, match="float16"):
        run("1.30.0", "sm90", {**call, "q": call["q"].float()})
    with pytest.raises(ValueError, match="float32"):
        run("1.30.0", "sm90", {**call, "attn_sink": call["attn_sink"].bfloat16()})
    with pytest.raises(AttributeError):
        run("1.30.0", "sm90", {**call, "attn_sink": None})
    narrow = {**call, "q": call["q"][..., :128].contiguous(), "kv": call["kv"][..., :128].contiguous()}
    with pytest.raises(ValueError, match="head_dim"):
        run("1.27.0", "sm100", narrow)
    with pytest.raises(AssertionError, match="head_dim"):
        run("1.26.0", "sm90", narrow)
    with pytest.raises(AssertionError, match="heads"):
        run("1.30.0", "sm90", attention_inputs(ids_of([1]), heads=1)[0])
    strided = torch.zeros(512, 7, dtype=torch.bfloat16).T
    with pytest.raises(AssertionError, match="contiguous"):
        run("1.30.0", "sm100", call, dkv=strided)
    assert run("1.32.0", "sm100", call, dkv=strided)["dkv"] is strided
    shifted = torch.empty(65)[1:].view(1, 64).copy_(call["lse"])
    assert run("1.28.0", "sm100", {**call, "lse": shifted})
    with pytest.raises(ValueError, match="Misaligned"):
        run("1.29.0", "sm100", {**call, "lse": shifted})
    assert run("1.29.0", "sm90", {**call, "lse": shifted})


def forward(
    ids: Tensor, *, heads: int = 64, width: int = 576, **rest: Any
) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    q, kv = grid(ids.shape[0], heads, width) / 4, grid(7, width, seed=1)
    sink = rest.get("attn_sink")
    sink = torch.full((heads,), NONE) if sink is None else sink
    wanted = reference(q.double(), kv.double(), ids.masked_fill(ids >= 7, -1), sink.double(), width**-0.5)
    return SimulatedFrontend("1.29.1", "sm100").sparse_attention_forward_wrapper(q, kv, ids, **rest), wanted


@pytest.mark.parametrize(("heads", "width"), [(64, 512), (64, 576), (128, 512)])
@pytest.mark.parametrize("with_sink", [False, True])
def test_the_forward_gives_output_lse_without_the_sink_and_empty_rows(heads: int, width: int, with_sink: bool) -> None:
    sink = torch.linspace(-1, 1, heads) if with_sink else None
    result, (out, lse, peak) = forward(ids_of([3, -1, 0], [], [99, 6]), heads=heads, width=width, attn_sink=sink)
    assert error(result["out"], out) < 4e-3
    assert torch.allclose(result["lse"][[0, 2]], lse[[0, 2]].float(), atol=1e-5)
    assert torch.allclose(result["max_logits"], peak.float(), atol=1e-5)
    assert result["lse"][1].tolist() == [math.inf] * heads
    assert not result["out"][1].any()
    assert result["max_logits"][1].tolist() == [NONE] * heads
    assert result["lse_indexer"] is None


def test_a_length_cuts_the_slots_of_the_forward_and_the_first_slots_have_an_lse() -> None:
    ids = ids_of([3, 0, 5], [1, 2], width=600)
    result, _ = forward(ids, topk_length=torch.tensor([2, 0], dtype=torch.int32), indexer_topk=512)
    _, (out, lse, _) = forward(ids_of([3, 0], [], width=600))
    assert error(result["out"], out) < 4e-3
    assert torch.allclose(result["lse"][0], lse[0].float(), atol=1e-5)
    assert torch.equal(result["lse"], result["lse_indexer"])


def test_gates_of_the_forward() -> None:
    for bad, match in ((512, "indexer_topk"), (100, "indexer_topk")):
        with pytest.raises(ValueError, match=match):
            forward(ids_of([1]), indexer_topk=bad)
    with pytest.raises(ValueError, match="one of"):
        forward(ids_of([1]), heads=128, width=576)
    with pytest.raises(ValueError, match="int32"):
        forward(ids_of([1]).long())
    with pytest.raises(TypeError):
        SimulatedFrontend("1.29.1", "sm100").sparse_attention_forward_wrapper(None, None, None, None)
