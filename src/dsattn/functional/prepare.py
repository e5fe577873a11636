"""Compiling and checking of what a call needs, before it is needed, on all ranks alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dsattn.backends import Backend, choose, name_of, ordered
from dsattn.backends.dispatch import find
from dsattn.backends.trust import distrusted, refuse
from dsattn.errors import BadInput, DsattnError
from dsattn.functional.explain import Explanation, explain, problems_of
from dsattn.spec.problem import OPERATORS, Problem

_ELSEWHERE = "another rank of the group does not use it"


def prepare(operator: str, /, *args: Any, group: dist.ProcessGroup | None = None, **kwargs: Any) -> Explanation:
    """Compiles and self-checks the kernels that a call of `operator` needs, and lets all ranks choose alike.

    Call it before training, and before a CUDA graph is captured: without it each rank checks a kernel when it is first
    needed, which takes time there, and inside a capture is refused. Nothing is computed of the call itself.

    Args:
        operator: the name of a public operator, e.g. "indexer_topk" or "dsa_attention".
        args: the call's own arguments, of the sizes, dtypes and kinds of layout that will be used.
        group: the ranks that are to choose alike; all of them must call this. None: all ranks, or this process alone
            where torch.distributed is not initialised.
        kwargs: the call's own keywords; with `backend` a name, only that one is prepared.

    Returns:
        The table of `explain`, as it stands now.

    Semantics:
        A backend that one rank cannot use, for whatever reason, is refused on all of them. Ranks speak to each other
        once, by one all-reduce of a few bytes, after each is done.

    Raises:
        BadInput: an unknown operator, or arguments that the call itself would refuse.
        ContractDrift: the named backend was shown wrong, on this rank or another.
        UnsupportedProblem: the named backend does not take the problem, or none does.
        DsattnError: another rank could not prepare the call.
    """
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise BadInput("group", given=type(group).__name__, needed="a torch.distributed.ProcessGroup or None")
    choice, problems, failure = "auto", [], None
    marks = torch.ones(1 + len(OPERATORS) * 2 * (len(ordered()) + 1), dtype=torch.int32, device="cpu")
    try:
        # A rank that fails has to answer all the same: the others wait for it.
        choice = name_of(kwargs.get("backend", "auto"))
        problems = list(_needed(operator, args, kwargs))
        for problem, candidate, place in _places(problems, choice):
            if candidate.missing() or candidate.supports(problem) or distrusted(candidate, problem):
                marks[place] = 0
    except Exception as error:
        marks[0], failure = 0, error
    agreed = _least(marks, problems, group)
    if failure is not None:
        raise failure
    if not agreed[0]:
        raise DsattnError("prepare", given="a rank of the group that could not prepare its call", fix="see its error")
    for problem, candidate, place in _places(problems, choice):
        if marks[place] and not agreed[place]:
            refuse(candidate, problem, _ELSEWHERE)
    for problem in problems:
        choose(problem, choice, ordered())
    return explain(operator, *args, **{name: value for name, value in kwargs.items() if name != "backend"})


def _needed(operator: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Problem]:
    for problem in problems_of(operator, args, kwargs):
        yield from problem.directions()


def _places(problems: Sequence[Problem], choice: str) -> Iterator[tuple[Problem, Backend, int]]:
    """Every problem with every backend that may run it, and its place among the marks, which is the same on all ranks.

    The backends after the first that is good here count too: it may be refused elsewhere.
    """
    order = ordered()
    candidates = order if choice == "auto" else (find(choice, order),)
    for problem in problems:
        for candidate in candidates:
            number = order.index(candidate) if candidate in order else len(order)
            kind = OPERATORS.index(problem.operator) * 2 + problem.backward
            yield problem, candidate, 1 + kind * (len(order) + 1) + number


def _least(marks: torch.Tensor, problems: Sequence[Problem], group: dist.ProcessGroup | None) -> list[int]:
    """The least mark of all ranks."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return marks.tolist()
    device = problems[0].device if problems else torch.device("cpu")
    if any(name in dist.get_backend_config(group) for name in ("gloo", "mpi")):
        device = torch.device("cpu")
    elif device.type == "cpu":
        # NCCL moves device memory only.
        device = torch.device("cuda", torch.cuda.current_device())
    shared = marks.to(device, copy=True)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=group)
    return shared.tolist()
