"""Suite `megatron`: its records and tables, where Megatron comes from, and the process in which it is loaded."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from typing import Any

import megatron_wheel
import pytest
import torch
from megatron_fake import source
from packaging.version import Version

from dsattn import BackendMissing, BadInput
from dsattn.integrations.megatron_module import Kernels
from dsattn.verify import megatron_suite
from dsattn.verify.megatron_suite import judge, suite, wheel
from dsattn.verify.megatron_suite.host import Host, put
from dsattn.verify.megatron_suite.problems import losses, selection, selections
from dsattn.verify.records import Record
from dsattn.wheels import Unreachable

RIGHT = {"errors": {"d_index_q": [0.0, 1e-7]}, "zero": {"d_index_q": [False, False]}, "non_finite": 0}
ZERO = {"errors": {"d_index_q": [0.0, 1.0]}, "zero": {"d_index_q": [False, True]}, "non_finite": 0}


def record(case: str, metrics: dict[str, Any], **fields: Any) -> Record:
    common = {"suite": "megatron", "operator": "", "backend": "cudnn", "device": "cpu", "dtype": "bf16"}
    more = {"verdict": "pass", "release": "1.29.1", "arch": "sm100", "metrics": {"megatron": "0.19.2", **metrics}}
    return Record(**{**common, **more, "case": case, **fields})  # type: ignore[arg-type]


def test_tables_have_a_row_per_release_and_caller() -> None:
    recalls = [{"recall_mean": mean, "recall_min": low, "reason": ""} for mean, low in ((0.5, 0.1), (0.25, 0.0))]
    records = [
        record("loss-b2", ZERO, caller="naive"),
        *(record(f"documents-cp2-rank{r}", recalls[r], caller="naive", verdict="fail") for r in range(2)),
        record("loss-b2", RIGHT),
        record("loss-b2", RIGHT, suite="quick"),
    ]
    gradients, recall = megatron_suite.tables(records)
    assert gradients.columns[:5] == ("megatron-core", "frontend", "arch", "calls", "0 of 2")
    assert gradients.rows == [
        ("0.19.2", "1.29.1", "sm100", "as released", "0", "zero", "", "", "", "fail"),
        ("0.19.2", "1.29.1", "sm100", "after install()", "0", "1e-07", "", "", "", "pass"),
    ]
    assert recall.rows[0][5] == "0.250 / 0.000"
    assert all(len(row) == len(table.columns) for table in (gradients, recall) for row in table.rows)
    assert megatron_suite.tables([record("loss-b2", RIGHT, suite="quick")]) == []


@pytest.mark.parametrize(
    ("metrics", "right"),
    [
        (RIGHT, True),
        (ZERO, False),
        ({**RIGHT, "errors": {"d_index_q": [2e-6, 0.0]}}, False),
        ({**RIGHT, "errors": {"d_index_q": [float("nan"), 0.0]}}, False),
        ({**RIGHT, "non_finite": 1}, False),
        ({"recall_mean": 1.0, "reason": ""}, True),
        ({"recall_mean": 1.0, "reason": "row 3: an id twice"}, False),
    ],
)
def test_right_is_told_from_wrong(metrics: dict[str, Any], right: bool) -> None:
    assert (judge.is_right(metrics) == []) is right


@pytest.mark.parametrize(
    ("case", "metrics", "old", "faulty"),
    [
        ("loss-b2", ZERO, False, True),
        ("loss-b2", RIGHT, False, False),
        ("loss-b2", {**ZERO, "errors": {"d_index_q": [1.0, 1.0]}}, False, False),
        ("documents-cp2-rank0", {"recall_mean": 0.5}, False, True),
        ("documents-cp2-rank0", {"recall_mean": 1.0}, False, False),
        ("padding-cp2-rank0", {"recall_mean": 0.86}, True, True),
        ("padding-cp2-rank0", {"recall_mean": 0.5}, True, False),
        ("padding-cp2-rank0", {"recall_mean": 0.5}, False, True),
        ("slice-cp2-rank0", {"recall_mean": 1.0}, True, False),
    ],
)
def test_a_fault_is_told_from_none_and_from_another(
    case: str, metrics: dict[str, Any], old: bool, faulty: bool
) -> None:
    assert (judge.is_faulty(case, metrics, old=old) == []) is faulty


def test_every_case_of_the_tables_is_there() -> None:
    names = [*losses(0), *(problem.case for problem in selections(0))]
    assert names == list(suite.cases(0))
    assert len(names) == len(set(names)) == 18
    assert all(name.rpartition("-cp")[0] in judge.RECALLS for name in names if not name.startswith("loss"))


def test_layouts_of_the_problems_are_those_of_the_ranks() -> None:
    padded = selection("padding", (16,), 2, 1, 0, keys=24)
    assert (padded.layout.num_q, padded.layout.num_k, padded.local_rows) == (8, 24, 12)
    assert [rows.tolist() for rows in padded.visible][:5] == [list(range(n)) for n in (5, 6, 7, 8, 9)]
    sliced = selection("slice", (16, 16), 2, 0, 0, rows=(3, 7))
    assert [len(rows) for rows in sliced.visible] == [4, 13, 14, 15]
    assert sliced.index_q.shape[0] == 4


def test_without_a_megatron_nothing_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(version: str) -> Path:
        raise Unreachable("package index", given=f"no answer for {version}")

    monkeypatch.setattr(suite, "unpacked", absent)
    monkeypatch.setattr(suite, "_installed", lambda: None)
    (found,) = megatron_suite.run(["1.29.1"])
    assert (found.verdict, found.reason) == ("not run", f"package index: given no answer for {suite.NEWEST}")
    (found,) = megatron_suite.run(["1.29.1"], "0.1")
    assert found.reason == "package index: given no answer for 0.1"


@pytest.mark.parametrize(("releases", "options"), [(["nonsense"], {}), (["1.29.1"], {"arch": "sm80"})])
def test_names_that_nothing_has_are_refused_first(releases: list[str], options: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        megatron_suite.run(releases, **options)
    with pytest.raises(BackendMissing):
        megatron_suite.run(["1.20.0"])


def test_a_run_tells_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = megatron_wheel.folder_of(suite.NEWEST)
    few = {name: suite.cases(0)[name] for name in ("one-document-cp4-rank1", "slice-cp2-rank1")}
    monkeypatch.setattr(suite, "cases", lambda seed: few)
    monkeypatch.setattr(suite, "unpacked", lambda version: folder)
    seen: list[tuple[str, int, int]] = []
    records = megatron_suite.run(
        ["1.29.1", "1.29.1"], suite.NEWEST, lambda case, done, total: seen.append((case, done, total))
    )
    assert seen == [(name, i, 4) for i, name in enumerate([name for name in few for _ in range(2)], 1)]
    assert [(r.case, r.caller, r.verdict) for r in records] == [
        (name, caller, "pass") for name in few for caller in ("naive", "dsattn")
    ]
    assert {(r.suite, r.release, r.arch, r.simulated, r.metrics["megatron"]) for r in records} == {
        ("megatron", "1.29.1", "sm100", True, suite.NEWEST)
    }


def test_what_does_not_run_is_told() -> None:
    """A frontend that is not installed, and a Megatron that breaks."""
    kernels = Kernels({"dsa_layout": None}, "broken", "")
    on_a_gpu = suite.Frontend(None, "sm100", 0, "cuda")
    found = suite.record_of(kernels, on_a_gpu, "loss-b2", "naive", "0.19.2")
    assert (found.verdict, found.simulated) == ("not run", False)
    simulated = suite.Frontend("1.29.1", "sm100", 0, "cpu")
    found = suite.record_of(kernels, simulated, "loss-b2", "naive", "0.19.2")
    assert (found.verdict, found.reason) == ("fail", "KeyError: '_run_sparse_indexer_backward'")
    assert found.traceback is not None


# What a wheel of Megatron needs to be imported, and kernels that are built like its own.
IMPORTS = """
import sys
from typing import override
import triton
import triton.language as tl

