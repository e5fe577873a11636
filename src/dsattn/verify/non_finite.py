"""Which checks a backend cannot be held to, by its own word: numbers that are not finite, terms that nearly cancel."""

from __future__ import annotations

from dataclasses import replace

import torch

from dsattn.backends import Backend, choose, name_of, ordered
from dsattn.errors import UnsupportedProblem
from dsattn.functional.problems import problem_of
from dsattn.ops.inputs import AttentionInputs, IndexerInputs
from dsattn.spec.case import Input
from dsattn.spec.problem import Operator, Problem, Support
from dsattn.verify.reference import Reference

OPERATORS_OF: dict[str, tuple[tuple[Operator, Support | None], ...]] = {
    "indexer_scores": (("indexer_scores", None),),
    "indexer_topk": (("indexer_topk", None),),
    "sparse_attention": (("sparse_attention", None),),
    "dense_attention": (("dense_attention", None),),
    "indexer_loss:selected": (("indexer_loss", "selected"),),
    "indexer_loss:visible": (("indexer_loss", "visible"),),
    "dsa_attention:selected": (("indexer_topk", None), ("sparse_attention", None), ("indexer_loss", "selected")),
    "dsa_attention:visible": (("dense_attention", None), ("indexer_loss", "visible")),
}
"""The operators that a check calls; of the loss, over which keys."""

_INDEXER: tuple[Input, ...] = ("index_q", "index_k", "weights")
_TAKES: dict[Operator, tuple[Input, ...]] = {
    "indexer_scores": _INDEXER,
    "indexer_topk": _INDEXER,
    "sparse_attention": ("q", "kv", "sink"),
    "dense_attention": ("q", "kv", "sink"),
    "indexer_loss": (*_INDEXER, "q", "kv"),
}


def refuse_swallowed(check: str, reference: Reference, backend: str | Backend, device: torch.device) -> None:
    """Refuses a check of a case whose point the backend says that it loses: a bad number, or the last bits of weights.

    The backend is asked for every operator of the check that the case is hard for, forward and backward.

    Args:
        check: a name of `CHECKS`.
        reference: of the subject.
        backend: a name, or a backend itself.
        device: where the check runs.

    Raises:
        UnsupportedProblem: the backend says so, with its reason alone, or does not take an operator.
        BackendMissing: the named backend is absent here.
    """
    bad, opposed = reference.case.bad, reference.case.weights == "opposed"
    for operator, support in OPERATORS_OF[check]:
        hard = operator == "indexer_loss" if bad is None else bad.name in _TAKES[operator]
        if not hard or (bad is None and not opposed):
            continue
        for problem in _problem(operator, support, reference, device).directions():
            chosen = choose(problem, name_of(backend), ordered())
            reason = chosen.rounds(problem) if bad is None else chosen.non_finite(problem)
            if reason is not None:
                raise UnsupportedProblem(reason)


def _problem(operator: Operator, support: Support | None, reference: Reference, device: torch.device) -> Problem:
    """What the check's call of an operator asks for."""
    inputs, case = reference.inputs, reference.case
    x = IndexerInputs(inputs.index_q, inputs.index_k, inputs.weights, case.scale, case.relu)
    a = AttentionInputs(inputs.q, inputs.kv, case.value_width, case.softmax_scale, inputs.sink)
    selects = operator in ("indexer_topk", "sparse_attention") or support == "selected"
    problem = problem_of(
        operator,
        x if operator.startswith("indexer") else None,
        None if operator in ("indexer_scores", "indexer_topk") else a,
        batch=case.batch,
        layout=None if operator == "sparse_attention" else reference.layout,
        top_k=case.top_k if selects else None,
        support=support,
        requires_grad=operator != "indexer_topk",
    )
    return replace(problem, device=device)
