"""Which backend runs a problem."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from weakref import WeakValueDictionary

from dsattn.backends.base import Backend
from dsattn.backends.trust import distrusted
from dsattn.errors import BackendMissing, BadInput, ContractDrift, UnsupportedProblem
from dsattn.spec.problem import Problem

_PASSED_OVER: set[tuple[str, str, str]] = set()
_GIVEN: WeakValueDictionary[str, Backend] = WeakValueDictionary()


def name_of(backend: str | Backend) -> str:
    """The name under which `find` knows a backend; a Backend that is not one of dsattn's gets one while it lives."""
    if not isinstance(backend, Backend):
        if not isinstance(backend, str):
            raise BadInput("backend", given=type(backend).__name__, needed='"auto", a name of backends(), or a Backend')
        return backend
    name = f"{backend.name} at {id(backend):#x}"
    _GIVEN[name] = backend
    return name


def choose(problem: Problem, backend: str, order: Sequence[Backend]) -> Backend:
    """The backend that runs `problem`; kernels that were not yet shown to be right for it are checked now.

    Args:
        problem: the call, in one direction.
        backend: "auto" for the first of `order` that takes the problem, or a name. A named backend never falls back.
        order: the known backends, best first.

    Raises:
        UnsupportedProblem: the named backend does not take the problem, or none does; the message has the reasons.
        BadInput: no backend has that name.
        BackendMissing: the named backend is absent here.
        ContractDrift: a self-check has shown that the named backend is wrong here; the message has the likely cause.
    """
    if backend != "auto":
        chosen = find(backend, order)
        reason = chosen.supports(problem)
        if reason is not None:
            fix = 'pass backend="auto", or call it under torch.no_grad()' if problem.backward else None
            raise UnsupportedProblem(f"{problem.title} on backend {chosen.name!r}", given=reason, fix=fix)
        reason = distrusted(chosen, problem)
        if reason is not None:
            raise ContractDrift(
                f"{problem.title} on backend {chosen.name!r}",
                given=reason,
                needed="the oracle's numbers",
                fix='pass backend="auto", and report the release',
            )
        return chosen
    reasons = []
    for candidate in order:
        if candidate.missing() is not None:
            continue
        reason = candidate.supports(problem) or distrusted(candidate, problem)
        if reason is None:
            _warn_of_fallback(problem, candidate, reasons)
            return candidate
        reasons.append((candidate.name, reason))
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons) or "no backend is usable here"
    raise UnsupportedProblem(problem.title, given=listed)


def find(name: str, order: Sequence[Backend]) -> Backend:
    """The backend called `name`.

    Raises:
        BadInput: no backend has that name; the message lists the names.
        BackendMissing: it is known, but its package, compiler or device is absent here; the message has the cause.
    """
    if name in _GIVEN:
        return _GIVEN[name]
    for backend in order:
        if backend.name == name:
            cause = backend.missing()
            if cause is not None:
                raise BackendMissing(f"backend {name!r}", given=cause)
            return backend
    names = ", ".join(repr(name) for name in ("auto", *(backend.name for backend in order)))
    raise BadInput("backend", given=repr(name), needed=f"one of {names}")


def _warn_of_fallback(problem: Problem, chosen: Backend, reasons: list[tuple[str, str]]) -> None:
    for name, reason in reasons:
        key = (problem.title, name, reason)
        if key not in _PASSED_OVER:
            _PASSED_OVER.add(key)
            message = f"{problem.title} runs on {chosen.name!r} because {name!r} does not take it: {reason}"
            warnings.warn(message, stacklevel=5)
