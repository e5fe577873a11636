"""Seeded tensors of a named case: the same numbers on every device."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dsattn.spec.cases import Case


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
    index_q, index_k = _shape_scores(case, index_q, index_k)
    if case.weights == "negative":
        # On the grid a weight may be 0; -1/8 keeps all of them negative.
        weights = -weights.abs().clamp(min=0.125)
    tensors = Inputs(
        index_q=index_q.to(dtype),
        index_k=index_k.to(dtype),
        weights=weights.to(wide if case.weights_fp32 else dtype),
        q=draw.values(t, case.heads, case.key_width).to(dtype),
        kv=draw.values(s, case.key_width).to(dtype),
        d_out=draw.values(t, case.heads, case.value_width).to(dtype),
        sink=_sink(case, draw, wide),
        row_mask=_row_mask(case, draw, t),
    )
    return tensors.to(device)


@dataclass(frozen=True)
class _Draw:
    generator: torch.Generator

    def values(self, *shape: int, grid: bool = False) -> Tensor:
        """Standard normal values, or multiples of 1/8 in [-1, 1]."""
        if grid:
            return torch.randint(-8, 9, shape, generator=self.generator, device="cpu").double() / 8
        return torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")


def _shape_scores(case: Case, index_q: Tensor, index_k: Tensor) -> tuple[Tensor, Tensor]:
    if case.scores == "equal":
        return index_q, index_k[:1].expand_as(index_k).contiguous()
    if case.scores == "repeated":
        return index_q, index_k[torch.arange(len(index_k), device="cpu") % 8]
    if case.scores == "plateau":
        # Queries have no positive entry; keys have none that is negative, but for every seventh, which has only those.
        sign = torch.ones(len(index_k), 1, dtype=torch.float64, device="cpu")
        sign[3::7] = -1
        return -index_q.abs(), index_k.abs() * sign
    return index_q, index_k


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
