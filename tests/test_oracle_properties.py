"""What must hold for any numbers: key order, full selections, and documents that know nothing of each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn.layouts import CausalLayout, Segment
from dsattn.spec import oracle
from dsattn.spec.oracle import Exact, Rows

T, S, HEADS, WIDTH, VALUE = 7, 9, 3, 5, 4
LENGTHS = (4, 1, 6)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def attend(q: Tensor, kv: Tensor, support: Rows, sink: Tensor, d_out: Tensor) -> dict[str, Exact]:
    return oracle.attention(q, kv, support, value_dim=VALUE, softmax_scale=0.4, sink=sink, d_out=d_out)


def lose(inputs: dict[str, Any], support: Rows, reduction: str = "mean") -> dict[str, Exact]:
    return oracle.indexer_loss(**inputs, support=support, softmax_scale=0.4, scale=0.6, reduction=reduction)


def loss_inputs(t: int = T, s: int = S) -> dict[str, Tensor]:
    return {
        "index_q": randn(t, 2, 3),
        "index_k": randn(s, 3),
        "weights": randn(t, 2),
        "q": randn(t, HEADS, WIDTH),
        "kv": randn(s, WIDTH),
    }


def random_support() -> Rows:
    return [torch.randperm(S)[: i % 5].sort().values for i in range(T)]


def same(got: Exact, wanted: Exact, order: Tensor | None = None) -> None:
    for mine, other in ((got.value, wanted.value), (got.terms, wanted.terms)):
        torch.testing.assert_close(mine if order is None else mine[order], other, rtol=1e-12, atol=1e-12)


def test_permuting_keys_permutes_their_gradients_and_nothing_else() -> None:
    support, order = random_support(), torch.randperm(S)
    moved = [order.argsort()[keys].sort().values for keys in support]
    inputs, sink, d_out = loss_inputs(), randn(HEADS), randn(T, HEADS, VALUE)
    before = attend(inputs["q"], inputs["kv"], support, sink, d_out) | lose(inputs, support)
    inputs |= {"kv": inputs["kv"][order], "index_k": inputs["index_k"][order]}
    after = attend(inputs["q"], inputs["kv"], moved, sink, d_out) | lose(inputs, moved)
    for name, exact in before.items():
        same(after[name], exact, order.argsort() if name in ("d_kv", "d_index_k") else None)


def test_terms_do_not_depend_on_signs_and_are_no_less_than_values() -> None:
    """Both factors of each dot product negated: the probabilities stay, and so must all terms."""
    support, x, sink, d_out = random_support(), loss_inputs(), randn(HEADS), randn(T, HEADS, VALUE)

    def both(sign: float, **scales: float) -> dict[str, Exact]:
        q, kv, index_q, index_k, weights = (sign * x[name] for name in ("q", "kv", "index_q", "index_k", "weights"))
        attention = oracle.attention(q, kv, support, value_dim=VALUE, softmax_scale=0.4, sink=sink, d_out=sign * d_out)
        loss = oracle.indexer_loss(
            index_q, index_k, weights, q, kv, support, softmax_scale=0.4, scale=sign * 0.6, coeff=sign * 0.7
        )
        return attention | loss

    negated = both(-1.0)
    for name, exact in both(1.0).items():
        torch.testing.assert_close(negated[name].terms, exact.terms, rtol=1e-12, atol=1e-12)
        assert (exact.value[exact.value.isfinite()].abs() <= exact.terms[exact.value.isfinite()] + 1e-12).all(), name
    q = oracle.attention(-x["q"], x["kv"], support, value_dim=VALUE, softmax_scale=-0.4, sink=sink, d_out=d_out)
    for name, exact in q.items():
        torch.testing.assert_close(exact.terms, negated[name].terms, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("top_k", [6, 50])
def test_selecting_at_least_all_visible_keys_is_dense(top_k: int) -> None:
    layout = CausalLayout.from_segments([Segment(0, 6, 0, 6, 0)], num_q=6, num_k=6)
    scores = oracle.indexer_scores(randn(6, 2, 3), randn(6, 3), randn(6, 2), layout)
    visible = oracle.visible_keys(layout)
    selected = oracle.indexer_topk(scores.value, visible, top_k=top_k)
    assert all(torch.equal(mine, all_keys) for mine, all_keys in zip(selected, visible, strict=True))


def test_a_batch_equals_its_documents_one_by_one() -> None:
    """Packed documents, as a batch is, against calls with one document each."""
    total = sum(LENGTHS)
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    whole = CausalLayout.from_segments(
        [Segment(start, n, start, n, 0) for start, n in zip(starts, LENGTHS, strict=True)], num_q=total, num_k=total
    )
    inputs, sink, d_out = loss_inputs(total, total), randn(HEADS), randn(total, HEADS, VALUE)
    visible = oracle.visible_keys(whole)
    scores = oracle.indexer_scores(inputs["index_q"], inputs["index_k"], inputs["weights"], whole)
    selected = oracle.indexer_topk(scores.value, visible, top_k=3)
    packed = attend(inputs["q"], inputs["kv"], selected, sink, d_out) | lose(inputs, selected, "sum")
    sums = {"loss": torch.zeros((), dtype=torch.float64), "d_sink": torch.zeros(HEADS, dtype=torch.float64)}
    for start, n in zip(starts, LENGTHS, strict=True):
        mine = slice(start, start + n)
        alone = CausalLayout.from_segments([Segment(0, n, 0, n, 0)], num_q=n, num_k=n)
        part = {name: x[mine] for name, x in inputs.items()}
        table = oracle.indexer_scores(part["index_q"], part["index_k"], part["weights"], alone)
        same(Exact(scores.value[mine, mine], scores.terms[mine, mine]), table)
        keys = oracle.indexer_topk(table.value, oracle.visible_keys(alone), top_k=3)
        assert all(torch.equal(a - start, b) for a, b in zip(selected[mine], keys, strict=True))
        got = attend(part["q"], part["kv"], keys, sink, d_out[mine]) | lose(part, keys, "sum")
        for name, exact in got.items():
            if name in sums:
                sums[name] += exact.value
            else:
                same(Exact(packed[name].value[mine], packed[name].terms[mine]), exact)
    for name, value in sums.items():
        torch.testing.assert_close(packed[name].value, value)
