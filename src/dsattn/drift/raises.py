"""Raise sites that a call can reach now, and could not before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dsattn.drift.findings import Finding
from dsattn.drift.snapshot import Exported, Site
from dsattn.drift.watch import Call

Pairs = Sequence[tuple[Exported, Exported]]


def findings(pairs: Pairs, part: str, calls: Sequence[Call]) -> Iterator[Finding]:
    """The sites that were added, each once, with the exported names whose calls can reach it.

    Args:
        pairs: what both releases export, as the old one has it and as the new one has it.
        part: the package that was read, which names are told relative to.
        calls: the watched calls.
    """
    sites: dict[tuple[Site, str], list[str]] = {}
    new: set[Site] = set()
    for before, after in pairs:
        added = {each.name for each in after.parameters} - {each.name for each in before.parameters}
        for site in after.sites:
            if site in before.sites:
                continue
            earlier = {each.when for each in before.sites if site.says and told(each) == told(site)}
            was = f", was when {earlier.pop()}" if len(earlier) == 1 else ""
            sites.setdefault((site, was), []).append(after.name)
            if _is_about(site, added):
                new.add(site)
    for (site, was), names in sites.items():
        what = told(site) + (f", when {site.when}" if site.when else "") + was
        where = site.where.removeprefix(f"{part}.")
        if site in new:
            yield Finding("raises", where, what, "harmless", "about a parameter that is new", reached_by=tuple(names))
            continue
        touches = tuple(call.label for call in calls if call.name in names)
        means = "calls that meet the condition"
        yield Finding("raises", where, what, "may refuse", means, touches, reached_by=tuple(names))


def told(site: Site) -> str:
    """The error and what it says."""
    return f"{site.error}: {site.says}" if site.says else site.error


def _is_about(site: Site, parameters: set[str]) -> bool:
    """Whether the condition, or else the message, is about one of these parameters."""
    text = site.when or site.says
    return any(re.search(rf"\b{re.escape(name)}\b", text) for name in parameters)
