"""The simulated selection kernels: order, ties, short rows, ids outside the row, id spaces."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cudnn_literal import ARCHS, grid, scores
from torch import Tensor

from dsattn.backends.cudnn.simulator import SimulatedFrontend

NONE = -math.inf


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def top_k(values: Any, lengths: Tensor, k: int, version: str = "1.30.0", seed: int = 0, **rest: Any) -> dict[str, Any]:
    frontend = SimulatedFrontend(version, "sm100", seed=seed)
    return frontend.indexer_top_k_wrapper(torch.as_tensor(values), lengths, k, **rest)


def test_the_largest_come_as_local_ids_in_no_order_with_their_values() -> None:
    values = torch.randperm(64).float().view(2, 32)
    orders = set()
    for seed in range(4):
        result = top_k(values, ints(32, 20), 5, seed=seed)
        for row, length in enumerate((32, 20)):
            wanted = set(values[row, :length].topk(5).indices.tolist())
            assert set(result["indices"][row].tolist()) == wanted
            assert torch.equal(result["values"][row], values[row, result["indices"][row].long()])
        orders.add(tuple(result["indices"][0].tolist()))
    assert result["indices"].dtype == torch.int32
    assert len(orders) > 1, "slots must not come in one order"
    assert any(list(order) != sorted(order) for order in orders)


def test_a_row_no_longer_than_k_is_taken_in_order_and_padded() -> None:
    values = torch.tensor([[3.0, NONE, 7.0, 1.0]]).repeat(4, 1)
    result = top_k(values, ints(3, 2, 0, -5), 3)
    assert result["indices"].tolist() == [[0, 1, 2], [0, 1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert result["values"].tolist() == [[3.0, NONE, 7.0], [3.0, NONE, NONE], [NONE] * 3, [NONE] * 3]
    assert top_k(values, ints(3, 2, 0, 1), 3, return_val=False)["values"] is None


def test_rows_of_a_group_see_one_column_more_each() -> None:
    values = torch.arange(8.0).repeat(4, 1)
    result = top_k(values, ints(8, 3), 4, next_n=2)
    assert [set(row) for row in result["indices"].tolist()] == [{3, 4, 5, 6}, {4, 5, 6, 7}, {0, 1, -1}, {0, 1, 2, -1}]


def test_ties_fall_anyhow_without_a_rule_and_by_it_with_one() -> None:
    values = torch.zeros(1, 32)
    chosen = {tuple(sorted(top_k(values, ints(32), 4, seed=seed)["indices"][0].tolist())) for seed in range(6)}
    assert len(chosen) > 1
    frontend = SimulatedFrontend("1.30.0", "sm90")
    again = {
        tuple(sorted(frontend.indexer_top_k_wrapper(values, ints(32), 4)["indices"][0].tolist())) for _ in range(6)
    }
    assert len(again) > 1, "the choice differs from call to call"
    rules = {1: {0, 1, 2, 3}, 2: {28, 29, 30, 31}}
    for rule, wanted in rules.items():
        assert set(top_k(values, ints(32), 4, "1.31.0", tie_break=rule)["indices"][0].tolist()) == wanted
    ascending = top_k(torch.tensor([[5.0, 1.0, 5.0, 9.0, 5.0]]), ints(5), 3, "1.32.0", deterministic=True)
    assert ascending["indices"].tolist() == [[0, 2, 3]]


def test_plus_zero_comes_before_minus_zero_and_nan_before_all() -> None:
    values = torch.tensor([[-0.0, -0.0, 0.0, -1.0, 0.0, -2.0]])
    for seed in range(3):
        assert set(top_k(values, ints(6), 2, seed=seed)["indices"][0].tolist()) == {2, 4}
    values = torch.tensor([[1.0, math.nan, math.inf, 3.0]])
    assert set(top_k(values, ints(4), 2)["indices"][0].tolist()) == {1, 2}


@pytest.mark.parametrize("version", ["1.27.0", "1.32.0"])
def test_minus_infinity_inside_the_length_is_a_candidate(version: str) -> None:
    values = torch.full((1, 64), NONE)
    values[0, 9] = 1.0
    seen = set()
    for seed in range(8):
        result = top_k(values, ints(40), 4, version, seed)
        ids = result["indices"][0].tolist()
        assert 9 in ids
        assert len(set(ids)) == 4
        assert max(ids) < 40
        assert sorted(result["values"][0].tolist()) == [NONE, NONE, NONE, 1.0]
        seen |= set(ids)
    assert len(seen) > 8


@pytest.mark.parametrize(("largest", "spoilt"), [(-65_000.0, False), (-66_000.0, True)])
def test_scores_below_the_least_of_fp16_are_as_good_as_lanes_past_the_row(largest: float, spoilt: bool) -> None:
    """Before 1.27; the first pass sees them as -inf, and later ones look at other rows' scores."""
    values = largest - torch.arange(64.0).repeat(2, 1)
    for version, found in (("1.26.0", spoilt), ("1.27.0", False)):
        tables = [top_k(values, ints(40, 41), 8, version, seed)["indices"] for seed in range(4)]
        assert any(set(row.tolist()) != set(range(8)) for table in tables for row in table) == found


