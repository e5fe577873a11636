"""What the backend's kernels are told of the sequences of a call, after it was cut and folded."""

from __future__ import annotations

from functools import lru_cache

from dsattn.backends.base import Launch, launches_of
from dsattn.backends.cudnn.contracts import Contract
from dsattn.backends.cudnn.folding import batch_of, folds, table_elements
from dsattn.backends.cudnn.steps import Steps
from dsattn.layouts import CausalLayout, DeviceLayout
from dsattn.spec.problem import Problem


def launches(problem: Problem, contract: Contract) -> frozenset[Launch]:
    """The kinds of launches that a call makes."""
    layout = problem.layout
    if layout is None or isinstance(layout, DeviceLayout) or problem.num_q == 0 or problem.num_k == 0:
        return launches_of(problem)
    if problem.support == "selected":
        # A batch that is too large for one launch is folded.
        kinds = (True, False) if batch_of(layout) > 1 else (False,)
        return frozenset(Launch(batched, offsets=False) for batched in kinds)
    name = "dense_attn_score_recompute" if problem.operator == "indexer_loss" else "indexer_forward"
    squared = Steps().squared(name, contract.wrapper(name).alignment)
    return _of_folds(layout, squared, table_elements(problem.device))


@lru_cache(maxsize=64)
def _of_folds(layout: CausalLayout, squared: bool, elements: int) -> frozenset[Launch]:
    found = folds(layout, squared=squared, elements=elements)
    return frozenset(Launch(fold.batch is not None, not fold.aligned) for fold in found)
