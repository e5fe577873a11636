"""Problems at the edges of the native kernels' blocks, and what the backends `cpu` and `torch` make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from calls import Arguments, Operators, results, selection
from strategies import ALL_LAYOUTS, Drawn, Problem, random_problem
from torch import Tensor

import dsattn
from dsattn import CausalLayout, TopK
from dsattn.backends import Backend, CpuBackend

Way = Callable[[Tensor], Tensor]

OPERATORS = ("indexer_scores", "indexer_topk", "sparse_attention", "dense_attention", "indexer_loss")
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 4e-3}
"""Far above rounding, far below what a wrong key or head makes."""


class Unchecked(CpuBackend):
    """The backend without its self-check, which would hide what a test wants to see."""

    checked = False


def operators(backend: Backend | str, way: Way | None = None) -> Operators:
    """The operators on a backend; `way` makes views of all tensors that they are given."""

    def given(x: Any) -> Any:
        if isinstance(x, TopK) and way is not None:
            return TopK(way(x.indices), way(x.lengths), num_q=x.num_q, num_k=x.num_k)
        return way(x) if isinstance(x, Tensor) and way is not None else x

    def on_backend(name: str) -> Callable[..., Any]:
        def operator(*arguments: Any, **options: Any) -> Any:
            options = {key: given(x) for key, x in options.items()}
            return getattr(dsattn, name)(*map(given, arguments), backend=backend, **options)

        return operator

    return SimpleNamespace(**{name: on_backend(name) for name in OPERATORS})


def of(layout: CausalLayout, **sizes: Any) -> Problem:
    """A problem on a layout."""
    return Problem(drawn=Drawn(made_by="", layout=layout, places=(), num_k=layout.num_k, ratio=layout.ratio), **sizes)


def edges() -> Iterator[tuple[str, Problem]]:
    """Zero lengths, single keys and heads, ends of blocks, decode, compressed keys."""
    packed = CausalLayout.packed
    sizes: dict[str, Any] = {"h_i": 3, "d_i": 7, "h": 5, "d_qk": 9, "d_v": 4}
    yield "no query row", of(CausalLayout.batched(1, 0, 5, q_offset=0), **sizes)
    yield "no key row", of(CausalLayout.batched(1, 4, 0, q_offset=0), **sizes)
    yield "nothing", of(packed([0, 0]), **sizes)
    yield "one of all", of(CausalLayout.batched(1, 1), h_i=1, d_i=1, h=1, d_qk=1, d_v=1, top_k=1)
    yield "one key", of(CausalLayout.batched(1, 3, 1, q_offset=0), **sizes)
    yield "more slots than keys", of(CausalLayout.batched(2, 5), top_k=40, **sizes)
    yield "decode", of(CausalLayout.batched(1, 1, 1000, q_offset=999), top_k=129, **sizes)
    yield "decode, odd", of(CausalLayout.batched(3, 1, 333, q_offset=[332, 100, -1]), top_k=67, h_i=1, d_i=33)
    yield "compressed", of(CausalLayout.batched(2, 37, ratio=4), top_k=3, **sizes)
    yield "compressed, packed", of(packed([0, 3, 3, 70, 71], ratio=4, num_q=75, num_k=20), top_k=5, **sizes)
    yield "empty documents", of(packed([0, 0, 5, 5, 5, 70, 70], num_q=72, num_k=73), top_k=9, **sizes)
    yield "nothing seen", of(CausalLayout.batched(1, 4, 9, q_offset=-9), **sizes)
    yield "far keys", of(CausalLayout.batched(1, 3, 200, q_offset=[140]), top_k=65, relu=False, **sizes)
    for keys in (63, 64, 65, 127, 129):
        yield f"{keys} keys", of(CausalLayout.batched(1, keys), top_k=keys - 1, grid=True, masked=True, **sizes)


def sizes() -> Iterator[tuple[str, Problem]]:
    """Every number of heads up to 35, every odd width up to 69, and values of any width."""
    layout = CausalLayout.packed([0, 2, 2, 23])
    for heads in range(1, 36):
        width = 2 * heads - 1
        widths = {"d_i": 70 - width, "d_qk": width, "d_v": 1 + heads % width}
        problem = of(layout, h_i=36 - heads, h=heads, top_k=heads, relu=heads % 3 > 0, sink=heads % 2 > 0, **widths)
        yield f"{heads} heads, width {width}", problem


def drawn(count: int) -> Iterator[tuple[str, Problem]]:
    """Random problems on random layouts of every kind."""
    for number in range(count):
        rng = Random(number)
        problem = random_problem(rng, ALL_LAYOUTS[number % len(ALL_LAYOUTS)](rng))
        yield f"{number}: {problem}", problem


def everything(problem: Problem, dtype: torch.dtype, backend: Backend | str, way: Way | None = None) -> dict[str, Any]:
    """All results and gradients of a problem; selections are the torch backend's, so that others run over the same."""
    a, layout = Arguments.of(problem).to(dtype), problem.layout
    ops = operators(backend, way)
    found: dict[str, Any] = {"topk": selection(problem, a, layout, ops=ops)}
    topk = selection(problem, a, layout, ops=operators("torch"))
    if way is not None:
        a = Arguments(a.x, way(a.d_scores), way(a.d_out), a.sink, a.row_mask)
    return found | results(problem, a, layout, topk, ops=ops)


def difference(got: dict[str, Any], wanted: dict[str, Any], dtype: torch.dtype) -> str:
    """What differs by more than rounding does; "" if nothing."""
    for name, x in wanted.items():
        other = _kept(got, wanted["scores"]) if name == "topk" else got[name]
        x = _kept(wanted, wanted["scores"]) if name == "topk" else x
        if other.shape != x.shape or other.dtype != x.dtype:
            return f"{name}: {other.dtype} {list(other.shape)}, not {x.dtype} {list(x.shape)}"
        x, other = x.detach().double(), other.detach().double()
        finite = x.isfinite()
        if not torch.equal(x[~finite], other[~finite]):
            return f"{name}: other places of NaN or infinities"
        error = (x - other)[finite].abs()
        if not (error <= TOLERANCES[dtype] * (1 + x[finite].abs().amax())).all() if error.numel() else False:
            return f"{name}: an error of {float(error.nan_to_num(torch.inf).amax()):.2g}"
    return ""


def _kept(found: dict[str, Any], scores: Tensor) -> Tensor:
    """The scores of a selection in descending order: keys of nearly equal scores may differ."""
    topk = found["topk"]
    if scores.shape[1] == 0:
        return topk.lengths
    kept = scores.gather(1, topk.indices.long().clamp(min=0))
    return kept.masked_fill(topk.indices < 0, -torch.inf).sort(dim=1, descending=True).values
