"""Calls of the operators for the tests of self-checks: a batch of two, in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn import CausalLayout, TopK, indexer_loss, indexer_scores, indexer_topk, sparse_attention
from dsattn.backends import Backend, TorchBackend
from dsattn.backends.trust import check
from dsattn.backends.trust.keys import Key
from dsattn.backends.trust.verdicts import Verdict
from dsattn.ops.inputs import AttentionInputs

CHUNKS = CausalLayout.batched(2, 4, 60, q_offset=56)
WHOLE = CausalLayout.batched(2, 60)


def tensors(layout: CausalLayout, heads: int = 2) -> dict[str, Tensor]:
    """BSHD inputs in bf16 for a batch of two."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape).bfloat16()

    sq, sk = layout.num_q // 2, layout.num_k // 2
    index = {"index_q": normal(sq, heads, 16), "index_k": normal(sk, 16), "weights": normal(sq, heads).float()}
    return index | {"q": normal(sq, heads, 24), "kv": normal(sk, 24)}


def topk_call(backend: Backend | str, layout: CausalLayout = CHUNKS, top_k: int = 40) -> TopK:
    x = tensors(layout)
    return indexer_topk(x["index_q"], x["index_k"], x["weights"], layout, top_k=top_k, scale=0.2, backend=backend)


def scores_call(backend: Backend | str, layout: CausalLayout = CHUNKS) -> Tensor:
    x = tensors(layout)
    return indexer_scores(x["index_q"], x["index_k"], x["weights"], layout, scale=0.2, backend=backend)


def attention_call(backend: Backend | str, top_k: int = 40, sink: bool = True) -> tuple[Tensor, Tensor]:
    x = tensors(CHUNKS)
    topk = topk_call(TorchBackend(), top_k=top_k)
    options: dict[str, Any] = {"value_dim": 16, "softmax_scale": 0.2, "sink": torch.ones(2) if sink else None}
    return sparse_attention(x["q"], x["kv"], topk, return_lse=True, backend=backend, **options)


def loss_call(
    backend: Backend | str, support: str = "selected", top_k: int = 40, layout: CausalLayout = CHUNKS
) -> Tensor:
    x = tensors(layout)
    topk = topk_call(TorchBackend(), layout, top_k) if support == "selected" else None
    index = x["index_q"].requires_grad_(), x["index_k"], x["weights"]
    options: dict[str, Any] = {"topk": topk, "softmax_scale": 0.2, "scale": 0.2}
    return indexer_loss(*index, x["q"], x["kv"], layout, backend=backend, **options)


class Checked(TorchBackend):
    """Plain PyTorch that has to show itself right; `factor` times the log-sum-exp that is."""

    name = "checked"
    checked = True

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def sparse_attention(self, a: AttentionInputs, topk: TopK) -> tuple[Tensor, Tensor]:
        out, lse = super().sparse_attention(a, topk)
        return out, lse * self.factor


def counted_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles of the checks that run from now on."""
    ran: list[str] = []
    inner = check.check

    def counted(backend: Backend, key: Key, *rest: Any) -> Verdict:
        ran.append(key.title)
        return inner(backend, key, *rest)

    monkeypatch.setattr(check, "check", counted)
    return ran
