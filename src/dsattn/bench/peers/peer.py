"""What a peer is: a released library, where it is found, and in words how it is driven."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Where a child process finds what it needs.

    Attributes:
        python: the interpreter that runs it.
        path: folders that it imports from before all others.
    """

    python: Path = Path(sys.executable)
    path: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Peer:
    """A released library.

    Attributes:
        name: the name by which works call it.
        package: its distribution.
        release: the release that is timed.
        how: how it is driven.
        place: fetches it on first use, and says where it is.
    """

    name: str
    package: str
    release: str
    how: str
    place: Callable[[], Place]

    def __str__(self) -> str:
        return f"{self.package} {self.release}"
