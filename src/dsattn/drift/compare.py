"""Two releases of a package compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dsattn.backends.cudnn.contracts import distribution
from dsattn.drift import known, raises, requirements, texts
from dsattn.drift.findings import Drift, Finding
from dsattn.drift.signatures import Signatures
from dsattn.drift.snapshot import Snapshot, kept, named, taken, versioned
from dsattn.drift.watch import Call, checked, listed, own
from dsattn.errors import BadInput

Advance = Callable[[str, int, int], None]


def drift(package: str, old: str, new: str, *, watch: Path | None = None, advance: Advance | None = None) -> Drift:
    """What changed in the call contract between two releases.

    Args:
        package: a distribution on the package index.
        old: a release of it.
        new: another one.
        watch: a file that lists the watched calls; default: dsattn's own calls of the cuDNN frontend, and no others.
        advance: told what is at hand, the steps done and all steps.

    Raises:
        BadInput: an unknown package or release, a broken wheel, a wrong file of calls.
        Unreachable: a wheel is needed and the index does not answer.
    """
    package = named(package)
    versions = versioned(old), versioned(new)
    frontend = package == distribution()["name"]
    calls = listed(watch) if watch is not None else own() if frontend else []
    advance = advance or (lambda *_: None)
    snapshots = []
    for done, version in enumerate(versions):
        advance(f"{package} {version}", done, len(versions))
        snapshots.append(kept(package, version) or taken(package, version))
    advance("compared", len(versions), len(versions))
    before, after = snapshots
    if not (before.present or after.present):
        needed = f"a release with {before.part or 'Python sources'}"
        raise BadInput(f"{package} {old} and {new}", given="nothing to compare", needed=needed)
    if watch is not None:
        checked(calls, before, after)
    found = compare(before, after, calls)
    notes = list(_notes(before, after))
    if frontend:
        facts = known.findings(before, after, calls, versions)
        found = [*known.marked(found, facts), *facts]
        notes += known.notes(*versions)
    return Drift(
        package=package,
        part=after.part,
        old=before.version,
        new=after.version,
        findings=found,
        watched=list(dict.fromkeys(call.label for call in calls)),
        unchanged=_unchanged(after, found),
        notes=notes,
    )


def compare(old: Snapshot, new: Snapshot, calls: Sequence[Call]) -> list[Finding]:
    """Everything that the sources and metadata of two releases show."""
    found = [*_exports(old, new, calls)]
    common = [(old.exports[name], each) for name, each in new.exports.items() if name in old.exports]
    for before, after in common:
        watched = [call for call in calls if call.name == after.name]
        found += Signatures(before, after, watched).findings()
        found += texts.findings(before, after, watched)
    found += raises.findings(common, new.part, calls)
    return [*found, *requirements.findings(old, new)]


def _unchanged(new: Snapshot, found: Sequence[Finding]) -> list[str]:
    """The exported names of which nothing was found, nor of their methods."""
    changed = {name for finding in found for name in finding.about}
    changed |= {name.rpartition(".")[0] for name in changed}
    return [name for name, each in new.exports.items() if each.kind != "method" and name not in changed]


def _exports(old: Snapshot, new: Snapshot, calls: Sequence[Call]) -> Iterator[Finding]:
    homes = {each.home.rpartition(".")[2]: name for name, each in new.exports.items() if name not in old.exports}
    for name, before in old.exports.items():
        after = new.exports.get(name)
        labels = tuple(call.label for call in calls if call.name == name)
        if after is None and not _owner_gone(name, new):
            moved = homes.get(before.home.rpartition(".")[2])
            what = f"{before.kind} is gone" + (f"; {moved} is new and may be it" if moved else "")
            yield Finding("exports", name, what, "breaks", "every caller (no such name)", labels)
        elif after is not None and after.kind != before.kind:
            yield Finding(
                "exports",
                name,
                f"is a {after.kind}, was a {before.kind}",
                "read",
                "whether callers can still use it",
                labels,
            )
        elif after is not None and after.home != before.home:
            what = f"comes from {after.home}, came from {before.home}"
            yield Finding("exports", name, what, "harmless", "the same under this name; imports of its module break")
    for name, after in new.exports.items():
        if name not in old.exports and not _owner_gone(name, old):
            yield Finding("exports", name, f"{after.kind} added", "harmless", "nobody calls it yet")


def _owner_gone(name: str, other: Snapshot) -> bool:
    """Whether a method's class is absent: that says it all."""
    owner = name.rpartition(".")[0]
    return bool(owner) and owner not in other.exports


def _notes(old: Snapshot, new: Snapshot) -> Iterator[str]:
    yield "static: nothing was imported or run, so what a kernel computes is not seen"
    for each in (old, new):
        if not each.present:
            yield f"{each.version} has no {each.part}"
        for path in each.unread:
            yield f"{each.version}: {path} is not Python that this interpreter can parse, and was not read"
        unknown = [exported.name for exported in each.exports.values() if exported.kind == "unknown"]
        if unknown:
            yield f"{each.version}: what stands behind {', '.join(unknown)} was not found in the sources"
