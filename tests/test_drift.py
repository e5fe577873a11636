"""`dsattn drift` on wheels made here, with changes that no table knows: every kind of finding, and what it touches."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import small_wheels
from conftest import RunPython

from dsattn.cli import main
from dsattn.drift.findings import NOTHING

OLD = {
    "kernels/__init__.py": """
from importlib import import_module

_SYMBOLS = {
    "scores": (".forward", "scores"),
    "top_k": (".forward", "top_k"),
    "attention": (".attention", "attention"),
    "retired": (".attention", "retired"),
    "same": (".attention", "same"),
    "Plan": (".plan", "Plan"),
}


def __getattr__(name):
    module, symbol = _SYMBOLS[name]
    return getattr(import_module(module, __name__), symbol)


raise SystemExit("imported")
""",
    "kernels/forward.py": '''
from typing import Optional

from .sizes import BLOCK


def scores(q, k, weights, scale=1.0, block=BLOCK, stream: Optional[int] = None) -> dict:
    """Scores of every key. Masked ones are zero.

    Args:
        scale: multiplies them.
    """
    return {}


def top_k(values, k, *, sort=True, mode="fast"):
    return values
''',
    "kernels/attention.py": """
from .checks import check


def attention(q, kv, ids, out=None, stream=None, **options):
    check(q)
    return q


def retired(q):
    return q


def same(q, k=1):
    return q
""",
    "kernels/checks.py": """
def check(q):
    if q is None:
        raise ValueError("q is missing")
""",
    "kernels/sizes.py": "SIZES = (64, 128)\nBLOCK = SIZES[0]\n",
    "kernels/plan.py": """
class Plan:
    def __init__(self, heads, width=128):
        self.heads = heads

    def run(self, q, out=None):
        return q

    def _hidden(self):
        return None
""",
}
NEW = {
    **OLD,
    "kernels/__init__.py": OLD["kernels/__init__.py"]
    .replace('    "retired": (".attention", "retired"),\n', "")
    .replace('"same": (".attention", "same")', '"same": (".extra", "same")')
    .replace('    "Plan"', '    "fresh": (".extra", "fresh"),\n    "Plan"'),
    "kernels/forward.py": '''
from typing import Optional

from .sizes import BLOCK


def scores(q, keys, weights, scale=1.0, block=BLOCK, out=None, stream: int | None = None) -> list:
    """Scores of every key. Masked ones are -inf.

    Args:
        scale: multiplies them.
        out: where they go.
    """
    return []


def top_k(values, k, mode, *, sort=False):
    return values
''',
    "kernels/attention.py": """
from .checks import check


def attention(q, kv, ids, stream=None, out=None):
    check(q)
    return q
""",
    "kernels/checks.py": """
def check(q):
    if q is None:
        raise ValueError("q is missing")
    if q.ndim != 3:
        raise ValueError(f"q has {q.ndim} dimensions")
    _helper(q)


def _helper(q):
    assert q.is_contiguous(), "q is strided"
""",
    "kernels/extra.py": "def fresh(q):\n    return q\n\n\ndef same(q, k=1):\n    return q\n",
    "kernels/sizes.py": "SIZES = (128, 64)\nBLOCK = SIZES[0]\n",
    "kernels/plan.py": OLD["kernels/plan.py"].replace("out=None", "out, *, workspace=None"),
}
NEEDS = [
    "Requires-Python: >=3.9",
    "Requires-Dist: dsl>=4.5",
    'Requires-Dist: ffi; extra == "fast"',
    "Provides-Extra: fast",
]
NEEDS_NOW = [
    "Requires-Python: >=3.11",
    "Requires-Dist: dsl[cu13]>=4.8",
    "Requires-Dist: torch",
    "Provides-Extra: slow",
]
CALLS = """
[[call]]
wrapper = "scores"
positional = ["q", "k", "weights"]
keywords = ["scale", "block"]
where = "train.py:10"

[[call]]
wrapper = "scores"
positional = 6
where = "train.py:20"

[[call]]
wrapper = "scores"
positional = 1
keywords = ["k", "weights"]
where = "train.py:30"

