"""The calls of dsattn that are timed, with their inputs: one function for each kind of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import dsattn
from dsattn.bench.sizes import Sizes
from dsattn.layouts import CausalLayout, TopK

_CHUNK = 1024
"""Rows of scores that are computed and thrown away at a time."""
_BLOCK = 1024


@dataclass(frozen=True)
class Call:
    """A call that is ready.

    Attributes:
        inputs: the tensors that were made for it.
        run: what is timed; gives results by name.
        before: what has to have run first and is not timed.
    """

    inputs: Sequence[Tensor]
    run: Callable[[], Mapping[str, Tensor]]
    before: Callable[[], object] = lambda: None


Make = Callable[[Sizes, int, torch.dtype, str], Call]
"""What makes a call: of sizes, rows, the dtype, and the name of what runs it."""


def normal(*shape: int, dtype: torch.dtype, grad: bool = False) -> Tensor:
    """Random numbers on the CPU, a leaf of autograd if `grad`."""
    return torch.randn(shape, dtype=dtype, device="cpu").requires_grad_(grad)


def scores(sizes: Sizes, rows: int, dtype: torch.dtype, backend: str) -> Call:
    """`indexer_scores` of 1,024 rows after the other against the keys that they see; each table is thrown away."""
    index_q, index_k, weights = index = _index(sizes, rows, dtype)

    def run() -> Mapping[str, Tensor]:
        for begin in range(0, rows, _CHUNK):
            end = min(begin + _CHUNK, rows)
            layout = CausalLayout.batched(1, end - begin, end, q_offset=begin)
            part = index_q[begin:end], index_k[:end], weights[begin:end]
            dsattn.indexer_scores(*part, layout, scale=_scale(sizes), backend=backend)
        return {}

    return Call(index, run)


def topk(sizes: Sizes, rows: int, dtype: torch.dtype, backend: str) -> Call:
    """`indexer_topk` without scores."""
    index, layout = _index(sizes, rows, dtype), _layout(rows)

    def run() -> Mapping[str, Tensor]:
        found = dsattn.indexer_topk(*index, layout, top_k=sizes.top_k, scale=_scale(sizes), backend=backend)
        return {"indices": found.indices}

    return Call(index, run)


def sparse(sizes: Sizes, rows: int, dtype: torch.dtype, backend: str) -> Call:
    """The forward of `sparse_attention` over random keys."""
    q, kv = _attention(sizes, rows, dtype)
    chosen = selection(rows, sizes.top_k)
    return Call((q, kv, chosen.indices), lambda: {"out": _attend(sizes, q, kv, chosen, backend)})


def sparse_backward(sizes: Sizes, rows: int, dtype: torch.dtype, backend: str) -> Call:
    """The backward of `sparse_attention`, after its forward."""
    q, kv = _attention(sizes, rows, dtype, grad=True)
    chosen = selection(rows, sizes.top_k)
    d_out = normal(rows, sizes.heads, sizes.value_width, dtype=dtype)
    out: list[Tensor] = []

    def run() -> Mapping[str, Tensor]:
        out[0].backward(d_out)
        return {}

    return Call((q, kv, chosen.indices, d_out), run, lambda: out.append(_attend(sizes, q, kv, chosen, backend)))


def dense(sizes: Sizes, rows: int, dtype: torch.dtype, backend: str) -> Call:
    """The forward of `dense_attention`."""
    (q, kv), layout = _attention(sizes, rows, dtype), _layout(rows)
    options = {"value_dim": sizes.value_width, "softmax_scale": sizes.key_width**-0.5}
    return Call((q, kv), lambda: {"out": dsattn.dense_attention(q, kv, layout, backend=backend, **options)})


def loss_selected(sizes: Sizes, rows: int, dtype: torch.dtype, backend: str) -> Call:
    """`indexer_loss` over random keys, and its backward."""
    return _loss(sizes, rows, dtype, backend, selection(rows, sizes.top_k))


def loss_visible(sizes: Sizes, rows: int, dtype: torch.dtype, backend: str) -> Call:
    """`indexer_loss` over all visible keys, and its backward."""
    return _loss(sizes, rows, dtype, backend, None)


def layer_selected(sizes: Sizes, rows: int, dtype: torch.dtype, backend: str) -> Call:
    """`dsa_attention` with the loss over the selected keys, forward and backward."""
    return _layer(sizes, rows, dtype, backend, "selected")


def layer_visible(sizes: Sizes, rows: int, dtype: torch.dtype, backend: str) -> Call:
    """`dsa_attention` over the selected keys with the loss over all visible ones, forward and backward."""
    return _layer(sizes, rows, dtype, backend, "visible")


def selection(rows: int, top_k: int) -> TopK:
    """Keys of a causal document: all that a row sees, or `top_k` of them at random.

    Sums of exponential numbers, divided by the last, are sorted uniform numbers; the place in the row added makes them
    distinct. No table of rows x keys is made.
    """
    indices = torch.empty(rows, top_k, dtype=torch.int32, device="cpu")
    for begin, end in _blocks(rows):
        place = torch.arange(top_k, device="cpu")
        seen = torch.arange(begin + 1, end + 1, device="cpu")[:, None]
        sums = torch.empty(end - begin, top_k + 1, device="cpu").exponential_().cumsum(-1)
        free = (seen - top_k).clamp(min=0)
        chosen = (sums[:, :-1] / sums[:, -1:] * (free + 1)).long().minimum(free) + place
        indices[begin:end] = chosen.masked_fill(place >= seen, -1)
    lengths = torch.arange(1, rows + 1, dtype=torch.int32, device="cpu").clamp(max=top_k)
    return TopK(indices, lengths, num_q=rows, num_k=rows)


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, rows, _BLOCK):
        yield begin, min(begin + _BLOCK, rows)


def _layout(rows: int) -> CausalLayout:
    return CausalLayout.batched(1, rows)


def _scale(sizes: Sizes) -> float:
    return (sizes.index_heads * sizes.index_width) ** -0.5


def _index(sizes: Sizes, rows: int, dtype: torch.dtype, *, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """index_q, index_k and fp32 weights."""
    index_q = normal(rows, sizes.index_heads, sizes.index_width, dtype=dtype, grad=grad)
    index_k = normal(rows, sizes.index_width, dtype=dtype, grad=grad)
    return index_q, index_k, normal(rows, sizes.index_heads, dtype=torch.float32, grad=grad)


def _attention(sizes: Sizes, rows: int, dtype: torch.dtype, *, grad: bool = False) -> tuple[Tensor, Tensor]:
    q = normal(rows, sizes.heads, sizes.key_width, dtype=dtype, grad=grad)
    return q, normal(rows, sizes.key_width, dtype=dtype, grad=grad)


def _attend(sizes: Sizes, q: Tensor, kv: Tensor, chosen: TopK, backend: str) -> Tensor:
    options = {"value_dim": sizes.value_width, "softmax_scale": sizes.key_width**-0.5}
    return dsattn.sparse_attention(q, kv, chosen, backend=backend, **options)


def _loss(sizes: Sizes, rows: int, dtype: torch.dtype, backend: str, chosen: TopK | None) -> Call:
    index, attention = _index(sizes, rows, dtype, grad=True), _attention(sizes, rows, dtype)
    layout = _layout(rows)

    def run() -> Mapping[str, Tensor]:
        loss = dsattn.indexer_loss(
            *index,
            *attention,
            layout,
            softmax_scale=sizes.key_width**-0.5,
            scale=_scale(sizes),
            topk=chosen,
            backend=backend,
        )
        loss.backward()
        return {"loss": loss}

    return Call((*index, *attention, *([] if chosen is None else [chosen.indices])), run)


def _layer(sizes: Sizes, rows: int, dtype: torch.dtype, backend: str, support: str) -> Call:
    index, attention = _index(sizes, rows, dtype, grad=True), _attention(sizes, rows, dtype, grad=True)
    d_out, layout = normal(rows, sizes.heads, sizes.value_width, dtype=dtype), _layout(rows)

    def run() -> Mapping[str, Tensor]:
        result = dsattn.dsa_attention(
            *attention,
            *index,
            layout,
            top_k=sizes.top_k,
            value_dim=sizes.value_width,
            softmax_scale=sizes.key_width**-0.5,
            scale=_scale(sizes),
            loss=support,
            backend=backend,
        )
        if result.loss is None:
            raise RuntimeError("dsa_attention gave no loss")
        torch.autograd.backward([result.out, result.loss], [d_out, torch.ones_like(result.loss)])
        return {"out": result.out, "loss": result.loss}

    return Call((*attention, *index, d_out), run)
