"""The rules of the house that no linter has: sizes, markers, machine paths, docstrings of the public names."""

from __future__ import annotations

import ast
import re
from collections.abc import Container
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT

import dsattn

MAX_FILE, MAX_FUNCTION = 400, 60

# "path" or "path:function" -> why it may be longer.
EXCEPTIONS: dict[str, str] = {}

MARKER = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")
MACHINE_PATH = re.compile(r"(?<![\w.:/~*-])/(?:home|root|Users|work|mnt|opt|srv|tmp)/|\b[A-Z]:\\+Users\b")


def len_of(node: ast.stmt) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def long_parts(name: str, source: str, exceptions: Container[str] = EXCEPTIONS) -> list[str]:
    """The file and the functions in it that are too long; a function counts without its docstring."""
    lines = len(source.splitlines())
    found = [f"{name}: {lines} lines"] if lines > MAX_FILE and name not in exceptions else []
    if not name.endswith(".py"):
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = len_of(node) - (len_of(node.body[0]) if ast.get_docstring(node, clean=False) is not None else 0)
            if lines > MAX_FUNCTION and f"{name}:{node.name}" not in exceptions:
                found.append(f"{name}:{node.name}: {lines} lines")
    return found


def lines_with(pattern: re.Pattern[str], name: str, source: str) -> list[str]:
    """The lines in which the pattern is found, as `file:number: text`."""
    numbered = enumerate(source.splitlines(), 1)
    return [f"{name}:{number}: {line.strip()}" for number, line in numbered if pattern.search(line)]


def without_docstring(module: Any) -> list[str]:
    """The public names whose own docstring is missing, empty, or only the one that `dataclass` makes up."""
    found = []
    for name in module.__all__:
        text = getattr(module, name).__doc__ or ""
        if not text.strip() or text.startswith(f"{name}("):
            found.append(name)
    return found


def files(*patterns: str) -> list[tuple[str, str]]:
    """Every file that matches, as (path from the root, text)."""
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


SOURCES = ("src/**/*.py", "src/**/*.c", "src/**/*.h")
TEXTS = (
    *SOURCES,
    "src/**/*.j2",
    "tests/**/*.py",
    "docs/**/*.md",
    "benchmarks/**/*.py",
    "*.md",
    "*.toml",
    "*.yml",
    "Makefile",
    ".ci/run",
)


def test_nothing_is_too_long() -> None:
    sources = files(*SOURCES)
    assert len(sources) > 10, "the sources were not found"
    assert [part for name, source in sources for part in long_parts(name, source)] == []


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("a.py", "x = 1\n" * 401, ["a.py: 401 lines"]),
        ("a.c", "int x;\n" * 401, ["a.c: 401 lines"]),
        ("a.py", "class A:\n  def f(self):\n" + "    pass\n" * 60, ["a.py:f: 61 lines"]),
        ("a.py", 'def f():\n  """One.\n\n  Two.\n  """\n' + "  pass\n" * 60, ["a.py:f: 61 lines"]),
        ("a.py", 'def f():\n  """One.\n\n  Two.\n  """\n' + "  pass\n" * 59, []),
        ("a.py", "async def f():\n" + "    pass\n" * 59, []),
    ],
)
def test_too_long_is_found(name: str, source: str, found: list[str]) -> None:
    assert long_parts(name, source) == found


def test_every_exception_is_needed_and_explained() -> None:
    long = {part.rpartition(":")[0] for name, source in files(*SOURCES) for part in long_parts(name, source, ())}
    assert [name for name, reason in EXCEPTIONS.items() if name not in long or not reason.strip()] == []


def test_no_marker_is_left() -> None:
    assert [line for name, text in files(*TEXTS) for line in lines_with(MARKER, name, text)] == []


def test_no_path_of_a_machine() -> None:
    assert [line for name, text in files(*TEXTS) for line in lines_with(MACHINE_PATH, name, text)] == []


@pytest.mark.parametrize(
    ("pattern", "bad", "good"),
    [
        (MARKER, "x = 1  # TO" + "DO later", "todo = 1"),
        (MARKER, "# XX" + "X", "XXXL = 1"),
        (MACHINE_PATH, "open('/ho" + "me/me/x')", "a / home / b"),
        (MACHINE_PATH, r"'C:" + r"\Users\me'", "https://host/opt/x"),
        (MACHINE_PATH, "/tm" + "p/x", "build/tmp/x"),
    ],
)
def test_bad_lines_are_found(pattern: re.Pattern[str], bad: str, good: str) -> None:
    assert lines_with(pattern, "a.py", f"{good}\n{bad}\n") == [f"a.py:2: {bad}"]


def test_public_names_have_docstrings() -> None:
    assert dsattn.__all__ == sorted(set(dsattn.__all__), key=dsattn.__all__.index), "a name is listed twice"
    assert without_docstring(dsattn) == []


def test_missing_docstrings_are_found() -> None:
    class Data:
        """Data(x: int)"""

    class Heir(ValueError): ...

    def told() -> None:
        """Told."""

    Heir.__doc__ = None
    module = SimpleNamespace(__all__=["Data", "Heir", "told"], Data=Data, Heir=Heir, told=told)
    assert without_docstring(module) == ["Data", "Heir"]
