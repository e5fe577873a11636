"""What is found: one line each, with what it means for a caller and which watched calls it touches."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Effect = Literal["breaks", "silent", "changed behaviour", "may refuse", "read", "harmless"]
Group = Literal["exports", "parameters", "requirements", "raises", "docstrings", "known"]
NOTHING = "no static change seen"


@dataclass(frozen=True)
class Finding:
    """One change.

    Attributes:
        group: where it was seen; "known" is dsattn's own table of the cuDNN frontend.
        name: the exported name, or the requirement.
        what: the change.
        effect: breaks (an error), silent (another meaning without an error), changed behaviour
            (known to do something else),
            may refuse (raises where it did not), read (a person has to), harmless.
        means: that in words, for a caller.
        touches: the watched calls that it concerns.
        parameter: the parameter that it is about, if it is about one.
        reached_by: of a raise site the exported names whose calls can reach it.
    """

    group: Group
    name: str
    what: str
    effect: Effect
    means: str
    touches: tuple[str, ...] = ()
    parameter: str | None = None
    reached_by: tuple[str, ...] = ()

    @property
    def about(self) -> tuple[str, ...]:
        """The exported names that it concerns."""
        return self.reached_by or (self.name,)


@dataclass
class Drift:
    """Everything that was found between two releases of a package.

    Attributes:
        package: the distribution.
        part: the package in it that was read; empty for all of it.
        old: a release.
        new: the other.
        findings: the changes.
        watched: the labels of the calls that are watched.
        unchanged: exported names of which nothing was found.
        notes: what could not be seen.
    """

    package: str
    part: str
    old: str
    new: str
    findings: list[Finding]
    watched: list[str]
    unchanged: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def touched(self) -> list[str]:
        """The watched calls that something touches."""
        found = {label for finding in self.findings for label in finding.touches}
        return [label for label in self.watched if label in found]

    def touching(self, label: str) -> dict[Effect, int]:
        """Effect -> how many findings of it touch a watched call."""
        return dict(Counter(finding.effect for finding in self.findings if label in finding.touches))

    @property
    def summary(self) -> str:
        """The verdict in one line; that nothing was seen is never called compatible."""
        watched = f"{len(self.watched)} watched call{'s' if len(self.watched) != 1 else ''}"
        if not self.findings:
            return f"{NOTHING}; {watched}" if self.watched else NOTHING
        seen = "1 change" if len(self.findings) == 1 else f"{len(self.findings)} changes"
        if not self.watched:
            return f"{seen} seen; no call is watched, --watch names yours"
        touching = sum(bool(finding.touches) for finding in self.findings)
        if not touching:
            return f"{seen} seen, none touches one of {watched}"
        verb = "touches" if touching == 1 else "touch"
        return f"{seen} seen, {touching} {verb} {len(self.touched)} of {watched}"

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "touched": self.touched, "summary": self.summary}
