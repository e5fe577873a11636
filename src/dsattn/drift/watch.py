"""The calls that are watched: our own, or those that a file lists."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsattn.backends.cudnn.caller import SETTLED
from dsattn.backends.cudnn.contracts_table import table
from dsattn.drift.snapshot import VAR_KEYWORD, Exported, Snapshot
from dsattn.errors import BadInput

_KEYS = {"wrapper", "positional", "keywords", "where"}


@dataclass(frozen=True)
class Call:
    """One call of an exported name.

    Attributes:
        name: the exported name.
        label: how a report names the call.
        positional: how many arguments it passes by position.
        names: their names in the old release, where the caller gave them.
        keywords: what it passes by keyword.
        adapts: it asks the signature first, and passes a keyword only where that has it.
        settled: keywords that it can do without.
    """

    name: str
    label: str
    positional: int = 0
    names: tuple[str, ...] = ()
    keywords: frozenset[str] = frozenset()
    adapts: bool = False
    settled: frozenset[str] = frozenset()

    def by_keyword(self, exported: Exported, name: str) -> bool:
        """Whether it passes an argument by keyword to that release."""
        taken = exported.parameter(name) is not None or (exported.has(VAR_KEYWORD) and not self.adapts)
        return name in self.keywords and taken

    def by_position(self, exported: Exported, name: str) -> bool:
        """Whether it passes an argument by position."""
        return name in [each.name for each in exported.positions[: self.positional]]

    def passes(self, exported: Exported, name: str) -> bool:
        """Whether it passes an argument at all."""
        return self.by_keyword(exported, name) or self.by_position(exported, name)

    def needs(self, name: str) -> bool:
        """Whether it passes a keyword that it cannot do without."""
        return name in self.keywords - self.settled


def own() -> list[Call]:
    """The calls of dsattn's backend cudnn: what its contract table says that they rely on, and what they settle."""
    found = []
    for name, wrapper in table()["wrapper"].items():
        relies = frozenset(wrapper.get("relies", ()))
        if relies:
            settled = frozenset(SETTLED.get(name, {})) - relies
            symbol = wrapper.get("symbol", f"{name}_wrapper")
            found.append(Call(symbol, f"dsattn: {name}", keywords=relies | settled, adapts=True, settled=settled))
    return found


def listed(path: Path) -> list[Call]:
    """The calls that a TOML file lists.

    Raises:
        BadInput: the file cannot be read, or an entry is wrong; the message says which.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(str(path), given=error.strerror, needed="a TOML file with a [[call]] for each call") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(str(path), given=f"no TOML: {error}") from error
    calls = data.get("call")
    if not isinstance(calls, list) or not calls or set(data) != {"call"}:
        raise BadInput(str(path), given=", ".join(data) or "nothing", needed="a [[call]] for each call")
    return [_call(f"{path}: call {number}", each) for number, each in enumerate(calls, 1)]


def _call(at: str, entry: Any) -> Call:
    if not isinstance(entry, dict) or "wrapper" not in entry or not set(entry) <= _KEYS:
        given = ", ".join(entry) if isinstance(entry, dict) else repr(entry)
        raise BadInput(at, given=given, needed="wrapper, and of positional, keywords, where what applies")
    positional, keywords = entry.get("positional", 0), entry.get("keywords", [])
    names = _names(f"{at}: positional", positional) if isinstance(positional, list) else ()
    count = len(names) if isinstance(positional, list) else positional
    if type(count) is not int or count < 0:
        raise BadInput(f"{at}: positional", given=repr(positional), needed="a number of arguments, or their names")
    for key in ("wrapper", "where"):
        if not isinstance(entry.get(key, ""), str):
            raise BadInput(f"{at}: {key}", given=repr(entry[key]), needed="a text")
    label = entry.get("where") or entry["wrapper"]
    return Call(entry["wrapper"], label, count, names, frozenset(_names(f"{at}: keywords", keywords)))


def _names(at: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise BadInput(at, given=repr(value), needed="a list of names")
    if len(set(value)) < len(value):
        raise BadInput(at, given=repr(value), needed="each name once")
    return tuple(value)


def checked(calls: Sequence[Call], old: Snapshot, new: Snapshot) -> None:
    """Refuses calls that are none in either release: a misspelt one would never be touched.

    Raises:
        BadInput: a name is exported by neither, or a keyword taken by neither, or the names of the positional
            arguments are others than those of the old release.
    """
    for call in calls:
        found = [each for each in (old.exports.get(call.name), new.exports.get(call.name)) if each]
        if not found:
            near = difflib.get_close_matches(call.name, {**old.exports, **new.exports}, 3)
            needed = f"a name that {old.version} or {new.version} exports" + (f": {', '.join(near)}" if near else "")
            raise BadInput(f"watched call {call.label}", given=repr(call.name), needed=needed)
        if call.adapts or found[0].kind in ("unknown", "value"):
            continue
        _check_keywords(call, found)
        positions = [each.name for each in found[0].positions]
        if call.names and list(call.names) != positions[: len(call.names)]:
            needed = f"those of {call.name} in order: {', '.join(positions)}"
            raise BadInput(f"watched call {call.label}", given=f"positional {', '.join(call.names)}", needed=needed)


def _check_keywords(call: Call, found: Iterable[Exported]) -> None:
    if any(each.has(VAR_KEYWORD) for each in found):
        return
    taken = {parameter.name for each in found for parameter in each.parameters}
    strange = sorted(call.keywords - taken)
    if strange:
        near = difflib.get_close_matches(strange[0], taken, 3)
        needed = f"a parameter of {call.name}" + (f": {', '.join(near)}" if near else "")
        raise BadInput(f"watched call {call.label}", given=f"keyword {strange[0]!r}", needed=needed)
