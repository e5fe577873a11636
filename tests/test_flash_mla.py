"""The flash_mla backend on a CPU stand-in of every release, against the oracle; a GPU is not needed."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from flash_mla_calls import NUM_K, call, faults, run
from flash_mla_fake import ARCHS, RELEASES, FakeFlashMLA, ProcessEnded

from dsattn import TopK, sparse_attention
from dsattn.backends import flash_mla
from dsattn.backends.flash_mla import FlashMLABackend
from dsattn.backends.torch_backend import TorchBackend
from dsattn.errors import ContractDrift, UnsupportedProblem
from dsattn.ops.inputs import AttentionInputs

HOPPER_OR_BLACKWELL = {"sm90": (9, 0), "sm100": (10, 0)}
# Heads, columns, columns of values, slots.
SIZES = [
    (4, 24, 16, 5),
    (64, 576, 512, 130),
    (128, 512, 512, 7),
    (65, 520, 512, 128),
    (16, 512, 448, 129),
    (1, 576, 1, 1),
    (192, 96, 64, 12),
    (130, 513, 512, 3),
    (256, 40, 40, 9),
]


def any_fake(seed: int) -> FakeFlashMLA:
    """A release with the freedoms that a seed picks."""
    choice = random.Random(seed)
    return FakeFlashMLA(
        release=choice.choice(("first", "second", "branch", "fork")),
        arch=choice.choice(ARCHS),
        base2=choice.random() < 0.5,
        empty_lse=choice.choice((math.inf, -math.inf, math.nan, 0.0)),
        empty_out=choice.choice((math.nan, math.inf, 0.0)),
        sink_in_lse=choice.random() < 0.3,
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_results_are_within_the_budgets(size: tuple[int, int, int, int], seed: int) -> None:
    torch.manual_seed(seed)
    sink = torch.randn(size[0]) if seed else None
    assert run(any_fake(100 * seed + sum(size)), *call(*size, sink=sink)) == []


@pytest.mark.parametrize("base2", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("release", RELEASES)
def test_every_release_on_every_gpu_gives_the_same_results(release: str, arch: str, base2: bool) -> None:
    fake = FakeFlashMLA(release, arch, base2)
    a, topk = call(sink=torch.randn(3))
    if not fake.runs:
        with pytest.raises(UnsupportedProblem, match="only supported on SM100f"):
            FlashMLABackend(fake).sparse_attention(a, topk)
        return
    for empty_lse, empty_out in itertools.product((math.inf, -math.inf, math.nan), (math.nan, 0.0)):
        fake.empty_lse, fake.empty_out = empty_lse, empty_out
        assert run(fake, a, topk) == []
    out, _ = TorchBackend().sparse_attention(a, topk)
    got, _ = FlashMLABackend(fake).sparse_attention(a, topk)
    torch.testing.assert_close(got, out, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("release", ["first", "second"])
@pytest.mark.parametrize("sink_in_lse", [False, True])
@pytest.mark.parametrize("sink", [[-math.inf, 0.5, math.inf], [2.4e38, -2.4e38, -80.0], [30.0, -30.0, 0.0]], ids=str)
def test_sinks_of_any_size(sink: list[float], sink_in_lse: bool, release: str) -> None:
    fake = FakeFlashMLA(release, sink_in_lse=sink_in_lse)
    assert run(fake, *call(sink=torch.tensor(sink))) == []


@pytest.mark.parametrize("scale", [30.0, -0.2, -30.0, 0.0, -0.0, 1e-42, -1e-60, 5e-324, 1e-30])
@pytest.mark.parametrize("release", ["first", "second"])
def test_scales_of_any_size_and_sign(scale: float, release: str) -> None:
    assert run(FakeFlashMLA(release), *call(k=20, scale=scale, sink=torch.randn(3))) == []


def test_keys_that_no_row_selects_are_not_read() -> None:
    a, topk = call()
    selected = topk.indices[topk.indices >= 0].unique().long()
    kv = torch.full_like(a.kv, math.nan)
    kv[selected] = a.kv[selected]
    a = replace(a, kv=kv)
    assert selected.numel() < NUM_K
    out, lse = FlashMLABackend(FakeFlashMLA()).sparse_attention(a, topk)
    assert faults(replace(a, kv=a.kv.nan_to_num()), topk, out, lse) == []


def test_views_are_taken() -> None:
    a, topk = call(64, 512, 512, 128)
    q = torch.zeros(9, 64, 514, dtype=torch.bfloat16)[..., 1:513].copy_(a.q)
    # Contiguous, and two bytes off every alignment.
    kv = torch.zeros(NUM_K * 512 + 1, dtype=torch.bfloat16)[1:].view(NUM_K, 512).copy_(a.kv)
    ids = torch.zeros(9 * 128 + 1, dtype=torch.int32)[1:].view(9, 128).copy_(topk.indices)
    lengths = torch.zeros(18, dtype=torch.int32)[::2].copy_(topk.lengths)
    topk = TopK._trusted(ids, lengths, None, num_q=9, num_k=NUM_K)
    before = [x.clone() for x in (q, kv, ids, lengths)]
    for release in ("second", "third"):
        assert run(FakeFlashMLA(release, "sm100"), replace(a, q=q, kv=kv), topk) == []
    assert all(map(torch.equal, before, (q, kv, ids, lengths)))


def test_nothing_to_attend_to_calls_no_kernel() -> None:
    fake = FakeFlashMLA("first")
    for t, keys, slots in ((0, 3, 2), (2, 0, 2), (2, 3, 0)):
        a = AttentionInputs(torch.ones(t, 3, 24).bfloat16(), torch.ones(keys, 24).bfloat16(), 16, 1.0, torch.ones(3))
        ids = torch.full((t, slots), -1, dtype=torch.int32)
        topk = TopK(ids, torch.zeros(t, dtype=torch.int32), num_q=t, num_k=keys)
        out, lse = FlashMLABackend(fake).sparse_attention(a, topk)
        assert out.shape == (t, 3, 16)
        assert not out.any()
        assert lse.shape == (t, 3)
        assert (lse == -math.inf).all()
    assert fake.calls == []


@pytest.mark.parametrize(("h", "heads"), [(1, [64]), (64, [64]), (65, [128]), (192, [128, 64]), (300, [128, 128, 64])])
def test_heads_run_in_the_fewest_groups(h: int, heads: list[int]) -> None:
    fake = FakeFlashMLA()
    backend = FlashMLABackend(fake)
    a, topk = call(h, sink=torch.randn(h))
    backend.sparse_attention(*call())
    fake.calls.clear()
    out, lse = backend.sparse_attention(a, topk)
    assert faults(a, topk, out, lse) == []
    assert [(q[1], names) for q, _, names in fake.calls] == [(n, {"topk_length", "attn_sink"}) for n in heads]


@pytest.mark.parametrize("limit", [1, 64 * 512 * 4, 64 * 512 * 5 - 1])
@pytest.mark.parametrize("h", [3, 192])
def test_rows_are_cut_for_32_bit_addresses(h: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFlashMLA()
    backend = FlashMLABackend(fake)
    a, topk = call(h, sink=torch.randn(h))
    whole = backend.sparse_attention(a, topk)
    monkeypatch.setattr(flash_mla, "_MAX_ELEMENTS", limit)
    fake.calls.clear()
    cut = backend.sparse_attention(a, topk)
    assert all(map(torch.equal, cut, whole))
    assert len(fake.calls) > (2 if h == 192 else 1)
    assert all(math.prod(q) <= limit or q[0] == 1 for q, _, _ in fake.calls)


_PADDED = flash_mla._padded
WAYS: dict[str, tuple[FakeFlashMLA, dict[str, Any]]] = {
    "width": (FakeFlashMLA(), {"_WIDTHS": (24,)}),
    "columns of zeros": (FakeFlashMLA(), {"_padded": lambda x, *pads, value=0: _PADDED(x, *pads, value=value or 1)}),
    "heads": (FakeFlashMLA(), {"_HEADS": (3,)}),
    "ids of -1": (FakeFlashMLA(), {"_SLOTS": 64}),
    "the base of the log-sum-exp": (FakeFlashMLA(base2=True), {"replace": lambda kernel, **_: kernel}),
    "empty rows": (FakeFlashMLA(), {"_empty_rows_written": lambda out, lse, lengths: (out, lse)}),
    "the sign of the scale": (FakeFlashMLA(), {"_positive_scale": lambda q, scale: (q, scale)}),
    "the sink that a release lacks": (FakeFlashMLA("first"), {"torch": None}),
    "widths of the first release": (FakeFlashMLA("first"), {"_parameters": lambda function: {"topk_length"}}),
    "heads of the first release": (FakeFlashMLA("first", "sm100"), {"_HEADS": (64,)}),
}


class _SinkBlindTorch:
    """torch, with a sigmoid that keeps everything."""

    def __getattr__(self, name: str) -> Any:
        return torch.ones_like if name == "sigmoid" else getattr(torch, name)


@pytest.mark.parametrize("what", WAYS)
def test_each_guarantee_is_needed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right result without its mutant; a wrong one, or a refusal or the end of the process, with it."""
    fake, mutant = WAYS[what]
    a, topk = call(k=20, scale=-0.2, sink=torch.randn(3))
    assert run(fake, a, topk) == []
    for name, value in mutant.items():
        monkeypatch.setattr(flash_mla, name, _SinkBlindTorch() if value is None else value)
    try:
        found = run(fake, a, topk)
    except (UnsupportedProblem, ContractDrift, ProcessEnded) as error:
        found = [str(error)]
    assert found != []


