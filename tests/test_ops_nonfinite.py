"""Who is touched by a NaN or an inf: the rows that see it, and no other row or key that shares a block with them."""

from __future__ import annotations

import pytest
import torch
from problems import random_tensors

from dsattn import CausalLayout, dense_attention, indexer_loss, indexer_scores, indexer_topk, sparse_attention

LAYOUT = CausalLayout.packed([0, 20, 50])
BAD = [torch.nan, torch.inf, -torch.inf]
KEY = 30  # seen by rows 30 to 49


def rows_with(bad: torch.Tensor) -> list[int]:
    return bad.flatten(1).any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("value", BAD)
def test_a_bad_index_key_touches_the_rows_that_see_it(value: float) -> None:
    x = random_tensors(LAYOUT)
    x.index_k[KEY, 3] = value
    scores = indexer_scores(*x.index(), LAYOUT)
    assert scores[:, :KEY].isfinite().sum() == (scores[:, :KEY] != -torch.inf).sum(), "other keys keep numbers"
    topk = indexer_topk(*x.index(), LAYOUT, top_k=4)
    if value != value:
        assert all(KEY in topk.indices[row].tolist() for row in range(30, 50)), "a NaN score is selected, so it shows"
    assert all(KEY not in topk.indices[row].tolist() for row in range(30))


def test_nan_scores_rank_first_lowest_key_first() -> None:
    x = random_tensors(LAYOUT)
    x.index_q[49] = torch.nan
    topk = indexer_topk(*x.index(), LAYOUT, top_k=4, return_scores=True)
    assert topk.indices[49].tolist() == [20, 21, 22, 23]
    assert topk.scores is not None
    assert topk.scores[49].isnan().all()
    assert topk.scores[:49].isfinite().sum() == topk.lengths[:49].sum()


def test_inf_ranks_below_nan_and_minus_inf_is_still_a_visible_key() -> None:
    x = random_tensors(LAYOUT, h_i=1)
    x.index_q[:] = 1
    x.index_k[20:50] = 0.1
    x.index_k[22], x.index_k[24] = torch.inf, torch.nan
    x.weights[:] = 1
    assert indexer_topk(*x.index(), LAYOUT, top_k=2).indices[49].tolist() == [22, 24]
    assert indexer_topk(*x.index(), LAYOUT, top_k=1).indices[49].tolist() == [24]
    x.index_k[24] = 0.1
    x.weights[:] = -1
    topk = indexer_topk(*x.index(), LAYOUT, top_k=30, return_scores=True)
    assert topk.indices[49].tolist() == list(range(20, 50))
    assert topk.scores is not None
    assert topk.scores[49, 2] == -torch.inf


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("column", [0, 20])
def test_a_bad_kv_row_stays_with_the_rows_that_see_it(value: float, column: int) -> None:
    x = random_tensors(LAYOUT)
    clean = dense_attention(x.q, x.kv, LAYOUT, value_dim=16, softmax_scale=0.2)
    x.kv[KEY, column] = value
    x.requires_grad_()
    out, lse = dense_attention(x.q, x.kv, LAYOUT, value_dim=16, softmax_scale=0.2, return_lse=True)
    touched = rows_with(~out.isfinite())
    assert touched
    assert set(touched) <= set(range(30, 50))
    assert torch.equal(out[:30], clean[:30])
    assert lse[:30].isfinite().all()
    d_q, d_kv = torch.autograd.grad(out, [x.q, x.kv], torch.ones_like(out))
    assert set(rows_with(~d_q.isfinite())) <= set(range(30, 50))
    assert d_kv[:20].isfinite().all(), "keys of the other document"


@pytest.mark.parametrize("value", BAD)
def test_a_bad_query_stays_in_its_row_and_its_keys(value: float) -> None:
    x = random_tensors(LAYOUT)
    x.q[33, 1, 2] = value
    x.requires_grad_()
    for attend in ("dense", "sparse"):
        if attend == "dense":
            out = dense_attention(x.q, x.kv, LAYOUT, value_dim=16, softmax_scale=0.2)
            keys = set(range(20, 34))
        else:
            topk = indexer_topk(*x.index(), LAYOUT, top_k=5)
            out = sparse_attention(x.q, x.kv, topk, value_dim=16, softmax_scale=0.2)
            keys = set(topk.indices[33].tolist())
        assert rows_with(~out.isfinite()) == [33]
        d_q, d_kv = torch.autograd.grad(out, [x.q, x.kv], torch.ones_like(out))
        assert rows_with(~d_q.isfinite()) == [33]
        assert set(rows_with(~d_kv.isfinite())) <= keys


def test_unused_slots_read_no_key_row() -> None:
    x = random_tensors(LAYOUT)
    topk = indexer_topk(*x.index(), LAYOUT, top_k=5)
    selecting = (topk.indices == 0).any(1)
    x.kv[0] = torch.nan
    x.requires_grad_()
    out = sparse_attention(x.q, x.kv, topk, value_dim=16, softmax_scale=0.2)
    assert rows_with(~out.isfinite()) == selecting.nonzero().flatten().tolist()
    (d_q,) = torch.autograd.grad(out, [x.q], torch.ones_like(out))
    assert rows_with(~d_q.isfinite()) == selecting.nonzero().flatten().tolist()


@pytest.mark.parametrize("side", ["index_q", "weights", "q"])
@pytest.mark.parametrize("support", ["selected", "visible"])
def test_a_nan_makes_the_loss_nan_and_touches_only_its_row_and_keys(side: str, support: str) -> None:
    x = random_tensors(LAYOUT)
    topk = indexer_topk(*x.index(), LAYOUT, top_k=5)
    getattr(x, side)[33, 1] = torch.nan
    x.requires_grad_()
    selection = topk if support == "selected" else None
    loss = indexer_loss(*x.all(), LAYOUT, softmax_scale=0.2, topk=selection)
    assert loss.isnan()
    d_index_q, d_index_k, d_weights = torch.autograd.grad(loss, x.index())
    assert rows_with(~d_index_q.isfinite()) == [33]
    assert rows_with(~d_weights.isfinite()) == [33]
    keys = set(topk.indices[33].tolist()) if support == "selected" else set(range(20, 34))
    assert set(rows_with(~d_index_k.isfinite())) <= keys


@pytest.mark.parametrize("support", ["selected", "visible"])
def test_a_masked_row_takes_no_part_whatever_it_holds(support: str) -> None:
    x = random_tensors(LAYOUT)
    topk = indexer_topk(*x.index(), LAYOUT, top_k=5) if support == "selected" else None
    mask = torch.arange(50) != 33
    options = {"softmax_scale": 0.2, "topk": topk, "row_mask": mask}
    x.requires_grad_()
    expected = indexer_loss(*x.all(), LAYOUT, **options)
    gradients = torch.autograd.grad(expected, x.index())
    with torch.no_grad():
        for y in (x.index_q, x.weights, x.q):
            y[33] = torch.nan
    loss = indexer_loss(*x.all(), LAYOUT, **options)
    assert torch.equal(loss, expected)
    for got, wanted in zip(torch.autograd.grad(loss, x.index()), gradients, strict=True):
        assert torch.equal(got, wanted)
