"""Chunked prefill and decoding: what the chunks of a sequence give together is what one call gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from problems import Tensors, grid_tensors, random_tensors
from torch import Tensor

from dsattn import CausalLayout, TopK, dsa_attention, indexer_loss, indexer_scores, indexer_topk
from dsattn.spec import metrics, oracle
from dsattn.spec.cases_edges import CHUNKS

pytestmark = pytest.mark.usefixtures("each_backend")

LENGTH = CHUNKS[-1]
TOP_K = 9
SCALES: dict[str, Any] = {"scale": 0.25, "softmax_scale": 0.2}
CUTS = {
    "prefill": CHUNKS,
    "decode after prefill": (0, 70, 71, 73, LENGTH),
    "one by one": tuple(range(LENGTH + 1)),
}


@dataclass(frozen=True)
class Chunk:
    """Some query rows against the keys so far."""

    begin: int
    end: int
    ratio: int = 1

    @property
    def keys(self) -> int:
        return self.end // self.ratio

    @property
    def layout(self) -> CausalLayout:
        return CausalLayout.batched(1, self.end - self.begin, self.keys, q_offset=self.begin, ratio=self.ratio)

    def of(self, x: Tensors) -> Tensors:
        rows, keys = slice(self.begin, self.end), slice(0, self.keys)
        return Tensors(x.index_q[rows], x.index_k[keys], x.weights[rows], x.q[rows], x.kv[keys])


def chunks(cuts: Sequence[int], ratio: int = 1) -> list[Chunk]:
    return [Chunk(begin, end, ratio) for begin, end in pairwise(cuts)]


def select(x: Tensors, layout: CausalLayout) -> TopK:
    return indexer_topk(*x.index(), layout, top_k=TOP_K, scale=SCALES["scale"])


def together(x: Tensors, parts: list[Chunk]) -> TopK:
    """The selections of the chunks, one after the other: a key has the same row in all of them."""
    found = [select(part.of(x), part.layout) for part in parts]
    indices, lengths = torch.cat([topk.indices for topk in found]), torch.cat([topk.lengths for topk in found])
    return TopK(indices, lengths, num_q=LENGTH, num_k=parts[-1].keys)


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_chunks_select_what_one_call_selects(cuts: tuple[int, ...], ratio: int) -> None:
    layout = CausalLayout.batched(1, LENGTH, ratio=ratio)
    x = grid_tensors(layout)
    one, several = select(x, layout), together(x, chunks(cuts, ratio))
    assert torch.equal(several.indices, one.indices)
    assert torch.equal(several.lengths, one.lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_off_the_grid_chunks_select_keys_that_are_as_good(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    layout = CausalLayout.batched(1, LENGTH)
    x = random_tensors(layout, dtype=dtype)
    scores = oracle.indexer_scores(*x.index(), layout, scale=SCALES["scale"])
    tau = metrics.tau(*x.index(), layout, scale=SCALES["scale"])
    for topk in (select(x, layout), together(x, chunks(cuts))):
        visible = oracle.visible_keys(layout)
        found = metrics.compare_topk(topk.indices, topk.lengths, scores, visible, top_k=TOP_K, tau=tau)
        assert found.verdict, found.reason
        assert found.recall_min == 1


def results(x: Tensors, layout: CausalLayout, d_out: Tensor) -> dict[str, Tensor]:
    """Outputs, losses by `num_rows` and gradients of one call."""
    x = Tensors(*(y.detach().clone() for y in x.all())).requires_grad_()
    found: dict[str, Tensor] = {}
    for attend in ("selected", "visible"):
        options: dict[str, Any] = {"attend": attend, "loss": attend, "top_k": TOP_K, "value_dim": 16, **SCALES}
        result = dsa_attention(*x.dsa(), layout, num_rows=LENGTH, **options)
        assert result.loss is not None
        gradients = torch.autograd.grad([result.out, result.loss], x.all(), [d_out, torch.ones_like(result.loss)])
        found |= {f"{attend} out": result.out, f"{attend} lse": result.lse, f"{attend} loss": result.loss}
        names = "d_index_q", "d_index_k", "d_weights", "d_q", "d_kv"
        found |= {f"{attend} {name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    scores = indexer_scores(*x.index(), layout, scale=SCALES["scale"])
    return {name: y.detach() for name, y in found.items()} | {"scores": scores.detach()}


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("cuts", [CUTS["prefill"], CUTS["decode after prefill"]], ids=["prefill", "decode"])
def test_outputs_of_chunks_follow_each_other_and_gradients_of_keys_add(cuts: tuple[int, ...], ratio: int) -> None:
    layout = CausalLayout.batched(1, LENGTH, ratio=ratio)
    x = grid_tensors(layout)
    x = Tensors(*(y.double() for y in x.all()))
    d_out = torch.randn(LENGTH, 4, 16, dtype=torch.float64)
    whole = results(x, layout, d_out)
    found = {name: torch.zeros_like(y) for name, y in whole.items()}
    found["scores"].fill_(-torch.inf)
    for part in chunks(cuts, ratio):
        rows, keys = slice(part.begin, part.end), slice(0, part.keys)
        for name, y in results(part.of(x), part.layout, d_out[rows]).items():
            if name == "scores":
                found[name][rows, keys] = y
            elif name.endswith("loss"):
                found[name] += y
            elif name.endswith(("d_index_k", "d_kv")):
                found[name][keys] += y
            else:
                found[name][rows] = y
    for name, y in found.items():
        torch.testing.assert_close(y, whole[name], rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def right(pasts: list[int], q_len: int) -> list[int]:
    return pasts


def first_of_all(pasts: list[int], q_len: int) -> list[int]:
    return [pasts[0]] * len(pasts)


def one_too_many(pasts: list[int], q_len: int) -> list[int]:
    return [past + 1 for past in pasts]


def last_row_first(pasts: list[int], q_len: int) -> list[int]:
    return [past + q_len - 1 for past in pasts]


@pytest.mark.parametrize("q_len", [1, 2, 3])
@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("pasts_of", [right, first_of_all, one_too_many, last_row_first])
def test_sequences_with_different_pasts_decode_as_each_alone(
    q_len: int, ratio: int, pasts_of: Callable[[list[int], int], list[int]]
) -> None:
    pasts = [42, 0, 21, 11]
    keys = 48 // ratio
    layout = CausalLayout.batched(4, q_len, keys, q_offset=pasts_of(pasts, q_len), ratio=ratio)
    x = grid_tensors(layout)
    topk = indexer_topk(*x.index(), layout, top_k=TOP_K)
    loss = indexer_loss(*x.all(), layout, topk=topk, softmax_scale=0.2, reduction="sum")
    alone, losses = [], 0.0
    for i, past in enumerate(pasts):
        rows, own = slice(i * q_len, (i + 1) * q_len), slice(i * keys, (i + 1) * keys)
        part = Tensors(x.index_q[rows], x.index_k[own], x.weights[rows], x.q[rows], x.kv[own])
        single = CausalLayout.batched(1, q_len, keys, q_offset=past, ratio=ratio)
        found = indexer_topk(*part.index(), single, top_k=TOP_K)
        alone.append(torch.where(found.indices >= 0, found.indices + i * keys, -1))
        losses += float(indexer_loss(*part.all(), single, topk=found, softmax_scale=0.2, reduction="sum"))
    same = torch.equal(topk.indices, torch.cat(alone))
    assert same == (pasts_of is right or (pasts_of is last_row_first and q_len == 1))
    if same:
        torch.testing.assert_close(float(loss), losses, rtol=1e-5, atol=1e-6)
