"""All results and gradients of one problem, from the public operators or from wrong ones in their place."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import config as jaxtyping_config
from problems import Tensors
from strategies import Problem
from torch import Tensor

import dsattn
from dsattn import BadInput, CausalLayout, TopK
from dsattn.spec import metrics, oracle

SCALES: dict[str, Any] = {"scale": 0.5, "softmax_scale": 0.4}

Operators = Any
"""The module `dsattn`, or a namespace of `wrong`."""


@dataclass(frozen=True)
class Arguments:
    """The packed tensors of a call and what comes in for its backward."""

    x: Tensors
    d_scores: Tensor
    d_out: Tensor
    sink: Tensor | None
    row_mask: Tensor | None

    @staticmethod
    def of(problem: Problem) -> Arguments:
        """In fp64, where any two right ways to compute agree to many digits."""
        t, s = problem.layout.num_q, problem.layout.num_k
        return Arguments(
            x=problem.tensors(),
            d_scores=problem.normal(t, s, salt=3),
            d_out=problem.normal(t, problem.h, problem.d_v, salt=4),
            sink=problem.normal(problem.h, salt=5) if problem.sink else None,
            row_mask=problem.row_mask,
        )

    def to(self, dtype: torch.dtype) -> Arguments:
        """Rounded; sinks and gradients of scores are fp32 with inputs of lower precision."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        sink = None if self.sink is None else self.sink.to(wide)
        x = Tensors(*(y.to(dtype) for y in self.x.all()))
        return replace(self, x=x, d_scores=self.d_scores.to(wide), d_out=self.d_out.to(dtype), sink=sink)

    def part(self, q_rows: Tensor, k_rows: Tensor) -> Arguments:
        """Those of a call that has these query and key rows only."""
        x = self.x
        mask = None if self.row_mask is None else self.row_mask[q_rows]
        tensors = Tensors(x.index_q[q_rows], x.index_k[k_rows], x.weights[q_rows], x.q[q_rows], x.kv[k_rows])
        return Arguments(tensors, self.d_scores[q_rows][:, k_rows], self.d_out[q_rows], self.sink, mask)

    def shaped(self, batch: int | None) -> Arguments:
        """As a BSHD call has them."""
        if batch is None:
            return self
        x = Tensors(*(y.unflatten(0, (batch, -1)) for y in self.x.all()))
        mask = None if self.row_mask is None else self.row_mask.unflatten(0, (batch, -1))
        return Arguments(x, self.d_scores, self.d_out.unflatten(0, (batch, -1)), self.sink, mask)


@contextmanager
def without_shape_checks() -> Generator[None]:
    """The test of the oracle checks shapes on the same layouts; here they would take most of the time."""
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping_config.update("jaxtyping_disable", before)


@without_shape_checks()
def selection(
    problem: Problem, a: Arguments, layout: CausalLayout, *, ops: Operators = dsattn, batch: int | None = None
) -> TopK:
    """The selection of a call, packed."""
    x = a.shaped(batch).x
    topk = ops.indexer_topk(*x.index(), layout, top_k=problem.top_k, scale=SCALES["scale"], relu=problem.relu)
    indices, lengths = topk.indices.reshape(-1, problem.top_k), topk.lengths.flatten()
    try:
        return TopK(indices, lengths, num_q=topk.num_q, num_k=topk.num_k)
    except BadInput as error:
        raise AssertionError(f"the selection breaks a rule: {error}") from error


