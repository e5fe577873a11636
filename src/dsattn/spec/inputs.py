"""Seeded tensors of a named case: the same numbers on every device."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dsattn.spec import inputs_edges
from dsattn.spec.case import Case

# Its square times the scale of a small case is above 89, whose exp is beyond fp32.
_FAR = 28.0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of one call, packed or BSHD, with the gradients that come in from above.

    Attributes:
        index_q: indexer queries.
        index_k: indexer keys.
        weights: head weights.
        q: attention queries.
        kv: attention keys, whose first columns are the values.
        sink: one logit per head, or None.
        row_mask: the rows that count in the loss, or None.
        d_out: gradient of `out`, in its dtype.
        d_loss: gradient of the loss: a power of two, so that it rounds nothing.
    """

    index_q: Float[Tensor, "*rows h_i d_i"]
    index_k: Float[Tensor, "*keys d_i"]
    weights: Float[Tensor, "*rows h_i"]
    q: Float[Tensor, "*rows h d_qk"]
    kv: Float[Tensor, "*keys d_qk"]
    d_out: Float[Tensor, "*rows h d_v"]
    sink: Float[Tensor, " h"] | None = None
    row_mask: Bool[Tensor, "*rows"] | None = None
    d_loss: float = -2.0

    def to(self, device: torch.device | str) -> Inputs:
        """The same numbers on another device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: x.to(device) for name, x in tensors.items() if isinstance(x, Tensor)})

    def to_bshd(self, batch: int) -> Inputs:
        """The same numbers as BSHD tensors of `batch` sequences: rows [b*s, ...] become [b, s, ...]."""
        rows = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("sink", "d_loss")}
        return replace(self, **{name: x.unflatten(0, (batch, -1)) for name, x in rows.items() if x is not None})

    def as_views(self) -> Inputs:
        """The same numbers as views of larger buffers, whose other numbers are NaN."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: _view(x) for name, x in tensors.items() if isinstance(x, Tensor)})


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu") -> Inputs:
    """Seeded packed tensors of a case, drawn on the CPU in float64, then rounded to `dtype`, then moved.

    Attention inputs and incoming gradients are standard normal; the indexer's are too, or multiples of 1/8 in [-1, 1]
    where `case.grid` says so. Sinks are fp32, or fp64 with fp64 inputs; so are weights where `case.weights_fp32`.

    Args:
        case: the named case.
        dtype: of index_q, index_k, q, kv and d_out.
        device: where the tensors go.
    """
    layout = case.layout()
    t, s = layout.num_q, layout.num_k
    draw = _Draw(torch.Generator("cpu").manual_seed(zlib.crc32(case.name.encode()) + case.seed))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    index_q = draw.values(t, case.index_heads, case.index_width, grid=case.grid)
    index_k = draw.values(s, case.index_width, grid=case.grid)
    weights = draw.values(t, case.index_heads, grid=case.grid)
    index_q, index_k, weights = _shape_scores(case, index_q, index_k, weights)
    if case.weights == "negative":
        # On the grid a weight may be 0; -1/8 keeps all of them negative.
        weights = -weights.abs().clamp(min=0.125)
    elif case.weights == "opposed":
        index_q[:, 1::2] = index_q[:, ::2]
        weights[:, 1::2] = weights[:, ::2] * (2.0**-6 - 1)
    q, kv = draw.values(t, case.heads, case.key_width), draw.values(s, case.key_width)
    if case.logits == "far":
        _move_logits(q, kv)
    elif case.logits == "wide":
        q, kv = inputs_edges.wide_logits(q, kv, case.softmax_scale)
    tensors = Inputs(
        index_q=index_q.to(dtype),
        index_k=index_k.to(dtype),
        weights=weights.to(wide if case.weights_fp32 else dtype),
        q=q.to(dtype),
        kv=kv.to(dtype),
        d_out=draw.values(t, case.heads, case.value_width).to(dtype),
        sink=_sink(case, draw, wide),
        row_mask=_row_mask(case, draw, t),
    )
    if case.bad is not None:
        inputs_edges.spoil(case.bad, getattr(tensors, case.bad.name))
    return tensors.to(device)


def _view(x: Tensor) -> Tensor:
    """x as a view: the first n columns of n + 1, and rows and heads in the other order in memory."""
    other = torch.nan if x.is_floating_point() else 0
    if x.ndim < 2:
        return torch.stack([x, torch.full_like(x, other)], -1)[..., 0]
    swapped = x.transpose(-3, -2) if x.ndim > 2 else x
    wide = torch.nn.functional.pad(swapped, (0, 1), value=other)[..., :-1]
    return wide.transpose(-3, -2) if x.ndim > 2 else wide


@dataclass(frozen=True)
class _Draw:
    generator: torch.Generator

    def values(self, *shape: int, grid: bool = False) -> Tensor:
        """Standard normal values, or multiples of 1/8 in [-1, 1]."""
        if grid:
            return torch.randint(-8, 9, shape, generator=self.generator, device="cpu").double() / 8
        return torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")


def _shape_scores(case: Case, index_q: Tensor, index_k: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if case.scores == "equal":
        index_k = index_k[:1].expand_as(index_k).contiguous()
    elif case.scores == "repeated":
        index_k = index_k[torch.arange(len(index_k), device="cpu") % 8]
    elif case.scores == "plateau":
        # Queries have no positive entry; keys have none that is negative, but for every seventh, which has only those.
        sign = torch.ones(len(index_k), 1, dtype=torch.float64, device="cpu")
        sign[3::7] = -1
        index_q, index_k = -index_q.abs(), index_k.abs() * sign
    elif case.scores == "positive":
        index_q, index_k = index_q.abs(), index_k.abs()
    elif case.scores == "near":
        return inputs_edges.near(index_q, index_k, weights, grid=case.grid)
    elif case.scores == "wide":
        return inputs_edges.wide_scores(index_q, index_k, weights)
    return index_q, index_k, weights


def _move_logits(q: Tensor, kv: Tensor) -> None:
    """Moves all logits of a row and head by the same, in place; those of every other head downwards."""
    q[..., -1] = kv[..., -1] = _FAR
    q[:, 1::2, -1] *= -1


def _sink(case: Case, draw: _Draw, dtype: torch.dtype) -> Tensor | None:
    if case.sink is None:
        return None
    values = draw.values(case.heads)
    if case.sink == "zero":
        values = torch.zeros_like(values)
    elif case.sink == "-inf":
        values = torch.full_like(values, -torch.inf)
    elif case.sink == "large":
        # exp(100) is beyond fp32. exp(16) is not, and shows that the little it leaves to the keys is right.
        values = torch.full_like(values, 16.0)
        values[1::2] = 100.0
    return values.to(dtype)


def _row_mask(case: Case, draw: _Draw, rows: int) -> Tensor | None:
    if case.row_mask is None:
        return None
    share = 0.7 if case.row_mask == "some" else 0.0
    return torch.rand(rows, generator=draw.generator, dtype=torch.float64, device="cpu") < share
