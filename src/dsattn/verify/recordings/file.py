"""The file of a recording: JSON, checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsattn.errors import BadInput
from dsattn.verify.recordings.digest import NOT_FINITE
from dsattn.verify.records import write as write_text

FORMAT = "dsattn-recording/1"


@dataclass(kw_only=True)
class Check:
    """One operator on one case: its verdict, and its calls of wrappers in order.

    A call has `wrapper`, `arguments`, and either `changed` (the arguments whose memory changed) and `results` (digests
    by name), or `raises`.
    """

    case: str
    operator: str
    verdict: str
    calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(kw_only=True)
class Recording:
    """What the wrappers of one release did on one architecture.

    Attributes:
        release: of the frontend.
        arch: "sm90" or "sm100".
        environment: versions, driver and device.
        cases: by name, the seed of the inputs, their dtype, and what they were.
        checks: in the order in which they ran.
    """

    release: str
    arch: str
    environment: dict[str, Any]
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)


def write(path: Path, recording: Recording) -> None:
    """Writes a recording.

    Raises:
        BadInput: the file cannot be written.
    """
    text = json.dumps({"format": FORMAT, **asdict(recording)}, separators=(",", ":"), allow_nan=False)
    # A run that dies meanwhile leaves the file of the step before.
    new = path.with_name(path.name + ".new")
    write_text(new, text + "\n")
    new.replace(path)


def read(path: Path) -> Recording:
    """The recording in a file.

    Raises:
        BadInput: it cannot be read, has another format, or is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(str(path), given=error.strerror, needed="a recording") from error
    except ValueError as error:
        raise BadInput(str(path), given=f"a file that is no JSON ({error})", needed=_NEEDED) from error
    form = found.get("format") if isinstance(found, dict) else None
    if form != FORMAT:
        given = "a file without a format" if form is None else f"format {form!r}"
        raise BadInput(str(path), given=given, needed=_NEEDED, fix="record again with this dsattn")
    try:
        return _recording(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise BadInput(str(path), given=f"a damaged recording ({told})", needed=_NEEDED) from error


_NEEDED = f"a file of `dsattn verify --record`, format {FORMAT!r}"


def _recording(found: dict[str, Any]) -> Recording:
    checks = [Check(**{name: one[name] for name in Check.__dataclass_fields__}) for one in found["checks"]]
    for call in (call for check in checks for call in check.calls):
        _text(call["wrapper"])
        for argument in call["arguments"].values():
            if isinstance(argument, dict):
                _digest(argument, ("hash",), ("counted", "max", "sum"))
        if "raises" in call:
            _text(call["raises"])
            continue
        _each(_text, call["changed"])
        for result in call["results"].values():
            if result is not None:
                _digest(result, ("negative", "hash"), ("max", "sums", "values"), ("negative", "rows"))
    for facts in found["cases"].values():
        _text(facts["dtype"]), facts["inputs"].values()
    names = "release", "arch", "environment", "cases"
    _text(found["release"]), _text(found["arch"])
    return Recording(**{name: found[name] for name in names}, checks=checks)


def _digest(found: dict[str, Any], *kinds: tuple[str, ...]) -> None:
    _text(found["dtype"])
    _each(int, found["shape"])
    if not any(all(name in found for name in kind) for kind in kinds):
        raise ValueError(f"a digest with {', '.join(found)}")
    for name in (*NOT_FINITE, "negative"):
        if found.get(name) is not None:
            count, _ = found[name]
            int(count)
    for name in ("max", "sum", "counted"):
        float(found.get(name, 0))
    _each(float, found.get("sums", ()))
    _each(float, (value for value in found.get("values", ()) if value is not None))
    for row, ids, near in found.get("rows", ()):
        _each(int, (row, *ids, *near))


def _each(kind: Callable[[Any], Any], values: Iterable[Any]) -> None:
    for value in values:
        kind(value)


def _text(value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} in the place of a word")
