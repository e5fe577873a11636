"""Numbers of one check, and what each caller must show: Megatron as released its faults, after `install()` none."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from dsattn.spec.metrics import compare_topk
from dsattn.verify.frontend_defaults.judge import Metrics
from dsattn.verify.megatron_suite.problems import TOP_K, Selection
from dsattn.verify.records import metrics_of

LIMIT = 1e-6
"""Below this a relative error is none."""
WRONG = 0.1
"""A gradient that is off by less than this is not one of another sequence's keys, or of none."""
RECALLS = {
    "one-document": (0.0, 0.7),
    "documents": (0.0, 0.7),
    "padding": (0.7, 0.95),
    "slice": (0.0, 0.7),
}
"""Between which mean recalls Megatron as released lies, by the first words of the case."""


def selection_metrics(ids: Int[Tensor, "t k"], lengths: Int[Tensor, " t"], problem: Selection) -> Metrics:
    """Recall against the oracle's scores, and under `reason` what is wrong with the selection, "" if nothing is."""
    found = compare_topk(ids.cpu(), lengths.cpu(), problem.scores, problem.visible, top_k=TOP_K, tau=problem.tau)
    return {**metrics_of({"topk": found}), "reason": found.reason}


def is_right(metrics: Metrics) -> list[str]:
    """The reasons why a result is not right."""
    if "recall_mean" in metrics:
        return [metrics["reason"]] if metrics["reason"] else []
    found = [
        f"{name} of sequence {b} is off by {error:.1e}"
        for name, errors in metrics["errors"].items()
        for b, error in enumerate(errors)
        if not error <= LIMIT
    ]
    return found + ([f"{metrics['non_finite']} numbers are not finite"] if metrics["non_finite"] else [])


def is_faulty(case: str, metrics: Metrics, *, old: bool) -> list[str]:
    """The reasons why a result of Megatron as released does not have the fault of its case.

    Args:
        case: the name of the check.
        metrics: its numbers.
        old: whether the frontend is one from before 1.26. Only what has nothing to do with it is wrong there.
    """
    if "errors" in metrics:
        first = {name: errors[:1] for name, errors in metrics["errors"].items()}
        found = is_right({"errors": first, "non_finite": metrics["non_finite"]})
        # Gradients of the keys add up what the rows of any sequence leave there.
        later = {name: errors[1:] for name, errors in metrics["errors"].items()}
        return found + [
            f"{name} of sequence {b} is off by {error:.1e} only"
            for name, errors in later.items()
            for b, error in enumerate(errors, 1)
            if not error > WRONG
        ]
    low, high = RECALLS[case.rpartition("-cp")[0]]
    if not old:
        # Both faults at once.
        low = 0.0
    mean = metrics["recall_mean"]
    return [] if low <= mean <= high else [f"mean recall {mean:.3f} is not within {low} and {high}"]
