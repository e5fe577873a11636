"""What an installation of a release needs beside it."""

from __future__ import annotations

from collections.abc import Iterator

from dsattn.drift.findings import Finding
from dsattn.drift.snapshot import Snapshot


def findings(old: Snapshot, new: Snapshot) -> Iterator[Finding]:
    """The requirements, extras and Python versions that changed; no call depends on them, an installation does."""
    if old.requires_python != new.requires_python:
        what = f"{new.requires_python or 'any'}, was {old.requires_python or 'any'}"
        yield _finding("Python", what, "pip refuses the release on other Pythons")
    for extra in old.extras:
        if extra not in new.extras:
            yield _finding(f"extra {extra}", "gone", "pip warns, and installs without what it named")
    for extra in new.extras:
        if extra not in old.extras:
            yield Finding("requirements", f"extra {extra}", "added", "harmless", "nobody asks for it yet")
    before, after = _by_name(old), _by_name(new)
    for name in sorted({*before, *after}):
        was, now = before.get(name, set()), after.get(name, set())
        gone, came = (" or ".join(sorted(texts)) for texts in (was - now, now - was))
        if not now:
            yield _finding(name, f"no longer required, was {gone}", "no longer installed along with it")
        elif not was:
            yield _finding(name, f"required now: {came}", "installed along with it")
        elif was != now:
            what = f"{came}, was {gone}" if came and gone else f"also {came}" if came else f"no longer {gone}"
            yield _finding(name, what, "an environment that pins it may not resolve")


def _finding(name: str, what: str, means: str) -> Finding:
    return Finding("requirements", name, what, "read", means)


def _by_name(snapshot: Snapshot) -> dict[str, set[str]]:
    """Distribution -> what it must be, and where."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    found: dict[str, set[str]] = {}
    for text in snapshot.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            found.setdefault(text, set()).add("as it stands")
            continue
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        needed = f"{extras}{requirement.url or requirement.specifier}" or "any version"
        where = "" if requirement.marker is None else f" where {requirement.marker}"
        found.setdefault(canonicalize_name(requirement.name), set()).add(needed + where)
    return found