@triton.jit
def kernel(x: tl.constexpr): ...

@triton.autotune(configs=[triton.Config({})], key=[])
def tuned(): return 3

ABOUT = kernel.__name__, tuned(), "triton" in sys.modules, triton.__version__
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a package that has the names of Megatron's."""
    place = tmp_path / "wheel" / "megatron" / "core" / "transformer" / "experimental_attention_variant"
    place.mkdir(parents=True)
    for each in (place.parents[1], place.parent, place):
        (each / "__init__.py").write_text("__version__ = '0.19.9'\n", encoding="utf-8")
    (place / "dsa_cudnn_kernels.py").write_text(IMPORTS + source(), encoding="utf-8")
    return tmp_path / "wheel"


def about(kernels: Kernels) -> tuple[Any, ...]:
    put(kernels, "frontend", "sm90")
    with torch.cuda.nvtx.range("a range"):
        held = kernels.names["_cudnn_dsa"]
    left = "triton" in sys.modules or torch.compile.__name__ != "compile"
    current: Any = kernels.names["_current_sm"]
    return (*kernels.names["ABOUT"], left, str(kernels), held, current())


def dies(kernels: Kernels) -> None:
    import os

    os._exit(3)


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed: nothing stands in")
def test_a_host_supplies_what_an_import_of_megatron_needs(folder: Path) -> None:
    with Host(folder) as host:
        name, tuned, seen, version, *rest = host.call(about)
        assert (name, tuned, seen, version) == ("kernel", 3, True, "3.0.0")
        assert rest == [False, "megatron-core 0.19.9", "frontend", (9, 0)]
        assert "megatron" not in sys.modules
        with pytest.raises(BackendMissing, match="died"):
            host.call(dies)


