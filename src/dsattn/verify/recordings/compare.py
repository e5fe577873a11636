"""One recorded call against the same call of a stand-in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from dsattn.verify.recordings import tolerances
from dsattn.verify.recordings.digest import NOT_FINITE, sampled_places
from dsattn.verify.recordings.file import Check

Verdict = Literal["agrees", "differs", "follows"]
Call = Mapping[str, Any]
# A scalar goes through the arithmetic of another machine's Python at most.
_SCALAR = 1e-6


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one recorded call.

    Attributes:
        wrapper: its name.
        case: the case.
        operator: the operator of the check.
        verdict: "follows" for a difference after one in the same check, or in arguments after a call that chose
            otherwise among equal scores.
        what: the result or arguments that differ first; "" where none does.
        text: what differs about it.
    """

    wrapper: str
    case: str
    operator: str
    verdict: Verdict
    what: str = ""
    text: str = ""


def outcomes(recorded: Check, found: Check) -> Iterator[Outcome]:
    """The outcome of every recorded call of a check, and of the first call too many.

    Args:
        recorded: the check as recorded.
        found: the same check over a stand-in.
    """
    differed = chose_otherwise = False
    for old, new in zip_longest(recorded.calls, found.calls):
        wrapper = (old or new)["wrapper"]
        excused = differed or chose_otherwise
        if old is None or new is None or old["wrapper"] != new["wrapper"]:
            text = "no such call" if new is None else f"a call of {new['wrapper']}"
            fault = "calls", f"{text}, recorded {'none' if old is None else old['wrapper']}"
        else:
            fault = next(_arguments(old, new), None)
            if fault is None:
                # What the call was given is as good as equal, which only a difference before it can be hidden in.
                fault, excused = next(_results(old, new), None), differed
            chose_otherwise = chose_otherwise or _chose_otherwise(old, new)
        verdict: Verdict = "agrees" if fault is None else "follows" if excused else "differs"
        differed = differed or verdict == "differs"
        what, text = fault or ("", "")
        yield Outcome(
            wrapper=wrapper, case=recorded.case, operator=recorded.operator, verdict=verdict, what=what, text=text
        )
        if what == "calls":
            return


def _arguments(old: Call, new: Call) -> Iterator[tuple[str, str]]:
    """Arguments that are not those of the recorded call."""
    names = dict.fromkeys([*old["arguments"], *new["arguments"]])
    for name in names:
        was, now = (call["arguments"].get(name) for call in (old, new))
        text = argument(was, now)
        if text is not None:
            yield f"argument {name}", text


def argument(was: Any, now: Any) -> str | None:
    """What differs between a recorded argument and one of now; None if nothing does."""
    if isinstance(was, dict) and isinstance(now, dict):
        header = _header(was, now)
        if header is not None:
            return header
        if was.get("hash") != now.get("hash"):
            return "other integers than recorded"
        if was.get("counted") != now.get("counted"):
            return f"{now.get('counted')} numbers that are no padding, recorded {was.get('counted')}"
        for name in ("max", "sum"):
            if abs(now.get(name, 0) - was.get(name, 0)) > tolerances.OF_ARGUMENTS * abs(was.get(name, 0)) + 1e-30:
                return f"{name} of absolute values {now[name]:.6g}, recorded {was[name]:.6g}"
        return None
    both = isinstance(was, (int, float)) and isinstance(now, (int, float))
    same = math.isclose(was, now, rel_tol=_SCALAR) if both else was == now
    return None if same else f"{_told(now)}, recorded {_told(was)}"


def _results(old: Call, new: Call) -> Iterator[tuple[str, str]]:
    """Results and side effects that are not the recorded ones."""
    if "raises" in old or "raises" in new:
        was, now = (call.get("raises", "a result") for call in (old, new))
        # The words are the library's and its version's own.
        if was.partition(":")[0] != now.partition(":")[0]:
            yield "exception", f"{now}, recorded {was}"
        return
    for name in dict.fromkeys([*old["results"], *new["results"]]):
        was, now = (call["results"].get(name) for call in (old, new))
        if was is None or now is None:
            text = None if was is now else f"{_told(now)}, recorded {_told(was)}"
        else:
            text = next(_floats(old, new, name) if "max" in was and "max" in now else _integers(was, now), None)
        if text is not None:
            yield name, text
    gone = [name for name in old["changed"] if name not in new["changed"]]
    more = [name for name in new["changed"] if name not in old["changed"]]
    for names, text in ((gone, "left as it was, recorded as changed"), (more, "changed, recorded as left as it was")):
        if names:
            yield f"buffer {', '.join(names)}", text


