"""`contracts.toml` as plain data: read once, checked, and looked up by release and architecture."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsattn.errors import BadInput

if TYPE_CHECKING:
    from packaging.version import Version

ARCHS = ("sm90", "sm100")
EVIDENCE = ("read", "compiled", "seam", "gpu")
DTYPES = ("bfloat16", "float16", "float32", "int32", "int64")
PATH = Path(__file__).with_name("contracts.toml")

# A fact that is one of a few words -> those words. contracts.toml says what they mean.
WORDS: dict[str, tuple[str, ...]] = {
    "ids": ("local", "global", "flat"),
    "id_check": ("own batch", "whole buffer"),
    "id_beyond": ("zero key", "stale key"),
    "hole": ("score 0", "stale key"),
    "tail": ("zero", "unwritten"),
    "alignment": ("bottom-right", "top-left"),
    "masked": ("-inf", "0", "mixed"),
    "past_segment": ("-inf", "blocks"),
    "empty_row": ("-inf", "nan", "0", "+inf", "undefined"),
    "normaliser": ("own", "given"),
    "divisor": ("all rows",),
    "grad_loss": ("tensor or number", "one-element float32 tensor"),
    "clip": ("probability", "log-probability"),
    "epsilon": ("added", "threshold"),
    "stream": ("caller", "caller in bshd", "current"),
}
FLAGS = ("runs", "clears_out", "view", "deterministic")
NUMBERS = ("max_rows", "max_batch")
# Lists of the wrapper's own parameters, and lists of other names.
PARAMETERS = ("destroys", "accumulates", "contiguous", "host_reads", "recompiles")
NAMES: dict[str, tuple[str, ...]] = {"returns": (), "layouts": ("bshd", "thd", "rows", "flat")}
LIMITS = ("heads", "widths", "top_k")
OTHERS = ("signature", "dtypes", "aligned", "gate", "pairs")
FACTS = (*WORDS, *FLAGS, *NUMBERS, *PARAMETERS, *NAMES, *LIMITS, *OTHERS)

Row = dict[str, Any]


@cache
def read() -> dict[str, Any]:
    """The whole file as it stands."""
    with PATH.open("rb") as file:
        return tomllib.load(file)


@cache
def table() -> dict[str, Any]:
    """The whole file, checked.

    Raises:
        BadInput: a row is wrong; the message says which.
    """
    check(read())
    return read()


@cache
def parsed(text: str) -> Version:
    """The version that a row names."""
    from packaging.version import Version

    return Version(text)


def applies(row: Row, release: Version, arch: str) -> bool:
    """Whether a row holds for a release on an architecture."""
    started = "from" not in row or parsed(row["from"]) <= release
    ended = "until" in row and parsed(row["until"]) <= release
    return started and not ended and row.get("arch", arch) == arch


def row_of(rows: list[Row], release: Version, arch: str) -> Row | None:
    """The row that holds, or None."""
    return next((row for row in rows if applies(row, release, arch)), None)


def facts_of(wrapper: dict[str, Any], release: Version, arch: str) -> dict[str, Row]:
    """Fact -> the row that holds; empty where the release has no such wrapper."""
    if row_of(wrapper["signature"], release, arch) is None:
        return {}
    rows = {fact: row_of(wrapper[fact], release, arch) for fact in FACTS if fact in wrapper}
    return {fact: row for fact, row in rows.items() if row is not None}


@cache
def parameters(signature: str) -> tuple[tuple[str, bool, str | None], ...]:
    """(name, keyword only, source of the default or None) of each parameter of a signature's text."""
    (function,) = ast.parse(f"def f({signature}): ...").body
    if not isinstance(function, ast.FunctionDef):
        raise BadInput("signature", given=signature)
    return tuple(parameters_of(function.args))


