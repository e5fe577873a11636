"""One measurement: every work at tiny sizes, its inputs, memory, the matrix peak, and processes that answer or die."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import SIZES
from safetensors.torch import load_file

from dsattn.bench import calls, child, memory, peak
from dsattn.bench.child import Measurement, Request, measure
from dsattn.bench.children import ChildFailed, Children, _run
from dsattn.bench.peers.peer import Place
from dsattn.bench.works import WORKS
from dsattn.errors import BackendMissing
from dsattn.layouts import CausalLayout

CPU = [name for name, work in WORKS.items() if work.suite == "cpu"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Works of small heads and widths."""
    for name, work in WORKS.items():
        monkeypatch.setitem(WORKS, name, replace(work, sizes=SIZES, warm=6))


def request(work: str, **options: Any) -> Request:
    given: dict[str, Any] = {"runner": "torch", "dtype": "fp32", "rows": 24, "threads": 1, **options}
    return Request(work=work, **given)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_work_is_measured(name: str, dtype: str) -> None:
    found = measure(request(name, dtype=dtype))
    assert found.wall > 0
    assert found.cpu >= 0
    assert found.peak >= found.held > 0
    assert found.inputs > 0
    trains = name.startswith(("loss", "dsa")) or name.endswith("backward")
    assert (found.gradients > 0) is trains


@pytest.mark.parametrize("make", [calls.scores, calls.topk, calls.sparse, calls.dense, calls.layer_selected])
def test_the_backend_that_is_named_runs(make: calls.Make) -> None:
    with pytest.raises(Exception, match="no-such-backend"):
        make(SIZES, 8, torch.float32, "no-such-backend").run()


def test_only_the_backward_is_timed_where_it_alone_is_asked_for() -> None:
    call = calls.sparse_backward(SIZES, 8, torch.float32, "torch")
    with pytest.raises(IndexError):
        call.run()
    call.before()
    call.run()
    q, kv, *_ = call.inputs
    assert q.grad is not None
    assert kv.grad is not None


@pytest.mark.usefixtures("tiny")
def test_a_gradient_that_is_not_finite_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any) -> calls.Call:
        x = torch.ones(2, requires_grad=True)
        return calls.Call([x], lambda: (x * torch.nan).sum().backward() or {})

    monkeypatch.setitem(WORKS, "dense-16", replace(WORKS["dense-16"], make=make))
    with pytest.raises(RuntimeError, match="not finite"):
        measure(request("dense-16"))


@pytest.mark.parametrize(("rows", "top_k"), [(1, 4), (4, 4), (40, 4), (1500, 64)])
def test_random_keys_are_a_selection(rows: int, top_k: int) -> None:
    found = calls.selection(rows, top_k)
    layout = CausalLayout.batched(1, rows)
    # Validated once more, against what each row sees.
    again = type(found).from_ids(found.indices, layout)
    assert torch.equal(again.indices, found.indices)
    assert torch.equal(found.lengths.long(), torch.arange(1, rows + 1).clamp(max=top_k))
    if rows > 1000:
        last = found.indices[-100:].float()
        assert 0.46 < (last.mean() / rows).item() < 0.51
        assert last.unique().numel() > rows // 2


def test_scores_cover_the_last_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr("dsattn.indexer_scores", lambda *x, **_: seen.append((x[3].num_q, x[3].num_k)))
    monkeypatch.setattr(calls, "_CHUNK", 256)
    calls.scores(SIZES, 300, torch.float32, "torch").run()
    assert seen == [(256, 256), (44, 300)]


@pytest.mark.usefixtures("tiny")
def test_results_of_the_call_before_are_written(tmp_path: Path) -> None:
    file = tmp_path / "r"
    measure(request("dsa-selected", results=str(file)))
    found = load_file(file)
    assert found["out"].shape == (6, SIZES.heads, SIZES.value_width)
    measure(request("dsa-selected", results=str(file)))
    assert torch.equal(load_file(file)["out"], found["out"])


def test_the_peak_of_memory_begins_anew() -> None:
    large = torch.ones(16 << 20)
    high = memory.highest()
    del large
    memory.give_back()
    if not memory.forget():
        pytest.skip("this system cannot")
    assert memory.highest() <= high - (50 << 20)
    assert memory.resident() == pytest.approx(memory.highest(), rel=0.05)


def test_without_a_system_that_tells_the_most_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "no" / "clear")
    assert memory.resident() == memory.highest() > 1 << 20
    assert not memory.forget()


def test_the_peak_is_that_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "of_one_thread", lambda dtype: 3e9 if dtype == torch.bfloat16 else 1e9)
    assert peak.matrix_peak(torch.bfloat16, 2) == (6e9, peak.REGISTERS)
    assert peak.matrix_peak(torch.float32, 3) == (3e9, peak.REGISTERS)


def test_without_a_compiler_products_of_matrices_are_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: torch.dtype) -> float:
        raise BackendMissing("backend 'cpu'", given="no compiler")

    monkeypatch.setattr(peak, "of_one_thread", missing)
    monkeypatch.setattr(peak, "_SHAPES", ((64, 64, 64), (8, 8, 8)))
    monkeypatch.setattr(peak, "_SECONDS", 0.01)
    found, source = peak.matrix_peak(torch.bfloat16, 1)
    assert found > 1e6
    assert source == peak.PRODUCTS
    answer = child.answer({"peak": "bf16", "threads": 1})
    assert set(answer) == {"peak", "source"}


def test_what_goes_wrong_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(child.answered('{"peak": "fp7", "threads": 1}')) == {"error": "KeyError: 'fp7'"}
    assert "Traceback" in capsys.readouterr().err


@pytest.fixture(scope="module")
def children() -> Any:
    with Children() as started:
        yield started


@pytest.mark.skipif(sys.platform != "linux", reason="processes are not forked here")
def test_a_process_measures_and_others_follow_it(children: Children) -> None:
    # What fails is told, and does not end the next measurement.
    with pytest.raises(ChildFailed, match="KeyError: 'no-such-work'"):
        children(request("no-such-work").as_json(), Place())
    question = request("indexer-topk", rows=16).as_json()
    first, second = children(question, Place()), children(question, Place())
    assert set(first) == set(second) == {one.name for one in fields(Measurement)}
    assert first["wall"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="processes are not forked here")
def test_a_process_that_is_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_: str) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    told: list[str] = []
    monkeypatch.setattr(child, "answered", killed)
    monkeypatch.setattr(child, "import_module", lambda _: None)
    child.serve(["{}\n", "{}\n"], told.append)
    assert [json.loads(line)["error"] for line in told] == ["the process was killed, as where memory runs out"] * 2


def test_an_interpreter_without_dsattn_says_what_is_missing(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ModuleNotFoundError: no torch' >&2\nexit 3\n")
    program.chmod(0o755)
    place = Place(python=program)
    with Children() as started, pytest.raises(ChildFailed, match="no torch"):
        started("{}", place)
    with pytest.raises(ChildFailed, match="no torch"):
        _run("{}", place)


def test_where_nothing_forks_a_process_is_started_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "{\\"peak\\": 1, \\"source\\": \\"$3\\"}"\n')
    program.chmod(0o755)
    monkeypatch.setattr("dsattn.bench.children.FORKS", False)
    with Children() as started:
        assert started("question", Place(python=program)) == {"peak": 1, "source": "question"}
