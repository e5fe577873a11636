"""The errors that dsattn raises on purpose; catch `DsattnError` for all of them."""

from __future__ import annotations

from typing import Any


class DsattnError(Exception):
    """Base of every error that dsattn raises on purpose.

    The message reads `what: given ...; needed ...; fix`; parts that were not given are left out.

    Args:
        what: the argument, operator or backend that is at fault.
        given: what was found.
        needed: what would be right.
        fix: what to change.
    """

    def __init__(self, what: str, *, given: Any = None, needed: str | None = None, fix: str | None = None) -> None:
        self.what, self.given, self.needed, self.fix = what, given, needed, fix
        parts = []
        if given is not None:
            parts.append(f"given {given}")
        if needed is not None:
            parts.append(f"needed {needed}")
        if fix is not None:
            parts.append(fix)
        super().__init__(f"{what}: {'; '.join(parts)}" if parts else what)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions rebuild themselves from `args`, which would lose the keywords (spawned workers, test runners).
        return _rebuild, (type(self), self.what, self.given, self.needed, self.fix)


def _rebuild(kind: type[DsattnError], what: str, given: Any, needed: str | None, fix: str | None) -> DsattnError:
    return kind(what, given=given, needed=needed, fix=fix)


class BadInput(DsattnError, ValueError):
    """An argument is wrong (shape, dtype, device, range, combination); nothing was computed."""


class UnsupportedProblem(DsattnError):
    """The backend is present and works, but not for this problem; the message has its reason."""


class BackendMissing(DsattnError):
    """The backend's package, compiler or device is absent here; the message has the cause."""


class ContractDrift(DsattnError):
    """A kernel was shown wrong here, or follows a contract that dsattn does not know."""
