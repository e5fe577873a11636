"""The simulated indexer backward kernels: formula, divisor, id spaces of every release, destroyed buffers, gates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cudnn_inputs import (
    DENSE_KEYS,
    HEADS,
    KEYS,
    ROWS,
    SLOTS,
    WIDTH,
    dense_gradients,
    dense_inputs,
    flat,
    sparse_gradients,
    sparse_inputs,
)
from cudnn_literal import ARCHS, error, grid, indexer_gradients
from torch import Tensor

from dsattn.backends.cudnn.simulator import SimulatedFrontend

NAMES = ("d_index_q", "d_weights", "d_index_k")
ONE = torch.ones(1, device="cpu")


def frontend(version: str, arch: str, **rest: Any) -> SimulatedFrontend:
    return SimulatedFrontend(version, arch, races=False, **rest)


def run(version: str, arch: str, x: dict[str, Tensor], **rest: Any) -> dict[str, Tensor]:
    copies = {name: value.clone() for name, value in x.items()}
    return frontend(version, arch).indexer_backward_wrapper(**copies, **{"grad_loss": ONE, **rest})


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", ["1.25.0", "1.26.0", "1.29.1", "1.32.0"])
def test_explicit_flat_ids_give_the_formula_on_every_release(version: str, arch: str) -> None:
    x = flat(sparse_inputs())
    flag = {} if version == "1.25.0" else {"topk_indices_global": True}
    buffer = torch.zeros_like(x["index_k"], dtype=torch.float32)
    got = run(version, arch, x, sm_scale=0.5, loss_coeff=3.0, grad_loss=ONE * 2, d_index_k=buffer, **flag)
    # The divisor counts every row of the call.
    wanted = sparse_gradients(x, 3.0 * 2 / 6, 0.5)
    assert error(got["d_index_k"].flatten(0, 1), wanted[2]) < 1e-5
    for name, value in zip(NAMES[:2], wanted, strict=False):
        assert got[name].dtype == torch.bfloat16
        assert error(got[name].flatten(0, 1), value) < 4e-3
    assert run(version, arch, x, **flag)["d_index_k"].dtype == torch.bfloat16


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", ["1.25.0", "1.26.0", "1.28.0", "1.29.1", "1.31.0", "1.32.0"])
def test_a_naive_caller_with_two_batches_loses_the_second_since_1_26(version: str, arch: str) -> None:
    """Flat ids and no flag, as a caller of 1.25 writes it."""
    x = flat(sparse_inputs())
    got, wanted = run(version, arch, x), sparse_gradients(x, 1 / 6)
    for name, value in zip(NAMES, wanted, strict=True):
        value = value.view(got[name].shape)
        assert error(got[name][0], value[0]) < 4e-3
        if version == "1.25.0":
            assert error(got[name][1], value[1]) < 4e-3
        else:
            assert not got[name][1].any(), f"{name} of batch 1 must be exactly zero"


def test_local_ids_where_flat_ones_are_expected() -> None:
    x = sparse_inputs()
    wanted = sparse_gradients(flat(x), 1 / 6)
    hopper = run("1.25.0", "sm90", x)
    assert not any(hopper[name][1].any() for name in NAMES)
    blackwell = run("1.25.0", "sm100", x)
    assert not blackwell["d_index_k"][1].any()
    misled = sparse_gradients(x, 1 / 6)[2]
    assert error(blackwell["d_index_k"][0], misled[:KEYS]) < 4e-3, "batch 1 goes to the keys of batch 0"
    assert error(blackwell["d_index_k"][0], wanted[2][:KEYS]) > 0.1


def test_flat_ids_under_the_local_default_with_three_batches() -> None:
    x = flat(sparse_inputs(batch=3))
    shifted = x["topk_indices"].clone()
    shifted[1] = torch.where(shifted[1] >= 0, shifted[1] + KEYS, -1)
    shifted[2] = -1
    misled = sparse_gradients({**x, "topk_indices": shifted}, 1 / 9)[2].view(3, KEYS, WIDTH)
    for version, arch in (("1.26.0", "sm100"), ("1.28.0", "sm100")):
        got = run(version, arch, x)["d_index_k"]
        assert error(got[2], misled[2]) < 4e-3, "batch 1 goes to the keys of batch 2"
        assert not got[1].any()
    for version, arch in (("1.26.0", "sm90"), ("1.29.0", "sm100")):
        assert not run(version, arch, x)["d_index_k"][1:].any()


@pytest.mark.parametrize(
    ("version", "arch", "gone"),
    [
        ("1.25.0", "sm90", {"attn_score"}),
        ("1.32.0", "sm90", {"attn_score"}),
        ("1.28.0", "sm100", {"attn_score", "index_score"}),
        ("1.29.0", "sm100", {"attn_score"}),
    ],
)
def test_the_score_buffers_are_destroyed(version: str, arch: str, gone: set[str]) -> None:
    x = sparse_inputs(batch=1)
    frontend(version, arch).indexer_backward_wrapper(**x, grad_loss=ONE)
    assert {name for name in ("attn_score", "index_score") if x[name].isnan().all()} == gone
    assert not any(x[name].isnan().any() for name in {"attn_score", "index_score"} - gone)


def test_underflowed_students_lose_the_teachers_term() -> None:
    x = sparse_inputs(batch=1, rows=1)
    x["index_score"][0, 0, 0] = 0.0
    # The other slots have been normalised without it.
    x["index_score"][0, 0, 1:4] = torch.tensor([0.5, 0.25, 0.25])
    got = run("1.30.0", "sm90", x, d_index_k=torch.zeros(1, KEYS, WIDTH))["d_index_k"][0]
    assert error(got, sparse_gradients(x, 1.0)[2]) < 1e-5
    wrong = x["index_score"] - x["attn_score"]
    true = indexer_gradients(x["index_q"][0], x["index_k"][0], x["weights"][0], wrong[0], x["topk_indices"][0])[2]
    assert error(got, true) > 0.1
    x["index_score"][0, 0, 0] = 1e-42
    kept = [run_with_seed(x, seed)["d_index_k"][0] for seed in range(8)]
    clipped = {error(value, got) < 1e-5 for value in kept}
    assert clipped == {True, False}, "whether a denormal probability counts is left open"


def run_with_seed(x: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    copies = {name: value.clone() for name, value in x.items()}
    buffer = torch.zeros(1, KEYS, WIDTH)
    return frontend("1.30.0", "sm90", seed=seed).indexer_backward_wrapper(**copies, grad_loss=ONE, d_index_k=buffer)


def test_the_order_of_atomics_differs_from_call_to_call_but_not_for_the_query() -> None:
    x = sparse_inputs(batch=1, rows=24, keys=8)
    x["index_q"] = torch.randn(1, 24, HEADS, WIDTH).bfloat16()
    simulated = frontend("1.30.0", "sm90")
    calls = [
        simulated.indexer_backward_wrapper(
            **{name: value.clone() for name, value in x.items()}, grad_loss=ONE, d_index_k=torch.zeros(1, 8, WIDTH)
        )
        for _ in range(4)
    ]
    assert all(torch.equal(calls[0]["d_index_q"], call["d_index_q"]) for call in calls)
    assert not all(torch.equal(calls[0]["d_index_k"], call["d_index_k"]) for call in calls)
    assert all(error(call["d_index_k"], calls[0]["d_index_k"]) < 1e-5 for call in calls)


def test_a_float32_buffer_is_added_to_before_1_28() -> None:
    x = sparse_inputs(batch=1)
    clean = run("1.28.0", "sm100", x, d_index_k=torch.full((1, KEYS, WIDTH), 7.0))["d_index_k"]
    added = run("1.27.0", "sm100", x, d_index_k=torch.full((1, KEYS, WIDTH), 7.0))["d_index_k"]
    assert torch.allclose(added, clean + 7, atol=1e-6)
    assert error(clean.flatten(0, 1), sparse_gradients(x, 1 / 3)[2]) < 1e-5


def test_gates_of_the_sparse_backward() -> None:
    x = sparse_inputs(batch=1)
    for bad, kind in ((1.0, TypeError), (torch.ones(2), ValueError), (torch.ones(1, dtype=torch.float64), ValueError)):
        with pytest.raises(kind, match="grad_loss"):
            run("1.27.0", "sm90", x, grad_loss=bad)
    assert error(run("1.26.0", "sm90", x, grad_loss=2.0)["d_index_q"], 2 * run("1.26.0", "sm90", x)["d_index_q"]) == 0
    few = sparse_inputs(batch=1, heads=32)
    for version, arch in (("1.32.0", "sm90"), ("1.31.0", "sm100")):
        with pytest.raises(AssertionError, match="heads"):
            run(version, arch, few)
    assert run("1.32.0", "sm100", few)
    many = sparse_inputs(batch=1, heads=128)
    with pytest.raises(RuntimeError, match="heads"):
        run("1.32.0", "sm90", many)
    assert run("1.26.0", "sm100", many)
    short = {**x, **{name: x[name][..., :64].contiguous() for name in ("attn_score", "index_score", "topk_indices")}}
    with pytest.raises(AssertionError, match="topk"):
        run("1.32.0", "sm100", short)
    with pytest.raises(ValueError, match="bfloat16"):
        run("1.30.0", "sm90", {**x, "weights": x["weights"].float()})
    with pytest.raises(ValueError, match="d_weights"):
        run("1.28.0", "sm100", x, d_weights=torch.zeros(1, 3, HEADS))
    with pytest.raises(ValueError, match="index_k must be contiguous"):
        frontend("1.28.0", "sm90").indexer_backward_wrapper(**{**x, "index_k": grid(1, WIDTH, KEYS).mT}, grad_loss=ONE)
    with pytest.raises(RuntimeError, match="sm100_v2"):
        run("1.28.0", "sm90", x, backend="sm100_v2")
    with pytest.raises(ValueError, match="deterministic"):
        run("1.32.0", "sm90", x, deterministic=True)
    with pytest.raises(RuntimeError, match="configuration"):
        run("1.25.0", "sm100", long_inputs(65536))


def long_inputs(rows: int) -> dict[str, Tensor]:
    scores = torch.zeros(1, rows, SLOTS)
    ids = torch.zeros(1, rows, SLOTS, dtype=torch.int32)
    q, k, w = torch.zeros(1, rows, HEADS, 2), torch.zeros(1, 2, 2), torch.zeros(1, rows, HEADS)
    half = {"index_q": q.bfloat16(), "index_k": k.bfloat16(), "weights": w.bfloat16()}
    return {**half, "attn_score": scores, "index_score": scores, "topk_indices": ids}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("version", "offset"), [("1.25.0", 4), ("1.26.0", 0), ("1.28.0", 2), ("1.32.0", -1)])
def test_the_dense_backward_uses_visible_scores_only(version: str, offset: int, arch: str) -> None:
    x, target, predict = dense_inputs(offset)
    told = {"q_causal_offsets": torch.tensor([offset], dtype=torch.int32)} if version in {"1.28.0", "1.32.0"} else {}
    got = frontend(version, arch).dense_indexer_backward_wrapper(
        **x, grad_loss=ONE, loss_coeff=2.0, d_index_k=torch.full((1, DENSE_KEYS, WIDTH), 5.0), **told
    )
    wanted = dense_gradients(x, target, predict, 2.0 / ROWS)
    assert error(got["d_index_k"][0], wanted[2]) < 1e-5
    assert error(got["d_index_q"][0], wanted[0]) < 4e-3
    assert error(got["d_weights"][0], wanted[1]) < 4e-3
    gone = "attn_score" if (version, arch) == ("1.25.0", "sm90") else "index_score"
    assert x[gone].isnan().all()


def test_hopper_1_25_ignores_the_given_normalisers() -> None:
    x, target, predict = dense_inputs(4)
    wanted = dense_gradients(x, target, predict, 1 / ROWS)[2]
    for version, arch, ignores in (("1.25.0", "sm90", True), ("1.25.0", "sm100", False)):
        call = {**dense_inputs(4)[0], "attn_l1norm": x["attn_l1norm"] * 3, "index_lse": x["index_lse"] + 1}
        got = frontend(version, arch).dense_indexer_backward_wrapper(**call, grad_loss=ONE)["d_index_k"][0]
        assert (error(got, wanted) < 1e-2) == ignores


def test_the_packed_dense_backward_divides_by_all_rows() -> None:
    x, target, predict = dense_inputs(0)
    packed = {name: torch.cat((value[0], value[0])) for name, value in x.items()}
    cu = torch.tensor([0, ROWS, 2 * ROWS], dtype=torch.int32)
    keys = torch.tensor([0, DENSE_KEYS, 2 * DENSE_KEYS], dtype=torch.int32)
    got = frontend("1.29.1", "sm100").dense_indexer_backward_wrapper(
        **packed, grad_loss=ONE, cu_seqlens_q=cu, cu_seqlens_k=keys, d_index_k=torch.zeros(2 * DENSE_KEYS, WIDTH)
    )["d_index_k"]
    wanted = dense_gradients(x, target, predict, 1 / (2 * ROWS))[2]
    assert error(got[:DENSE_KEYS], wanted) < 1e-5
    assert error(got[DENSE_KEYS:], wanted) < 1e-5


def test_gates_of_the_dense_backward() -> None:
    x, _, _ = dense_inputs(0)
    turned = {name: value for name, value in x.items() if name not in {"attn_score", "index_score", "index_k"}}
    small = {"index_k": x["index_k"][:, :2].contiguous()}
    small |= {name: x[name][..., :2].contiguous() for name in ("attn_score", "index_score")}
    with pytest.raises(ValueError, match="seqlen_q"):
        frontend("1.25.0", "sm100").dense_indexer_backward_wrapper(**turned, **small, grad_loss=ONE)
    assert frontend("1.27.0", "sm100").dense_indexer_backward_wrapper(**turned, **small, grad_loss=ONE)
    few = {**x, "index_q": x["index_q"][:, :, :32].contiguous(), "weights": x["weights"][..., :32].contiguous()}
    for arch in ARCHS:
        with pytest.raises(ValueError, match="heads"):
            frontend("1.32.0", arch).dense_indexer_backward_wrapper(**few, grad_loss=ONE)
    with pytest.raises(ValueError, match="index_lse"):
        frontend("1.32.0", "sm90").dense_indexer_backward_wrapper(**{**x, "index_lse": ONE}, grad_loss=ONE)
    with pytest.raises(TypeError, match="grad_loss"):
        frontend("1.32.0", "sm90").dense_indexer_backward_wrapper(**x, grad_loss=1.0)
