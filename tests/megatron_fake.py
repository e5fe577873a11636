"""Packages that are built like Megatron's cuDNN kernels, and frontends that write down how they are called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

# As in release 0.19: the frontend's DSA in a global, a loader that fills it, and callers that name neither argument.
KERNELS = '''
import torch

_cudnn_dsa = None

def _ensure_dsa_namespace():
    """Loads the frontend."""
    global _cudnn_dsa
    if _cudnn_dsa is None:
        from frontend_of_tests import DSA
        _cudnn_dsa = DSA

def run_fused_qk_topk(*args, **kwargs):
    return _indexer_topk_bshd(*args, **kwargs)

def backward(*args, **kwargs):
    _ensure_dsa_namespace()
    return _run_sparse_indexer_backward(*args, **kwargs)

def _run_sparse_indexer_backward(
    q_idx_bshd, w_bsh, k_idx_bsd, attn_score, index_score, topk_indices, *, loss_coeff, grad_loss, block_i
):
    return _cudnn_dsa.indexer_backward_wrapper(
        q_idx_bshd, w_bsh, k_idx_bsd, attn_score, index_score, topk_indices,
        sm_scale=1.0, loss_coeff=loss_coeff, grad_loss=grad_loss, block_I=block_i, IDS
    )

def _indexer_topk_single_packed_cp_segments(
    q_bshd, k_bshd, w_bsh, topk_k, return_topk_scores, local_packed_cp_rank,
    local_packed_cp_query_start=0, local_packed_cp_query_len=None,
):
    half, keys = q_bshd.shape[1] // 2, k_bshd.shape[1]
    found = []
    for rows, end in ((slice(0, half), (local_packed_cp_rank + 1) * half),
                      (slice(half, None), keys - local_packed_cp_rank * half)):
        k = k_bshd[:, :end]
        scores = _cudnn_dsa.indexer_forward_wrapper(
            q_bshd[:, rows], k, w_bsh[:, rows], ratio=1, sm_scale=1.0, OFFSETS
        )["scores"]
        found.append(scores.topk(topk_k).indices.int())
    return torch.cat(found, 1), None

def _indexer_topk_multi_packed_cp_thd(
    q_bshd, k_bshd, w_bsh, topk_k, return_topk_scores, starts, ends, packed_cu_seqlens_q, packed_cu_seqlens_k,
    packed_max_seqlen_q, packed_max_seqlen_k, cp_size, cp_rank,
):
    half = packed_cu_seqlens_q.diff() // (2 * cp_size)
    lengths_q = torch.stack((half, half), 1).flatten()
    lengths_k = torch.stack(((cp_rank + 1) * half, packed_cu_seqlens_k.diff() - cp_rank * half), 1).flatten()
    zero = lengths_q.new_zeros(1)
    cu_seqlens_q = torch.cat((zero, lengths_q.cumsum(0))).int()
    cu_seqlens_k = torch.cat((zero, lengths_k.cumsum(0))).int()
    at = torch.cat([
        torch.arange(length) + begin
        for length, begin in zip(lengths_k, packed_cu_seqlens_k[:-1].repeat_interleave(2))
    ])
    scores = _cudnn_dsa.indexer_forward_wrapper(
        q_bshd[0], k_bshd[0, at], w_bsh[0], ratio=1, sm_scale=1.0, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=int(lengths_q.max()), max_seqlen_k=int(lengths_k.max()), PACKED_OFFSETS
    )["scores"]
    return (scores.topk(topk_k).indices.int() + starts[:, None].int())[None], None

def _indexer_topk_bshd(
    q_bshd, k_bsd, w_bsh, topk, varlen_starts=None, varlen_ends=None, key_positions=None, return_scores=False,
    single_packed_thd_sequence=True, local_packed_cp_rank=0, packed_cu_seqlens_q=None, packed_cp_size=1,
):
    """Selects keys."""
    _ensure_dsa_namespace()
    k_bshd = k_bsd[:, :, None]
    if single_packed_thd_sequence:
        ids, scores = _indexer_topk_single_packed_cp_segments(
            q_bshd, k_bshd, w_bsh, topk, False, local_packed_cp_rank
        )
    else:
        longest = int(packed_cu_seqlens_q.diff().max())
        ids, scores = _indexer_topk_multi_packed_cp_thd(
            q_bshd, k_bshd, w_bsh, topk, False, varlen_starts, varlen_ends, packed_cu_seqlens_q, packed_cu_seqlens_q,
            longest, longest, packed_cp_size, local_packed_cp_rank,
        )
    return ids, (ids >= 0).sum(-1), scores

def _run_sparse_attention_forward(query, kv_full, topk_indices, softmax_scale, d_v, topk_length=None):
    return query[..., :d_v]
'''
IDS, OFFSETS, PACKED_OFFSETS = (
    "topk_indices_global=True",
    "q_causal_offsets=torch.full((1,), end - half, dtype=torch.int32)",
    "q_causal_offsets=(lengths_k - lengths_q).int()",
)


def source(*, fixed: bool = False, **parts: bool) -> str:
    """The kernels' source; `fixed` or single parts of it say what they mean."""
    text = KERNELS
    # The longer name first: it has the other one in it.
    for name, said in {"PACKED_OFFSETS": PACKED_OFFSETS, "OFFSETS": OFFSETS, "IDS": IDS}.items():
        text = text.replace(f", {name}\n", f", {said if parts.get(name.lower(), fixed) else ''}\n")
    return text


