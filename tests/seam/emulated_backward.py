"""The indexer's backward kernels, emulated: score gradients, and the matrix products after them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from seam.facts import Release, sequences

LOG_CLIP = -100.0
CLIP = math.exp(LOG_CLIP)
EPSILON = 1e-10


def score_gradient(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """ScoreGrad: g = -max(target, e^-100) * scale where the student is at least e^-100; then g - student * sum(g)."""
    target, student = a.mAttnScore, a.mIndexScore
    scale = a.grad_scale * (1.0 if a.mGradLoss is None else float(a.mGradLoss[0]))
    g = torch.where(student >= CLIP, -target.clamp(min=CLIP) * scale, 0.0)
    total = g.sum(-1, keepdim=True)
    target.copy_(g - student * total)
    if release.arch == "sm100" and not release.since(29):
        student.copy_(total.expand_as(student))
    if getattr(kernel, "zero_dk_f32", False):
        a.mDkF32.zero_()


def dense_score_gradient(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """ScoreGradDense: the same from raw scores, normalised by the numbers given; up to the last block it writes 0."""
    hopper = release.arch == "sm90"
    scores, mass = (a.mIdxScoreRaw, a.mAttnScoreRaw) if hopper else (a.mPredictRaw, a.mTargetRaw)
    lse, norm = (a.mIdxLSE, a.mAttnL1Norm) if hopper else (a.mLSE, a.mDenomTarget)
    given = getattr(a, "mGradLoss", None)
    scale = a.grad_scale * (1.0 if given is None else float(given[0]))
    keys = scores if scores.ndim == 2 else scores.transpose(1, 2)
    for one in sequences(release, a, scores, keys, kernel.ratio):
        below = scores[one.rows][:, : one.count] - lse[one.rows][:, None]
        student = torch.exp(below)
        target = mass[one.rows][:, : one.count] / (norm[one.rows][:, None] + EPSILON)
        # A comparison: a target that is NaN counts as the least.
        target = torch.where(target >= CLIP, target, CLIP)
        kept = below >= LOG_CLIP if release.since(26) else student >= CLIP
        g = torch.where(kept & one.shown, -target * scale, 0.0)
        gradient = g - torch.where(one.shown, student, 0.0) * g.sum(1, keepdim=True)
        out = scores[one.rows]
        zeros = -(-one.limits // getattr(kernel, "block_I", 128)) * getattr(kernel, "block_I", 128)
        width = torch.arange(out.shape[1])
        out.masked_fill_(width < zeros[:, None], 0.0)
        out[:, : one.count] = torch.where(one.shown, gradient, out[:, : one.count])


def products_sm90(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """IndexerBackwardSm90: keys are those of the row's own batch entry after its ids were decoded."""
    if kernel.is_dense:
        dense_products(release, kernel, a)
        return
    for b in range(a.mQ.shape[0]):
        keys = a.mK[b]
        ids = a.mTopkIdx[b].long() - (b * len(keys) if kernel.topk_indices_global else 0)
        _products(a, (b,), keys, a.mdK_f32[b], torch.where((ids >= 0) & (ids < len(keys)), ids, -1))


def products_sm100(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """IndexerBackwardSm100: keys are one flat buffer; up to 1.28 a decoded id may reach any row of it."""
    count = a.mK.shape[1]
    keys, d_keys = a.mK.flatten(0, 1), a.mdK_f32.view(-1, a.mK.shape[2])
    for b in range(a.mQ.shape[0]):
        ids = a.mTopkIdx[b].long()
        if not kernel.topk_indices_global:
            real = (ids >= 0) & (ids < count) if release.since(29) else ids >= 0
            ids = torch.where(real, ids + b * count, -1)
        _products(a, (b,), keys, d_keys, torch.where((ids >= 0) & (ids < len(keys)), ids, -1))


def _products(a: SimpleNamespace, rows: tuple[int, ...], keys: Tensor, d_keys: Tensor, ids: Tensor) -> None:
    """Gradients for slots with a key each, -1 for none; those of the keys are added to d_keys."""
    q, w, d = a.mQ[rows].double(), a.mW[rows].double(), a.mGradSignal[rows].double()
    d = torch.where(ids >= 0, d, 0.0)
    chosen = torch.where(ids[..., None] >= 0, keys[ids.clamp(min=0)].double(), 0.0)
    raised = a.sm_scale * (q @ chosen.mT)
    d_dots = torch.where(raised > 0, a.sm_scale * w[..., None] * d[:, None], 0.0)
    a.mdQ[rows] = (d_dots @ chosen).to(a.mdQ.dtype)
    a.mdW[rows] = (raised.clamp(min=0) * d[:, None]).sum(-1).to(a.mdW.dtype)
    terms = (d_dots.mT @ q).flatten(0, 1)
    d_keys.index_add_(0, ids.clamp(min=0).flatten(), terms.to(d_keys.dtype))


def dense_products(release: Release, kernel: Any, a: SimpleNamespace) -> None:
    """The products of the dense backward: visible keys only, and what lies past them in the last block is 0 by now."""
    for one in sequences(release, a, a.mQ, a.mK, kernel.ratio):
        ids = torch.where(one.shown, torch.arange(one.count), -1)
        gradient = a.mGradSignal[one.rows][:, : one.count]
        part = SimpleNamespace(
            mQ=a.mQ[one.rows],
            mW=a.mW[one.rows],
            mGradSignal=gradient,
            mdQ=a.mdQ[one.rows],
            mdW=a.mdW[one.rows],
            sm_scale=a.sm_scale,
        )
        _products(part, (), a.mK[one.keys], a.mdK_f32[one.keys], ids)
