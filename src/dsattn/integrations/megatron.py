"""Repairs a released Megatron-LM in one line, and lets `dsattn.capture` see its calls.

    from dsattn.integrations import megatron

    megatron.install()

megatron-core 0.19 calls the cuDNN frontend as its releases up to 1.25 understood it. From 1.26 on the same calls mean
something else and nothing says so: selections on context-parallel ranks miss keys, and with more than one sequence in a
micro-batch the indexer's gradients are zero from the second on. docs/megatron.md tells the whole story.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType, TracebackType

from packaging.version import Version

from dsattn.backends import find as find_backend
from dsattn.backends import name_of, ordered
from dsattn.backends.cudnn.namespace import Installed
from dsattn.backends.cudnn.namespace import find as find_frontend
from dsattn.errors import DsattnError
from dsattn.functional.call import Choice
from dsattn.functional.capture import add_source
from dsattn.integrations.megatron_module import find
from dsattn.integrations.megatron_namespace import CHANGED
from dsattn.integrations.megatron_patch import LOCK, Patch

__all__ = ["Installation", "install", "uninstall"]

_LOGGER = logging.getLogger(__name__)
_PATCHES: list[Patch] = []


class Installation:
    """What one `install` did; as a context manager it takes that back at the end of its block.

    Attributes:
        megatron: which Megatron.
        repaired: whether calls of the frontend are repaired, by this or an earlier `install`.
        scorer: whether packed context-parallel selections are dsattn's, by this or an earlier `install`.
        changed: whether this `install` changed anything.
    """

    def __init__(self, patch: Patch, before: tuple[bool, Choice | None]) -> None:
        self.megatron = str(patch.kernels)
        self.repaired, self.scorer = patch.repairs, patch.scores is not None
        self.changed = (patch.repairs, patch.scores) != before
        self._patch, self._before = patch, before

    def __repr__(self) -> str:
        return f"Installation({self.megatron!r}, repaired={self.repaired}, scorer={self.scorer})"

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.changed:
            _switch(self._patch, *self._before)


def install(*, scorer: bool = False, backend: Choice = "auto", module: ModuleType | str | None = None) -> Installation:
    """Repairs Megatron's calls of the cuDNN frontend in this process.

    The frontend's DSA as Megatron holds it is wrapped, and so is what Megatron loads it with; `cudnn.DSA` itself stays
    as it is for everybody else. A call that leaves them out gets `topk_indices_global=True` and bottom-right
    `q_causal_offsets` where the wrapper takes them and the call means something else without. All other calls pass
    through untouched: those of older frontends, those with one batch entry or no offset, those that say it themselves.

    Args:
        scorer: also let dsattn select the keys of packed context-parallel rows. Megatron's own scorers miss keys where
            padding follows the documents (also with the old frontend), and where a tensor-parallel rank holds a slice
            of the rows of many documents. Each layer's windows are read from the device, which waits for it.
        backend: what runs those selections: "auto", a name of `dsattn.backends()`, or a Backend.
        module: the module of Megatron's kernels, or its name, where it is not the one that Megatron's dispatcher
            imports.

    Returns:
        What was done. It may be used as a context manager, which takes back what this call changed.

    Semantics:
        Installing twice changes nothing more; installing with `scorer=True` later adds the scorers, and another
        `backend` takes the place of the first. A Megatron that names both arguments itself is left as it is. One line
        goes to the log of `dsattn.integrations.megatron`. May be called from any thread, before or after Megatron's
        first step.

    Raises:
        BackendMissing: Megatron is not installed or cannot be imported, or the named backend is absent; the message has
            the cause.
        ContractDrift: Megatron's functions are not those that are known; nothing was changed. Also out of a later call
            that a frontend can no longer be told the meaning of.
        BadInput: `module` is neither a module nor a name, or no backend has that name.
    """
    if scorer and backend != "auto":
        # A name that nothing has is refused now, not in the first step.
        find_backend(name_of(backend), ordered())
    with LOCK:
        patch = _patch_of(module)
        before = patch.repairs, patch.scores
        _switch(patch, not patch.fixed, backend if scorer else patch.scores)
        done = Installation(patch, before)
    _LOGGER.info("%s", _told(patch, done.changed))
    return done


def uninstall() -> bool:
    """Takes back what `install` changed, in every Megatron; whether there was anything.

    A running `dsattn.capture` goes on seeing Megatron's calls.
    """
    with LOCK:
        patches = [patch for patch in _PATCHES if patch.repairs or patch.scores is not None]
        for patch in patches:
            _switch(patch, False, None)
            _LOGGER.info("%s: calls of the cuDNN frontend are its own again", patch.kernels)
    return bool(patches)


def _patch_of(module: ModuleType | str | None) -> Patch:
    kernels = find(module)
    for patch in _PATCHES:
        if patch.kernels.names is kernels.names:
            return patch
    _PATCHES.append(Patch(kernels))
    return _PATCHES[-1]


def _switch(patch: Patch, repairs: bool, scores: Choice | None) -> None:
    with LOCK:
        before = patch.repairs, patch.scores
        patch.repairs, patch.scores = repairs, scores
        try:
            patch.apply()
        except DsattnError:
            patch.repairs, patch.scores = before
            raise


def _told(patch: Patch, changed: bool) -> str:
    """What is in force, in one line."""
    found = find_frontend()
    known = isinstance(found, Installed)
    frontend = f"cuDNN frontend {found.version}" if known else "cuDNN frontend"
    parts = []
    if patch.fixed:
        parts.append(f"it names id spaces and causal offsets in its calls of the {frontend} itself, nothing to repair")
    elif known and Version(found.version.base_version) < CHANGED:
        parts.append(f"its calls of the {frontend} pass as they are, and would be repaired from {CHANGED} on")
    else:
        parts.append(f"its calls of the {frontend} get explicit id spaces and causal offsets")
    if patch.scores is not None:
        name = patch.scores if isinstance(patch.scores, str) else patch.scores.name
        parts.append(f"dsattn selects the keys of packed context-parallel rows (backend {name})")
    if not changed and (patch.repairs or patch.scores is not None):
        parts.append("as before")
    return f"{patch.kernels}: {'; '.join(parts)}"


@contextmanager
def _seen() -> Generator[None]:
    """While it is entered, observers of this process are told of Megatron's calls, if Megatron is loaded."""
    with LOCK:
        if "megatron.core" in sys.modules:
            with _told_of_failure():
                _patch_of(None)
        patches = [patch for patch in _PATCHES if _watched(patch, 1)]
    try:
        yield
    finally:
        with LOCK:
            for patch in patches:
                _watched(patch, -1)


def _watched(patch: Patch, more: int) -> bool:
    """Counts captures up or down; whether the calls of this Megatron can be seen."""
    patch.captures += more
    with _told_of_failure():
        patch.apply()
        return True
    patch.captures -= more
    return False


@contextmanager
def _told_of_failure() -> Generator[None]:
    """Megatron's kernels may be others than those that are known, which is no reason to capture nothing else."""
    try:
        yield
    except DsattnError as error:
        _LOGGER.warning("dsattn.capture does not see Megatron's calls: %s", error)


add_source(_seen)
