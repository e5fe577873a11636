"""The simulated indexer_forward and dense score recomputations, against loops and by release."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cudnn_literal import ARCHS, error, grid, mass, scores, visible_keys
from torch import Tensor

from dsattn.backends.cudnn.simulator import SimulatedFrontend

NONE = -math.inf


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def bshd(rows: int, keys: int, heads: int = 32, batch: int = 1) -> dict[str, Tensor]:
    return {
        "q": grid(batch, rows, heads, 128),
        "k": grid(batch, keys, 1, 128, seed=1),
        "w": grid(batch, rows, heads, seed=2),
    }


def thd(q_lens: tuple[int, ...], k_lens: tuple[int, ...], heads: int = 32) -> dict[str, Any]:
    return {
        "q": grid(sum(q_lens), heads, 128),
        "k": grid(sum(k_lens), 1, 128, seed=1),
        "w": grid(sum(q_lens), heads, seed=2),
        "cu_seqlens_q": ints(0, *torch.tensor(q_lens).cumsum(0).tolist()),
        "cu_seqlens_k": ints(0, *torch.tensor(k_lens).cumsum(0).tolist()),
        "max_seqlen_q": max(q_lens),
        "max_seqlen_k": max(k_lens),
    }


def literal(x: dict[str, Tensor], offset: int, ratio: int, scale: float = 1.0, b: int = 0) -> Tensor:
    return scores(x["q"][b], x["k"][b, :, 0], x["w"][b], offset, ratio, scale)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("version", "offset"), [("1.25.0", 5), ("1.26.0", 0), ("1.29.1", 0), ("1.32.0", 0)])
def test_a_naive_forward_masks_from_the_other_corner_since_1_26(version: str, offset: int, arch: str) -> None:
    x = bshd(rows=3, keys=8)
    got = SimulatedFrontend(version, arch).indexer_forward_wrapper(**x, ratio=1, sm_scale=0.5)["scores"]
    assert torch.equal(got[0], literal(x, offset, 1, 0.5))
    first_row = [4.0, 1.0][offset == 0] if offset == 0 else 6
    assert int(got[0, 0].isfinite().sum()) == first_row


@pytest.mark.parametrize("arch", ARCHS)
def test_offsets_ratio_and_batches_in_the_forward(arch: str) -> None:
    x = bshd(rows=4, keys=3, batch=2)
    frontend = SimulatedFrontend("1.28.0", arch)
    got = frontend.indexer_forward_wrapper(**x, ratio=2, q_causal_offsets=ints(3, -2))["scores"]
    assert torch.equal(got[0], literal(x, 3, 2))
    assert torch.equal(got[1], literal(x, -2, 2, b=1))
    assert bool((got[1, :3] == NONE).all()), "rows before the first key see nothing"
    default = frontend.indexer_forward_wrapper(**x)["scores"]
    assert torch.equal(default[0], literal(x, 0, 4)), "the ratio of this wrapper is 4 unless the call gives one"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("version", ["1.25.0", "1.26.0"])
def test_packed_forward_has_local_columns_and_its_own_offset_per_sequence(version: str, arch: str) -> None:
    x = thd((2, 3), (4, 2))
    got = SimulatedFrontend(version, arch).indexer_forward_wrapper(**x, ratio=1)["scores"]
    offsets = (2, -1) if version == "1.25.0" else (0, 0)
    assert got.shape == (5, 4)
    assert torch.equal(got[:2], scores(x["q"][:2], x["k"][:4, 0], x["w"][:2], offsets[0]))
    assert torch.equal(got[2:, :2], scores(x["q"][2:], x["k"][4:, 0], x["w"][2:], offsets[1]))
    assert bool((got[2:, 2:] == NONE).all())


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("version", "refuses"),
    [("1.25.0", True), ("1.26.0", False), ("1.27.0", "sm100"), ("1.31.0", "sm100"), ("1.32.0", False)],
)
def test_more_rows_than_keys_is_refused_by_some_releases(version: str, refuses: bool | str, arch: str) -> None:
    call = {**bshd(rows=5, keys=2), "ratio": 2}
    wrapper = SimulatedFrontend(version, arch).indexer_forward_wrapper
    if refuses in {True, arch}:
        with pytest.raises(ValueError, match=r"seqlen_q \(5\) must be <= seqlen_k \* ratio \(4\)"):
            wrapper(**call)
    else:
        assert wrapper(**call)["scores"].shape == (1, 5, 2)
    call = {**bshd(rows=6, keys=2), "ratio": 2}
    if version == "1.32.0" and arch == "sm100":
        with pytest.raises(ValueError, match="seqlen_q"):
            wrapper(**call)


def test_heads_dtypes_and_widths_of_the_forward() -> None:
    def heads_taken(version: str, arch: str) -> list[int]:
        taken = []
        for heads in (4, 8, 16, 32, 64, 128):
            try:
                SimulatedFrontend(version, arch).indexer_forward_wrapper(**bshd(2, 2, heads))
            except (ValueError, AssertionError):
                continue
            taken.append(heads)
        return taken

    assert heads_taken("1.25.0", "sm90") == heads_taken("1.31.0", "sm100") == [32, 64]
    assert heads_taken("1.27.0", "sm90") == [16, 32, 64]
    assert heads_taken("1.32.0", "sm100") == [4, 8, 16, 32, 64]
    x = bshd(2, 2)
    for version, refuses in (("1.30.0", True), ("1.31.0", False)):
        wrapper = SimulatedFrontend(version, "sm100").indexer_forward_wrapper
        if refuses:
            with pytest.raises(AssertionError, match="bfloat16"):
                wrapper(**{**x, "w": x["w"].float()})
        else:
            assert wrapper(**{**x, "w": x["w"].float()}, ratio=1)["scores"].isfinite().any()
    with pytest.raises(NotImplementedError, match="unit last stride"):
        SimulatedFrontend("1.31.0", "sm90").indexer_forward_wrapper(**{**x, "w": grid(1, 32, 2).float().mT})
    with pytest.raises(AssertionError, match="head_dim"):
        SimulatedFrontend("1.31.0", "sm90").indexer_forward_wrapper(
            **{**x, "q": x["q"][..., :64], "k": x["k"][..., :64]}
        )


def test_slices_of_offsets_and_cu_seqlens_are_misaligned() -> None:
    x = thd((2, 3), (2, 3))
    x["cu_seqlens_q"] = ints(7, 0, 2, 5)[1:]
    for version in ("1.25.0", "1.32.0"):
        with pytest.raises(ValueError, match="Misaligned"):
            SimulatedFrontend(version, "sm90").indexer_forward_wrapper(**x)
    with pytest.raises(ValueError, match="Misaligned"):
        SimulatedFrontend("1.28.0", "sm100").indexer_forward_wrapper(**bshd(2, 2), q_causal_offsets=ints(1, 0)[1:])
    with pytest.raises(ValueError, match=r"shape \(1,\)"):
        SimulatedFrontend("1.28.0", "sm100").indexer_forward_wrapper(**bshd(2, 2), q_causal_offsets=ints(1, 0))
    with pytest.raises(ValueError, match="int32"):
        SimulatedFrontend("1.28.0", "sm100").indexer_forward_wrapper(
            **bshd(2, 2), q_causal_offsets=torch.zeros(1, dtype=torch.int64)
        )


def test_what_else_the_forward_returns_and_refuses() -> None:
    x = bshd(2, 6)
    strided = SimulatedFrontend("1.26.0", "sm100").indexer_forward_wrapper(**x)["scores"]
    assert strided.stride() == (16, 8, 1)
    assert SimulatedFrontend("1.27.0", "sm100").indexer_forward_wrapper(**x)["scores"].is_contiguous()
    hopper = SimulatedFrontend("1.27.0", "sm90")
    result = hopper.indexer_forward_wrapper(**x, ratio=1, return_lse=True)
    assert torch.equal(result["lse"], result["scores"].logsumexp(-1))
    with pytest.raises(NotImplementedError, match="lse"):
        SimulatedFrontend("1.27.0", "sm100").indexer_forward_wrapper(**x, return_lse=True)
    with pytest.raises(ValueError, match="tuning"):
        hopper.indexer_forward_wrapper(**x, n_block_size=64)
    out = torch.zeros(1, 2, 6)
    assert hopper.indexer_forward_wrapper(**x, ratio=1, out=out)["scores"] is out
    assert torch.equal(out, result["scores"])


def test_a_nan_in_q_or_k_is_lost_in_the_relu_and_one_in_the_weights_is_not() -> None:
    for arch in ARCHS:
        wrapper = SimulatedFrontend("1.32.0", arch).indexer_forward_wrapper
        x = bshd(2, 2)
        x["k"][0, 0, 0, 5] = math.nan
        got = wrapper(**x, ratio=1)["scores"]
        assert got[0, :, 0].tolist() == [0.0, 0.0]
        x = bshd(2, 2)
        x["w"][0, 1, 3] = math.nan
        assert wrapper(**x, ratio=1)["scores"].isnan().tolist() == [[[False, False], [True, True]]]


def test_a_zero_score_may_be_minus_zero() -> None:
    x = {**bshd(1, 8), "q": torch.zeros(1, 1, 32, 128, dtype=torch.bfloat16)}
    got = SimulatedFrontend("1.32.0", "sm90").indexer_forward_wrapper(**x, ratio=1, q_causal_offsets=ints(7))["scores"]
    assert got.signbit().any()
    assert not got.signbit().all()


def dense_call(x: dict[str, Any], attention: bool) -> tuple[str, dict[str, Any]]:
    aux = x["w"].float() if attention else x["w"]
    rest = {name: value for name, value in x.items() if name != "w"}
    if attention:
        return "dense_attn_score_recompute_wrapper", {**rest, "lse": aux + 3, "softmax_scale": 0.25}
    return "dense_indexer_score_recompute_wrapper", {**rest, "weights": aux, "sm_scale": 0.5}


FILLS = [
    ("1.25.0", "sm90", "zero"),
    ("1.25.0", "sm100", "zero"),
    ("1.26.0", "sm90", "mixed"),
    ("1.29.1", "sm90", "mixed"),
    ("1.30.0", "sm90", "none"),
    ("1.26.0", "sm100", "none"),
    ("1.32.0", "sm100", "none"),
]


@pytest.mark.parametrize("attention", [False, True], ids=["indexer", "attention"])
@pytest.mark.parametrize(("version", "arch", "fill"), FILLS)
def test_dense_scores_and_what_stands_where_they_are_masked(
    version: str, arch: str, fill: str, attention: bool
) -> None:
    rows, keys = 2, 70
    x = bshd(rows, keys, heads=32)
    name, call = dense_call(x, attention)
    result = getattr(SimulatedFrontend(version, arch), name)(**call)
    offset = keys - rows if version == "1.25.0" else 0
    for i in range(rows):
        seen = visible_keys(i, offset, 1, keys)
        if attention:
            wanted = [mass(x["q"][0, i], x["k"][0, j, 0], call["lse"][0, i], 0.25) for j in range(seen)]
            denom = sum(wanted)
        else:
            wanted = scores(x["q"][0], x["k"][0, :, 0], x["w"][0], offset, 1, 0.5)[i, :seen].tolist()
            denom = math.log(sum(math.exp(value) for value in wanted))
        assert result["out"][0, i, :seen].tolist() == pytest.approx(wanted, rel=1e-5)
        assert float(result["denom"][0, i]) == pytest.approx(denom, rel=1e-5)
        tile = -(-seen // 64) * 64
        masked = {"zero": [0.0] * (keys - seen), "none": [NONE] * (keys - seen)}
        masked["mixed"] = [0.0 if j < tile else NONE for j in range(seen, keys)]
        assert result["out"][0, i, seen:].tolist() == masked[fill]


@pytest.mark.parametrize(
    ("version", "arch"), [("1.25.0", "sm90"), ("1.25.0", "sm100"), ("1.26.0", "sm100"), ("1.32.0", "sm90")]
)
def test_a_row_without_a_key_has_a_denominator_of_its_release(version: str, arch: str) -> None:
    x = bshd(rows=2, keys=2, heads=32)
    frontend = SimulatedFrontend(version, arch)
    offsets = {} if version == "1.25.0" else {"q_causal_offsets": ints(-1)}
    if version == "1.25.0":
        x = bshd(rows=3, keys=2, heads=32)
    for attention in (False, True):
        name, call = dense_call(x, attention)
        empty = float(getattr(frontend, name)(**call, **offsets)["denom"][0, 0])
        if attention:
            assert empty == 0.0
        else:
            assert math.isnan(empty) if (version, arch) == ("1.25.0", "sm100") else empty == NONE


@pytest.mark.parametrize(
    ("version", "arch"), [("1.25.0", "sm90"), ("1.25.0", "sm100"), ("1.26.0", "sm90"), ("1.26.0", "sm100")]
)
def test_columns_past_the_own_keys_of_a_packed_sequence(version: str, arch: str) -> None:
    x = thd((2, 2), (2, 130), heads=32)
    result = SimulatedFrontend(version, arch).dense_indexer_score_recompute_wrapper(**dense_call(x, False)[1])
    past = result["out"][0, 2:]
    if (version, arch) == ("1.25.0", "sm100"):
        assert past[:126].tolist() == [0.0] * 126
        assert past[126:].isnan().all(), "memory that no tile covers"
    else:
        assert past.tolist() == [NONE] * 128
    rows_of_none = thd((2, 1), (2, 3), heads=32)
    rows_of_none["cu_seqlens_q"] = ints(0, 2, 2)
    result = SimulatedFrontend(version, arch).dense_indexer_score_recompute_wrapper(
        **dense_call(rows_of_none, False)[1]
    )
    assert result["denom"][2].isnan(), "a row of no sequence has no denominator"


def test_a_callers_own_buffer_keeps_its_content_where_1_24_writes_nothing() -> None:
    x = bshd(rows=200, keys=200, heads=32)
    out = torch.full((1, 200, 200), 7.0)
    call = dense_call(x, False)[1]
    for version, kept in (("1.24.0", 7.0), ("1.25.0", 0.0)):
        result = SimulatedFrontend(version, "sm90").dense_indexer_score_recompute_wrapper(**call, out=out.clone())
        assert result["out"][0, 0, 1:64].tolist() == [0.0] * 63
        assert result["out"][0, 0, 64:].tolist() == [kept] * 136


def test_gates_of_the_dense_scores() -> None:
    name, call = dense_call(bshd(2, 2, heads=96), False)
    with pytest.raises(AssertionError, match="heads"):
        getattr(SimulatedFrontend("1.30.0", "sm90"), name)(**call)
    assert getattr(SimulatedFrontend("1.29.1", "sm100"), name)(**call)
    name, call = dense_call(bshd(2, 2, heads=32), False)
    narrow = {**call, "q": call["q"][..., :64].contiguous(), "k": call["k"][..., :64].contiguous()}
    assert getattr(SimulatedFrontend("1.29.1", "sm100"), name)(**narrow)
    with pytest.raises(AssertionError, match="head_dim"):
        getattr(SimulatedFrontend("1.30.0", "sm100"), name)(**narrow)
    with pytest.raises(ValueError, match="bfloat16"):
        getattr(SimulatedFrontend("1.32.0", "sm100"), name)(**{**call, "weights": call["weights"].float()})
    with pytest.raises(ValueError, match="both"):
        getattr(SimulatedFrontend("1.32.0", "sm100"), name)(**call, cu_seqlens_q=ints(0, 2))


def test_dense_scores_of_a_large_block_agree_with_one_product() -> None:
    """More rows than one step takes: the blocks are put together rightly."""
    rows, keys, heads = 300, 600, 64
    x = {"q": torch.randn(rows, heads, 128), "k": torch.randn(keys, 128), "w": torch.randn(rows, heads)}
    x = {name: value.bfloat16() for name, value in x.items()}
    call = {"q": x["q"][None], "k": x["k"][None, :, None], "w": x["w"][None], "ratio": 1}
    got = SimulatedFrontend("1.29.1", "sm100").indexer_forward_wrapper(**call, q_causal_offsets=ints(300))["scores"][0]
    products = torch.einsum("rhd,kd->rhk", x["q"].double(), x["k"].double()).relu()
    wanted = torch.einsum("rhk,rh->rk", products, x["w"].double())
    seen = torch.arange(keys) < torch.arange(301, 601)[:, None]
    assert torch.equal(got.isfinite(), seen)
    assert error(got[seen], wanted[seen]) < 1e-6
