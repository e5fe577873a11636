"""What dsattn's contract table knows of a range of releases of the cuDNN frontend: behaviour, not signatures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dsattn.backends.cudnn.contracts import ARCHS, Contract, Defect, Wrapper, contract, releases
from dsattn.backends.cudnn.contracts_table import FACTS
from dsattn.drift.facts import CHANGED, OF_PARAMETERS, PAIRS, meaning, told
from dsattn.drift.findings import Effect, Finding
from dsattn.drift.snapshot import Snapshot
from dsattn.drift.watch import Call

if TYPE_CHECKING:
    from packaging.version import Version

# The parameter by which a caller says what is otherwise a default of the release.
STATED_BY = {"alignment": "q_causal_offsets", "ids": "topk_indices_global", "deterministic": "deterministic"}


@dataclass(frozen=True)
class _Change:
    symbol: str
    fact: str
    what: str
    effect: Effect
    means: str
    parameters: tuple[str, ...] | None = None


def notes(old: Version, new: Version) -> Iterator[str]:
    """What the table cannot say about two releases."""
    known = releases()
    for version in (old, new):
        if version < known[0]:
            yield f"{version} is older than the first release with DSA, {known[0]}: no behaviour is known of it"
        elif not contract(version, ARCHS[0]).known:
            before = max(one for one in known if one <= version)
            yield f"{version} is not in dsattn's contract table: it was taken for {before}, its own changes are unknown"


def findings(old: Snapshot, new: Snapshot, calls: Sequence[Call], versions: tuple[Version, Version]) -> list[Finding]:
    """The facts and defects that differ, once for the architectures that agree.

    Args:
        old: the old release's exports, for what a call passes.
        new: the new one's.
        calls: the watched calls.
        versions: the two releases.
    """
    if min(versions) < releases()[0]:
        return []
    by_arch = {arch: list(_changes(*(contract(version, arch) for version in versions))) for arch in ARCHS}
    together: dict[_Change, list[str]] = {}
    for arch, changes in by_arch.items():
        for change in changes:
            together.setdefault(change, []).append(arch)
    order = {change.symbol: at for at, change in reversed(list(enumerate(together)))}
    found = []
    for change, archs in sorted(together.items(), key=lambda item: order[item[0].symbol]):
        touches = tuple(call.label for call in calls if _touched(call, change, old, new))
        where = "" if len(archs) == len(ARCHS) else f" on {archs[0]}"
        stated = STATED_BY.get(change.fact)
        found.append(Finding("known", change.symbol, change.what + where, change.effect, change.means, touches, stated))
    return found


def marked(found: Sequence[Finding], known: Sequence[Finding]) -> Iterator[Finding]:
    """The findings, where a new parameter that states a default which has changed is told to be changed behaviour."""
    stated = {(each.name, each.parameter): each for each in known if each.parameter and each.effect == CHANGED}
    for each in found:
        cause = stated.get((each.name, each.parameter or ""))
        if each.group != "parameters" or cause is None or " added" not in each.what:
            yield each
            continue
        means = f"for callers that leave it out: {cause.what}"
        if each.effect != "harmless":
            means += f"; {each.means}"
        touches = tuple(dict.fromkeys((*cause.touches, *each.touches)))
        yield replace(each, effect=CHANGED, means=means, touches=touches)


def _touched(call: Call, change: _Change, old: Snapshot, new: Snapshot) -> bool:
    if call.name != change.symbol or change.effect == "harmless":
        return False
    before, after = old.exports.get(call.name), new.exports.get(call.name)
    if before is None or after is None:
        return True
    stated = STATED_BY.get(change.fact)
    if stated is not None and call.passes(before, stated) and call.passes(after, stated):
        return False
    return change.parameters is None or any(call.passes(after, name) for name in change.parameters)


def _changes(old: Contract, new: Contract) -> Iterator[_Change]:
    for after in new.wrappers:
        if not old.has(after.name):
            continue
        before = old.wrapper(after.name)
        # Where a wrapper did not run, nothing that it did can have changed.
        for fact in ("runs",) if not before.runs else (each for each in FACTS if each != "signature"):
            if getattr(before, fact) != getattr(after, fact):
                yield from _fact(fact, before, after)
    symbols = {wrapper.name: wrapper.symbol for wrapper in new.wrappers if old.has(wrapper.name)}
    for defect in old.defects:
        if defect not in new.defects:
            yield from _defect(defect, symbols, "defect fixed", "harmless", "right now; a workaround can go")
    for defect in new.defects:
        if defect not in old.defects:
            yield from _defect(defect, symbols, "new defect", CHANGED, "see whether your calls are of that kind")


def _defect(defect: Defect, symbols: Mapping[str, str], kind: str, effect: Effect, means: str) -> Iterator[_Change]:
    for name in defect.wrappers:
        if name in symbols:
            yield _Change(symbols[name], defect.id, f"{kind}, {defect.id}: {defect.what}", effect, means)


def _fact(fact: str, before: Wrapper, after: Wrapper) -> Iterator[_Change]:
    was, now = getattr(before, fact), getattr(after, fact)
    parameters = None
    if fact in OF_PARAMETERS:
        was, now = (dict(side) if fact in PAIRS else dict.fromkeys(side, True) for side in (was, now))
        # What is said of a parameter that the old release did not have concerns no caller of it.
        parameters = tuple(name for name in {**was, **now} if was.get(name) != now.get(name) and before.accepts(name))
        was, now = ({name: side[name] for name in parameters if name in side} for side in (was, now))
        if not parameters:
            return
    effect, means = meaning(fact, was, now)
    yield _Change(after.symbol, fact, f"{fact}: {told(fact, was)} -> {told(fact, now)}", effect, means, parameters)
