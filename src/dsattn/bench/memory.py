"""Resident memory of this process: now, and at its highest."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> int:
    """Resident bytes now; where the system does not tell, the most that there were."""
    return _told("VmRSS") or _ever()


def highest() -> int:
    """The most resident bytes since `forget`, or since this program began.

    `ru_maxrss` would also count what the process held before it became this program: a child starts as a copy of the
    one that started it.
    """
    return _told("VmHWM") or _ever()


def forget() -> bool:
    """Begins the count of `highest` anew; whether the system can."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def give_back() -> None:
    """Gives memory that is free back to the system, which a C library keeps for later and would count as resident."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _told(name: str) -> int:
    if not _STATUS.exists():
        return 0
    lines = [line.split() for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(lines[0][1]) * 1024 if lines else 0


def _ever() -> int:
    # Where there is no such module, the rest of the command line still works.
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
