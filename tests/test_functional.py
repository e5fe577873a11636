"""The public operators: forms of tensors, combinations of options, and how calls reach a backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import Tensors, random_tensors
from torch import Tensor

import dsattn
from dsattn import (
    BadInput,
    CausalLayout,
    TopK,
    UnsupportedProblem,
    dense_attention,
    dsa_attention,
    indexer_loss,
    indexer_scores,
    indexer_topk,
    sparse_attention,
)
from dsattn.backends import backends, torch_backend
from dsattn.backends.cpu import backend as cpu_backend

pytestmark = pytest.mark.usefixtures("each_backend")

LAYOUT = CausalLayout.batched(2, 12)
ATTENTION: dict[str, Any] = {"value_dim": 16, "softmax_scale": 0.2}


def bshd(x: Tensors, b: int = 2) -> Tensors:
    return Tensors(*(y.unflatten(0, (b, -1)) for y in x.all()))


def test_bshd_tensors_give_what_packed_ones_give_in_their_form() -> None:
    packed = random_tensors(LAYOUT)
    batched = bshd(packed)
    topk, topk_b = (indexer_topk(*x.index(), LAYOUT, top_k=5, return_scores=True) for x in (packed, batched))
    assert topk.scores is not None
    assert topk_b.scores is not None
    assert topk_b.indices.shape == (2, 12, 5)
    assert torch.equal(topk_b.indices.flatten(0, 1), topk.indices)
    assert torch.equal(topk_b.lengths.flatten(), topk.lengths)
    assert torch.equal(topk_b.scores.flatten(0, 1), topk.scores)
    assert indexer_scores(*batched.index(), LAYOUT).shape == (24, 24)
    both: list[tuple[Any, Any, Any]] = [(sparse_attention, topk, topk_b), (dense_attention, LAYOUT, LAYOUT)]
    for attend, keys, keys_b in both:
        out, lse = attend(packed.q, packed.kv, keys, return_lse=True, **ATTENTION)
        out_b, lse_b = attend(batched.q, batched.kv, keys_b, return_lse=True, **ATTENTION)
        assert torch.equal(out_b, out.unflatten(0, (2, 12)))
        assert torch.equal(lse_b, lse.unflatten(0, (2, 12)))
    mask = torch.rand(24) > 0.3
    for keys, keys_b in ((topk, topk_b), (None, None)):
        loss = indexer_loss(*packed.all(), LAYOUT, softmax_scale=0.2, topk=keys, row_mask=mask)
        mask_b = mask.unflatten(0, (2, 12))
        assert torch.equal(indexer_loss(*batched.all(), LAYOUT, softmax_scale=0.2, topk=keys_b, row_mask=mask_b), loss)


def test_packed_and_batched_selections_are_taken_alike() -> None:
    x = random_tensors(LAYOUT)
    topk = indexer_topk(*x.index(), LAYOUT, top_k=5)
    topk_b = indexer_topk(*bshd(x).index(), LAYOUT, top_k=5)
    out = sparse_attention(x.q, x.kv, topk, **ATTENTION)
    assert torch.equal(sparse_attention(x.q, x.kv, topk_b, **ATTENTION), out)
    assert torch.equal(sparse_attention(bshd(x).q, bshd(x).kv, topk, **ATTENTION).flatten(0, 1), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_of_results(dtype: torch.dtype) -> None:
    x = random_tensors(LAYOUT, dtype=dtype).requires_grad_()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    topk = indexer_topk(*x.index(), LAYOUT, top_k=5, return_scores=True)
    assert topk.indices.dtype == topk.lengths.dtype == torch.int32
    assert topk.scores is not None
    assert topk.scores.dtype == wide
    sink = torch.zeros(4, dtype=wide, requires_grad=True)
    result = dsa_attention(*x.dsa(), LAYOUT, top_k=5, sink=sink, loss="selected", **ATTENTION)
    assert result.loss is not None
    assert (result.out.dtype, result.lse.dtype, result.loss.dtype) == (dtype, wide, wide)
    (result.out.sum() + result.loss).backward()
    for y in (*x.all(), sink):
        assert y.grad is not None
        assert y.grad.dtype == y.dtype
        assert bool(y.grad.any())


def test_fp32_weights_with_bf16_queries_are_not_rounded() -> None:
    x = random_tensors(LAYOUT, dtype=torch.bfloat16)
    weights = torch.randn(24, 3)
    scores = indexer_scores(x.index_q, x.index_k, weights, LAYOUT)
    rounded = indexer_scores(x.index_q, x.index_k, weights.bfloat16(), LAYOUT)
    exact = indexer_scores(x.index_q.double(), x.index_k.double(), weights.double(), LAYOUT)
    seen = exact.isfinite()
    assert (scores - exact)[seen].abs().max() < 1e-4
    assert (rounded - exact)[seen].abs().max() > 1e-3


def test_dsa_attention_is_its_operators() -> None:
    x = random_tensors(LAYOUT).requires_grad_()
    topk = indexer_topk(*x.index(), LAYOUT, top_k=5, scale=0.3)
    expected = {
        "selected": sparse_attention(x.q, x.kv, topk, **ATTENTION),
        "visible": dense_attention(x.q, x.kv, LAYOUT, **ATTENTION),
    }
    for attend in ("selected", "visible"):
        for loss in ("none", "selected", "visible"):
            result = dsa_attention(
                *x.dsa(), LAYOUT, top_k=5, scale=0.3, attend=attend, loss=loss, coeff=0.5, **ATTENTION
            )
            assert torch.equal(result.out, expected[attend])
            needs_selection = "selected" in (attend, loss)
            assert (result.topk is not None) == needs_selection
            ran = {"sparse_attention" if attend == "selected" else "dense_attention"}
            ran |= {"indexer_topk"} if needs_selection else set()
            if loss == "none":
                assert result.loss is None
            else:
                selection = topk if loss == "selected" else None
                value = indexer_loss(*x.all(), LAYOUT, softmax_scale=0.2, scale=0.3, topk=selection, coeff=0.5)
                assert result.loss is not None
                assert torch.equal(result.loss, value)
                ran |= {"indexer_loss"}
            assert result.backend == dict.fromkeys(ran, backends()[0])


def test_dsa_attention_reuses_a_selection_without_an_indexer() -> None:
    x = random_tensors(LAYOUT)
    topk = indexer_topk(*x.index(), LAYOUT, top_k=5)
    result = dsa_attention(x.q, x.kv, None, None, None, LAYOUT, topk=topk, **ATTENTION)
    assert torch.equal(result.out, sparse_attention(x.q, x.kv, topk, **ATTENTION))
    assert result.topk is not None
    assert torch.equal(result.topk.indices, topk.indices)


def test_the_loss_trains_the_indexer_only() -> None:
    x = random_tensors(LAYOUT).requires_grad_()
    indexer_loss(*x.all(), LAYOUT, softmax_scale=0.2).backward()
    assert all(y.grad is not None and bool(y.grad.any()) for y in x.index())
    assert x.q.grad is None
    assert x.kv.grad is None


@pytest.mark.parametrize("support", ["selected", "visible"])
def test_coefficient_zero_gives_exact_zeros_and_no_work(support: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tensors(LAYOUT).requires_grad_()
    topk = indexer_topk(*x.index(), LAYOUT, top_k=5) if support == "selected" else None

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("work was done")

    for used in (cpu_backend, torch_backend):
        monkeypatch.setattr(used, "indexer_kl", refuse)
    with pytest.raises(AssertionError, match="work was done"):
        indexer_loss(*x.all(), LAYOUT, softmax_scale=0.2, topk=topk)
    loss = indexer_loss(*x.all(), LAYOUT, softmax_scale=0.2, topk=topk, coeff=0.0)
    assert loss.item() == 0
    loss.backward()
    for y in x.index():
        assert y.grad is not None
        assert not y.grad.any()


def test_micro_batches_with_num_rows_add_up_to_one_batch() -> None:
    x = random_tensors(LAYOUT).requires_grad_()
    whole = indexer_loss(*x.all(), LAYOUT, softmax_scale=0.2)
    expected = torch.autograd.grad(whole, x.index())
    total, gradients = torch.zeros(()), [torch.zeros_like(y) for y in x.index()]
    for part, num_rows in ((LAYOUT.slice_queries(0, 7), 24), (LAYOUT.slice_queries(7, 24), torch.tensor([24]))):
        rows = slice(0, 7) if part.num_q == 7 else slice(7, 24)
        loss = indexer_loss(
            x.index_q[rows], x.index_k, x.weights[rows], x.q[rows], x.kv, part, softmax_scale=0.2, num_rows=num_rows
        )
        total = total + loss.detach()
        for gradient, added in zip(gradients, torch.autograd.grad(loss, x.index()), strict=True):
            gradient += added
    torch.testing.assert_close(total, whole.detach())
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("num_rows", [None, torch.tensor(0), torch.tensor(0.0)])
def test_no_contributing_row_gives_loss_zero_and_zero_gradients(num_rows: Tensor | None) -> None:
    x = random_tensors(LAYOUT).requires_grad_()
    mask = torch.zeros(24, dtype=torch.bool)
    loss = indexer_loss(*x.all(), LAYOUT, softmax_scale=0.2, row_mask=mask, num_rows=num_rows)
    assert loss.item() == 0
    assert not any(bool(g.any()) for g in torch.autograd.grad(loss, x.index()))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_no_query_rows_or_no_keys(shape: tuple[int, int]) -> None:
    t, s = shape
    layout = CausalLayout.batched(1, t, s, q_offset=0)
    x = random_tensors(layout).requires_grad_()
    result = dsa_attention(*x.dsa(), layout, top_k=3, loss="selected", **ATTENTION)
    assert result.out.shape == (t, 4, 16)
    assert not result.out.any()
    assert bool((result.lse == -torch.inf).all())
    assert result.loss is not None
    (result.out.sum() + result.loss).backward()
    for y in x.all():
        assert y.grad is not None
        assert not y.grad.any()
    assert indexer_scores(*x.index(), layout).shape == (t, s)


def test_the_upstream_gradient_scales_the_loss_gradient() -> None:
    x = random_tensors(LAYOUT).requires_grad_()
    loss = indexer_loss(*x.all(), LAYOUT, softmax_scale=0.2)
    once = torch.autograd.grad(loss, x.index(), retain_graph=True)
    for one, scaled in zip(once, torch.autograd.grad(3 * loss, x.index()), strict=True):
        torch.testing.assert_close(scaled, 3 * one)


def test_fp16_loss_gradients_survive_a_loss_scaler() -> None:
    x = random_tensors(LAYOUT, dtype=torch.float16).requires_grad_()
    loss = indexer_loss(*x.all(), LAYOUT, softmax_scale=0.2, coeff=1e-6)
    scaled = torch.autograd.grad(2.0**16 * loss, x.index())
    x32 = Tensors(*(y.detach().float() for y in x.all())).requires_grad_()
    exact = torch.autograd.grad(2.0**16 * indexer_loss(*x32.all(), LAYOUT, softmax_scale=0.2, coeff=1e-6), x32.index())
    for got, wanted in zip(scaled, exact, strict=True):
        torch.testing.assert_close(got.float(), wanted, rtol=2e-3, atol=1e-6)


def test_inputs_that_are_views_give_the_same() -> None:
    x = random_tensors(LAYOUT)
    views = Tensors(
        x.index_q.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([x.index_k.new_zeros(1), x.index_k.flatten()])[1:].view_as(x.index_k),
        x.weights.T.contiguous().T,
        x.q.transpose(0, 2).contiguous().transpose(0, 2),
        x.kv.repeat_interleave(2, 1)[:, ::2],
    )
    expected = dsa_attention(*x.dsa(), LAYOUT, top_k=5, loss="selected", **ATTENTION)
    result = dsa_attention(*views.dsa(), LAYOUT, top_k=5, loss="selected", **ATTENTION)
    assert expected.topk is not None
    assert result.topk is not None
    assert torch.equal(result.topk.indices, expected.topk.indices)
    torch.testing.assert_close(result.out, expected.out)
    torch.testing.assert_close(result.loss, expected.loss)


def test_lse_is_not_differentiable() -> None:
    x = random_tensors(LAYOUT).requires_grad_()
    _, lse = dense_attention(x.q, x.kv, LAYOUT, return_lse=True, **ATTENTION)
    assert not lse.requires_grad


def test_public_names_are_there() -> None:
    assert all(hasattr(dsattn, name) for name in dsattn.__all__)
    assert isinstance(TopK, type)


def test_layouts_and_selections_made_in_inference_mode_can_be_trained_with() -> None:
    x = random_tensors(LAYOUT).requires_grad_()
    with torch.inference_mode():
        layout = CausalLayout.batched(2, 12)
        topk = indexer_topk(*x.index(), layout, top_k=5)
    out = sparse_attention(x.q, x.kv, topk, **ATTENTION) + dense_attention(x.q, x.kv, layout, **ATTENTION)
    scores = indexer_scores(*x.index(), layout)
    (out.sum() + scores[scores.isfinite()].sum()).backward()
    assert all(y.grad is not None and bool(y.grad.any()) for y in x.all())


def test_second_derivatives_are_refused() -> None:
    x = random_tensors(LAYOUT).requires_grad_()
    for result, leaf in (
        (indexer_loss(*x.all(), LAYOUT, softmax_scale=0.2), x.index_q),
        (dense_attention(x.q, x.kv, LAYOUT, **ATTENTION).sum(), x.q),
    ):
        (gradient,) = torch.autograd.grad(result, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.autograd.grad(gradient.square().sum(), leaf)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_derivatives_are_refused() -> None:
    x = random_tensors(LAYOUT)
    for call, leaf in (
        (lambda q: dense_attention(q, x.kv, LAYOUT, **ATTENTION), x.q),
        (lambda w: indexer_loss(x.index_q, x.index_k, w, x.q, x.kv, LAYOUT, softmax_scale=0.2), x.weights),
    ):
        with pytest.raises(UnsupportedProblem, match="forward-mode"):
            torch.func.jvp(call, (leaf,), (torch.ones_like(leaf),))


def test_a_named_backend_is_looked_for_even_if_nothing_is_to_be_done() -> None:
    x = random_tensors(LAYOUT)
    with pytest.raises(BadInput, match="'nope'"):
        indexer_loss(*x.all(), LAYOUT, softmax_scale=0.2, coeff=0.0, backend="nope")


def test_top_k_has_to_be_that_of_a_given_selection() -> None:
    x = random_tensors(LAYOUT)
    topk = indexer_topk(*x.index(), LAYOUT, top_k=5)
    with pytest.raises(BadInput, match="5, the slots of topk"):
        dsa_attention(*x.dsa(), LAYOUT, topk=topk, top_k=6, **ATTENTION)
    dsa_attention(*x.dsa(), LAYOUT, topk=topk, top_k=5, **ATTENTION)


def test_a_selection_with_a_score_of_minus_inf_can_be_rebuilt() -> None:
    x = random_tensors(LAYOUT)
    x.weights[:] = -torch.inf
    topk = indexer_topk(*x.index(), LAYOUT, top_k=5, return_scores=True)
    assert topk.scores is not None
    assert bool((topk.scores[topk.indices >= 0] == -torch.inf).any())
    TopK(topk.indices, topk.lengths, topk.scores, num_q=24, num_k=24)


def test_one_tensor_may_stand_in_two_places() -> None:
    layout = CausalLayout.batched(1, 10)
    shared = torch.randn(10, 16, requires_grad=True)
    once, again = shared.detach().clone().requires_grad_(), shared.detach().clone().requires_grad_()
    queries = torch.randn(10, 3, 16)

    def total(index_k: Tensor, kv: Tensor) -> Tensor:
        result = dsa_attention(
            queries,
            kv,
            queries,
            index_k,
            queries[..., 0],
            layout,
            top_k=4,
            value_dim=8,
            softmax_scale=0.2,
            loss="visible",
        )
        assert result.loss is not None
        return result.out.sum() + result.loss

    total(shared, shared).backward()
    total(once, again).backward()
    assert shared.grad is not None
    assert once.grad is not None
    assert again.grad is not None
    torch.testing.assert_close(shared.grad, once.grad + again.grad)


def test_the_default_device_does_not_matter() -> None:
    x = random_tensors(LAYOUT).requires_grad_()
    expected = dsa_attention(*x.dsa(), LAYOUT, top_k=5, loss="selected", **ATTENTION)
    with torch.device("meta"):
        result = dsa_attention(*x.dsa(), LAYOUT, top_k=5, loss="selected", **ATTENTION)
    assert torch.equal(result.out, expected.out)
    assert result.loss is not None
    with torch.device("meta"):
        (result.out.sum() + result.loss).backward()
    assert all(y.grad is not None and y.grad.device.type == "cpu" for y in x.all())