Build = Callable[..., ModuleType]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Makes a package of files and imports one of its modules: build({"kernels": source()}, "kernels")."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def package(files: dict[str, str], module: str = "kernels") -> ModuleType:
        name = f"like_megatron_{len(made)}_{tmp_path.name}"
        made.append(name)
        (tmp_path / name).mkdir()
        for path, text in {"__init__": "", **files}.items():
            (tmp_path / name / f"{path}.py").write_text(text.replace("PACKAGE", name), encoding="utf-8")
        return importlib.import_module(f"{name}.{module}")

    yield package
    for name in [each for each in sys.modules if each.partition(".")[0] in made]:
        del sys.modules[name]


class Frontend:
    """Writes down the arguments of each call by name; subclasses have the wrappers."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def _noted(self, given: dict[str, Any]) -> dict[str, Tensor]:
        self.calls.append({name: value for name, value in given.items() if name != "self"})
        q, k = given["q"], given["k"]
        columns = given.get("max_seqlen_k") or k.shape[1]
        return {"scores": torch.zeros(*q.shape[:-2], columns)}

    @property
    def last(self) -> dict[str, Any]:
        return self.calls[-1]


class Old(Frontend):
    """Release 1.25: it has neither parameter and takes no other."""

    def indexer_forward_wrapper(
        self, q, k, w, ratio=4, sm_scale=1.0, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None
    ):
        return self._noted(locals())

    def indexer_backward_wrapper(
        self, index_q, weights, index_k, attn_score, index_score, topk_indices, sm_scale=1.0, loss_coeff=1.0,
        grad_loss=1.0, block_I=128,
    ):  # fmt: skip
        self.calls.append({name: value for name, value in locals().items() if name != "self"})

    def dense_attn_score_recompute_wrapper(self, q, k, lse, softmax_scale, qhead_per_kv_head=None, ratio=1):
        return self._noted(locals())


class New(Frontend):
    """Release 1.26 and later."""

    def indexer_forward_wrapper(
        self, q, k, w, ratio=4, sm_scale=1.0, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, q_causal_offsets=None,
    ):  # fmt: skip
        """Scores."""
        return self._noted(locals())

    def indexer_backward_wrapper(
        self, index_q, weights, index_k, attn_score, index_score, topk_indices, sm_scale=1.0, loss_coeff=1.0,
        grad_loss=1.0, block_I=128, topk_indices_global=False,
    ):  # fmt: skip
        """Gradients."""
        self.calls.append({name: value for name, value in locals().items() if name != "self"})

    def dense_attn_score_recompute_wrapper(
        self, q, k, lse, softmax_scale, qhead_per_kv_head=None, ratio=1, q_causal_offsets=None
    ):
        return self._noted(locals())

    def dense_indexer_backward_wrapper(
        self, index_q, weights, index_k, attn_score, attn_l1norm, index_score, index_lse, ratio=1, q_causal_offsets=None
    ):
        self.calls.append({name: value for name, value in locals().items() if name != "self"})

    def other_wrapper(self, q):
        return "other"


def select(kernels: ModuleType, **options: Any) -> Tensor:
    """The ids that a rank of two selects from one document of 8 keys; with `cu_seqlens` from documents."""
    rows, keys = 4, 8
    ids, _, _ = kernels._indexer_topk_bshd(
        torch.ones(1, rows, 2, 4), torch.ones(1, keys, 4), torch.ones(1, rows, 2), 1, **options
    )
    return ids


def backward(kernels: ModuleType, batch: int) -> None:
    """A sparse backward of so many sequences."""
    scores = torch.zeros(batch, 1, 2)
    kernels.backward(
        torch.ones(batch, 1, 2, 4),
        torch.ones(batch, 1, 2),
        torch.ones(batch, 4, 4),
        scores,
        scores,
        scores.int(),
        loss_coeff=1.0,
        grad_loss=1.0,
        block_i=128,
    )