def test_a_host_without_megatron_says_so(tmp_path: Path) -> None:
    with Host(tmp_path) as host, pytest.raises(BackendMissing, match="no module megatron"):
        host.call(about)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Puts a small wheel in the place of the package index; what was asked of it."""
    asked: list[tuple[str, str]] = []

    def give(package: str, version: Version, folder: Path) -> Path:
        asked.append((package, str(version)))
        path = tmp_path / "small.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("megatron/core/__init__.py", "x = 1\n")
        return path

    monkeypatch.setattr(wheel, "wheel", give)
    return asked


def test_a_wheel_is_downloaded_and_unpacked_once(tmp_path: Path, index: list[tuple[str, str]]) -> None:
    folder = wheel.unpacked("9.9", tmp_path)
    assert (folder / "megatron" / "core" / "__init__.py").read_text(encoding="utf-8") == "x = 1\n"
    assert wheel.unpacked("9.9", tmp_path) == folder
    assert index == [("megatron-core", "9.9")]
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("version", ["latest", "../0.19.2", ""])
def test_what_is_no_release_is_refused(version: str, tmp_path: Path, index: list[tuple[str, str]]) -> None:
    with pytest.raises(BadInput, match="megatron-core: given release"):
        wheel.unpacked(version, tmp_path)
    assert index == []


def test_a_failed_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Path:
        raise Unreachable("package index")

    monkeypatch.setattr(wheel, "wheel", refuse)
    with pytest.raises(Unreachable):
        wheel.unpacked("9.9", tmp_path)
    assert list(tmp_path.rglob("9.9")) == []


def test_another_process_may_be_faster(tmp_path: Path, index: list[tuple[str, str]]) -> None:
    first = wheel.unpacked("9.9", tmp_path)
    (tmp_path / "other").mkdir()
    wheel.put(tmp_path / "other", first)
    assert (first / "megatron").is_dir()
    assert not (tmp_path / "other").exists()
