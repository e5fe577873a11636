"""Tensors that are views: whatever their strides and offsets are, inputs and incoming gradients mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Tensors, grid_tensors
from torch import Tensor

import dsattn
from dsattn import CausalLayout, TopK
from dsattn.ops import attention, indexer

pytestmark = pytest.mark.usefixtures("each_backend")

LAYOUT = CausalLayout.batched(2, 18, 20, q_offset=[2, 1])
TOP_K = 6
Way = Callable[[Tensor], Tensor]


def one_on(x: Tensor) -> Tensor:
    """The same numbers, one element on in a larger buffer."""
    return torch.cat([_foreign(x, (1,)), x.flatten(), _foreign(x, (3,))])[1 : 1 + x.numel()].view(x.shape)


def middle_of_rows(x: Tensor) -> Tensor:
    """Every row is the middle of a longer one."""
    shape = (*x.shape[:-1], 1)
    return torch.cat([_foreign(x, shape), x, _foreign(x, shape)], -1)[..., 1:-1]


def every_second_row(x: Tensor) -> Tensor:
    """Rows of something else stand in between."""
    return torch.stack([x, _foreign(x, x.shape)], 1).flatten(0, 1)[::2]


def columns_apart(x: Tensor) -> Tensor:
    """No two elements of a row stand side by side."""
    return torch.stack([x, _foreign(x, x.shape)], -1)[..., 0]


def transposed(x: Tensor) -> Tensor:
    """The axes in memory in the opposite order."""
    axes = list(reversed(range(x.ndim)))
    return x.permute(axes).contiguous().permute(axes)


def heads_first(x: Tensor) -> Tensor:
    """Heads, or columns, before rows, as [h, t, d] buffers have them."""
    return x.transpose(0, -2 if x.ndim > 2 else -1).contiguous().transpose(0, -2 if x.ndim > 2 else -1)


def _foreign(x: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """What must not be read."""
    if x.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    return torch.full(shape, torch.nan if x.is_floating_point() else 2**30, dtype=x.dtype)


WAYS: list[Way] = [one_on, middle_of_rows, every_second_row, columns_apart, transposed, heads_first]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
forms = pytest.mark.parametrize("batch", [None, 2], ids=["packed", "bshd"])


class Arguments:
    """The tensors of all operators, each made a view in one way, as leaves of autograd; and their gradients."""

    def __init__(self, way: Way, batch: int | None) -> None:
        self.way, self.batch = way, batch
        torch.manual_seed(0)
        x = grid_tensors(LAYOUT)
        ids = dsattn.indexer_topk(*x.index(), LAYOUT, top_k=TOP_K)
        t = LAYOUT.num_q
        doubles = [self.rows(y.double()) for y in x.all()]
        self.x = Tensors(*(way(y).detach() for y in doubles)).requires_grad_()
        self.sink = way(torch.randn(4, dtype=torch.float64)).detach().requires_grad_()
        self.row_mask = way(self.rows(torch.rand(t) > 0.3))
        self.lse = way(self.rows(torch.randn(t, 4, dtype=torch.float64)))
        self.d_out = way(self.rows(torch.randn(t, 4, 16, dtype=torch.float64)))
        self.d_scores = way(torch.randn(t, LAYOUT.num_k, dtype=torch.float64))
        indices, lengths = (way(self.rows(y)) for y in (ids.indices, ids.lengths))
        self.topk = TopK(indices, lengths, num_q=t, num_k=LAYOUT.num_k)

    def rows(self, x: Tensor) -> Tensor:
        return x if self.batch is None else x.unflatten(0, (self.batch, -1))

    def gradients(self, result: Tensor, d_result: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
        return result, *torch.autograd.grad(result, sources, d_result)

    @property
    def attending(self) -> dict[str, Any]:
        return {"value_dim": 16, "softmax_scale": 0.3, "sink": self.sink}


def scores(a: Arguments) -> tuple[Tensor, ...]:
    return a.gradients(dsattn.indexer_scores(*a.x.index(), LAYOUT, scale=0.5), a.d_scores, *a.x.index())


def selection(a: Arguments) -> tuple[Tensor, ...]:
    topk = dsattn.indexer_topk(*a.x.index(), LAYOUT, top_k=TOP_K, return_scores=True)
    assert topk.scores is not None
    return topk.indices, topk.lengths, topk.scores


def sparse(a: Arguments) -> tuple[Tensor, ...]:
    return a.gradients(dsattn.sparse_attention(a.x.q, a.x.kv, a.topk, **a.attending), a.d_out, a.x.q, a.x.kv, a.sink)


def dense(a: Arguments) -> tuple[Tensor, ...]:
    return a.gradients(dsattn.dense_attention(a.x.q, a.x.kv, LAYOUT, **a.attending), a.d_out, a.x.q, a.x.kv, a.sink)


def losses(a: Arguments) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    # A gradient that is an element of a buffer, and no number to spare behind it.
    d_loss = torch.tensor([torch.nan, -2.0], dtype=torch.float64)[1]
    for topk in (a.topk, None):
        options: dict[str, Any] = {"softmax_scale": 0.3, "scale": 0.5, "topk": topk, "lse": a.lse}
        loss = dsattn.indexer_loss(*a.x.all(), LAYOUT, row_mask=a.row_mask, **options)
        found += a.gradients(loss, d_loss, *a.x.index())
    return tuple(found)


def whole(a: Arguments) -> tuple[Tensor, ...]:
    options: dict[str, Any] = {"top_k": TOP_K, "loss": "selected", "row_mask": a.row_mask, **a.attending}
    result = dsattn.dsa_attention(*a.x.dsa(), LAYOUT, **options)
    assert result.loss is not None
    sources = (*a.x.all(), a.sink)
    gradients = torch.autograd.grad([result.out, result.loss], sources, [a.d_out, torch.ones_like(result.loss)])
    return result.out, result.lse, result.loss, *gradients


OPERATORS = [scores, selection, sparse, dense, losses, whole]
operators = pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)


def compare(operator: Callable[[Arguments], tuple[Tensor, ...]], way: Way, batch: int | None) -> None:
    expected, got = operator(Arguments(torch.clone, batch)), operator(Arguments(way, batch))
    for one, other in zip(got, expected, strict=True):
        if one.dtype == torch.int32:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


@ways
@forms
def test_the_views_are_views_of_the_same_numbers(way: Way, batch: int | None) -> None:
    plain, viewed = Arguments(torch.clone, batch), Arguments(way, batch)
    pairs = [*zip(plain.x.all(), viewed.x.all(), strict=True), (plain.d_out, viewed.d_out), (plain.sink, viewed.sink)]
    for one, other in pairs:
        assert torch.equal(one, other)
    if way is one_on:
        assert viewed.x.kv.storage_offset() == 1
    else:
        assert not viewed.x.kv.is_contiguous()
        assert not viewed.d_out.is_contiguous()


@ways
@forms
@operators
def test_views_give_what_their_numbers_give(
    operator: Callable[[Arguments], tuple[Tensor, ...]], way: Way, batch: int | None
) -> None:
    compare(operator, way, batch)


def one_for_all(x: Tensor) -> Tensor:
    """All rows, heads or batch entries are the first one, which is there once."""
    return x[:1].expand_as(x)


@operators
def test_an_expanded_gradient_or_input_is_as_good_as_its_copies(
    operator: Callable[[Arguments], tuple[Tensor, ...]],
) -> None:
    for name in ("d_out", "d_scores", "row_mask"):
        a, b = (Arguments(torch.clone, None) for _ in range(2))
        setattr(a, name, one_for_all(getattr(a, name)))
        setattr(b, name, getattr(a, name).contiguous())
        for one, other in zip(operator(a), operator(b), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    a, b = (Arguments(torch.clone, None) for _ in range(2))
    for name in ("index_q", "index_k", "weights", "q", "kv"):
        setattr(a.x, name, one_for_all(getattr(a.x, name).detach()).requires_grad_())
        setattr(b.x, name, getattr(a.x, name).detach().contiguous().requires_grad_())
    for one, other in zip(operator(a), operator(b), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def flat_misread(x: Tensor) -> Tensor:
    """What a kernel reads that takes a pointer and believes in contiguous rows."""
    return torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride())


# Rows whose elements stand side by side in order are read rightly all the same, block by block.
@pytest.mark.parametrize("way", [middle_of_rows, columns_apart, transposed, heads_first], ids=lambda way: way.__name__)
@pytest.mark.parametrize(("module", "operator"), [(indexer, scores), (attention, dense), (attention, sparse)])
def test_a_kernel_that_ignores_strides_is_found(
    module: Any, operator: Any, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = module.head_dots
    monkeypatch.setattr(module, "head_dots", lambda queries, *rest, **how: right(flat_misread(queries), *rest, **how))
    with pytest.raises(AssertionError):
        compare(operator, way, None)
