"""The simulated sparse score recomputations: softmax and mass over slots, unused slots, ids of no key, gates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cudnn_literal import ARCHS, grid, mass, score
from torch import Tensor

from dsattn.backends.cudnn.simulator import SimulatedFrontend

SLOTS = 128
HEADS = 64


def inputs(attention: bool, *, rows: int = 2, keys: int = 9, batch: int = 1, heads: int = HEADS) -> dict[str, Any]:
    q, k = grid(batch, rows, heads, 64), grid(batch, keys, 64, seed=1)
    if attention:
        return {"q_attn": q, "k_attn": k, "lse": grid(batch, rows, heads, seed=2).float() + 2, "softmax_scale": 0.125}
    return {"q_indexer": q, "k_indexer": k, "weights": grid(batch, rows, heads, seed=2) / 8}


def slots(*rows: list[int], batch: int = 1, width: int = SLOTS) -> Tensor:
    table = torch.full((len(rows), width), -1, dtype=torch.int32, device="cpu")
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return table.view(batch, len(rows) // batch, width)


def run(frontend: SimulatedFrontend, x: dict[str, Any], ids: Tensor, **rest: Any) -> Tensor:
    kind = "attn" if "lse" in x else "indexer"
    result = getattr(frontend, f"sparse_{kind}_score_recompute_wrapper")(**x, topk_indices=ids, **rest)
    return result["target" if kind == "attn" else "predict"]


def wanted(x: dict[str, Any], row: int, keys: list[int], b: int = 0) -> list[float]:
    if "lse" in x:
        terms = [mass(x["q_attn"][b, row], x["k_attn"][b, j], x["lse"][b, row], 0.125) for j in keys]
    else:
        raw = [score(x["q_indexer"][b, row], x["k_indexer"][b, j], x["weights"][b, row]) for j in keys]
        terms = [math.exp(value - max(raw)) for value in raw]
    return [term / sum(terms) for term in terms]


@pytest.mark.parametrize("attention", [False, True], ids=["indexer", "attention"])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", ["1.26.0", "1.31.0"])
def test_slots_are_normalised_and_unused_ones_are_zero(version: str, arch: str, attention: bool) -> None:
    x, rows = inputs(attention), ([3, 0, 8, 5], [])
    frontend = SimulatedFrontend(version, arch)
    for length in (None, torch.tensor([[4, 0]], dtype=torch.int32)):
        got = run(frontend, x, slots(*rows), topk_length=length)
        assert got[0, 0, :4].tolist() == pytest.approx(wanted(x, 0, rows[0]), rel=1e-4)
        assert got[0, 0, 4:].tolist() == [0.0] * (SLOTS - 4)
        assert got[0, 1].tolist() == [0.0] * SLOTS
    got = run(frontend, x, slots([3, -1, 0, -1, 8], []))
    assert got[0, 0, [0, 2, 4]].tolist() == pytest.approx(wanted(x, 0, [3, 0, 8]), rel=1e-4)
    assert got[0, 0, [1, 3]].tolist() == [0.0, 0.0], "without topk_length -1 may stand anywhere"


@pytest.mark.parametrize("attention", [False, True], ids=["indexer", "attention"])
@pytest.mark.parametrize("arch", ARCHS)
def test_ids_are_local_unless_the_call_says_global(arch: str, attention: bool) -> None:
    x, frontend = inputs(attention, batch=2), SimulatedFrontend("1.25.0", arch)
    local = run(frontend, x, slots([1, 2], [], [4, 6], [], batch=2))
    told = run(frontend, x, slots([1, 2], [], [13, 15], [], batch=2), topk_indices_global=True)
    assert torch.equal(local, told)
    assert local[1, 0, :2].tolist() == pytest.approx(wanted(x, 0, [4, 6], b=1), rel=1e-4)


@pytest.mark.parametrize("attention", [False, True], ids=["indexer", "attention"])
def test_an_id_of_no_key_is_a_key_of_zeros_on_hopper_and_stale_on_blackwell(attention: bool) -> None:
    x = inputs(attention)
    got = run(SimulatedFrontend("1.30.0", "sm90"), x, slots([3, 99], []))
    zero = torch.zeros(64, dtype=torch.bfloat16)
    if attention:
        terms = [mass(x["q_attn"][0, 0], key, x["lse"][0, 0], 0.125) for key in (x["k_attn"][0, 3], zero)]
    else:
        terms = [math.exp(score(x["q_indexer"][0, 0], key, x["weights"][0, 0])) for key in (x["k_indexer"][0, 3], zero)]
    assert got[0, 0, :2].tolist() == pytest.approx([term / sum(terms) for term in terms], rel=1e-4)
    stale = run(SimulatedFrontend("1.31.0", "sm100"), x, slots([3, 99], []))
    if attention:
        assert stale[0, 0].tolist() == [0.0] * SLOTS, "a NaN sum fails the comparison with the threshold"
    else:
        assert stale[0, 0, :2].isnan().all()


@pytest.mark.parametrize("attention", [False, True], ids=["indexer", "attention"])
def test_with_a_length_the_slots_before_it_are_not_looked_at(attention: bool) -> None:
    x, ids, length = inputs(attention), slots([3, -1, 5], [1]), torch.tensor([[3, 1]], dtype=torch.int32)
    got = run(SimulatedFrontend("1.30.0", "sm90"), x, ids, topk_length=length)
    assert float(got[0, 0, 1]) > 0, "-1 before the length counts as a key of zeros"
    assert float(got[0, 0, :3].sum()) == pytest.approx(1, rel=1e-5)
    fine = run(SimulatedFrontend("1.30.0", "sm90"), x, ids)
    assert float(fine[0, 0, 1]) == 0
    if not attention:
        stale = run(SimulatedFrontend("1.31.0", "sm100"), x, ids, topk_length=length)
        assert stale[0, 0, :3].isnan().all(), "Blackwell scores it with whatever key was there"
    longer = torch.tensor([[2, 0]], dtype=torch.int32)
    x_ids = slots([3, 4, 5], [1])
    cut = run(SimulatedFrontend("1.30.0", "sm90"), x, x_ids, topk_length=longer)
    assert cut[0, 0, :3].tolist() == pytest.approx([*wanted(x, 0, [3, 4]), 0.0], rel=1e-4)
    blackwell = run(SimulatedFrontend("1.31.0", "sm100"), x, x_ids, topk_length=longer)
    used = (blackwell > 0).sum(-1)[0].tolist()
    assert used == ([3, 1] if attention else [2, 0]), "its attention wrapper keeps the length to itself for this size"
    if attention:
        q, k = grid(1, 2, 64, 512), grid(1, 9, 512, seed=1)
        tuned = {"q_attn": q, "k_attn": k, "lse": x["lse"], "softmax_scale": 0.0}
        kept = run(SimulatedFrontend("1.31.0", "sm100"), tuned, x_ids, topk_length=longer)
        assert (kept > 0).sum(-1)[0].tolist() == [2, 0]


def test_the_guard_of_the_division_differs_by_architecture() -> None:
    x = inputs(True)
    x["lse"] = x["lse"] + 40
    terms = [mass(x["q_attn"][0, 0], x["k_attn"][0, j], x["lse"][0, 0], 0.125) for j in (3, 0)]
    assert 0 < sum(terms) < 1e-10
    hopper = run(SimulatedFrontend("1.30.0", "sm90"), x, slots([3, 0], []))[0, 0, :2]
    assert hopper.tolist() == pytest.approx([term / (sum(terms) + 1e-10) for term in terms], rel=1e-4)
    assert run(SimulatedFrontend("1.31.0", "sm100"), x, slots([3, 0], []))[0, 0, :2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("attention", [False, True], ids=["indexer", "attention"])
def test_slots_past_a_multiple_of_128_are_left_out_on_hopper(attention: bool) -> None:
    x = inputs(attention)
    ids = slots([3, 0], [], width=192)
    ids[0, 0, 150] = 5
    for version, tail in (("1.25.0", 0.0), ("1.26.0", math.nan)):
        got = run(SimulatedFrontend(version, "sm90"), x, ids)
        assert got[0, 0, :2].tolist() == pytest.approx(wanted(x, 0, [3, 0]), rel=1e-4)
        assert got[0, 0, 128:].isnan().all() if math.isnan(tail) else bool((got[0, 0, 128:] == 0).all())
    with pytest.raises(ValueError, match="strictly positive"):
        run(SimulatedFrontend("1.26.0", "sm90"), x, slots([3], [], width=64))
    blackwell = SimulatedFrontend("1.31.0", "sm100")
    with pytest.raises(AssertionError, match="topk"):
        run(blackwell, x, slots([3, 0], [], width=160 if attention else 192))
    if attention:
        assert run(blackwell, x, ids)[0, 0, 150] > 0, "its blocks are of 64 slots here"


def test_gates_of_the_sparse_scores() -> None:
    x, hopper = inputs(False), SimulatedFrontend("1.31.0", "sm90")
    ids = slots([1], [2])
    with pytest.raises(ValueError, match="bfloat16"):
        run(hopper, {**x, "weights": x["weights"].float()}, ids)
    with pytest.raises(ValueError, match="int32"):
        run(hopper, x, ids.long())
    assert run(SimulatedFrontend("1.32.0", "sm90"), x, ids.long()).shape == ids.shape
    with pytest.raises(ValueError, match="dimensions"):
        run(hopper, {**x, "k_indexer": x["k_indexer"][:, :, None]}, ids)
    with pytest.raises(ValueError, match="Misaligned"):
        run(hopper, x, ids, topk_length=torch.ones(3, dtype=torch.int32)[1:].view(1, 2))
    with pytest.raises(AssertionError, match="heads"):
        run(hopper, inputs(True, heads=96), ids)
    assert run(SimulatedFrontend("1.32.0", "sm90"), inputs(True, heads=96), ids).shape == ids.shape
    with pytest.raises(AssertionError, match="heads"):
        run(hopper, inputs(True, heads=1), ids)
    out = torch.empty(1, 2, SLOTS)
    assert run(hopper, x, ids, out=out) is out