def test_padding_with_a_real_key_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lengths are not taken, only -1 keeps padding out."""
    monkeypatch.setattr(flash_mla, "_padded", lambda x, *pads, value=0: _PADDED(x, *pads, value=max(0, value)))
    with pytest.raises(ContractDrift):
        run(FakeFlashMLA("first"), *call())


def test_alignment_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "_ALIGNMENT", 1)
    with pytest.raises(ProcessEnded, match="misaligned"):
        test_views_are_taken()


@pytest.mark.parametrize("arch", ARCHS)
def test_the_first_release_gets_64_heads_on_hopper_only(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER_OR_BLACKWELL[arch])
    fake = FakeFlashMLA("first", arch)
    seen = []

    def probe(kernel: Any, device: torch.device) -> Any:
        seen.append((kernel.width, kernel.heads, kernel.takes_lengths, kernel.takes_sink))
        return kernel

    monkeypatch.setattr(flash_mla, "_probe", probe)
    flash_mla._find_kernels(fake.flash_mla_sparse_fwd, torch.device("cuda", 0))
    heads = (64, 128) if arch == "sm90" else (128,)
    assert seen == [(576, count, False, False) for count in heads]


def test_through_the_public_operator() -> None:
    a, topk = call(sink=torch.randn(3))
    backend = FlashMLABackend(FakeFlashMLA(base2=True))
    options: dict[str, Any] = {"value_dim": a.value_dim, "softmax_scale": a.softmax_scale, "sink": a.sink}
    out, lse = sparse_attention(a.q, a.kv, topk, return_lse=True, backend=backend, **options)
    assert faults(a, topk, out, lse) == []
    with pytest.raises(UnsupportedProblem, match="no backward"):
        sparse_attention(a.q.requires_grad_(), a.kv, topk, backend=backend, **options)
