"""Who is touched where no oracle has the answer: sinks, incoming gradients, gradients of scores, infinities in a loss.

Touched is what differs in a bit from the same call with numbers only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from problems import Tensors, random_tensors
from torch import Tensor

from dsattn import CausalLayout, TopK, dense_attention, indexer_loss, indexer_scores, indexer_topk, sparse_attention
from dsattn.ops import products

pytestmark = pytest.mark.usefixtures("each_backend")

# Two documents that share a block, two rows of padding behind them, and a key that nobody sees.
LAYOUT = CausalLayout.packed([0, 20, 50], num_q=52, num_k=51)
ROW, KEY, HEAD = 33, 30, 1
SEEN_BY_ROW, SEE_KEY = set(range(20, 34)), set(range(30, 50))
VALUES = [torch.nan, torch.inf, -torch.inf]
values = pytest.mark.parametrize("value", VALUES, ids=str)
supports = pytest.mark.parametrize("selected", [False, True], ids=["visible", "selected"])


def touched(now: Tensor, clean: Tensor) -> set[int]:
    """The rows in which something is another number; NaN is none of a clean call's."""
    return set((now != clean).reshape(len(now), -1).any(1).nonzero().flatten().tolist())


def with_nan(now: Tensor) -> set[int]:
    """The rows in which a NaN is."""
    return set(now.flatten(1).isnan().any(1).nonzero().flatten().tolist())


def tensors() -> Tensors:
    torch.manual_seed(0)
    return random_tensors(LAYOUT)


def selection() -> TopK:
    return indexer_topk(*tensors().index(), LAYOUT, top_k=5)


def keys_of(rows: Iterable[int], selected: bool) -> set[int]:
    """The keys that some rows read."""
    if not selected:
        start, end = LAYOUT.bounds()
        return {key for row in rows for key in range(int(start[row]), int(end[row]))}
    return {key for row in rows for key in selection().indices[row].tolist() if key >= 0}


def readers(key: int, selected: bool) -> set[int]:
    """The rows that read a key."""
    return {row for row in range(LAYOUT.num_q) if key in keys_of([row], selected)}


def attention(
    x: Tensors, selected: bool, sink: Tensor, d_out: Tensor | None = None, heads: slice = slice(None)
) -> dict[str, Tensor]:
    q, kv, sink = (y.detach().clone().requires_grad_() for y in (x.q[:, heads], x.kv, sink[heads]))
    options: dict[str, Any] = {"value_dim": 16, "softmax_scale": 0.2, "sink": sink, "return_lse": True}
    if selected:
        out, lse = sparse_attention(q, kv, selection(), **options)
    else:
        out, lse = dense_attention(q, kv, LAYOUT, **options)
    d_out = torch.ones_like(out) if d_out is None else d_out
    gradients = torch.autograd.grad(out, (q, kv, sink), d_out)
    return {"out": out.detach(), "lse": lse, **dict(zip(("d_q", "d_kv", "d_sink"), gradients, strict=True))}


@values
@supports
def test_a_bad_sink_is_its_heads_alone(value: float, selected: bool) -> None:
    x, sink = tensors(), torch.zeros(4)
    clean = attention(x, selected, sink)
    sink[HEAD] = value
    found = attention(x, selected, sink)
    others = [head for head in range(4) if head != HEAD]
    for name in ("out", "d_q"):
        assert torch.equal(found[name][:, others], clean[name][:, others]), name
        assert not found[name][50:].any(), "rows without keys have no use for a sink"
        if value == torch.inf:
            assert not found[name].select(1, HEAD).any(), "all weight is on the sink"
        else:
            assert found[name][:50, HEAD].isnan().all() == (value != value)
    assert torch.equal(found["lse"], clean["lse"]), "which excludes the sink"
    assert torch.equal(found["d_sink"][others], clean["d_sink"][others])
    assert touched(found["d_kv"], clean["d_kv"]) <= keys_of(range(50), selected)
    if value == torch.inf:
        without = [attention(x, selected, torch.zeros(4), heads=slice(h, h + 1))["d_kv"] for h in others]
        torch.testing.assert_close(found["d_kv"], sum(without[1:], without[0]))


@values
@supports
def test_a_bad_gradient_of_an_output_stays_with_its_row(value: float, selected: bool) -> None:
    x, sink = tensors(), torch.zeros(4)
    d_out = torch.randn(LAYOUT.num_q, 4, 16)
    clean = attention(x, selected, sink, d_out)
    d_out[ROW, HEAD, 2] = value
    found = attention(x, selected, sink, d_out)
    assert touched(found["d_q"], clean["d_q"]) == {ROW}
    assert touched(found["d_q"][ROW], clean["d_q"][ROW]) == {HEAD}
    assert touched(found["d_kv"], clean["d_kv"]) == keys_of([ROW], selected)
    assert touched(found["d_sink"], clean["d_sink"]) == {HEAD}
    if value != value:
        assert with_nan(found["d_q"]) == {ROW}
        assert with_nan(found["d_kv"]) == keys_of([ROW], selected)


@supports
def test_a_bad_gradient_of_a_row_without_keys_goes_nowhere(selected: bool) -> None:
    x, sink = tensors(), torch.zeros(4)
    d_out = torch.randn(LAYOUT.num_q, 4, 16)
    clean = attention(x, selected, sink, d_out)
    d_out[51] = torch.nan
    for name, result in attention(x, selected, sink, d_out).items():
        assert torch.equal(result, clean[name]), name