def test_gates_of_top_k_by_release() -> None:
    values = torch.zeros(4, 33)
    for version in ("1.25.0", "1.31.0"):
        with pytest.raises(ValueError, match="Misaligned"):
            top_k(values[1:], ints(1, 1, 1), 2, version)
        with pytest.raises(ValueError, match="compact"):
            top_k(torch.zeros(2, 40)[:, :32], ints(1, 1), 2, version)
    assert top_k(values[1:], ints(1, 1, 1), 2, "1.32.0")["indices"].shape == (3, 2)
    for k in (0, 2049):
        with pytest.raises(ValueError, match="top_k"):
            top_k(values, ints(1, 1, 1, 1), k)
    with pytest.raises(ValueError, match="n_rows"):
        top_k(values, ints(1, 1), 2)
    with pytest.raises(ValueError, match="int32"):
        top_k(values, ints(1, 1, 1, 1).long(), 2)
    with pytest.raises(ValueError, match="no element"):
        top_k(torch.zeros(0, 4), ints(), 2, "1.32.0")
    odd = torch.zeros(2, 400)
    with pytest.raises(AssertionError, match="vecsize"):
        top_k(odd, ints(400, 400), 301, "1.26.0")
    assert top_k(odd, ints(400, 400), 301, "1.27.0")["indices"].shape == (2, 301)
    assert top_k(odd, ints(400, 400), 302, "1.26.0")["indices"].shape == (2, 302)
    assert top_k(torch.zeros(2, 8, dtype=torch.bfloat16), ints(8, 8), 2)["values"].dtype == torch.bfloat16


def test_local_ids_become_global_ones() -> None:
    frontend = SimulatedFrontend("1.25.0", "sm90")
    ids = torch.tensor([[[0, 3, -1]], [[2, -7, 1]]], dtype=torch.int32)
    assert frontend.local_to_global_wrapper(ids, 10)["indices"].tolist() == [[[0, 3, -1]], [[12, -1, 11]]]
    packed = torch.tensor([[1, -1], [0, 2], [4, 0]])
    got = frontend.local_to_global_wrapper(packed, 0, cu_seqlens_q=ints(0, 2, 2, 3), cu_seqlens_k=ints(0, 5, 6, 11))
    assert got["indices"].tolist() == [[1, -1], [0, 2], [10, 6]]
    assert got["indices"].dtype == torch.int32
    with pytest.raises(ValueError, match="3D"):
        frontend.local_to_global_wrapper(packed, 5)
    with pytest.raises(ValueError, match="both"):
        frontend.local_to_global_wrapper(packed, 5, cu_seqlens_q=ints(0, 3))
    with pytest.raises(TypeError, match="int32"):
        frontend.local_to_global_wrapper(ids.float(), 5)


def test_compaction_keeps_the_order_of_valid_ids() -> None:
    frontend = SimulatedFrontend("1.32.0", "sm100")
    result = frontend.compactify_wrapper(torch.tensor([[[5, -1, 3, -2]], [[-1, -1, -1, -1]]], dtype=torch.int32))
    assert result["indices"].tolist() == [[5, 3, -1, -1], [-1, -1, -1, -1]]
    assert result["topk_length"].tolist() == [2, 0]
    assert result["topk_length"].dtype == torch.int32
    with pytest.raises(TypeError, match="int32"):
        frontend.compactify_wrapper(torch.zeros(1, 2, dtype=torch.int64))


def forward_top_k(version: str = "1.29.1", seed: int = 0, **rest: Any) -> dict[str, Any]:
    call = {"q": grid(2, 6, 32, 128), "k": grid(2, 6, 1, 128, seed=1), "w": grid(2, 6, 32, seed=2), "ratio": 1, **rest}
    return SimulatedFrontend(version, "sm100", seed=seed).indexer_forward_top_k_wrapper(**call)