@without_shape_checks()
def results(
    problem: Problem,
    a: Arguments,
    layout: CausalLayout,
    topk: TopK,
    *,
    ops: Operators = dsattn,
    batch: int | None = None,
    **reduction: Any,
) -> dict[str, Tensor]:
    """Scores, both attentions and both losses with all gradients, packed; the last word of a name says what it is."""
    a = a.shaped(batch)
    leaves = Tensors(*(y.detach().clone() for y in a.x.all())).requires_grad_()
    sink = None if a.sink is None else a.sink.detach().clone().requires_grad_()
    if batch is not None:
        shape = (batch, layout.num_q // max(1, batch))
        indices, lengths = topk.indices.unflatten(0, shape), topk.lengths.unflatten(0, shape)
        topk = TopK(indices, lengths, num_q=topk.num_q, num_k=topk.num_k)
    scoring = {"scale": SCALES["scale"], "relu": problem.relu}
    found: dict[str, Tensor] = {}

    def add(name: str, result: Tensor, d_result: Tensor, sources: Mapping[str, Tensor | None]) -> None:
        there = {key: x for key, x in sources.items() if x is not None}
        gradients = torch.autograd.grad(result, list(there.values()), d_result)
        found.update({f"{name} {key}": _packed(x, key, batch) for key, x in zip(there, gradients, strict=True)})

    index = dict(zip(("d_index_q", "d_index_k", "d_weights"), leaves.index(), strict=True))
    found["scores"] = ops.indexer_scores(*leaves.index(), layout, **scoring)
    add("scores", found["scores"], a.d_scores, index)
    attending = {"value_dim": problem.d_v, "softmax_scale": SCALES["softmax_scale"], "sink": sink, "return_lse": True}
    for name, attend, keys in (("sparse", ops.sparse_attention, topk), ("dense", ops.dense_attention, layout)):
        out, lse = attend(leaves.q, leaves.kv, keys, **attending)
        found |= {f"{name} out": _packed(out, "out", batch), f"{name} lse": _packed(lse, "lse", batch)}
        add(name, out, a.d_out, {"d_q": leaves.q, "d_kv": leaves.kv, "d_sink": sink})
    losing = {"softmax_scale": SCALES["softmax_scale"], "row_mask": a.row_mask, **scoring, **reduction}
    for name, keys in (("selected", topk), ("visible", None)):
        found[f"{name} loss"] = loss = ops.indexer_loss(*leaves.all(), layout, topk=keys, **losing)
        add(name, loss, torch.ones_like(loss), index)
    return {name: x.detach() for name, x in found.items()}


def _packed(x: Tensor, name: str, batch: int | None) -> Tensor:
    return x if batch is None or name == "d_sink" else x.flatten(0, 1)


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """All results of fp64 calls agree but for the order of sums."""
    assert got.keys() == wanted.keys()
    for name, x in got.items():
        torch.testing.assert_close(x, wanted[name], rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_keys(problem: Problem, a: Arguments, layout: CausalLayout, one: TopK, other: TopK) -> None:
    """Two selections of a call agree: exactly on the grid, elsewhere but for keys within tau of the k-th score."""
    assert torch.equal(one.lengths, other.lengths)
    if torch.equal(one.indices, other.indices):
        return
    assert not problem.grid, "ids differ on the grid, where all scores are exact"
    scores = oracle.indexer_scores(*a.x.index(), layout, scale=SCALES["scale"], relu=problem.relu).value
    tau = metrics.tau(*a.x.index(), layout, scale=SCALES["scale"])
    for row, length in enumerate(one.lengths.tolist()):
        kth = scores[row].sort(descending=True).values[length - 1] if length else 0
        differing = set(one.indices[row].tolist()) ^ set(other.indices[row].tolist())
        assert all(abs(scores[row, key] - kth) <= tau[row] for key in differing), f"row {row}: {differing}"


def wrong(
    name: str, change: Callable[[Any], Any], when: Callable[[Any], bool] = lambda _: True, ops: Operators = dsattn
) -> Operators:
    """The operators, one of them wrong: it is given `change(x)` in place of a layout or selection x where `when(x)`."""
    right = getattr(ops, name)

    def changed(x: Any) -> Any:
        return change(x) if isinstance(x, (CausalLayout, TopK)) and when(x) else x

    def operator(*arguments: Any, **options: Any) -> Any:
        return right(*map(changed, arguments), **{key: changed(x) for key, x in options.items()})

    return replaced(name, operator, ops)


def replaced(name: str, operator: Callable[..., Any], ops: Operators = dsattn) -> Operators:
    """The operators with another one under one of the names."""
    return SimpleNamespace(**{key: getattr(ops, key) for key in dsattn.__all__} | {name: operator})


def offset_off_by_one(x: Any) -> Any:
    """Each row of a layout sees one position more."""
    if not isinstance(x, CausalLayout):
        return x
    segments = [replace(s, q_offset=s.q_offset + 1) for s in x.segments]
    return CausalLayout.from_segments(segments, num_q=x.num_q, num_k=x.num_k, ratio=x.ratio)


def key_dropped(x: Any) -> Any:
    """The last key of every segment is never seen, or the last of every row not selected."""
    if isinstance(x, CausalLayout):
        segments = [replace(s, k_len=max(0, s.k_len - 1)) for s in x.segments]
        return CausalLayout.from_segments(segments, num_q=x.num_q, num_k=x.num_k, ratio=x.ratio)
    lengths = (x.lengths - 1).clamp(min=0)
    used = torch.arange(x.indices.shape[-1]) < lengths[..., None]
    return TopK(x.indices.masked_fill(~used, -1), lengths, num_q=x.num_q, num_k=x.num_k)


FAULTS: dict[str, Callable[[Any], Any]] = {
    "indexer_scores": offset_off_by_one,
    "indexer_topk": offset_off_by_one,
    "sparse_attention": key_dropped,
    "dense_attention": offset_off_by_one,
    "indexer_loss": offset_off_by_one,
}
"""One fault for every operator."""
