"""Verdicts on disk: shared by processes, bound to what they hang on, and never in the way."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import made_up
import pytest
import torch
from conftest import ROOT, RunPython
from test_imports import BLOCK
from trust_calls import attention_call, counted_checks

from dsattn import ContractDrift
from dsattn.backends.cudnn.backend import CudnnBackend
from dsattn.backends.trust import keys, verdicts
from dsattn.backends.trust.keys import folder_hash, package_identity
from dsattn.backends.trust.verdicts import Verdict, load, save
from dsattn.wheels import cache_folder

CPU = torch.device("cpu")
IDENTITY = {"frontend": "1.45", "nvidia-cutlass-dsl": "4.4"}


class Kept(CudnnBackend):
    """A stand-in that is taken for an installed release, so that its verdicts are kept."""

    facts = IDENTITY

    @classmethod
    def of(cls, changes: dict[str, made_up.Change]) -> Kept:
        backend = cls(made_up.release("1.45", "sm100", changes).namespace_for(CPU))
        backend.checked = True
        return backend

    def identity(self, device: torch.device) -> dict[str, str] | None:
        return self.facts


WRONG: dict[str, made_up.Change] = {"sparse_attention_forward": made_up.returns_base_two}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of which nothing was told yet."""
    monkeypatch.setenv("DSATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(verdicts, "_TOLD", set())
    return tmp_path / "cache"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return counted_checks(monkeypatch)


def files(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_a_verdict_is_taken_from_disk_by_the_next_process(cache: Path, checks: list[str]) -> None:
    for _ in range(2):  # a new backend has an empty memory, as a new process has
        attention_call(Kept.of({}))
        assert len(checks) == 1
    (file,) = files(cache)
    content = json.loads(file.read_text())
    assert content["passed"] is True
    assert content["identity"]["torch"] == torch.__version__
    assert json.loads(content["key"])["operator"] == "sparse_attention"


def test_a_refusal_is_taken_from_disk_with_its_cause_and_says_where_it_is(cache: Path, checks: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(ContractDrift, match="lse is base 2") as caught:
            attention_call(Kept.of(WRONG))
        assert len(checks) == 1
    (file,) = files(cache)
    assert f"kept in {file}" in str(caught.value)
    file.unlink()
    with pytest.raises(ContractDrift):
        attention_call(Kept.of(WRONG))
    assert len(checks) == 2


@pytest.mark.parametrize("name", ["frontend", "nvidia-cutlass-dsl"])
def test_another_version_is_checked_again(
    name: str, cache: Path, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_call(Kept.of({}))
    monkeypatch.setattr(Kept, "facts", IDENTITY | {name: "new"})
    attention_call(Kept.of({}))
    assert len(checks) == 2


def test_other_sources_of_dsattn_and_another_driver_are_checked_again(
    cache: Path, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_call(Kept.of({}))
    for name in ("_own_version", "_driver"):
        monkeypatch.setattr(keys, name, lambda: "another")
        attention_call(Kept.of({}))
    assert len(checks) == 3


def test_a_stand_in_leaves_nothing_on_disk(cache: Path) -> None:
    attention_call(made_up.release("1.45", "sm100", {}))
    assert files(cache) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"format": "dsattn-verdict/1"}', b'{"format": "other"}', "edited", "typed"],
)
def test_a_corrupt_verdict_is_made_again_and_told_once(
    content: bytes | str, cache: Path, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_call(Kept.of({}))
    (file,) = files(cache)
    whole = json.loads(file.read_text())
    changes = {"edited": {"key": "another"}, "typed": {"passed": 1}}
    damaged = json.dumps(whole | changes[content]).encode() if isinstance(content, str) else content
    file.write_bytes(damaged)
    with pytest.warns(UserWarning, match="^a verdict on a kernel could not be read, so its self-check runs again: "):
        attention_call(Kept.of({}))
    assert len(checks) == 2
    assert json.loads(file.read_text()) == whole
    file.write_bytes(damaged)
    attention_call(Kept.of({}))  # a second warning would be an error here


def test_a_cache_that_cannot_be_written_is_told_once(cache: Path, checks: list[str]) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="^a verdict on a kernel could not be read, so its self-check") as told:
        attention_call(Kept.of({}))
    assert len(told) == 1
    attention_call(Kept.of({}))  # a second warning would be an error here
    assert len(checks) == 2


def test_a_verdict_that_failed_is_not_written_over_by_one_that_passed(cache: Path) -> None:
    failed = save(IDENTITY, "key", Verdict(False, "cause", "found"))
    assert save(IDENTITY, "key", Verdict(True)) == failed
    assert load(IDENTITY, "key") == failed == Verdict(False, "cause", "found", failed.file)
    assert save(IDENTITY, "other", Verdict(True)).passed
    assert not save(IDENTITY, "other", Verdict(False, "cause")).passed
    found = load(IDENTITY, "other")
    assert found is not None
    assert not found.passed


def test_what_another_run_may_decide_otherwise_is_kept_in_memory_only(cache: Path) -> None:
    verdict = Verdict(False, "the call fails", lasting=False)
    assert save(IDENTITY, "key", verdict) == replace(verdict, file=None)
    assert files(cache) == []


STARTED_AT_ONCE = """
import multiprocessing as mp, sys
sys.path[:0] = [sys.argv[1]]
import torch
from trust_calls import Checked, attention_call
from dsattn import ContractDrift

class Kept(Checked):
    def identity(self, device):
        return {"package": "1"}

def main(barrier, results):
    barrier.wait()
    attention_call(Kept())
    try:
        attention_call(Kept(factor=1.4427), top_k=9)
    except ContractDrift as error:
        results.put("lse is base 2" in str(error))

if __name__ == "__main__":
    torch.set_num_threads(1)
    attention_call("torch")  # the first call of an op loads much of PyTorch
    context = mp.get_context("fork")
    barrier, results = context.Barrier(8), context.SimpleQueue()
    started = [context.Process(target=main, args=(barrier, results)) for _ in range(8)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    print([each.exitcode for each in started], [results.get() for _ in started])
"""


def test_eight_processes_share_one_verdict(cache: Path, run_python: RunPython) -> None:
    done = run_python("-W", "error", "-W", "ignore::DeprecationWarning", "-c", STARTED_AT_ONCE, str(ROOT / "tests"))
    assert done.stdout == f"{[0] * 8} {[True] * 8}\n", done.stderr
    assert [path.suffix for path in files(cache)] == [".json"] * 2, "a part was left"
    found = {json.loads(file.read_text())["passed"]: file for file in files(cache)}
    assert sorted(found) == [False, True]


def test_the_folder_is_the_users_cache_unless_one_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DSATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert cache_folder() == tmp_path / "dsattn"
    monkeypatch.setenv("DSATTN_CACHE_DIR", "elsewhere")
    assert cache_folder() == Path("elsewhere")


WITHOUT_PLATFORMDIRS = """
import os, sys, warnings
sys.path[:0] = [sys.argv[1]]
os.environ.pop("DSATTN_CACHE_DIR", None)
from dsattn.backends.trust.verdicts import Verdict, load, save
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    print(load({}, "key"), save({}, "key", Verdict(True)).passed, len(told))
print("No module named 'platformdirs'" in str(told[0].message))
"""


def test_without_platformdirs_verdicts_are_not_kept(run_python: RunPython) -> None:
    done = run_python("-c", BLOCK % "platformdirs" + WITHOUT_PLATFORMDIRS, str(ROOT / "tests"))
    assert done.stdout == "None True 1\nTrue\n", done.stderr


def test_a_folders_hash_sees_names_contents_and_large_files(tmp_path: Path) -> None:
    def write(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return folder_hash(tmp_path)

    seen = [write("a.py", b"x"), write("a.py", b"y"), write("sub/b.py", b"y"), write("large.so", b"0" * (2 << 20))]
    assert len(set(seen)) == 4
    assert write("__pycache__/a.pyc", b"compiled") == seen[-1]
    os.utime(tmp_path / "large.so", (1, 1))
    assert folder_hash(tmp_path) not in seen
    assert folder_hash(tmp_path / "nowhere") == folder_hash(tmp_path / "nowhere too")


def test_a_packages_identity_is_its_version_and_files() -> None:
    found = package_identity("jaxtyping")
    assert found is not None
    assert found["jaxtyping"][0].isdigit()
    assert len(found["jaxtyping files"]) == 32
    assert package_identity("no_such_package") is None
