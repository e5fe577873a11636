"""Layouts whose documents only the device knows; here the device is the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import grid_tensors

from dsattn import BadInput, CausalLayout, UnsupportedProblem, dsa_attention, indexer_topk
from dsattn.layouts import DeviceLayout
from dsattn.ops.blocks import blocks_for

CU = [0, 5, 5, 30, 47]


def both(ratio: int = 1, max_len: int = 25) -> tuple[CausalLayout, CausalLayout]:
    host = CausalLayout.packed(CU, ratio=ratio, num_q=50, num_k=50)
    # Entries that repeat the last one are documents that are not there: a buffer of fixed size is filled up so.
    cu = torch.tensor([*CU, 47, 47], dtype=torch.int32)
    return host, CausalLayout.on_device(cu, num_q=50, num_k=50, max_len=max_len, ratio=ratio)


@pytest.mark.parametrize("ratio", [1, 3, 4])
@pytest.mark.parametrize("max_len", [25, 40, 1000])
def test_windows_and_results_are_those_of_the_host_layout(ratio: int, max_len: int) -> None:
    host, device = both(ratio, max_len)
    for got, wanted in zip(device.bounds(), host.bounds(), strict=True):
        assert torch.equal(got, wanted)
    x = grid_tensors(host).requires_grad_()
    options: dict[str, Any] = {"top_k": 6, "value_dim": 16, "softmax_scale": 0.2}
    for attend, loss in (("selected", "selected"), ("visible", "visible")):
        results = [dsa_attention(*x.dsa(), y, attend=attend, loss=loss, **options) for y in (device, host)]
        for result in results:
            assert result.loss is not None
        gradients = [torch.autograd.grad(r.out.sum() + r.loss, x.all()) for r in results]  # type: ignore[operator]
        torch.testing.assert_close(results[0].out, results[1].out)
        torch.testing.assert_close(results[0].loss, results[1].loss)
        for got, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(got, wanted)
    ids = [indexer_topk(*x.index(), y, top_k=6).indices for y in (device, host)]
    assert torch.equal(*ids)


@pytest.mark.parametrize("budget", [1, 2000, 10**8])
@pytest.mark.parametrize("ratio", [1, 4])
def test_blind_blocks_hold_every_window(budget: int, ratio: int) -> None:
    _, device = both(ratio)
    start, end = device.bounds()
    covered = torch.zeros(50, dtype=torch.int64)
    for block in blocks_for(device, 4, budget):
        for row in range(block.q_begin, block.q_end):
            covered[row] += 1
            assert start[row] == end[row] or (block.k_begin <= start[row] and end[row] <= block.k_end)
    assert bool((covered[end > start] == 1).all())
    assert int(covered.max()) == 1


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 30], "no document is longer than max_len"),
        ([1, 5], "starts at 0"),
        ([0, 9, 5], "does not decrease"),
        ([0, 20, 40, 60], "documents fit num_q and num_k"),
    ],
)
def test_wrong_lengths_are_refused(cu: list[int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        CausalLayout.on_device(torch.tensor(cu), num_q=50, num_k=50, max_len=25)


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("cu", [[0, 5], torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(0).long()])
def test_cu_seqlens_is_an_integer_tensor(cu: Any) -> None:
    with pytest.raises(BadInput, match="cu_seqlens"):
        CausalLayout.on_device(cu, num_q=50, num_k=50, max_len=25)


def test_what_the_host_does_not_know_is_refused() -> None:
    _, device = both()
    for ask in (
        lambda: device.segments,
        lambda: device.table,
        lambda: device.slice_queries(0, 5),
        lambda: indexer_topk(*grid_tensors(device).index(), device, top_k=3).to_ids(device, space="local"),
    ):
        with pytest.raises(UnsupportedProblem, match="device layout"):
            ask()


def test_two_device_layouts_are_equal_only_if_they_are_the_same() -> None:
    _, one = both()
    _, other = both()
    assert isinstance(one, DeviceLayout)
    assert one == one
    assert one != other
    assert len({one, other}) == 2
    assert "on_device(6 documents on cpu" in repr(one)


def test_a_live_buffer_is_read_when_it_is_used() -> None:
    cu = torch.tensor([0, 10, 20])
    layout = CausalLayout.on_device(cu, num_q=20, num_k=20, max_len=20)
    cu[1] = 5
    start, _ = layout.bounds()
    assert start.tolist() == [0] * 5 + [5] * 15
