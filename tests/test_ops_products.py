"""Large products go to oneDNN in parts of few shapes and short sums: nothing but the last bits may tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import Tensors, random_tensors
from torch import Tensor

from dsattn import CausalLayout, TopK, dsa_attention, indexer_scores, sparse_attention
from dsattn.ops import products

HEADS, WIDTH, VALUES = 16, 48, 40
LAYOUT = CausalLayout.packed([0, 20, 90], num_q=92, num_k=93)
needs_onednn = pytest.mark.skipif(products._onednn() is None, reason="no oneDNN, or no x86 CPU")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are large ones."""
    for name, value in {"_LARGE": 1, "_GRID": 8, "_PART": 24, "_DOT_TERMS": 16}.items():
        monkeypatch.setattr(products, name, value)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """The factors of every product that oneDNN runs."""
    found: list[tuple[Tensor, Tensor]] = []
    run = products._onednn()

    def spy(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        found.append((a, b))
        return run(a, b, *rest)

    monkeypatch.setattr(products, "_onednn", lambda: spy)
    return found


def drawn(rows: int, keys: int, form: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, factors, keys with so many axes, and the keys as [c, n, d]."""
    queries, factors = torch.randn(rows, HEADS, WIDTH), torch.rand(rows, HEADS, keys)
    given = torch.randn(keys, WIDTH) if form == 2 else torch.randn(rows, keys, WIDTH)
    return queries, factors, given, given.expand(rows, -1, -1)


def check_products(rows: int, keys: int, form: int) -> None:
    queries, factors, given, plain = drawn(rows, keys, form)
    seen, exact = torch.ones(rows, keys, dtype=torch.bool), plain.double()
    for width in (WIDTH, VALUES):
        dots = products.head_dots(queries[..., :width], given[..., :width])
        wanted = torch.einsum("chd,cnd->chn", queries[..., :width].double(), exact[..., :width])
        torch.testing.assert_close(dots.double(), wanted, rtol=1e-5, atol=1e-5)
        mixed = products.mix_keys(factors, given, seen, width)
        wanted = torch.einsum("chn,cnd->chd", factors.double(), exact[..., :width])
        torch.testing.assert_close(mixed.double(), wanted, rtol=1e-5, atol=1e-5)
    spread = products.mix_queries(factors, queries, seen, form == 2)
    wanted = torch.einsum("chn,chd->cnd", factors.double(), queries.double())
    torch.testing.assert_close(spread.double(), wanted.sum(0) if form == 2 else wanted, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("form", [2, 3])
@pytest.mark.parametrize("keys", [7, 8, 24, 61])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_are_right_in_any_number_of_parts(
    rows: int, keys: int, form: int, calls: list[tuple[Tensor, Tensor]]
) -> None:
    check_products(rows, keys, form)
    assert bool(calls) == (keys >= 8)
    for factors in calls:
        for x in factors:
            assert x.T.is_contiguous() or x.stride(1) == 1, "any other gap is very slow"
            assert all(size % 8 == 0 for size in x.shape)
            assert x.shape[1] <= 24, "a long sum"
        assert factors[1].is_contiguous() or factors[1].T.is_contiguous()


@needs_onednn
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("form", [2, 3])
def test_a_wrong_part_is_found(form: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = products._parts
    monkeypatch.setattr(products, "_parts", lambda n, large: right(n, large)[:1] * len(right(n, large)))
    with pytest.raises(AssertionError):
        check_products(5, 48, form)


@needs_onednn
@pytest.mark.usefixtures("small")
def test_long_sums_are_allowed_where_results_are_rounded(calls: list[tuple[Tensor, Tensor]]) -> None:
    queries, _, given, _ = drawn(1, 24, 3)
    products.head_dots(queries, given, short_sums=False)
    assert [a.shape[1] for a, _ in calls] == [WIDTH]


def results(x: Tensors) -> list[Tensor]:
    """Outputs and gradients of attention and loss over both supports, and scores."""
    options: dict[str, Any] = {"top_k": 30, "value_dim": VALUES, "softmax_scale": 0.2, "backend": "torch"}
    found = [indexer_scores(*x.index(), LAYOUT, backend="torch")]
    for where in ("selected", "visible"):
        result = dsa_attention(*x.dsa(), LAYOUT, attend=where, loss=where, sink=torch.zeros(HEADS), **options)
        assert result.loss is not None
        found += [result.out, result.lse, result.loss]
        found += torch.autograd.grad(result.out.sum() + result.loss, x.all())
    return [y.detach().double() for y in found]


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["index_k", "kv", "q"])
def test_operators_are_the_same(where: str, value: float, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    # On a grid, so that no rounding changes what is selected.
    x = random_tensors(LAYOUT, h_i=8, d_i=WIDTH, h=HEADS, d_qk=WIDTH)
    x.index_q, x.index_k, x.weights = (torch.randint(-8, 9, y.shape) / 8 for y in x.index())
    getattr(x, where)[70, ..., 3] = value
    x = Tensors(*(y.to(dtype) for y in x.all())).requires_grad_()
    wanted = results(x)
    request.getfixturevalue("small")
    calls = request.getfixturevalue("calls")
    got = results(x)
    assert calls
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def large_call() -> tuple[Tensor, Tensor, Tensor, TopK]:
    """Sparse attention whose products go to oneDNN as they are."""
    rows, keys, k = 6, 700, 600
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(keys, generator=generator)[:k].sort().values for _ in range(rows)]).int()
    lengths = torch.tensor([k, 500, 1, 0, 300, k], dtype=torch.int32)
    ids[torch.arange(k) >= lengths[:, None]] = -1
    q, kv = (torch.randn(*shape, generator=generator) for shape in ((rows, 16, 576), (keys, 576)))
    d_out = torch.randn(rows, 16, 512, generator=generator)
    return q.requires_grad_(), kv.requires_grad_(), d_out, TopK(ids, lengths, num_q=rows, num_k=keys)


def attended() -> list[Tensor]:
    q, kv, d_out, topk = large_call()
    out, lse = sparse_attention(q, kv, topk, value_dim=512, softmax_scale=0.04, return_lse=True, backend="torch")
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, kv), d_out)]


@needs_onednn
def test_large_products_have_the_same_bits_for_any_number_of_threads(calls: list[tuple[Tensor, Tensor]]) -> None:
    threads = torch.get_num_threads()
    wanted = attended()
    assert calls
    try:
        for count in (2, 3):
            torch.set_num_threads(count)
            for one, other in zip(attended(), wanted, strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)


def test_without_onednn_all_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = attended()
    monkeypatch.setattr(products, "_onednn", lambda: None)
    for one, other in zip(attended(), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_documents_of_all_lengths_make_few_shapes(calls: list[tuple[Tensor, Tensor]]) -> None:
    ends = torch.randint(200, 700, (40,)).cumsum(0).tolist()
    layout = CausalLayout.packed([0, *ends])
    x = random_tensors(layout, h_i=64, d_i=32, h=1, d_qk=8)
    for begin, end in zip([0, *ends], ends, strict=False):
        products.head_dots(x.index_q[begin : begin + 8], x.index_k[begin:end])
    shapes = {(tuple(a.shape), tuple(b.shape)) for a, b in calls}
    assert 0 < len(shapes) <= 16
