"""Faults in the arithmetic of the indexer's scores: scale, relu, mask, heads, precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsattn.ops.inputs import IndexerInputs
from dsattn.verify.mutants import (
    LOSS,
    LOSS_BACKWARD,
    SCORES,
    SCORES_BACKWARD,
    SELECTION,
    Fault,
    Operation,
    changed,
    to_tf32,
)

_PARTS = SCORES + SCORES_BACKWARD + SELECTION + LOSS + LOSS_BACKWARD
_HEADS, _COLUMNS = 32, 64


def _masked_as_0(operation: Operation) -> Tensor:
    scores = operation()
    return scores.masked_fill(scores == -torch.inf, 0)


def _gate_missing(operation: Operation) -> Any:
    d_index_q, d_index_k, _ = operation(x=replace(operation.x, relu=False))
    return d_index_q, d_index_k, operation()[2]


def _first_heads(x: IndexerInputs) -> IndexerInputs:
    weights = x.weights.clone()
    weights[:, _HEADS:] = 0
    return replace(x, weights=weights)


def _first_columns(x: IndexerInputs) -> IndexerInputs:
    index_q = x.index_q.clone()
    index_q[..., _COLUMNS:] = 0
    return replace(x, index_q=index_q)


def _folded(x: IndexerInputs) -> IndexerInputs:
    """|w| relu(sign(w) q . k) is relu(w q . k)."""
    signs = x.weights.sign().to(x.index_q.dtype)
    return replace(x, index_q=x.index_q * signs[..., None], weights=x.weights.abs())


FAULTS = (
    Fault(
        name="indexer scale dropped",
        imitates="the head sum is not multiplied by scale",
        parts=_PARTS,
        apply=changed("x", lambda x: replace(x, scale=1.0)),
    ),
    Fault(
        name="indexer relu missing",
        imitates="negative dots count against a key",
        parts=_PARTS,
        apply=changed("x", lambda x: replace(x, relu=False)),
    ),
    Fault(
        name="indexer relu always on",
        imitates="relu=False ignored",
        parts=_PARTS,
        apply=changed("x", lambda x: replace(x, relu=True)),
    ),
    Fault(
        name="relu gate missing",
        imitates="the backward of the indexer lets gradients through heads whose dot the relu cut off",
        parts=SCORES_BACKWARD,
        apply=_gate_missing,
    ),
    Fault(
        name="indexer heads past a tile skipped",
        imitates=f"a kernel that is right up to {_HEADS} indexer heads and stops there",
        parts=_PARTS,
        apply=changed("x", _first_heads),
    ),
    Fault(
        name="weights rounded to bf16",
        imitates="fp32 head weights cast to the dtype of index_q",
        parts=_PARTS,
        apply=changed("x", lambda x: replace(x, weights=x.weights.bfloat16().to(x.weights.dtype))),
        dtype="bf16",
    ),
    Fault(
        name="indexer products in TF32",
        imitates="torch.backends.cuda.matmul.allowto_tf32 = True",
        parts=_PARTS,
        apply=changed("x", lambda x: replace(x, index_q=to_tf32(x.index_q), index_k=to_tf32(x.index_k))),
    ),
    Fault(
        name="scores rounded to bf16",
        imitates="scores stored in the inputs' dtype",
        parts=SCORES,
        apply=lambda operation: operation().bfloat16().float(),
        dtype="bf16",
    ),
    Fault(
        name="mask fill 0",
        imitates="unseen keys score 0 instead of -inf",
        parts=SCORES,
        apply=_masked_as_0,
    ),
    Fault(
        name="indexer columns past a tile skipped",
        imitates=f"a kernel that is right up to an indexer width of {_COLUMNS} and stops there",
        parts=_PARTS,
        apply=changed("x", _first_columns),
    ),
    Fault(
        name="weights folded into the queries",
        imitates="relu(w * q . k), which is not w * relu(q . k) for a negative weight",
        parts=_PARTS,
        apply=changed("x", _folded),
    ),
)
"""The faults of this module."""
