"""What one release shows of its call contract, as data: read from its wheel once, then kept in the cache."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsattn.backends.cudnn.contracts import distribution
from dsattn.errors import BadInput
from dsattn.wheels import cache_folder, scratch, wheel

if TYPE_CHECKING:
    from packaging.version import Version

# Package -> the folder in its wheel that is read; of other packages all is.
_PARTS = {"megatron-core": "megatron/core/transformer/experimental_attention_variant"}
_READERS = ("snapshot", "source", "exports", "bodies", "annotations")
POSITIONAL = ("positional-only", "positional or keyword")
VAR_POSITIONAL, VAR_KEYWORD = "variadic positional", "variadic keyword"


@dataclass(frozen=True)
class Parameter:
    """One parameter as its source has it; `kind` in the words of griffe, constants in `default` followed to values.

    The name of a variadic one begins with its stars.
    """

    name: str
    kind: str
    default: str | None
    annotation: str | None

    @property
    def required(self) -> bool:
        """Whether a call without it raises TypeError."""
        return self.default is None and self.kind not in (VAR_POSITIONAL, VAR_KEYWORD)

    @property
    def positional(self) -> bool:
        """Whether it has a position."""
        return self.kind in POSITIONAL


@dataclass(frozen=True)
class Site:
    """A place that raises: the error, what it says, and the nearest condition around it; `where` is the function."""

    error: str
    says: str
    when: str
    where: str = field(compare=False)


@dataclass(frozen=True)
class Exported:
    """A name that callers can reach: a function, a class (its constructor's parameters), a method, or a value.

    `home` is the module and name that it comes from, `sites` are the raise sites that a call can reach, as far as names
    in the source tell. `kind` is "unknown" where the source does not show what the name is.
    """

    name: str
    kind: str
    home: str
    parameters: tuple[Parameter, ...] = ()
    returns: str | None = None
    docstring: str = ""
    sites: tuple[Site, ...] = ()

    @property
    def positions(self) -> tuple[Parameter, ...]:
        """The parameters that have a position, in order."""
        return tuple(each for each in self.parameters if each.positional)

    def parameter(self, name: str) -> Parameter | None:
        """The parameter of that name, or None."""
        return next((each for each in self.parameters if each.name == name), None)

    def has(self, kind: str) -> bool:
        """Whether there is a parameter of a kind."""
        return any(each.kind == kind for each in self.parameters)


@dataclass(frozen=True)
class Snapshot:
    """A release: its exports by name, what it requires, and the files that this Python could not parse.

    `present` is False where the wheel lacks the part that is read.
    """

    package: str
    version: str
    part: str
    present: bool
    exports: dict[str, Exported]
    requires_python: str | None
    requires: tuple[str, ...]
    extras: tuple[str, ...]
    unread: tuple[str, ...] = ()


def part_of(package: str) -> str:
    """The folder of a package's wheel that is read; empty for all of it."""
    frontend = distribution()
    if package == frontend["name"]:
        return f"{frontend['module']}/{frontend['folder']}"
    return _PARTS.get(package, "")


def named(package: str) -> str:
    """A distribution's name as indexes spell it.

    Raises:
        BadInput: it can be no distribution's name.
    """
    # Also keeps what would be an option or an address away from pip.
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", package):
        raise BadInput("--package", given=repr(package), needed="a distribution's name, such as nvidia-cudnn-frontend")
    from packaging.utils import canonicalize_name

    return canonicalize_name(package)


def versioned(text: str) -> Version:
    """A release as one writes it.

    Raises:
        BadInput: it is no version.
    """
    from packaging.version import InvalidVersion, Version

    try:
        return Version(text)
    except InvalidVersion:
        raise BadInput("release", given=repr(text), needed="a version, such as 1.26.0") from None


def kept(package: str, version: Version) -> Snapshot | None:
    """The snapshot of a release that is in the cache, or None."""
    try:
        return decoded(json.loads(_place(package, version).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        # Absent, cut short, or written by another dsattn: made anew.
        return None


def taken(package: str, version: Version) -> Snapshot:
    """The snapshot of a release, read from its wheel, which is downloaded if need be, and kept.

    Raises:
        BadInput: the release cannot be downloaded or read; the cache is as it was.
        Unreachable: the index does not answer.
    """
    from dsattn.drift.source import read

    made = read(wheel(package, version), package, part_of(package))
    place = _place(package, version)
    with scratch(place.parent) as fresh:
        written = fresh / place.name
        written.write_text(json.dumps(encoded(made)), encoding="utf-8")
        written.replace(place)
    return made


def encoded(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot as JSON."""
    return {"reader": _reader(), **asdict(snapshot)}


def decoded(data: Any) -> Snapshot:
    """A snapshot from JSON.

    Raises:
        KeyError: it is not one.
        TypeError: it is not one.
        ValueError: another reader wrote it.
    """
    if not isinstance(data, dict) or data.pop("reader") != _reader():
        raise ValueError("another reader's")
    exports = {name: _exported(each) for name, each in data.pop("exports").items()}
    lists: dict[str, Any] = {key: tuple(data.pop(key)) for key in ("requires", "extras", "unread")}
    return Snapshot(exports=exports, **lists, **data)


def _exported(data: dict[str, Any]) -> Exported:
    parameters = tuple(Parameter(**each) for each in data.pop("parameters"))
    sites = tuple(Site(**each) for each in data.pop("sites"))
    return Exported(parameters=parameters, sites=sites, **data)


def _place(package: str, version: Version) -> Path:
    from packaging.utils import canonicalize_version

    return cache_folder() / "drift" / f"{package}-{canonicalize_version(version)}.json"


@cache
def _reader() -> str:
    """What made a snapshot: another reader may see more, and its snapshots are not taken for this one's."""
    sources = (Path(__file__).with_name(f"{name}.py").read_bytes() for name in _READERS)
    return sha256(b"".join(sources) + repr(sys.version_info[:2]).encode()).hexdigest()