def _floats(recorded: Call, found: Call, name: str) -> Iterator[str]:
    """What differs between the digests of a result of floats."""
    was, now, wrapper = recorded["results"][name], found["results"][name], recorded["wrapper"]
    tolerance = tolerances.absolute(wrapper, name, was, recorded["arguments"])
    share = tolerances.OF_SUMS * tolerances.relative(wrapper, name, was["dtype"])
    header = _header(was, now)
    if header is not None:
        yield header
        return
    count = math.prod(was["shape"])
    for name in NOT_FINITE:
        yield from _places(name, was.get(name), now.get(name), count)
    shape = tuple(was["shape"])
    limit = f"tolerance {tolerance:.2g}, recorded maximum {was['max']:.6g}"
    for place, old, new in zip(sampled_places(shape), was["values"], now["values"], strict=False):
        if old is not None and new is not None and not abs(new - old) <= tolerance:
            yield f"{new:.6g} at {_index(place, shape)}, recorded {old:.6g} ({limit})"
    if not abs(now["max"] - was["max"]) <= tolerance:
        yield f"maximum {now['max']:.6g}, recorded {was['max']:.6g} ({limit})"
    if max(was["max"], now["max"]) <= tolerance:
        # What rounding left of terms that cancel has no sum to speak of.
        return
    mean = sum(was["sums"]) / max(1, len(was["sums"]))
    for i, (old, new) in enumerate(zip(was["sums"], now["sums"], strict=False), 1):
        allowed = share * (old + mean / 2)
        if not abs(new - old) <= allowed:
            where = f"in part {i} of {len(was['sums'])}"
            yield f"sum of absolute values {new:.6g}, recorded {old:.6g}, {where} (tolerance {allowed:.2g})"


def _integers(was: Call, now: Call) -> Iterator[str]:
    """What differs between digests of integers, or of a selection."""
    header = _header(was, now)
    if header is not None:
        yield header
        return
    yield from _places("negative numbers", was.get("negative"), now.get("negative"), math.prod(was["shape"]))
    if was.get("hash") != now.get("hash"):
        yield "other integers than recorded"
    for (row, old, near), (_, new, close) in zip(was.get("rows", ()), now.get("rows", ()), strict=False):
        open_to_both = {*near, *close}
        gone = [i for i in _less(old, new) if i not in open_to_both]
        more = [i for i in _less(new, old) if i not in open_to_both]
        if gone or more or len(old) != len(new):
            yield f"row {row}: {_some(more)} selected, recorded {_some(gone)}"


def _chose_otherwise(old: Call, new: Call) -> bool:
    """Whether calls that agree selected other keys, among scores that are as good as equal."""
    for name, was in old.get("results", {}).items():
        now = new.get("results", {}).get(name)
        if was is not None and now is not None and "rows" in was and was["rows"] != now.get("rows"):
            chosen, again = ([ids for _, ids, _ in one.get("rows", ())] for one in (was, now))
            if chosen != again:
                return True
            # The rows that the digests leave out may have.
            if len(chosen) < was["shape"][0]:
                return True
    return False


def _less(these: list[int], others: list[int]) -> list[int]:
    """Ids of one list, with those that are there twice, that the other has not."""
    rest = list(others)
    return [i for i in these if i not in rest or rest.remove(i)]


def _places(name: str, was: Any, now: Any, count: int) -> Iterator[str]:
    if was != now:
        (old, _), (new, _) = was or (0, ""), now or (0, "")
        others = " others" if old == new else ""
        yield f"{name} at other places: {new} of {count}, recorded {old}{others}"


def _header(was: Call, now: Call) -> str | None:
    for name in ("dtype", "shape"):
        if was[name] != now[name]:
            return f"{name} {now[name]}, recorded {was[name]}"
    return None


def _index(place: int, shape: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        found.append(rest)
    return found[::-1]


def _some(ids: list[int]) -> str:
    return f"{', '.join(map(str, ids[:4]))}{', ...' if len(ids) > 4 else ''}" if ids else "none of them"


def _told(value: Any) -> str:
    return f"a tensor {value['dtype']} {value['shape']}" if isinstance(value, dict) else str(value)
