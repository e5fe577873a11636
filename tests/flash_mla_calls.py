"""Calls of sparse attention for the tests of the flash_mla backend, and what is wrong with their results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from flash_mla_fake import FakeFlashMLA
from torch import Tensor

from dsattn import TopK
from dsattn.backends.flash_mla import FlashMLABackend
from dsattn.ops.inputs import AttentionInputs
from dsattn.spec import metrics, oracle, plain
from dsattn.spec.problem import AttentionSizes, Problem

NUM_K = 37


def call(
    h: int = 3, d_qk: int = 24, d_v: int = 16, k: int = 5, *, t: int = 9, scale: float = 0.2, sink: Tensor | None = None
) -> tuple[AttentionInputs, TopK]:
    """Normal inputs; the last row selects nothing, the others up to k keys."""
    q, kv = torch.randn(t, h, d_qk).bfloat16(), torch.randn(NUM_K, d_qk).bfloat16()
    ids = torch.full((t, k), -1, dtype=torch.int32)
    lengths = torch.randint(0, min(k, NUM_K) + 1, (t,), dtype=torch.int32)
    lengths[0], lengths[-1] = min(k, NUM_K), 0
    for row, length in enumerate(lengths.tolist()):
        ids[row, :length] = torch.randperm(NUM_K)[:length].sort().values
    return AttentionInputs(q, kv, d_v, scale, sink), TopK(ids, lengths, num_q=t, num_k=NUM_K)


def faults(a: AttentionInputs, topk: TopK, out: Tensor, lse: Tensor) -> list[str]:
    """What is wrong with a result, by the budgets of verify."""
    support = [ids[:n].long() for ids, n in zip(topk.indices, topk.lengths.tolist(), strict=True)]
    options = {"value_dim": a.value_dim, "softmax_scale": a.softmax_scale, "sink": a.sink}
    exact = oracle.attention(a.q, a.kv, support, **options)
    yard = plain.attention(a.q, a.kv, support, **options)
    found = []
    for name, got, dtype in (("out", out, torch.bfloat16), ("lse", lse, torch.float32)):
        assert got.is_contiguous()
        factor = metrics.FORWARD_FACTOR
        found.append(metrics.compare(name, got, exact[name], yard[name], factor=factor, dtype=dtype).reason)
    return [reason for reason in found if reason]


def run(fake: FakeFlashMLA, a: AttentionInputs, topk: TopK) -> list[str]:
    return faults(a, topk, *FlashMLABackend(fake).sparse_attention(a, topk))


def problem(
    *, key_width: int = 576, value_width: int = 512, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Problem:
    """The forward of sparse attention on the CPU, with changes."""
    sizes = AttentionSizes(heads=64, key_width=key_width, value_width=value_width, dtype=dtype)
    device = torch.device("cpu")
    base = Problem(operator="sparse_attention", num_q=4, num_k=8, device=device, attention=sizes, top_k=2)
    return replace(base, **changes)
