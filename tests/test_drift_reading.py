"""What is read of a wheel: exports, signatures with constants followed, docstrings, raise sites, metadata."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import small_wheels
from conftest import RunPython

from dsattn.drift import snapshot
from dsattn.drift.snapshot import Exported, Parameter, Snapshot, decoded, encoded
from dsattn.drift.source import read
from dsattn.drift.texts import sentences


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSATTN_CACHE_DIR", str(tmp_path / "cache"))


def read_of(tmp_path: Path, files: dict[str, str], part: str = "", metadata: Sequence[str] = ()) -> Snapshot:
    return read(small_wheels.make(tmp_path, "1.0", files, metadata=metadata), "kernels", part)


def exports_of(tmp_path: Path, files: dict[str, str], part: str = "") -> dict[str, Exported]:
    return read_of(tmp_path, files, part).exports


def told(exported: Exported) -> list[str]:
    return [f"{each.error}: {each.says} [{each.when}]" for each in exported.sites]


PART = """
LIMIT = 3

def g(q): ...

class C:
    def run(self, q): ...
    def _own(self): ...

def _hidden(): ...
"""
LAZY = "\ndef __getattr__(name):\n    raise SystemExit(name)\n"


@pytest.mark.parametrize(
    ("home", "names"),
    [
        (
            "_SYMBOLS = {'f': ('.part', 'g'), 'C': ('.part', 'C'), 'LIMIT': ('.part', 'LIMIT')}" + LAZY,
            ["f", "C", "C.run", "LIMIT"],
        ),
        ("_WHERE = {'g': '.part', 'gone': '.nowhere'}" + LAZY, ["g", "gone"]),
        ("_WHERE = {'g': 'kernels.part'}" + LAZY, ["g"]),
        ("from .part import C, g, LIMIT\n__all__ = ['g', 'LIMIT']", ["g", "LIMIT"]),
        ("from .part import g as f", ["f", "part.C", "part.C.run"]),
        ("", ["part.g", "part.C", "part.C.run"]),
        ("TABLE = {'a': ('b', 'c')}", ["part.g", "part.C", "part.C.run"]),
    ],
)
def test_what_a_package_exports(tmp_path: Path, home: str, names: list[str]) -> None:
    files = {"kernels/__init__.py": home, "kernels/part.py": PART, "kernels/_own.py": "def f(): ..."}
    found = exports_of(tmp_path, files)
    assert list(found) == names
    if "gone" in found:
        assert found["gone"].kind == "unknown"
    if "LIMIT" in found:
        assert found["LIMIT"].kind == "value"
    if "C" in found:
        assert (found["C"].kind, found["C.run"].kind) == ("class", "method")


def test_a_part_of_a_wheel_and_one_that_lacks_it(tmp_path: Path) -> None:
    files = {
        "top/__init__.py": "raise SystemExit",
        "top/deep/sub/one.py": "def f(q): ...",
        "top/other.py": "def g(): ...",
    }
    found = read_of(tmp_path, files, "top/deep/sub")
    assert (list(found.exports), found.part, found.present) == (["one.f"], "top.deep.sub", True)
    assert read_of(tmp_path, files, "top/deeper").present is False


def test_several_packages_at_the_top(tmp_path: Path) -> None:
    files = {"one/__init__.py": "def f(): ...", "two.py": "def f(): ...", "three/data.txt": "x"}
    assert list(exports_of(tmp_path, files)) == ["one.f", "two.f"]


def test_signatures(tmp_path: Path) -> None:
    files = {
        "kernels/__init__.py": "from .sizes import BEST, LIMITS as L\nfrom . import sizes\nimport torch\n"
        "def f(a, /, b: 'Optional[int]' = BEST, *rest, c=L[1] * 2, d=sizes.BEST, e=-1, f=torch.float32, **more)"
        " -> 'int': ...\n",
        "kernels/sizes.py": "LIMITS = (96, 128)\nBEST = LIMITS[0]\n",
    }
    found = exports_of(tmp_path, files)["f"]
    kinds = [
        "positional-only",
        "positional or keyword",
        "variadic positional",
        *["keyword-only"] * 4,
        "variadic keyword",
    ]
    assert [each.kind for each in found.parameters] == kinds
    assert [each.name for each in found.parameters] == ["a", "b", "*rest", "c", "d", "e", "f", "**more"]
    assert [each.default for each in found.parameters] == [
        None,
        "96",
        None,
        "128 * 2",
        "96",
        "-1",
        "torch.float32",
        None,
    ]
    assert (found.parameters[1].annotation, found.returns) == ("int | None", "int")


def test_constructors_and_methods(tmp_path: Path) -> None:
    text = """
from dataclasses import dataclass

class Base:
    def __init__(self, heads, width=128): ...
    @classmethod
    def of(cls, q): ...
    @staticmethod
    def plain(self_like): ...
    def __call__(self, q): ...
    @property
    def size(self): ...

class Own(Base):
    def run(self, q): ...

