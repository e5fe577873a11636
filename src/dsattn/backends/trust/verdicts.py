"""Verdicts on kernels, kept in memory and, for installed packages, in files that all processes share.

One file holds one verdict and is never edited: it is written under another name and renamed. A cache that cannot be
read or written costs time and no more; that is told once.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from dsattn.backends.base import Backend, Launch
from dsattn.backends.trust.keys import Key
from dsattn.wheels import cache_folder

_FORMAT = "dsattn-verdict/1"
_MEMORY: WeakKeyDictionary[Backend, dict[tuple[Key, Launch | None], Verdict]] = WeakKeyDictionary()
_TOLD: set[str] = set()


@dataclass(frozen=True)
class Verdict:
    """What a self-check found.

    Attributes:
        passed: whether all results were right.
        cause: the likely cause where one was not.
        found: what was wrong, in the words of the comparison.
        file: where the verdict is kept; None in memory alone.
        lasting: whether it may be kept on disk; False for what another run may decide otherwise.
    """

    passed: bool
    cause: str = ""
    found: str = ""
    file: Path | None = None
    lasting: bool = True

    @property
    def reason(self) -> str:
        """Why the kernel is not used."""
        parts = [self.found] if self.found else []
        parts += [] if self.file is None else [f"kept in {self.file}"]
        return f"its self-check failed: {self.cause}" + (f" ({'; '.join(parts)})" if parts else "")


def recall(backend: Backend, key: Key, launch: Launch | None) -> Verdict | None:
    """The verdict in memory; `launch` None asks for one on all launches, which only `prepare` makes."""
    kept = _MEMORY.get(backend)
    return None if kept is None else kept.get((key, launch))


def remember(backend: Backend, key: Key, launch: Launch | None, verdict: Verdict) -> None:
    """Keeps a verdict in memory."""
    _MEMORY.setdefault(backend, {})[key, launch] = verdict


def load(identity: dict[str, str], text: str) -> Verdict | None:
    """The verdict on disk about a key; None where there is none that can be read."""
    try:
        path = _path(identity, text)
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"no {_FORMAT}")
        if content["identity"] != identity or content["key"] != text:
            raise ValueError("about another kernel than its name says")
        return Verdict(
            _typed(content, "passed", bool), _typed(content, "cause", str), _typed(content, "found", str), path
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, ImportError) as error:
        _tell("read", error)
        return None


def save(identity: dict[str, str], text: str, verdict: Verdict) -> Verdict:
    """The verdict with the file that it was written to, or as it was where it could not be written.

    A verdict that passed does not take the place of one that failed meanwhile.
    """
    if not verdict.lasting:
        return verdict
    content = {
        "format": _FORMAT,
        "identity": identity,
        "key": text,
        "passed": verdict.passed,
        "cause": verdict.cause,
        "found": verdict.found,
    }
    try:
        path = _path(identity, text)
        path.parent.mkdir(parents=True, exist_ok=True)
        before = load(identity, text) if verdict.passed else None
        if before is not None and not before.passed:
            return before
        part = path.with_name(f".{path.stem}-{uuid.uuid4().hex}")
        try:
            part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        return replace(verdict, file=path)
    except (OSError, ImportError) as error:
        _tell("written", error)
        return verdict


def _typed(content: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(content[name], kind):
        raise ValueError(f"{name} is {content[name]!r}")
    return content[name]


def _path(identity: dict[str, str], text: str) -> Path:
    whole = json.dumps(identity, sort_keys=True)
    names = (hashlib.sha256(part.encode()).hexdigest()[:20] for part in (whole, text))
    return cache_folder().joinpath("verdicts", *names).with_suffix(".json")


def _tell(what: str, error: Exception) -> None:
    """Says once per process that verdicts are not kept, and why."""
    if _TOLD:
        return
    _TOLD.add(what)
    told = f"{type(error).__name__}: {error}"
    warnings.warn(f"a verdict on a kernel could not be {what}, so its self-check runs again: {told}", stacklevel=2)
