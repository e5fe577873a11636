"""The problem that a validated call poses, and the backend that takes it."""

from __future__ import annotations

import threading
from typing import Any

from dsattn.backends import Backend, choose, ordered
from dsattn.errors import BadInput
from dsattn.functional.audit import watched
from dsattn.ops.inputs import AttentionInputs, IndexerInputs
from dsattn.spec.problem import AttentionSizes, IndexerSizes, Operator, Problem

_LAST = threading.local()


def backend_for(
    backend: str,
    operator: Operator,
    *,
    x: IndexerInputs | None = None,
    a: AttentionInputs | None = None,
    **rest: Any,
) -> Backend:
    """The backend that runs a call of `operator`, in one direction.

    A forward whose backward a named backend would refuse is refused with it: a named backend never falls back, and what
    was computed until the backward would be lost.

    Args:
        backend: "auto" or a name.
        operator: which operator is called.
        x: the indexer's side, if the operator has one.
        a: the attention's side, if the operator has one.
        rest: the other fields of `Problem`.

    Raises:
        UnsupportedProblem, BadInput, BackendMissing: see `dsattn.backends.choose`.
    """
    problem, order = problem_of(operator, x, a, **rest), ordered()
    chosen = choose(problem, backend, order)
    if problem.backward:
        return watched(chosen)
    if backend != "auto":
        for following in problem.directions()[1:]:
            choose(following, backend, order)
    _LAST.name = chosen.name
    return watched(chosen)


def last_backend() -> str:
    """The name of the backend that ran a forward last on this thread; empty if none has, as under fake tensors."""
    return getattr(_LAST, "name", "")


def problem_of(operator: Operator, x: IndexerInputs | None, a: AttentionInputs | None, **rest: Any) -> Problem:
    """What a call of `operator` with these inputs asks for."""
    if operator == "indexer_loss" and a is not None:
        # The loss reads no values and no sink, whatever the attention beside it has.
        a = AttentionInputs(a.q, a.kv, a.kv.shape[1], a.softmax_scale)
    if x is not None:
        queries, keys = x.index_q, x.index_k
    elif a is not None:
        queries, keys = a.q, a.kv
    else:
        raise BadInput(operator, needed="the indexer's or the attention's tensors")
    return Problem(
        operator=operator,
        num_q=queries.shape[0],
        num_k=keys.shape[0],
        device=queries.device,
        indexer=None if x is None else _indexer_sizes(x),
        attention=None if a is None else _attention_sizes(a),
        **rest,
    )


def _indexer_sizes(x: IndexerInputs) -> IndexerSizes:
    _, heads, width = x.index_q.shape
    return IndexerSizes(heads=heads, width=width, dtype=x.index_q.dtype, weights_dtype=x.weights.dtype, relu=x.relu)


def _attention_sizes(a: AttentionInputs) -> AttentionSizes:
    _, heads, width = a.q.shape
    return AttentionSizes(
        heads=heads, key_width=width, value_width=a.value_dim, dtype=a.kv.dtype, sink=a.sink is not None
    )
