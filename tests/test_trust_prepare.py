"""prepare: kernels are checked before they are needed, and ranks choose alike."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, RunPython
from trust_calls import CHUNKS, WHOLE, Checked, counted_checks, tensors

from dsattn import BackendMissing, BadInput, ContractDrift, UnsupportedProblem, dsa_attention, prepare
from dsattn.backends import Backend, TorchBackend, dispatch
from dsattn.backends.trust import gate
from dsattn.spec.problem import Problem

OPTIONS: dict[str, Any] = {"top_k": 40, "value_dim": 16, "softmax_scale": 0.2}


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return counted_checks(monkeypatch)


def arguments(*, requires_grad: bool = False) -> tuple[Any, ...]:
    x = tensors(CHUNKS)
    for one in x.values():
        one.requires_grad_(requires_grad)
    return x["q"], x["kv"], x["index_q"], x["index_k"], x["weights"], CHUNKS


def register(monkeypatch: pytest.MonkeyPatch, *backends: Backend) -> None:
    for name in ("prepare", "problems", "explain"):
        monkeypatch.setattr(sys.modules[f"dsattn.functional.{name}"], "ordered", lambda: backends)
    monkeypatch.setattr(dispatch, "_PASSED_OVER", set())


@pytest.mark.parametrize("named", [False, True])
def test_a_prepared_call_checks_nothing_more(
    named: bool,
    monkeypatch: pytest.MonkeyPatch,
    checks: list[str],
) -> None:
    backend = Checked()
    register(monkeypatch, backend, TorchBackend())
    options: dict[str, Any] = OPTIONS | ({"backend": backend} if named else {})
    call = arguments(requires_grad=True)
    found = prepare("dsa_attention", *call, loss="selected", **options)
    assert {(a.operator, a.backward, a.self_check) for a in found.answers if a.backend == "checked"} == {
        ("indexer_topk", False, "passed"),
        ("sparse_attention", False, "passed"),
        ("sparse_attention", True, "passed"),
        ("indexer_loss", False, "passed"),
    }
    ran = list(checks)
    assert {"indexer_topk", "sparse_attention", "the backward of sparse_attention", "indexer_loss"} == set(ran)
    monkeypatch.setattr(gate, "capturing", lambda device: True)
    result = dsa_attention(*call, loss="selected", **options)
    assert result.loss is not None
    (result.out.float().sum() + result.loss).backward()
    assert checks == ran
    assert result.backend["sparse_attention"] == "checked"


def test_nothing_of_the_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(Checked):
        def sparse_attention(self, a: Any, topk: Any) -> Any:
            assert a.kv.shape[0] != CHUNKS.num_k
            return super().sparse_attention(a, topk)

    prepare("dsa_attention", *arguments(), backend=Small(), **OPTIONS)


def test_a_named_backend_that_is_wrong_is_refused_and_auto_passes_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ContractDrift, match="lse is base 2"):
        prepare("dsa_attention", *arguments(), backend=Checked(1.4427), **OPTIONS)
    register(monkeypatch, Checked(1.4427), TorchBackend())
    with pytest.warns(UserWarning, match="sparse_attention runs on 'torch' because 'checked' does not take it"):
        found = prepare("dsa_attention", *arguments(), **OPTIONS)
    assert [(a.operator, a.backend) for a in found.answers if a.chosen] == [
        ("indexer_topk", "checked"),
        ("sparse_attention", "torch"),
    ]
    dsa_attention(*arguments(), **OPTIONS)  # a second warning would be an error here


def test_later_backends_are_checked_too_since_a_rank_may_refuse_the_first(
    monkeypatch: pytest.MonkeyPatch,
    checks: list[str],
) -> None:
    register(monkeypatch, Checked(), Checked(), TorchBackend())
    prepare("indexer_topk", *arguments()[2:], top_k=40)
    assert checks == ["indexer_topk"] * 2


@pytest.mark.usefixtures("no_shape_checks")
def test_what_the_call_would_refuse_is_refused() -> None:
    class Picky(Checked):
        def supports(self, problem: Problem) -> str | None:
            return "not today"

    with pytest.raises(BadInput, match="one of 'indexer_scores'"):
        prepare("topk", *arguments()[2:], top_k=40)
    with pytest.raises(BadInput, match="top_k"):
        prepare("indexer_topk", *arguments()[2:], top_k=0)
    with pytest.raises(BackendMissing):
        prepare("indexer_topk", *arguments()[2:], top_k=40, backend="cudnn")
    with pytest.raises(UnsupportedProblem, match="not today"):
        prepare("indexer_topk", *arguments()[2:], top_k=40, backend=Picky())
    with pytest.raises(BadInput, match=r"^group: given str; needed a torch.distributed.ProcessGroup or None$"):
        prepare("indexer_topk", *arguments()[2:], top_k=40, group="world")  # type: ignore[arg-type]


RANKS = """
import sys, warnings
sys.path[:0] = [sys.argv[2]]
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_trust_prepare import CHUNKS, WHOLE, Checked, OPTIONS, TorchBackend, arguments, gate, tensors
import dsattn
from dsattn import prepare, dsa_attention
from dsattn.backends import dispatch

