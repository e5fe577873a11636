"""The native kernels are built where that is possible; where it is not, that is said and the torch backend serves."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RunPython
from test_imports import BLOCK, SMALL_CALL

import dsattn
from dsattn import BackendMissing, CausalLayout, UnsupportedProblem
from dsattn.backends import CpuBackend
from dsattn.backends.cpu import build
from dsattn.cli.doctor import examine
from dsattn.spec.problem import AttentionSizes, Problem

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
F32 = torch.float32
WORKS = 'for word; do [ "$before" = -o ] && printf "a library" > "$word"; before=$word; done'


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of a process that has not built anything."""
    monkeypatch.setenv("DSATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "_LOADED", {})
    return tmp_path / "cache" / "cpu"


@pytest.fixture
def set_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a script the compiler: one that says a version, then runs a text of sh."""

    def make(text: str, name: str = "compiler", version: str = "made up 1.0") -> Path:
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" && exit\n{text}\n', encoding="utf-8")
        script.chmod(0o755)
        monkeypatch.setenv("CC", str(script))
        build.about.cache_clear()
        return script

    return make


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)


def problem() -> Problem:
    """What `attention` asks for."""
    sizes = AttentionSizes(heads=2, key_width=8, value_width=4, dtype=F32)
    layout, cpu = CausalLayout.batched(1, 3), torch.device("cpu")
    return Problem(operator="dense_attention", num_q=3, num_k=3, device=cpu, layout=layout, attention=sizes)


def attention(backend: str = "auto") -> torch.Tensor:
    layout = CausalLayout.batched(1, 3)
    q, kv = torch.ones(3, 2, 8), torch.ones(3, 8)
    return dsattn.dense_attention(q, kv, layout, value_dim=4, softmax_scale=1.0, backend=backend)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_torch_serves_and_it_is_said() -> None:
    cause = "C compiler: no cc, gcc or clang on the path"
    assert CpuBackend().missing() == cause
    assert "cpu" not in dsattn.backends()
    assert torch.equal(attention(), torch.ones(3, 2, 4))
    with pytest.raises(BackendMissing, match=f"backend 'cpu': given {cause}"):
        attention("cpu")
    found = examine()
    assert found["backends"]["cpu"] == cause
    assert "cpu" not in found["usable"]


def test_a_compiler_of_cc_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-cc -m64")
    assert CpuBackend().missing() == "C compiler: no no-such-cc, which CC names"
    monkeypatch.setenv("CC", "'cc")
    assert CpuBackend().missing() == 'C compiler: CC="\'cc" (No closing quotation)'
    attention()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('echo "cc: note: x" >&2; echo "x.c:1:2: error: no such thing" >&2; exit 1', "x.c:1:2: error: no such thing"),
        ('echo "killed" >&2; exit 1', "killed"),
        ("exit 3", "exit code 3"),
        ("exit 0", "exit code 0"),
    ],
)
def test_a_compiler_that_fails(text: str, said: str, set_compiler: Callable[[str], Path], cache: Path) -> None:
    script = set_compiler(text)
    assert CpuBackend().missing() == f"the build of peak.c: {script} fails: {said}"
    attention()
    with pytest.raises(BackendMissing, match=said):
        attention("cpu")
    with pytest.raises(BackendMissing, match=f"see what this says: {script} -O3 .*peak.c"):
        build.library("peak", F32)
    assert files(cache) == []


def test_what_is_no_library(set_compiler: Callable[[str], Path]) -> None:
    set_compiler(WORKS)
    reason = CpuBackend().missing()
    assert reason is not None
    assert reason.startswith("the library of peak.c: ")
    assert "peak-f32-" in reason


@needs_compiler
def test_a_source_that_fails_though_the_first_was_built(set_compiler: Callable[[str], Path]) -> None:
    set_compiler(f"""case "$*" in
      *attention.c*) echo "attention.c:7: error: no such instruction" >&2; exit 1;;
      *) exec {shutil.which("cc")} "$@";;
    esac""")
    backend = CpuBackend()
    assert backend.missing() is None
    reason = backend.supports(problem())
    assert reason is not None
    assert "the build of attention.c" in reason
    assert "attention.c:7: error: no such instruction" in reason
    with pytest.warns(UserWarning, match="runs on 'torch' because 'cpu' does not take it: the build of attention.c"):
        attention()
    with pytest.raises(UnsupportedProblem, match="no such instruction"):
        attention("cpu")


def test_what_has_failed_is_not_tried_again(set_compiler: Callable[[str], Path], tmp_path: Path) -> None:
    set_compiler(f'echo run >> "{tmp_path}/log"; exit 1')
    assert CpuBackend().missing() == CpuBackend().missing()
    assert (tmp_path / "log").read_text() == "run\n"


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DSATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    reason = CpuBackend().missing()
    assert reason is not None
    assert "set DSATTN_CACHE_DIR to a folder that can be written to" in reason
    attention()


def test_without_the_package_that_knows_where_the_cache_is(
    run_python: RunPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSATTN_CACHE_DIR")
    done = run_python("-c", BLOCK % "platformdirs" + SMALL_CALL)
    assert done.stdout == "[[0, -1], [0, 1], [0, 1]] 4 1.0\n", done.stderr


def test_a_library_is_built_anew_when_what_it_is_made_of_changes(
    set_compiler: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_compiler(WORKS)

    def is_new() -> bool:
        before = set(files(cache)) if cache.is_dir() else set()
        build._built("peak", F32)
        return len(set(files(cache)) - before) == 1

    monkeypatch.setattr(build, "level", lambda: "portable")
    assert is_new()
    assert not is_new()
    monkeypatch.setattr(build, "level", lambda: "avx2")
    assert is_new()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert is_new()
    sources = tmp_path / "sources"
    shutil.copytree(build.FOLDER, sources)
    monkeypatch.setattr(build, "FOLDER", sources)
    assert not is_new()
    (sources / "vector.h").write_text("/* other */", encoding="utf-8")
    assert is_new()
    set_compiler(WORKS, version="made up 2.0")
    assert is_new()
    set_compiler(WORKS, name="other")
    assert is_new()
    build._built("peak", torch.bfloat16)
    assert any(name.startswith("peak-bf16-") for name in files(cache))


@needs_compiler
@pytest.mark.parametrize(
    "damage",
    [lambda content: content[: len(content) // 3], lambda _: b"", lambda content: content[:-9] + b"x" * 9],
    ids=["cut off", "empty", "overwritten"],
)
def test_a_damaged_library_is_built_again(damage: Callable[[bytes], bytes], cache: Path) -> None:
    path = build._built("topk", F32)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert build.library("topk", F32).topk
    assert path.read_bytes() == whole
    assert files(cache) == [path.name]


def load_together(barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put(build.library("topk", F32)._name)


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_that_start_at_once_build_one_file(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(6), context.Queue()
    children = [context.Process(target=load_together, args=(barrier, results)) for _ in range(6)]
    for child in children:
        child.start()
    loaded = {results.get(timeout=60) for _ in children}
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 6
    assert loaded == {str(cache / name) for name in files(cache)}
    assert len(loaded) == 1


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_does_not_wait_for_a_build_of_its_parent() -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(1), context.Queue()
    with build._LOCK:
        child = context.Process(target=load_together, args=(barrier, results))
        child.start()
        assert "topk-f32" in results.get(timeout=60)
        child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize(
    ("machine", "capability", "has_bf16", "level"),
    [
        ("x86_64", "AVX512", True, "avx512_bf16"),
        ("x86_64", "AVX512", False, "avx512"),
        ("AMD64", "AVX2", True, "avx2"),
        ("x86_64", "DEFAULT", False, "portable"),
        ("aarch64", "AVX512", True, "portable"),
        ("arm64", "DEFAULT", False, "portable"),
    ],
)
def test_the_instruction_set_is_the_best_that_torch_uses(
    machine: str, capability: str, has_bf16: bool, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has_bf16)
    assert build.level() == level
    assert build.dtype_for(torch.bfloat16) == (torch.bfloat16 if level == "avx512_bf16" else F32)
    assert (build.dtype_for(torch.float16), build.dtype_for(F32)) == (F32, F32)