@dataclass
class Data:
    x: int
    y: int = 2

class Empty: ...
"""
    found = exports_of(tmp_path, {"kernels.py": text})
    names = {name: [each.name for each in exported.parameters] for name, exported in found.items()}
    assert names == {
        "Base": ["heads", "width"],
        "Base.of": ["q"],
        "Base.plain": ["self_like"],
        "Base.__call__": ["q"],
        "Own": ["heads", "width"],
        "Own.of": ["q"],
        "Own.plain": ["self_like"],
        "Own.__call__": ["q"],
        "Own.run": ["q"],
        "Data": ["x", "y"],
        "Empty": [],
    }
    assert found["Data"].parameters[1] == Parameter("y", "positional or keyword", "2", "int")


def test_raise_sites_that_a_call_reaches(tmp_path: Path) -> None:
    files = {
        "kernels/__init__.py": """
from .plan import Plan
from . import checks


def f(q, kind):
    from .late import late
    if q is None:
        raise ValueError("no q")
    elif kind == 3:
        raise TypeError(f"kind {kind!r} is " + "three")
    try:
        Plan(q).run()
    except KeyError:
        raise RuntimeError from None
    checks.positive(q)
    late(q)
    raise


def g(positive):
    return positive(3)
""",
        "kernels/plan.py": """
class Plan:
    def __init__(self, q):
        self._value_error_if(q.ndim != 2, f"{q.ndim} dimensions")

    def run(self):
        assert self.q, "empty"
""",
        "kernels/checks.py": """
def positive(q):
    if not q:
        _refuse('zero')


def _refuse(what):
    raise_if(what)
    raise OSError
""",
        "kernels/late.py": "def late(q):\n    assert q > 0\n    late(q)\n",
    }
    found = exports_of(tmp_path, files)
    assert sorted(told(found["f"])) == [
        "AssertionError:  [not q > 0]",
        "AssertionError: empty [not self.q]",
        "OSError:  []",
        "RuntimeError:  [KeyError is raised]",
        "TypeError: kind {kind} is three [kind == 3]",
        "ValueError: no q [q is None]",
        "_value_error_if: {q.ndim} dimensions [q.ndim != 2]",
        "raise_if: {what} []",
    ]
    assert found["g"].sites == ()
    assert {each.where for each in found["f"].sites} >= {"kernels.f", "kernels.plan.Plan.run", "kernels.late.late"}


def test_metadata(tmp_path: Path) -> None:
    lines = ["Requires-Python: >=3.9", "Requires-Dist: dsl[cu13]>=4.5", "Provides-Extra: fast", "", "A description."]
    found = read_of(tmp_path, {"kernels.py": "def f(): ..."}, metadata=lines)
    assert (found.version, found.requires_python, found.extras) == ("1.0", ">=3.9", ("fast",))
    assert found.requires == ("dsl[cu13]>=4.5",)


def test_nothing_is_left_behind_or_imported(tmp_path: Path) -> None:
    files = {"kernels/__init__.py": "import sys\nsys.kernels_ran = True\ndef f(): ...", "kernels/fast.so": "x"}
    assert list(exports_of(tmp_path, files)) == ["f"]
    assert not hasattr(sys, "kernels_ran")
    assert "kernels" not in sys.modules
    assert list((tmp_path / "cache" / "drift").iterdir()) == []


def test_a_snapshot_comes_back_as_it_was(tmp_path: Path) -> None:
    text = "def f(q, k=1, *rest):\n    '''Says.'''\n    raise ValueError('no')\n"
    made = read_of(tmp_path, {"kernels.py": text}, metadata=["Requires-Dist: torch"])
    assert decoded(encoded(made)) == made
    assert made.exports["f"].sites[0].where == decoded(encoded(made)).exports["f"].sites[0].where


def test_a_snapshot_knows_all_modules_that_read(run_python: RunPython) -> None:
    code = "import sys\nimport dsattn.drift.source\nprint(*(m for m in sys.modules if m.startswith('dsattn.drift.')))"
    loaded = {name.rpartition(".")[2] for name in run_python("-c", code).stdout.split()}
    assert loaded == set(snapshot._READERS)


def test_sentences() -> None:
    text = """
    Scores of every key. They are
    ``fp32``. Masked: -inf, e.g. past a segment.

    Args:
        q: queries. Two of
            a kind.
        out (Tensor): where
            they go.
    - an item
    - another
    """
    assert sentences(text) == [
        "Scores of every key.",
        "They are ``fp32``.",
        "Masked: -inf, e.g. past a segment.",
        "Args:",
        "q: queries.",
        "Two of a kind.",
        "out (Tensor): where they go.",
        "- an item",
        "- another",
    ]


LOADED = """
import sys
import dsattn.cli.app
print(sorted({"griffe"} & set(sys.modules)))
"""


def test_griffe_is_imported_only_to_read(run_python: RunPython) -> None:
    assert run_python("-c", LOADED).stdout == "[]\n"
