"""What a change of a signature touches, held against what Python itself does with the call."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsattn.drift.annotations import normal, widens
from dsattn.drift.findings import Finding
from dsattn.drift.signatures import Signatures
from dsattn.drift.snapshot import Exported, Parameter
from dsattn.drift.watch import Call

KINDS = {
    "positional-only": inspect.Parameter.POSITIONAL_ONLY,
    "positional or keyword": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "variadic positional": inspect.Parameter.VAR_POSITIONAL,
    "keyword-only": inspect.Parameter.KEYWORD_ONLY,
    "variadic keyword": inspect.Parameter.VAR_KEYWORD,
}
ORDER = list(KINDS)


@st.composite
def signatures(draw: st.DrawFn) -> tuple[Parameter, ...]:
    """A legal signature of a few parameters out of seven names."""
    names = draw(st.lists(st.sampled_from("abcdefg"), unique=True, max_size=5))
    kinds = draw(
        st.lists(st.sampled_from(["positional or keyword"] * 3 + ["keyword-only", "positional-only"]), min_size=5)
    )
    found, optional = [], False
    for name, kind in zip(names, sorted(kinds[: len(names)], key=ORDER.index), strict=False):
        default = draw(st.sampled_from([None, None, "1", "2"]))
        if kind != "keyword-only":
            optional = optional or default is not None
            default = (default or "1") if optional else None
        found.append(Parameter(name, kind, default, None))
    for kind, stars in (("variadic positional", "*"), ("variadic keyword", "**")):
        if draw(st.integers(0, 5)) == 0:
            found.append(Parameter(stars + draw(st.sampled_from(["rest", "others"])), kind, None, None))
    return tuple(sorted(found, key=lambda each: ORDER.index(each.kind)))


@st.composite
def calls(draw: st.DrawFn, parameters: tuple[Parameter, ...]) -> Call:
    """A call that fits a signature."""
    positions = [each for each in parameters if each.positional]
    least = sum(each.required for each in positions if each.kind == "positional-only")
    more = 2 if any(each.name == "*rest" for each in parameters) else 0
    positional = draw(st.integers(least, len(positions) + more))
    left = [each for each in parameters if each not in positions[:positional] and not each.name.startswith("*")]
    keywords = {each.name for each in left if each.required or (each.kind != "positional-only" and draw(st.booleans()))}
    if any(each.name == "**rest" for each in parameters):
        keywords |= draw(st.frozensets(st.sampled_from("abcdefg"), max_size=2)) - {each.name for each in parameters}
    return Call("f", "the call", positional, keywords=frozenset(keywords))


def python(parameters: tuple[Parameter, ...]) -> inspect.Signature:
    made = []
    for each in parameters:
        default = inspect.Parameter.empty if each.default is None else each.default
        made.append(
            inspect.Parameter(each.name.lstrip("*") + "_" * each.name.count("*"), KINDS[each.kind], default=default)
        )
    return inspect.Signature(made)


def bound(parameters: tuple[Parameter, ...], call: Call) -> dict[str, Any] | None:
    """What each parameter gets; the arguments are called by their places. None: TypeError."""
    try:
        got = python(parameters).bind(*range(call.positional), **{name: name for name in call.keywords})
    except TypeError:
        return None
    got.apply_defaults()
    return dict(got.arguments)


def places(arguments: dict[str, Any], renamed: dict[str, str]) -> dict[Any, str]:
    """Argument -> the parameter that gets it; all that a variadic one takes goes to its kind."""
    found: dict[Any, str] = {}
    for name, value in arguments.items():
        if isinstance(value, tuple):
            found |= dict.fromkeys(value, "*")
        elif isinstance(value, dict):
            found |= dict.fromkeys(value, "**")
        else:
            found[value] = renamed.get(name, name)
    return found


def given_by(call: Call, arguments: dict[str, Any], renamed: dict[str, str]) -> dict[Any, str]:
    passed = {*range(call.positional), *call.keywords}
    return {value: name for value, name in places(arguments, renamed).items() if value in passed}


def differs(old: tuple[Parameter, ...], new: tuple[Parameter, ...], call: Call, renamed: dict[str, str]) -> bool:
    """Whether a call of the old signature means something else to the new one, or nothing."""
    before, after = bound(old, call), bound(new, call)
    assert before is not None
    if after is None or given_by(call, before, renamed) != given_by(call, after, {}):
        return True
    return any(after[name] != value for name, value in before.items() if name in after and isinstance(value, str))


def made(parameters: tuple[Parameter, ...]) -> Exported:
    return Exported("f", "function", "f", parameters)


@given(st.data())
@settings(max_examples=500)
def test_a_call_is_touched_where_python_treats_it_in_another_way(data: st.DataObject) -> None:
    old, new = data.draw(signatures()), data.draw(signatures())
    call = data.draw(calls(old))
    compared = Signatures(made(old), made(new), [call])
    told = [each for each in compared.findings() if each.touches and each.effect in ("breaks", "silent")]
    assert bool(told) == differs(old, new, call, compared.renamed), (python(old), python(new), call, told)


def only(old: str, new: str, call: Call | None = None) -> list[Finding]:
    """The findings between two signatures, written as Python."""
    return list(Signatures(written(old), written(new), [call] if call else []).findings())


def written(text: str) -> Exported:
    namespace: dict[str, Any] = {}
    exec(f"from __future__ import annotations\ndef f({text}): ...", namespace)
    names = {kind.name: name for name, kind in KINDS.items()}
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    return made(
        tuple(
            Parameter(
                stars.get(each.kind.name, "") + each.name,
                names[each.kind.name],
                None if each.default is each.empty else repr(each.default),
                None if each.annotation is each.empty else normal(each.annotation),
            )
            for each in inspect.signature(namespace["f"]).parameters.values()
        )
    )


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("a", "a", []),
        ("a, b=1", "a, c=1", ["b is called c"]),
        ("a, b=1", "a, c=2", ["b is gone", "c=2 added, at 1, last"]),
        ("a, b=1", "a, *, b=1", ["b is keyword-only, was positional or keyword"]),
        ("a, b=1", "a, /, b=1", ["a is positional-only, was positional or keyword"]),
        ("a, stream=None", "a, x, stream=None", ["x added, required, at 1, before stream", "moved: stream 1 -> 2"]),
        ("a, b", "b, a", ["moved: a 0 -> 1, b 1 -> 0"]),
        ("a, *rest", "a, *others", []),
        ("a, *rest, **more", "a", ["*rest is gone", "**more is gone"]),
        ("a, **more", "a, b=1, **more", ["b=1 added, at 1, last"]),
        ("a", "a, *rest, **more", ["*rest added", "**more added"]),
        ("a", "a=1", ["a has a default, 1"]),
        ("a: int", "a: Optional[int]", ["a: int | None, was int"]),
        ("a: Optional[int]", "a: None | 'int'", ["a: None | int, was int | None"]),
    ],
)
def test_what_is_told(old: str, new: str, told: list[str]) -> None:
    assert [each.what for each in only(old, new)] == told


def test_our_own_calls_ask_the_signature_first() -> None:
    call = Call(
        "f", "ours", keywords=frozenset({"a", "offsets", "precision"}), adapts=True, settled=frozenset({"precision"})
    )
    touched = [each.what for each in only("a, precision='bf16'", "b, *, c, offsets=None", call) if each.touches]
    assert touched == ["a is called b", "c added, required, keyword only"]
    assert not any(each.touches for each in only("a, precision='bf16'", "a, offsets=None", call))
    needed = replace(call, settled=frozenset())
    assert [each.what for each in only("a, precision='bf16'", "a", needed) if each.touches] == ["precision is gone"]


@pytest.mark.parametrize(
    ("text", "normally"),
    [
        ("Optional[torch.Tensor]", "torch.Tensor | None"),
        ("typing.Union[int, None, 'str']", "int | None | str"),
        ("'Optional[int]'", "int | None"),
        ("dict[str, Optional[int]]", "dict[str, int | None]"),
        ("Literal['a', 'b']", "Literal['a', 'b']"),
        ("not python at all", "not python at all"),
    ],
)
def test_annotations_in_one_spelling(text: str, normally: str) -> None:
    assert normal(text) == normally


@pytest.mark.parametrize(
    ("before", "after", "wider"),
    [
        ("int", "int | None", True),
        ("int | None", "None | int | str", True),
        ("int | None", "int", False),
        ("int", None, True),
        (None, "int", False),
    ],
)
def test_a_wider_annotation(before: str | None, after: str | None, wider: bool) -> None:
    assert widens(before, after) is wider


@pytest.mark.parametrize(
    ("positional", "touched"),
    [(0, []), (1, []), (2, ["moved: b 1 -> 2, c 2 -> 1"]), (3, ["moved: b 1 -> 2, c 2 -> 1"])],
)
def test_a_swap_touches_whose_positions_reach_it(positional: int, touched: list[str]) -> None:
    call = Call("f", "mine", positional, keywords=frozenset("abc"[positional:]))
    assert [each.what for each in only("a, b, c", "a, c, b", call) if each.touches] == touched
