"""Docstrings sentence by sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from dsattn.drift.findings import Finding
from dsattn.drift.snapshot import Exported
from dsattn.drift.watch import Call

# A paragraph, an item of a list or an argument's entry begins a sentence.
_BREAKS = re.compile(r"\n\s*\n|\n\s*(?=[-*] |\w+(?: \([^)\n]*\))?:\s)")
_ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\"'(])")


def sentences(docstring: str) -> list[str]:
    """The sentences of a docstring, white space made plain."""
    parts = (" ".join(part.split()) for part in _BREAKS.split(docstring))
    return [sentence for part in parts if part for sentence in _ENDS.split(part)]


def findings(before: Exported, after: Exported, calls: Sequence[Call]) -> Iterator[Finding]:
    """The sentences that came, went or changed; those about a parameter that is new are no news for its callers."""
    old, new = sentences(before.docstring), sentences(after.docstring)
    added = {each.name for each in after.parameters} - {each.name for each in before.parameters}
    labels = tuple(call.label for call in calls)
    for operation, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if operation == "equal":
            continue
        was, now = " ".join(old[i:j]), " ".join(new[k:m])
        what = " -> ".join(f"“{text}”" for text in (was, now) if text)
        words = {"delete": "gone: ", "insert": "new: ", "replace": ""}[operation]
        if not was and all(_names(sentence, added) for sentence in new[k:m]):
            means = "about a parameter that is new"
            yield Finding("docstrings", before.name, words + what, "harmless", means)
        else:
            means = "it may tell of another behaviour"
            yield Finding("docstrings", before.name, words + what, "read", means, labels)


def _names(sentence: str, parameters: set[str]) -> bool:
    return any(re.search(rf"\b{re.escape(name)}\b", sentence) for name in parameters)