def parameters_of(arguments: ast.arguments) -> Iterator[tuple[str, bool, str | None]]:
    """The same of a parsed function."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(positional, defaults, strict=True):
        yield argument.arg, False, None if default is None else ast.unparse(default)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument.arg, True, None if default is None else ast.unparse(default)


def check(file: dict[str, Any]) -> None:
    """Checks every row: keys, words, releases, and that no two hold at once.

    Raises:
        BadInput: the first row that is wrong.
    """
    releases = [parsed(text) for text in file["distribution"]["releases"]]
    _need(releases == sorted(set(releases)), "releases", "ascending")
    for name, wrapper in file["wrapper"].items():
        for fact, rows in wrapper.items():
            if fact not in ("symbol", "relies"):
                _need(fact in FACTS, f"{name}.{fact}", f"a fact of {', '.join(FACTS)}")
                for row in rows:
                    _check_row(f"{name}.{fact}", fact, row)
                    _check_evidence(f"{name}.{fact}", row, file["evidence"])
        for release in releases:
            for arch in ARCHS:
                _check_release(name, wrapper, release, arch)
        newest = [parameter for parameter, _, _ in parameters(wrapper["signature"][-1]["is"])]
        missing = set(wrapper.get("relies", ())) - set(newest)
        _need(not missing, f"{name}.relies", f"parameters of the newest signature, not {', '.join(missing)}")
    seen: set[str] = set()
    for row in file["defect"]:
        where = f"defect {row.get('id')!r}"
        _need({"id", "wrappers", "by", "what"} <= set(row), where, "id, wrappers, by and what")
        _need(set(row) <= {"id", "wrappers", "by", "what", "from", "until", "arch"}, where, "no other key")
        _need(row["id"] not in seen, where, "an id of its own")
        _need(set(row["wrappers"]) <= set(file["wrapper"]), where, "wrappers of the table")
        _check_range(where, row)
        _check_evidence(where, row, file["evidence"])
        seen.add(row["id"])


def _need(condition: bool, where: str, needed: str) -> None:
    if not condition:
        raise BadInput(f"contracts.toml: {where}", needed=needed)


def _check_range(where: str, row: Row) -> None:
    _need(row["by"] in EVIDENCE, where, f"by one of {', '.join(EVIDENCE)}")
    _need(row.get("arch", "sm90") in ARCHS, where, f"arch one of {', '.join(ARCHS)}")
    bounds = [parsed(row[key]) for key in ("from", "until") if key in row]
    _need(bounds == sorted(set(bounds)), where, "from before until")


def _check_evidence(where: str, row: Row, evidence: dict[str, dict[str, list[str]]]) -> None:
    for arch in ARCHS if "arch" not in row else (row["arch"],):
        tried = evidence.get(row["by"], {}).get(arch)
        held = tried is None or any(applies(row, parsed(release), arch) for release in tried)
        _need(held, where, f"a range with a release that is {row['by']} on {arch}")


def _check_row(where: str, fact: str, row: Row) -> None:
    _need({"is", "by"} <= set(row) <= {"is", "by", "from", "until", "arch"}, where, "is, by, from, until, arch")
    _check_range(where, row)
    value = row["is"]
    if fact in WORDS:
        _need(value in WORDS[fact], where, f"one of {', '.join(WORDS[fact])}")
    elif fact in FLAGS:
        _need(isinstance(value, bool), where, "true or false")
    elif fact in NUMBERS:
        _need(type(value) is int and value > 0, where, "a positive number")
    elif fact in NAMES:
        _need(not NAMES[fact] or set(value) <= set(NAMES[fact]), where, f"of {', '.join(NAMES[fact])}")
    elif fact in LIMITS:
        _need(set(value) <= {"one_of", "min", "max", "multiple", "block", "also"}, where, "limits")
    elif fact == "gate":
        _need(set(value) <= {"layouts", "tail"} and "layouts" in value, where, "layouts, tail")
    elif fact == "dtypes":
        _need(all(set(dtypes) <= set(DTYPES) for dtypes in value.values()), where, f"of {', '.join(DTYPES)}")
    elif fact == "signature":
        list(parameters(value))


def _check_release(name: str, wrapper: dict[str, Any], release: Version, arch: str) -> None:
    for fact in FACTS:
        holding = [row for row in wrapper.get(fact, ()) if applies(row, release, arch)]
        _need(len(holding) <= 1, f"{name}.{fact}", f"one row for {release} on {arch}, not {len(holding)}")
    facts = facts_of(wrapper, release, arch)
    if not facts:
        return
    _need("runs" in facts, f"{name}.runs", f"a row for {release} on {arch}")
    own = {parameter for parameter, _, _ in parameters(facts["signature"]["is"])}
    for fact in (*PARAMETERS, "dtypes", "aligned"):
        named = set(facts[fact]["is"]) if fact in facts else set()
        _need(named <= own, f"{name}.{fact}", f"parameters of {release}, not {', '.join(named - own)}")