def test_the_fused_selection_gives_global_ids_logits_softmax_and_lse() -> None:
    result = forward_top_k(top_k=3, sm_scale=0.5, return_lse=True, deterministic=True)
    local = forward_top_k(top_k=3, sm_scale=0.5, topk_indices_global=False, deterministic=True)
    for b in range(2):
        q, k, w = (grid(2, 6, 32, 128)[b], grid(2, 6, 1, 128, seed=1)[b, :, 0], grid(2, 6, 32, seed=2)[b])
        table = scores(q, k, w, 0, 1, 0.5)
        for row in range(6):
            order = sorted(range(row + 1), key=lambda j, row=row, table=table: (-float(table[row, j]), j))[:3]
            used = len(order)
            ids = result["indices"][b, row].tolist()
            assert set(ids[:used]) == {b * 6 + j for j in order}
            assert ids[used:] == [-1] * (3 - used)
            assert set(local["indices"][b, row].tolist()) == {*order, *ids[used:]}
            logits = result["logits"][b, row]
            assert logits[:used].tolist() == [float(table[row, i - b * 6]) for i in ids[:used]]
            assert logits[used:].tolist() == [NONE] * (3 - used)
            assert torch.allclose(result["softmax"][b, row], logits.softmax(0))
            assert float(result["lse"][b, row]) == pytest.approx(float(table[row].logsumexp(0)))
    assert list(forward_top_k(top_k=3, return_softmax=False)) != list(result)
    assert list(forward_top_k(top_k=3, return_softmax=False).keys()) == ["indices", "logits"]


def test_the_fused_selection_starts_at_offset_zero_and_takes_offsets() -> None:
    assert (forward_top_k(top_k=6)["indices"][0, 0] >= 0).sum() == 1
    result = forward_top_k(top_k=6, q_causal_offsets=ints(-1, 2))
    assert (result["indices"] >= 0).sum(-1).tolist() == [[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 6, 6]]
    assert result["softmax"][0, 0].tolist() == [0.0] * 6
    packed = SimulatedFrontend("1.27.0", "sm100").indexer_forward_top_k_wrapper(
        grid(3, 32, 128),
        grid(4, 1, 128, seed=1),
        grid(3, 32, seed=2),
        2,
        ratio=1,
        cu_seqlens_q=ints(0, 2, 3),
        cu_seqlens_k=ints(0, 2, 4),
        max_seqlen_q=2,
        max_seqlen_k=2,
    )
    assert sorted(packed["indices"][2].tolist()) == [-1, 2]


def test_gates_of_the_fused_selection() -> None:
    with pytest.raises(NotImplementedError, match="microbatch"):
        forward_top_k(top_k=2, microbatch_rows=2, return_lse=True)
    with pytest.raises(ValueError, match="multiples of ratio"):
        forward_top_k(top_k=2, ratio=4, microbatch_rows=2, k=grid(2, 2, 1, 128))
    with pytest.raises(ValueError, match="top_k"):
        forward_top_k(top_k=2049)
    with pytest.raises(ValueError, match="seqlen_q"):
        forward_top_k(top_k=2, k=grid(2, 5, 1, 128))
    with pytest.raises(TypeError, match="bfloat16"):
        forward_top_k(top_k=2, w=grid(2, 6, 32).float())
    assert forward_top_k("1.31.0", top_k=2, w=grid(2, 6, 32).float())["indices"].shape == (2, 6, 2)
    assert forward_top_k(top_k=9)["indices"].shape == (2, 6, 9), "more slots than keys"


@pytest.mark.parametrize("arch", ARCHS)
def test_a_naive_pair_of_forward_and_top_k_fills_up_with_masked_keys(arch: str) -> None:
    """The mechanism of the lost recall: -inf beyond the top-left mask, and a length that still counts those keys."""
    rows, keys, k = 2, 64, 8
    call = {"q": grid(1, rows, 32, 128), "k": grid(1, keys, 1, 128, seed=1), "w": grid(1, rows, 32, seed=2), "ratio": 1}
    lengths = ints(*(keys - rows + i + 1 for i in range(rows)))
    found = {}
    for version in ("1.25.0", "1.27.0"):
        frontend = SimulatedFrontend(version, arch)
        table = frontend.indexer_forward_wrapper(**call)["scores"][0]
        found[version] = frontend.indexer_top_k_wrapper(table, lengths, k)
    wanted = scores(call["q"][0], call["k"][0, :, 0], call["w"][0], keys - rows)
    for row in range(rows):
        kept = wanted[row, found["1.25.0"]["indices"][row].long()].sort(descending=True).values
        assert torch.equal(kept, wanted[row].topk(k).values)
        assert int((found["1.27.0"]["values"][row] == NONE).sum()) == k - (row + 1)