reduced, inner = [], dist.all_reduce
dist.all_reduce = lambda x, *args, **kwargs: (reduced.append(x.numel()), inner(x, *args, **kwargs))

def told(function, *args, **kwargs):
    before = len(reduced)
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    assert len(reduced) - before == 1, "one collective"
    return result

def register(*backends):
    for name in ("prepare", "problems", "explain"):
        sys.modules[f"dsattn.functional.{name}"].ordered = lambda: backends

def rank_main(rank, file, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    group = dist.new_group([0, 1])
    wrong_on_1 = lambda: Checked(1.4427 if rank else 1.0)
    lines = [told(prepare, "dsa_attention", *arguments(), backend=wrong_on_1(), group=group, **OPTIONS)]
    backend = wrong_on_1()
    register(backend, TorchBackend())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = told(prepare, "dsa_attention", *arguments(), **OPTIONS)
    lines.append([a.backend for a in found.answers if a.chosen])
    lines.append([str(w.message) for w in warned])
    # Without a further collective, and for other launches too.
    x = tensors(WHOLE)
    result = dsa_attention(x["q"], x["kv"], x["index_q"], x["index_k"], x["weights"], WHOLE, **OPTIONS)
    lines.append(result.backend)
    register(Checked(), TorchBackend())
    found = told(prepare, "dsa_attention", *arguments(), **OPTIONS)
    lines.append([a.backend for a in found.answers if a.chosen])
    lines.append(told(prepare, "dsa_attention", *arguments(), **(OPTIONS | {"top_k": 40 - 40 * rank})))
    results.put((rank, lines))
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.set_num_threads(1)
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    started = [context.Process(target=rank_main, args=(rank, sys.argv[1], results)) for rank in range(2)]
    for each in started:
        each.start()
    lines = dict(results.get() for _ in started)
    for each in started:
        each.join()
    for place in zip(lines[0], lines[1], strict=True):
        print(*place, sep=" | ")
"""


def test_two_ranks_choose_alike_and_none_hangs(run_python: RunPython, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = run_python("-W", "ignore", str(script), str(tmp_path / "store"), str(ROOT / "tests"))
    assert done.returncode == 0, done.stderr
    named, chosen, warned, ran, healthy, bad = (line.split(" | ") for line in done.stdout.splitlines())
    drift = "ContractDrift: sparse_attention on backend 'checked"
    assert named[0].startswith(drift)
    assert "another rank of the group does not use it" in named[0]
    assert named[1].startswith(drift)
    assert "lse is base 2" in named[1]
    assert chosen == ["['checked', 'torch']"] * 2
    assert "another rank of the group" in warned[0]
    assert "lse is base 2" in warned[1]
    assert ran == ["{'indexer_topk': 'checked', 'sparse_attention': 'torch'}"] * 2
    assert healthy == ["['checked', 'checked']"] * 2
    assert bad[0].startswith("DsattnError: prepare: given a rank of the group that could not prepare its call")
    assert bad[1].startswith("BadInput: top_k")


def test_the_ranks_of_the_default_group_are_not_waited_for_without_one() -> None:
    assert not torch.distributed.is_initialized()
    found = prepare("indexer_topk", *tensors_of_whole(), top_k=4, backend=Checked())
    assert found.answers[0].operator == "indexer_topk"


def tensors_of_whole() -> tuple[Any, ...]:
    x = tensors(WHOLE)
    return x["index_q"], x["index_k"], x["weights"], WHOLE