def score_gradients(x: Tensors, d_scores: Tensor, relu: bool = True) -> dict[str, Tensor]:
    leaves = [y.detach().clone().requires_grad_() for y in x.index()]
    scores = indexer_scores(leaves[0], leaves[1], leaves[2], LAYOUT, relu=relu)
    gradients = torch.autograd.grad(scores, leaves, d_scores)
    return dict(zip(("d_index_q", "d_index_k", "d_weights"), gradients, strict=True))


@values
def test_a_bad_gradient_of_a_score_reaches_its_row_and_key(value: float) -> None:
    x, d_scores = tensors(), torch.randn(LAYOUT.num_q, LAYOUT.num_k)
    clean = score_gradients(x, d_scores, relu=False)
    d_scores[ROW, KEY] = value
    found = score_gradients(x, d_scores, relu=False)
    expected = {"d_index_q": {ROW}, "d_index_k": {KEY}, "d_weights": {ROW}}
    assert {name: touched(y, clean[name]) for name, y in found.items()} == expected
    assert value == value or {name: with_nan(y) for name, y in found.items()} == expected


def test_a_bad_gradient_of_an_unseen_score_goes_nowhere() -> None:
    x, d_scores = tensors(), torch.randn(LAYOUT.num_q, LAYOUT.num_k)
    clean = score_gradients(x, d_scores)
    unseen = indexer_scores(*x.index(), LAYOUT) == -torch.inf
    for value in VALUES:
        for name, gradient in score_gradients(x, d_scores.masked_fill(unseen, value)).items():
            assert torch.equal(gradient, clean[name]), name


def check_scores(name: str, value: float, relu: bool) -> None:
    """Scores and their gradients with one bad element: in `index_q` and `weights` in ROW, in `index_k` in KEY."""
    x, d_scores = tensors(), torch.randn(LAYOUT.num_q, LAYOUT.num_k)
    scores, clean = indexer_scores(*x.index(), LAYOUT, relu=relu), score_gradients(x, d_scores, relu)
    getattr(x, name)[KEY if name == "index_k" else ROW].view(-1)[2] = value
    found = score_gradients(x, d_scores, relu)
    rows, keys = (SEE_KEY, {KEY}) if name == "index_k" else ({ROW}, SEEN_BY_ROW)
    now = indexer_scores(*x.index(), LAYOUT, relu=relu)
    assert touched(now, scores) <= rows
    assert touched(now.T, scores.T) <= keys
    assert touched(found["d_index_q"], clean["d_index_q"]) <= rows
    assert touched(found["d_index_k"], clean["d_index_k"]) <= keys
    assert touched(found["d_weights"], clean["d_weights"]) <= (set() if name == "weights" else rows)
    if value != value and not relu:
        # Where there is no gate, a gradient depends on the other two inputs alone.
        expected = {"d_index_q": rows, "d_index_k": keys, "d_weights": rows} | {f"d_{name}": set()}
        assert {what: with_nan(gradient) for what, gradient in found.items()} == expected
        assert with_nan(now) == rows


INDEX = ("index_q", "index_k", "weights")


@values
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", INDEX)
def test_a_bad_index_input_touches_the_scores_that_read_it_and_their_gradients(
    name: str, value: float, relu: bool
) -> None:
    check_scores(name, value, relu)


@pytest.mark.usefixtures("on_torch")
@pytest.mark.parametrize("name", ["index_q", "index_k"])
def test_products_that_spread_it_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "split_finite", lambda x: (x, None))
    with pytest.raises(AssertionError):
        check_scores(name, torch.nan, relu=False)


def loss_gradients(x: Tensors, selected: bool, relu: bool) -> dict[str, Tensor]:
    leaves = Tensors(*(y.detach().clone() for y in x.all())).requires_grad_()
    topk = selection() if selected else None
    loss = indexer_loss(*leaves.all(), LAYOUT, softmax_scale=0.2, topk=topk, relu=relu)
    gradients = torch.autograd.grad(loss, leaves.index())
    names = "d_index_q", "d_index_k", "d_weights"
    return {"loss": loss.detach()[None], **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize("value", [torch.inf, -torch.inf], ids=str)
@supports
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", INDEX)
def test_an_infinity_in_the_loss_touches_the_rows_that_read_it_and_their_keys(
    name: str, value: float, selected: bool, relu: bool
) -> None:
    x = tensors()
    clean = loss_gradients(x, selected, relu)
    getattr(x, name)[KEY if name == "index_k" else ROW].view(-1)[2] = value
    found = loss_gradients(x, selected, relu)
    rows = readers(KEY, selected) if name == "index_k" else {ROW}
    assert rows
    assert touched(found["loss"], clean["loss"]) == {0}
    assert touched(found["d_index_q"], clean["d_index_q"]) <= rows
    assert touched(found["d_weights"], clean["d_weights"]) <= rows
    assert touched(found["d_index_k"], clean["d_index_k"]) <= keys_of(rows, selected)
    assert any(touched(found[name], clean[name]) for name in ("d_index_q", "d_weights", "d_index_k"))