[[call]]
wrapper = "top_k"
keywords = ["values", "k", "sort", "mode"]

[[call]]
wrapper = "attention"
positional = 3
keywords = ["grid"]

[[call]]
wrapper = "retired"
positional = 1

[[call]]
wrapper = "same"
keywords = ["q"]

[[call]]
wrapper = "Plan.run"
positional = 1
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `index` that serves kernels 1.0 and 2.0, and a `cache` that has read them."""
    folder = tmp_path_factory.mktemp("prepared")
    small_wheels.make(folder / "index", "1.0", OLD, metadata=NEEDS)
    small_wheels.make(folder / "index", "2.0", NEW, metadata=NEEDS_NOW)
    with pytest.MonkeyPatch.context() as patch:
        small_wheels.serve(folder / "index", folder / "cache", patch)
        assert main(["drift", "1.0", "2.0", "--package", "kernels"]) == 0
    return folder


@pytest.fixture
def index(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that serves both, beside a cache that has them."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    small_wheels.serve(tmp_path / "index", tmp_path / "cache", monkeypatch)
    return tmp_path / "index"


def drifted(tmp_path: Path, *arguments: str, package: str = "kernels") -> tuple[int, dict[str, Any]]:
    """The exit code of `dsattn drift` and its JSON."""
    place = tmp_path / "drift.json"
    code = main(["drift", *arguments, "--package", package, "--json", str(place)])
    return code, json.loads(place.read_text())


def found(data: dict[str, Any], group: str) -> dict[str, tuple[str, list[str]]]:
    """The findings of a group: name and change -> effect and the calls that they touch."""
    findings = [each for each in data["findings"] if each["group"] == group]
    return {f"{each['name']}: {each['what']}": (each["effect"], list(each["touches"])) for each in findings}


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    place = tmp_path / "calls.toml"
    place.write_text(CALLS)
    return place


def test_every_kind_of_change_and_the_calls_that_it_touches(index: Path, tmp_path: Path, calls: Path) -> None:
    code, data = drifted(tmp_path, "1.0", "2.0", "--watch", str(calls))
    assert code == 1
    assert found(data, "exports") == {
        "retired: function is gone": ("breaks", ["retired"]),
        "same: comes from extra.same, came from attention.same": ("harmless", []),
        "fresh: function added": ("harmless", []),
    }
    ten, twenty, thirty = (f"train.py:{line}" for line in (10, 20, 30))
    assert found(data, "parameters") == {
        "scores: k is called keys": ("breaks", [thirty]),
        "scores: block=128, was 64": ("silent", [thirty]),
        "scores: out=None added, at 5, before stream": ("silent", [twenty]),
        "scores: moved: stream 5 -> 6": ("silent", [twenty]),
        "scores: returns list, was dict": ("read", [ten, twenty, thirty]),
        "top_k: sort=False, was True": ("silent", []),
        "top_k: mode is positional or keyword, was keyword-only": ("harmless", []),
        "top_k: mode is required, was 'fast' by default": ("breaks", []),
        "attention: moved: out 3 -> 4, stream 4 -> 3": ("silent", []),
        "attention: **options is gone": ("breaks", ["attention"]),
        "Plan.run: out is required, was None by default": ("breaks", ["Plan.run"]),
        "Plan.run: workspace=None added, keyword only": ("harmless", []),
    }
    assert found(data, "docstrings") == {
        "scores: “Masked ones are zero.” -> “Masked ones are -inf.”": ("read", [ten, twenty, thirty]),
        "scores: new: “out: where they go.”": ("harmless", []),
    }
    assert found(data, "raises") == {
        "checks.check: ValueError: q has {q.ndim} dimensions, when q.ndim != 3": ("may refuse", ["attention"]),
        "checks._helper: AssertionError: q is strided, when not q.is_contiguous()": ("may refuse", ["attention"]),
    }
    assert [each["reached_by"] for each in data["findings"] if each["group"] == "raises"] == [["attention"]] * 2
    requirements = found(data, "requirements")
    assert list(requirements) == [
        "Python: >=3.11, was >=3.9",
        "extra fast: gone",
        "extra slow: added",
        "dsl: [cu13]>=4.8, was >=4.5",
        'ffi: no longer required, was any version where extra == "fast"',
        "torch: required now: any version",
    ]
    assert not any(touches for _, touches in requirements.values())
    assert data["unchanged"] == []
    assert data["touched"] == [ten, twenty, thirty, "attention", "retired", "Plan.run"]
    assert found(data, "known") == {}


def test_what_a_finding_means_is_told(index: Path, tmp_path: Path) -> None:
    _, data = drifted(tmp_path, "1.0", "2.0")
    means = {f"{each['name']}: {each['what']}": each["means"] for each in data["findings"]}
    inserted = "positional callers break, silently where the value fits; keyword callers unaffected"
    assert means["scores: out=None added, at 5, before stream"] == inserted
    assert means["scores: k is called keys"].startswith("keyword callers (TypeError); positional ones unaffected")
    assert means["scores: block=128, was 64"] == "callers that leave it out; those that pass it unaffected"


def test_nothing_seen_is_not_called_compatible(index: Path, capsys: pytest.CaptureFixture[str], calls: Path) -> None:
    code = main(["drift", "1.0", "1.0.0", "--package", "Kernels", "--watch", str(calls)])
    out = capsys.readouterr().out
    assert code == 0
    assert f"\n{NOTHING}; 8 watched calls\n" in out
    assert "compatible" not in out


def test_without_a_watched_call_nothing_is_touched(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data = drifted(tmp_path, "1.0", "2.0")
    assert (code, data["watched"], data["touched"]) == (0, [], [])
    out = capsys.readouterr().out
    assert "changes seen; no call is watched, --watch names yours" in out
    assert "touches" not in out


def test_the_table_names_what_is_touched(index: Path, capsys: pytest.CaptureFixture[str], calls: Path) -> None:
    assert main(["drift", "1.0", "2.0", "--package", "kernels", "--watch", str(calls)]) == 1
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.split() == ["retired"])
    assert lines[lines.index(line) + 1].split() == [
        "function",
        "is",
        "gone",
        *["breaks:", "every", "caller", "(no", "such", "name)"],
        "retired",
    ]
    (verdict,) = [line for line in lines if " changes seen, " in line]
    assert verdict.endswith("touch 6 of 8 watched calls")
    (row,) = [line.split() for line in lines if line.startswith("train.py:30")]
    assert row == ["train.py:30", "1", "breaks,", "1", "silent,", "2", "read"]
    (row,) = [line.split() for line in lines if line.startswith("same") and "was seen" in line]
    assert row == ["same", "nothing", "that", "was", "seen"]
    assert any(line.startswith("static: nothing was imported or run") for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_a_known_pair_needs_no_index_and_no_wheel(index: Path, tmp_path: Path) -> None:
    first = drifted(tmp_path, "1.0", "2.0")
    shutil.rmtree(index)
    shutil.rmtree(tmp_path / "cache" / "wheels")
    assert drifted(tmp_path, "1.0", "2.0") == first
    shutil.rmtree(tmp_path / "cache")
    assert main(["drift", "1.0", "2.0", "--package", "kernels"]) == 2


@pytest.mark.parametrize("left", ["", "{", '{"reader": "older"}', "[]", "null", '{"exports": {}}'])
def test_a_spoilt_snapshot_is_made_anew(index: Path, tmp_path: Path, left: str) -> None:
    first = drifted(tmp_path, "1.0", "2.0")
    for place in (tmp_path / "cache" / "drift").iterdir():
        place.write_text(left)
    assert drifted(tmp_path, "1.0", "2.0") == first


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_a_terminal_gets_a_progress_bar_and_a_pipe_none(index: Path, run_python: RunPython) -> None:
    arguments = ["-m", "dsattn", "drift", "1.0", "2.0", "--package", "kernels"]
    code = "import pty, sys; sys.exit(pty.spawn([sys.executable, *sys.argv[1:]]))"
    done = run_python("-c", code, *arguments)
    assert done.returncode == 0
    assert "2/2" in done.stdout
    done = run_python(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2/2" not in done.stdout
