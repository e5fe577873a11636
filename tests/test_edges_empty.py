"""No query rows, no key rows, no sequences: results of the right form, zeros where nothing is, gradients too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from problems import Tensors
from torch import Tensor

from dsattn import (
    CausalLayout,
    TopK,
    backends,
    context_parallel_positions,
    dense_attention,
    dsa_attention,
    explain,
    gather_order,
    indexer_loss,
    indexer_scores,
    indexer_topk,
    sparse_attention,
)

pytestmark = pytest.mark.usefixtures("each_backend")

TOP_K = 3


@dataclass(frozen=True)
class Empty:
    """A call in which something is not there: rows [t] or [b, sq], keys [s] or [b, sk]."""

    layout: CausalLayout
    rows: tuple[int, ...]
    keys: tuple[int, ...]

    def tensors(self, dtype: torch.dtype) -> Tensors:
        shapes = (*self.rows, 3, 16), (*self.keys, 16), (*self.rows, 3), (*self.rows, 4, 24), (*self.keys, 24)
        return Tensors(*(torch.randn(shape).to(dtype) for shape in shapes)).requires_grad_()


CASES = {
    "nothing": Empty(CausalLayout.packed([0]), (0,), (0,)),
    "no rows": Empty(CausalLayout.packed([0, 0], [0, 5], q_offset=4), (0,), (5,)),
    "no keys": Empty(CausalLayout.packed([0, 6], [0, 0], q_offset=0), (6,), (0,)),
    "only padding": Empty(CausalLayout.packed([0], num_q=6, num_k=5), (6,), (5,)),
    "too short for a compressed key": Empty(CausalLayout.packed([0, 3, 6], ratio=4), (6,), (0,)),
    "no sequences": Empty(CausalLayout.batched(0, 4, 6, q_offset=2), (0, 4), (0, 6)),
    "sequences without rows": Empty(CausalLayout.batched(2, 0, 6), (2, 0), (2, 6)),
    "sequences without keys": Empty(CausalLayout.batched(2, 4, 0, q_offset=0), (2, 4), (2, 0)),
    "a rank without rows": Empty(CausalLayout.context_parallel([0], cp_size=2, cp_rank=1), (0,), (0,)),
    "a slice of no rows": Empty(CausalLayout.packed([0, 5]).slice_queries(3, 3), (0,), (5,)),
    "on the device": Empty(
        CausalLayout.on_device(torch.zeros(3, dtype=torch.int32), num_q=6, num_k=5, max_len=4), (6,), (5,)
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)


def check_zero_gradients(result: Tensor, *sources: Tensor) -> None:
    """A gradient of zeros for every source, in its form."""
    assert result.requires_grad
    gradients = torch.autograd.grad(result, sources, torch.ones_like(result))
    for gradient, source in zip(gradients, sources, strict=True):
        assert (gradient.shape, gradient.dtype) == (source.shape, source.dtype)
        assert not gradient.any()


def check_selection(topk: TopK, case: Empty) -> None:
    assert topk.indices.shape == (*case.rows, TOP_K)
    assert topk.lengths.shape == case.rows
    assert topk.indices.dtype == topk.lengths.dtype == torch.int32
    assert (topk.indices == -1).all()
    assert not topk.lengths.any()
    assert (topk.num_q, topk.num_k) == (case.layout.num_q, case.layout.num_k)
    TopK(topk.indices, topk.lengths, num_q=topk.num_q, num_k=topk.num_k)  # its form passes as a caller's would


def check_output(out: Tensor, lse: Tensor, case: Empty, dtype: torch.dtype) -> None:
    assert (out.shape, out.dtype) == ((*case.rows, 4, 16), dtype)
    assert (lse.shape, lse.dtype) == ((*case.rows, 4), torch.float64 if dtype == torch.float64 else torch.float32)
    assert not out.any()
    assert (lse == -torch.inf).all()


@cases
@dtypes
def test_scores_and_selections_of_nothing(case: Empty, dtype: torch.dtype) -> None:
    x, wide = case.tensors(dtype), torch.float64 if dtype == torch.float64 else torch.float32
    scores = indexer_scores(*x.index(), case.layout)
    assert (scores.shape, scores.dtype) == ((case.layout.num_q, case.layout.num_k), wide)
    assert (scores == -torch.inf).all()
    check_zero_gradients(scores, *x.index())
    topk = indexer_topk(*x.index(), case.layout, top_k=TOP_K, return_scores=True)
    check_selection(topk, case)
    assert topk.scores is not None
    assert (topk.scores.shape, topk.scores.dtype) == (topk.indices.shape, wide)
    assert (topk.scores == -torch.inf).all()


@cases
@dtypes
@pytest.mark.parametrize("with_sink", [False, True])
def test_attention_over_nothing(case: Empty, dtype: torch.dtype, with_sink: bool) -> None:
    x = case.tensors(dtype)
    sink = torch.randn(4, dtype=torch.float64 if dtype == torch.float64 else torch.float32, requires_grad=True)
    options: dict[str, Any] = {"value_dim": 16, "softmax_scale": 0.2, "sink": sink if with_sink else None}
    topk = indexer_topk(*x.index(), case.layout, top_k=TOP_K)
    calls: list[tuple[Any, Any]] = [(sparse_attention, topk), (dense_attention, case.layout)]
    for attend, keys in calls:
        out, lse = attend(x.q, x.kv, keys, return_lse=True, **options)
        check_output(out, lse, case, dtype)
        check_zero_gradients(out, x.q, x.kv, *([sink] if with_sink else []))


@cases
@dtypes
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"num_rows": 5}, {"num_rows": torch.tensor(0)}], ids=str)
def test_the_loss_over_nothing_is_zero(case: Empty, dtype: torch.dtype, options: dict[str, Any]) -> None:
    x = case.tensors(dtype)
    topk = indexer_topk(*x.index(), case.layout, top_k=TOP_K)
    for selection in (topk, None):
        for row_mask in (None, torch.ones(case.rows, dtype=torch.bool)):
            given: dict[str, Any] = {"topk": selection, "row_mask": row_mask, **options}
            loss = indexer_loss(*x.all(), case.layout, softmax_scale=0.2, **given)
            assert loss.shape == ()
            assert loss == 0
            check_zero_gradients(loss, *x.index())


@cases
@pytest.mark.parametrize("support", ["selected", "visible"])
def test_the_whole_of_nothing(case: Empty, support: str) -> None:
    x = case.tensors(torch.float32)
    options: dict[str, Any] = {"top_k": TOP_K, "attend": support, "loss": support}
    options |= {"value_dim": 16, "softmax_scale": 0.2}
    result = dsa_attention(*x.dsa(), case.layout, **options)
    check_output(result.out, result.lse, case, torch.float32)
    assert result.loss is not None
    check_zero_gradients(result.out.sum() + result.loss, *x.all())
    if support == "selected":
        assert result.topk is not None
        check_selection(result.topk, case)
    answers = explain("dsa_attention", *x.dsa(), case.layout, **options).answers
    assert all(answer.chosen for answer in answers if answer.backend == backends()[0])
    with torch.no_grad():
        again = dsa_attention(*x.dsa(), case.layout, **options)
    assert torch.equal(again.out, result.out)


def test_no_document_has_no_rows_on_any_rank() -> None:
    for scheme in ("zigzag", "contiguous"):
        assert gather_order([0], cp_size=3, scheme=scheme).shape == (0,)
        assert context_parallel_positions([0, 0], cp_size=3, cp_rank=2, scheme=scheme).shape == (0,)


def test_all_slots_of_a_few_keys() -> None:
    """The other end: more slots than there are keys at all, by much."""
    layout = CausalLayout.packed([0, 2, 5])
    torch.manual_seed(0)
    case = Empty(layout, (5,), (5,))
    x = case.tensors(torch.float32)
    topk = indexer_topk(*x.index(), layout, top_k=3000)
    assert topk.indices.shape == (5, 3000)
    assert [row[row >= 0].tolist() for row in topk.indices] == [[0], [0, 1], [2], [2, 3], [2, 3, 4]]
    out = sparse_attention(x.q, x.kv, topk, value_dim=16, softmax_scale=0.2)
    torch.testing.assert_close(out, dense_attention(x.q, x.kv, layout, value_dim=16, softmax_scale=0.2))
