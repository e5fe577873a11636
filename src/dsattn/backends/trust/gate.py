"""Whether a kernel may run a problem: only if a self-check on this machine has shown that it is right."""

from __future__ import annotations

import os
import threading
import warnings

import torch

from dsattn.backends.base import Backend, Launch
from dsattn.backends.trust import verdicts
from dsattn.backends.trust.keys import Key, identity, key_of
from dsattn.backends.trust.verdicts import Verdict
from dsattn.errors import BadInput, DsattnError, UnsupportedProblem
from dsattn.spec.problem import Problem

SWITCH = "DSATTN_SELF_CHECK"
_LOCK = threading.RLock()
_TOLD: set[str] = set()


class _Thread(threading.local):
    """A check calls operators of the backend; whatever asks for trust inside of it gets it."""

    checking = False


_thread = _Thread()


def distrusted(backend: Backend, problem: Problem) -> str | None:
    """Why the backend's kernels are not to be used for `problem`; None if they are.

    What nobody has checked yet is checked now, alone: no other rank is waited for.

    Raises:
        UnsupportedProblem: there is no verdict, and a graph is being captured, in which nothing can be checked.
        BadInput: `DSATTN_SELF_CHECK` is set to a word that means nothing.
    """
    if not backend.checked or _thread.checking:
        return None
    key = key_of(problem)
    agreed = verdicts.recall(backend, key, None)
    missing: list[Verdict | Launch] = [] if agreed is None else [agreed]
    for launch in sorted(backend.launches(problem)):
        verdict = verdicts.recall(backend, key, launch)
        if verdict is None or not verdict.passed:
            missing.append(verdict or launch)
    if not missing or is_off():
        return None
    for each in missing:
        verdict = each if isinstance(each, Verdict) else _verdict(backend, key, each, problem.device)
        if not verdict.passed:
            return verdict.reason
    return None


def standing(backend: Backend, problem: Problem) -> str:
    """What is known of kernels without running them: "passed", "failed: ...", "not yet run", "off"; "" for others."""
    if not backend.checked:
        return ""
    key = key_of(problem)
    known = [verdicts.recall(backend, key, None)]
    known += [_known(backend, key, launch, problem.device) for launch in sorted(backend.launches(problem))]
    failed = next((verdict for verdict in known if verdict is not None and not verdict.passed), None)
    if os.environ.get(SWITCH):
        return "off"
    if failed is not None:
        return f"failed: {failed.cause}"
    return "not yet run" if None in known[1:] else "passed"


def refuse(backend: Backend, problem: Problem, reason: str) -> None:
    """Refuses the kernels for problems of this kind, whatever their launches, in this process."""
    verdicts.remember(backend, key_of(problem), None, Verdict(False, reason, lasting=False))


def is_off() -> bool:
    """Whether self-checks are switched off, which is told once.

    Raises:
        BadInput: the variable holds another word.
    """
    word = os.environ.get(SWITCH, "")
    if not word:
        return False
    if word != "off":
        raise BadInput(SWITCH, given=repr(word), needed='"off", or not to be set')
    if SWITCH not in _TOLD:
        _TOLD.add(SWITCH)
        warnings.warn(f"{SWITCH}=off: kernels are used that nothing has shown to be right here", stacklevel=2)
    return True


def capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _verdict(backend: Backend, key: Key, launch: Launch, device: torch.device) -> Verdict:
    """The verdict, made now where there is none."""
    with _LOCK:
        verdict = _known(backend, key, launch, device)
        if verdict is None:
            if capturing(device):
                raise UnsupportedProblem(
                    f"{key.title} on backend {backend.name!r} in a graph capture",
                    given="kernels that no self-check has shown to be right here",
                    needed="a self-check, which cannot run in a capture",
                    fix="call dsattn.prepare with the call's arguments before the capture",
                )
            verdict = _checked(backend, key, launch, device)
            facts = identity(backend, device)
            if facts is not None:
                verdict = verdicts.save(facts, key.text(launch), verdict)
            verdicts.remember(backend, key, launch, verdict)
        return verdict


def _known(backend: Backend, key: Key, launch: Launch, device: torch.device) -> Verdict | None:
    """The verdict in memory, else on disk."""
    verdict = verdicts.recall(backend, key, launch)
    if verdict is not None:
        return verdict
    facts = identity(backend, device)
    verdict = None if facts is None else verdicts.load(facts, key.text(launch))
    if verdict is not None:
        verdicts.remember(backend, key, launch, verdict)
    return verdict


def _checked(backend: Backend, key: Key, launch: Launch, device: torch.device) -> Verdict:
    """The verdict of a check that runs now."""
    from dsattn.backends.trust.check import check

    _thread.checking = True
    try:
        return check(backend, key, launch, device)
    except DsattnError as error:
        return Verdict(False, "the backend refuses the problem", str(error), lasting=False)
    finally:
        _thread.checking = False


def _after_fork() -> None:
    """The lock of a process may have been taken for ever by a thread that its child does not have."""
    global _LOCK
    _LOCK = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
