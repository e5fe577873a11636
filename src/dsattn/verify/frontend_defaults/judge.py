"""Numbers of one check, and what a caller must show on a release: none of the faults, or exactly the known ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dsattn.spec.metrics import compare_topk
from dsattn.verify.frontend_defaults.naive import Dense, Gradients
from dsattn.verify.frontend_defaults.problems import TOP_K, DenseLoss, Selection
from dsattn.verify.records import metrics_of

Metrics = dict[str, Any]
Release = tuple[int, ...]
"""Major and minor number of a release."""
Rule = Callable[[Metrics, Release], list[str]]
"""The reasons why a naive call on a release does not show what it must show there."""

LIMIT = 1e-5
"""Below this a relative error is none."""
WRONG = 0.1
"""A dense result of a naive call is off by more than this where the alignment is the other one."""
NEAR = 0.01
"""How near a naive recall must come to the figures."""
FIGURES: Mapping[str, float] = {
    "recall-one-document-cp1": 0.706,
    "recall-one-document-cp2-rank0": 0.587,
    "recall-one-document-cp2-rank1": 0.332,
    "recall-documents-cp2-rank0": 0.579,
    "recall-documents-cp2-rank1": 0.289,
}
"""Mean recalls of naive calls that were seen on a GB300 with release 1.29.1."""
CHANGED: Release = (1, 26)
"""The release that changed both defaults."""
REPAIRED: Release = (1, 27)
"""The release from which on the selection takes no id outside a row any more."""


def gradient_metrics(got: Gradients, reference: Gradients) -> Metrics:
    """`errors`: the relative error of each gradient per batch entry; `zero`: whether it is exactly zero there."""
    named = zip(Gradients._fields, got, reference, strict=True)
    return {
        "errors": {name: relative_errors(mine, right) for name, mine, right in named},
        "zero": {name: [not bool(entry.any()) for entry in mine] for name, mine in zip(got._fields, got, strict=True)},
        "non_finite": sum(int((~x.isfinite()).sum()) for x in got),
    }


def selection_metrics(selected: tuple[Int[Tensor, "t k"], Int[Tensor, " t"]], problem: Selection) -> Metrics:
    """Recall against the oracle's scores, and under `reason` what is wrong with the selection, "" if nothing is."""
    ids, lengths = selected
    found = compare_topk(ids, lengths, problem.scores, problem.visible, top_k=TOP_K, tau=problem.tau)
    return {**metrics_of({"topk": found}), "reason": found.reason}


def dense_metrics(got: Dense, square: Dense, problem: DenseLoss) -> Metrics:
    """`errors` of scores, attention mass, their sums and the gradients; `non_finite`: numbers at visible keys that are.

    Args:
        got: of the rows that are judged.
        square: of the same rows as the last ones of a square call; its divisor is larger by keys / rows.
        problem: the rows that are judged.
    """
    first, seen = problem.offset, problem.visible()
    scale = problem.index_k.shape[1] / problem.index_q.shape[1]
    d_q, d_w, d_k = square.gradients
    metrics = gradient_metrics(got.gradients, Gradients(d_q[:, first:] * scale, d_w[:, first:] * scale, d_k * scale))
    errors: dict[str, list[float]] = {}
    for name in ("index_out", "index_denom", "attn_out", "attn_denom"):
        mine, right = getattr(got, name), getattr(square, name)[:, first:]
        if mine.ndim == 3:
            mine, right = mine.masked_fill(~seen, 0.0), right.masked_fill(~seen, 0.0)
        errors[name] = relative_errors(mine, right)
        metrics["non_finite"] += int((~mine.isfinite()).sum())
    return {"errors": {**errors, **metrics["errors"]}, "non_finite": metrics["non_finite"]}


def relative_errors(got: Float[Tensor, "b ..."], right: Float[Tensor, "b ..."]) -> list[float]:
    """||got - right|| / ||right|| of each batch entry; what is not finite counts as left out, as 0."""
    got = torch.where(got.isfinite(), got, 0.0).double().flatten(1)
    right = right.double().flatten(1)
    return ((got - right).norm(dim=1) / right.norm(dim=1)).tolist()


def for_json(metrics: Metrics) -> Metrics:
    """The numbers as JSON takes them: None for an error that is not finite."""
    if "errors" not in metrics:
        return metrics
    errors = {name: [x if math.isfinite(x) else None for x in found] for name, found in metrics["errors"].items()}
    return {**metrics, "errors": errors}


def is_right(metrics: Metrics) -> list[str]:
    """The reasons why a result is not right."""
    if "recall_mean" in metrics:
        return [metrics["reason"]] if metrics["reason"] else []
    found = [
        f"{name} of batch {b} is off by {error:.1e}"
        for name, errors in metrics["errors"].items()
        for b, error in enumerate(errors)
        if not error < LIMIT
    ]
    return found + ([f"{metrics['non_finite']} numbers are not finite"] if metrics["non_finite"] else [])


def loses_a_batch(metrics: Metrics, release: Release) -> list[str]:
    """Batch entry 0 is right, and the gradients of batch entry 1 are exactly zero."""
    del release
    found = [f"{name} of batch 0 is off by {e[0]:.1e}" for name, e in metrics["errors"].items() if not e[0] < LIMIT]
    return found + [f"{name} of batch 1 is not zero" for name, zero in metrics["zero"].items() if not zero[1]]


def loses_keys(case: str) -> Rule:
    """The recall is that of the figures, or on 1.26, which also selects ids outside the row, lower still."""

    def rule(metrics: Metrics, release: Release) -> list[str]:
        mean, figure = metrics["recall_mean"], FIGURES[case]
        if release < REPAIRED:
            return [] if mean < figure else [f"mean recall {mean:.3f} is not below {figure}"]
        return [] if abs(mean - figure) <= NEAR else [f"mean recall {mean:.3f} is not within {NEAR} of {figure}"]

    return rule


def sees_other_keys(metrics: Metrics, release: Release) -> list[str]:
    """Every result is off by far in every batch entry."""
    del release
    errors = metrics["errors"].items()
    return [f"{name} is off by {min(e):.1e} only" for name, e in errors if not min(e) > WRONG]
