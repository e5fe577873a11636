"""Buffers: what is never written is never read, what lies beside an input is not either, and sizes may be large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from problems import Tensors, random_tensors
from torch import Tensor

from dsattn import CausalLayout, TopK, dense_attention, dsa_attention, indexer_topk, sparse_attention
from dsattn.spec import oracle

LAYOUT = CausalLayout.packed([0, 20, 20, 50], num_q=53, num_k=54)
OPTIONS: dict[str, Any] = {"top_k": 7, "value_dim": 16, "softmax_scale": 0.2}


def results(x: Tensors, layout: CausalLayout = LAYOUT) -> list[Tensor]:
    """Outputs and gradients of all operators."""
    found: list[Tensor] = []
    for attend in ("selected", "visible"):
        result = dsa_attention(*x.dsa(), layout, attend=attend, loss=attend, sink=torch.zeros(x.q.shape[1]), **OPTIONS)
        assert result.loss is not None
        found += [result.out, result.lse, result.loss]
        found += torch.autograd.grad(result.out.sum() + result.loss, x.all())
        if result.topk is not None:
            found += [result.topk.indices, result.topk.lengths]
    return [y.detach().clone() for y in found]


def poison(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills every uninitialised buffer with NaN (or the largest int); counts them."""
    counted = [0]

    def filled(make: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            counted[0] += 1
            if made.is_floating_point():
                return made.fill_(torch.nan)
            return made.fill_(torch.iinfo(made.dtype).max) if made.dtype != torch.bool else made.fill_(True)

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))
    return counted


def test_no_uninitialised_memory_reaches_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tensors(LAYOUT).requires_grad_()
    expected = results(x)
    counted = poison(monkeypatch)
    got = results(x)
    assert counted[0] > 0
    assert torch.empty(1).isnan().all(), "the poison works"
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_guard_rows_around_every_buffer_are_never_read(dtype: torch.dtype) -> None:
    x = random_tensors(LAYOUT, dtype=dtype)
    expected = results(Tensors(*x.all()).requires_grad_())

    def guarded(y: Tensor) -> Tensor:
        wide = torch.full((y.shape[0] + 4, *y.shape[1:]), torch.nan, dtype=dtype)
        wide[2:-2] = y
        return wide[2:-2].detach()

    got = results(Tensors(*(guarded(y.detach()) for y in x.all())).requires_grad_())
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
        assert not one.isnan().any()


def test_padding_rows_and_unseen_keys_may_hold_anything() -> None:
    x = random_tensors(LAYOUT)
    expected = results(Tensors(*(y.clone() for y in x.all())).requires_grad_())
    for y, used in zip(x.all(), (50, 50, 50, 50, 50), strict=True):
        y[used:] = torch.nan
    for one, other in zip(results(x.requires_grad_()), expected, strict=True):
        assert torch.equal(one, other)


def test_seventy_thousand_rows() -> None:
    t = 70_000
    cu = [*range(0, t, 100), t]
    layout = CausalLayout.packed(cu)
    x = random_tensors(layout, h_i=1, d_i=8, h=1, d_qk=8).requires_grad_()
    options = OPTIONS | {"value_dim": 8}
    result = dsa_attention(*x.dsa(), layout, loss="selected", **options)
    assert result.topk is not None
    assert result.loss is not None
    (d_kv,) = torch.autograd.grad(result.out[65_000:].sum() + result.loss, x.kv)
    for row in (0, 99, 100, 65_535, 65_536, 69_999):
        document = row // 100 * 100
        part = CausalLayout.batched(1, 100).slice_queries(row - document, row - document + 1)
        keys = slice(document, document + 100)
        index_q, index_k, weights = (y.detach() for y in x.index())
        scores = oracle.indexer_scores(index_q[row : row + 1], index_k[keys], weights[row : row + 1], part)
        chosen = oracle.indexer_topk(scores.value, oracle.visible_keys(part), top_k=7)
        mine = result.topk.indices[row, : result.topk.lengths[row]].long() - document
        assert torch.equal(mine, chosen[0])
        exact = oracle.attention(
            x.q[row : row + 1].detach(), x.kv[keys].detach(), chosen, value_dim=8, softmax_scale=0.2
        )
        torch.testing.assert_close(result.out[row : row + 1].double(), exact["out"].value, rtol=1e-4, atol=1e-5)
    assert not d_kv[:65_000].any()
    assert bool(d_kv[65_000:].any())


def test_key_offsets_past_two_to_the_31(tmp_path: Path) -> None:
    # A sparse file: only the pages that are written or read exist.
    width, rows = 128, 2**31 // 128 + 1000
    file = tmp_path / "keys"
    with file.open("wb") as handle:
        handle.truncate(rows * width * 2)
    kv = torch.from_file(str(file), shared=True, size=rows * width, dtype=torch.bfloat16).view(rows, width)
    assert kv.numel() > 2**31
    begin = rows - 40
    near = torch.randn(40, width, dtype=torch.bfloat16)
    kv[begin:] = near
    q, weights = torch.randn(40, 2, width, dtype=torch.bfloat16), torch.randn(40, 2, dtype=torch.bfloat16)
    far_layout = CausalLayout.packed([0, 40], [0, 40], num_k=40)
    table = far_layout.table
    table[:, 2] = begin
    layout = CausalLayout._trusted(table, 40, rows, 1)
    topk, far = indexer_topk(q, near, weights, far_layout, top_k=5), indexer_topk(q, kv, weights, layout, top_k=5)
    used = topk.indices >= 0
    assert torch.equal(far.indices[used], topk.indices[used] + begin)
    options: dict[str, Any] = {"value_dim": 64, "softmax_scale": 0.1}
    assert torch.equal(sparse_attention(q, kv, far, **options), sparse_attention(q, near, topk, **options))
    assert torch.equal(dense_attention(q, kv, layout, **options), dense_attention(q, near, far_layout, **options))
    picked = TopK(far.indices, far.lengths, num_q=40, num_k=rows)
    assert torch.equal(picked.to_ids(layout, space="local"), topk.to_ids(far_layout, space="local"))
