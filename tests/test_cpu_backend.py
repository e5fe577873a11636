"""The backend `cpu` as dsattn uses it: no cut changes bits, tensors stay the caller's, wrong kernels are refused."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import RunPython
from cpu_faults import FUNCTIONS, broken
from cpu_problems import Unchecked, everything, of, operators
from problems import random_tensors
from torch import Tensor

import dsattn
from dsattn import CausalLayout, ContractDrift
from dsattn.backends import CpuBackend, TorchBackend, dispatch
from dsattn.backends.cpu import blocks
from dsattn.ops import blocks as common
from dsattn.verify.reference import References
from dsattn.verify.run import run, tasks
from dsattn.verify.suites import parts

pytestmark = pytest.mark.skipif(Unchecked().missing() is not None, reason="needs a C compiler")
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUT = CausalLayout.packed([0, 130, 131, 170], num_q=173, num_k=171)
PROBLEM = of(LAYOUT, h_i=5, d_i=16, h=3, d_qk=24, d_v=17, top_k=70, masked=True)


class Fresh(CpuBackend):
    """A backend of which nothing is known yet, and of which nothing is kept for other processes."""

    def identity(self, device: torch.device) -> None:
        return None


@contextmanager
def threads(number: int) -> Generator[None]:
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def assert_same_bits(one: dict[str, Any], other: dict[str, Any], *, gradients: bool = True) -> None:
    assert torch.equal(one["topk"].indices, other["topk"].indices)
    for name, x in one.items():
        if name != "topk" and (gradients or " d_" not in name):
            assert torch.equal(x, other[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_bits_are_those_of_any_thread_count_and_gradients_those_of_one(dtype: torch.dtype) -> None:
    one = everything(PROBLEM, dtype, Unchecked())
    for number in (2, 3):
        with threads(number):
            first, *others = [everything(PROBLEM, dtype, Unchecked()) for _ in range(3)]
        assert_same_bits(first, one, gradients=False)
        for other in others:
            assert_same_bits(other, first)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Sets the rows and bytes that a block has at most."""

    def set_sizes(rows: int, bytes_: int) -> None:
        monkeypatch.setattr(blocks, "_ROWS", rows)
        monkeypatch.setattr(blocks, "_RESULT_BYTES", bytes_)
        monkeypatch.setattr(blocks, "SCORES_BYTES", bytes_)
        monkeypatch.setattr(common, "_CPU_BYTES", 8 * bytes_)
        monkeypatch.setattr(common, "_MERGED_KEYS", rows)
        common.plan_blocks.cache_clear()

    yield set_sizes
    common.plan_blocks.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_size_of_blocks_changes_no_bit_of_a_forward(dtype: torch.dtype, cut: Callable[[int, int], None]) -> None:
    whole = everything(PROBLEM, dtype, Unchecked())
    for rows, bytes_ in ((1, 1), (7, 1000), (64, 40_000)):
        cut(rows, bytes_)
        found = everything(PROBLEM, dtype, Unchecked())
        # The rows of a block share its columns, of which the loss is a sum.
        losses = {name: found[name] for name in found if name.endswith("loss")}
        assert_same_bits({**found, **{name: whole[name] for name in losses}}, whole, gradients=False)
        for name, loss in losses.items():
            torch.testing.assert_close(loss, whole[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_stay_as_they_are_and_results_are_the_callers_own(dtype: torch.dtype) -> None:
    # Widths that need no padding: nothing is copied on the way in.
    layout, ops = CausalLayout.batched(1, 9), operators(Unchecked())
    x = [y.to(dtype).requires_grad_() for y in random_tensors(layout, d_i=16, d_qk=32).all()]
    sink, bounds = torch.zeros(4, requires_grad=True), layout._shared_bounds(CPU)

    def results() -> list[Tensor]:
        topk = ops.indexer_topk(*x[:3], layout, top_k=16, return_scores=True)
        attending = {"value_dim": 32, "softmax_scale": 0.2, "sink": sink, "return_lse": True}
        found = [topk.indices, topk.lengths, topk.scores, ops.indexer_scores(*x[:3], layout)]
        for out, lse in (
            ops.sparse_attention(*x[3:], topk, **attending),
            ops.dense_attention(*x[3:], layout, **attending),
        ):
            d_out = torch.ones_like(out)
            found += [out, lse, d_out, *torch.autograd.grad(out, [*x[3:], sink], d_out)]
        for selection in (topk, None):
            loss = ops.indexer_loss(*x, layout, topk=selection, softmax_scale=0.2)
            found += [loss, *torch.autograd.grad(loss, x[:3])]
        return [y.detach() for y in found]

    inputs = [*x, sink, *bounds]
    before = [y.detach().clone() for y in inputs]
    first = results()
    kept = [y.clone() for y in first]
    given = {y.untyped_storage().data_ptr() for y in inputs}
    storages = [y.untyped_storage().data_ptr() for y in first]
    assert not given & set(storages)
    assert len(set(storages)) == len(storages)
    for y in first:
        y.fill_(7)
    assert all(map(torch.equal, inputs, before))
    assert all(map(torch.equal, results(), kept))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_that_nobody_wrote_does_not_show(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = everything(PROBLEM, dtype, Unchecked())
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(1000).isnan().all())
        assert_same_bits(everything(PROBLEM, dtype, Unchecked()), wanted)
    finally:
        torch.use_deterministic_algorithms(False)


def digest(results: Any) -> None:
    with threads(2):
        found = everything(PROBLEM, torch.float32, Unchecked())
    results.put([float(x.double().nan_to_num(0, 0, 0).sum()) for name, x in found.items() if name != "topk"])


@pytest.mark.skipif(sys.platform != "linux", reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_is_forked_after_use_computes_the_same() -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    digest(results)
    mine = results.get(timeout=60)
    child = context.Process(target=digest, args=(results,))
    child.start()
    assert results.get(timeout=60) == mine
    child.join(60)
    assert child.exitcode == 0


def test_inference_mode_and_autocast_change_nothing() -> None:
    layout = CausalLayout.batched(1, 40)
    x, ops = random_tensors(layout), operators(Unchecked())

    def results() -> list[Tensor]:
        topk = ops.indexer_topk(*x.index(), layout, top_k=9)
        options = {"value_dim": 16, "softmax_scale": 0.2}
        loss = ops.indexer_loss(*x.all(), layout, topk=topk, softmax_scale=0.2)
        return [topk.indices, ops.sparse_attention(x.q, x.kv, topk, **options), loss]

    wanted = results()
    with torch.inference_mode():
        assert all(map(torch.equal, results(), wanted))
    with threads(2), torch.inference_mode():
        assert all(map(torch.equal, results(), wanted))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results()
    assert all(map(torch.equal, found, wanted))
    assert [y.dtype for y in found] == [y.dtype for y in wanted]


COMPILED = """
import torch
from dsattn import CausalLayout, dsa_attention
layout = CausalLayout.packed([0, 9, 40])

def layer(q, kv, index_q, index_k, weights, layout):
    result = dsa_attention(
        q, kv, index_q, index_k, weights, layout,
        top_k=8, value_dim=16, softmax_scale=0.2, loss="selected", backend="cpu",
    )
    return result.out, result.loss, result.topk.indices

shapes = (40, 4, 24), (40, 24), (40, 3, 16), (40, 16), (40, 3)
x = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
results = [f(*x, layout) for f in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True))]
gradients = [torch.autograd.grad(out.float().sum() + loss, x) for out, loss, _ in results]
print(all(map(torch.equal, results[0] + gradients[0], results[1] + gradients[1])))
"""


def test_a_compiled_call_is_the_same(run_python: RunPython) -> None:
    done = run_python("-c", COMPILED)
    assert done.stdout == "True\n", done.stderr


def call(name: str, backend: str | CpuBackend) -> list[Tensor]:
    """A call that needs a kernel, with all that it gives."""
    layout = CausalLayout.batched(2, 30)
    torch.manual_seed(1)
    x = random_tensors(layout).requires_grad_()
    ops = operators(backend)
    if name in ("pack_keys", "indexer_scores", "scores_backward"):
        scores = ops.indexer_scores(*x.index(), layout)
        seen = scores.masked_fill(scores.isinf(), 0)
        return [scores, *torch.autograd.grad(seen.sum(), x.index())]
    if name == "topk":
        return [ops.indexer_topk(*x.index(), layout, top_k=9).indices]
    topk = operators(TorchBackend()).indexer_topk(*x.index(), layout, top_k=9)
    if name in ("attend", "attend_backward"):
        out = ops.sparse_attention(x.q, x.kv, topk, value_dim=16, softmax_scale=0.2)
        return [out, *torch.autograd.grad(out.square().sum(), [x.q, x.kv])]
    loss = ops.indexer_loss(*x.all(), layout, topk=topk, softmax_scale=0.2)
    return [loss, *torch.autograd.grad(loss, x.index())]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_kernel_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = call(name, Fresh())
    with broken(name) as changed:
        with pytest.raises(ContractDrift, match="'cpu': given its self-check failed: "):
            call(name, Fresh())
        monkeypatch.setattr(sys.modules["dsattn.functional.problems"], "ordered", lambda: (fresh, TorchBackend()))
        monkeypatch.setattr(dispatch, "_PASSED_OVER", set())
        fresh = Fresh()
        with pytest.warns(UserWarning, match="on 'torch' because 'cpu' does not take it: its self-check failed: "):
            found = call(name, "auto")
    assert changed
    for x, wanted in zip(found, healthy, strict=True):
        torch.testing.assert_close(x, wanted, rtol=1e-4, atol=1e-4)


SUBJECTS = [subject for subject in parts("quick")[0].subjects if subject.case.name in ("bshd-b3", "packed")]
REFERENCES = References(keep=None)


def failures() -> list[str]:
    records = run(tasks(SUBJECTS, [Unchecked()], CPU, ["fp32"]), REFERENCES)
    return [record.operator for record in records if record.verdict != "pass"]


def test_verify_finds_wrong_kernels_and_nothing_else() -> None:
    assert SUBJECTS
    assert failures() == []
    for name in FUNCTIONS:
        with broken(name):
            assert failures(), name


def test_auto_takes_it_before_the_torch_backend() -> None:
    assert dsattn.backends().index("cpu") < dsattn.backends().index("torch")
