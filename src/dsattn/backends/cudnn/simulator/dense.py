"""The dense score recomputations, simulated: what they put where they mask differs from release to release."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsattn.backends.cudnn.simulator.masks import (
    SM90_TILE,
    Span,
    checked_cu_seqlens,
    equal_starts,
    is_packed,
    longest,
    spans,
    visible,
)
from dsattn.backends.cudnn.simulator.math import attention_mass, indexer_scores
from dsattn.backends.cudnn.simulator.state import (
    LAUNCH_ALIGNMENT,
    Arguments,
    Simulated,
    require,
    require_aligned,
    require_dtype,
    require_grid,
    require_shape,
    require_unit_stride,
    require_within,
    unwritten,
)

NONE = float("-inf")
# Key columns of a Blackwell tile.
SM100_TILE = 128


def dense_indexer_scores(sim: Simulated, a: Arguments) -> dict[str, Any]:
    """Dense indexer scores and the log-sum-exp of each row's visible ones: {out, denom}."""
    return _dense(sim, a, "weights", float(a.sm_scale))


def dense_attn_scores(sim: Simulated, a: Arguments) -> dict[str, Any]:
    """Attention mass summed over the heads and its sum over each row's visible keys: {out, denom}."""
    return _dense(sim, a, "lse", float(a.softmax_scale))


def _dense(sim: Simulated, a: Arguments, name: str, scale: float) -> dict[str, Any]:
    aux, is_attention = getattr(a, name), name == "lse"
    packed = is_packed(a, ValueError)
    _check_tensors(sim, a, packed, name)
    found, columns = _packed_spans(sim, a) if packed else _batched_spans(sim, a)
    q, k, aux = a.q.flatten(0, -3), a.k.flatten(0, -3)[:, 0], aux.flatten(0, -2)
    out, denom = _memory(sim, a, q.shape[0], columns), unwritten((q.shape[0],))
    product = attention_mass if is_attention else indexer_scores
    blocks = {-(-span.keys // SM100_TILE) for span in found}
    mixes = sim.has("sm100-dense-score-slots") and (len(blocks) > 1 or any(count & (count - 1) for count in blocks))
    for span in found:
        rows, keys = slice(span.q0, span.q1), slice(span.k0, span.k1)
        sim.launch(a.wrapper, (*q.shape[1:], scale, a.ratio, a.q_causal_offsets is not None), span.q1 - span.q0)
        values = product(sim, q[rows], k[keys], aux[rows], scale)
        if mixes:
            values.fill_(torch.nan)
        _write(sim, a, span, values, out[rows])
        hidden = values.masked_fill(~visible(span, a.ratio), 0.0 if is_attention else NONE)
        denom[rows] = hidden.sum(1) if is_attention else hidden.logsumexp(1)
        if a.wrapper.empty_row == "nan":
            denom[rows] = denom[rows].masked_fill(span.limits(a.ratio) == 0, torch.nan)
    shape = a.q.shape[:-2]
    return {
        "out": _deliver(sim, a.out, out.view(*shape, columns)),
        "denom": _deliver(sim, a.denom_out, denom.view(shape)),
    }


def _check_tensors(sim: Simulated, a: Arguments, packed: bool, name: str) -> None:
    aux = getattr(a, name)
    for argument in ("q", "k", name):
        require_dtype(ValueError, argument, getattr(a, argument), *a.wrapper.dtypes_of(argument))
    require(a.precision in {None, "bf16"}, NotImplementedError, "the simulator has bf16 scores only")
    ranks = (3, 3, 2) if packed else (4, 4, 3)
    require((a.q.ndim, a.k.ndim, aux.ndim) == ranks, ValueError, f"q, k, {name} must have {ranks} dimensions")
    require_shape(ValueError, name, aux, a.q.shape[:-1])
    require(packed or a.k.shape[0] == a.q.shape[0], ValueError, "q and k must have the same batch size")
    require_shape(ValueError, "k", a.k, (*a.k.shape[:-2], 1, a.q.shape[-1]))
    require(a.ratio >= 1, ValueError, f"ratio must be >= 1, got {a.ratio}")
    require_within(AssertionError, "heads", a.wrapper.heads, a.q.shape[-2])
    require_within(AssertionError, "head_dim", a.wrapper.widths, a.q.shape[-1])
    # Hopper gets a transposed copy of the per-head operand.
    require_aligned(q=a.q, k=a.k, **({} if sim.sm90 else {name: aux}))


def _offset_boundary(sim: Simulated, a: Arguments) -> int:
    return a.wrapper.alignment_of("q_causal_offsets") if sim.sm90 else LAUNCH_ALIGNMENT


def _batched_spans(sim: Simulated, a: Arguments) -> tuple[list[Span], int]:
    require_grid(a.wrapper, batch=a.q.shape[0], rows=a.q.shape[1])
    queries, keys = equal_starts(*a.q.shape[:2]), equal_starts(*a.k.shape[:2])
    return spans(a, queries, keys, a.ratio, boundary=_offset_boundary(sim, a)), a.k.shape[1]


def _packed_spans(sim: Simulated, a: Arguments) -> tuple[list[Span], int]:
    """The sequences of a THD call and the columns of its result; Hopper launches each on its own, but no empty one."""
    # Hopper, and from 1.32 on both, get a copy in int32.
    dtypes = ("int32", "int64") if sim.sm90 or sim.since("1.32") else ("int32",)
    queries, keys = checked_cu_seqlens(a, AssertionError, *dtypes, launched=not sim.sm90)
    columns = longest(keys) if a.max_seqlen_k is None else int(a.max_seqlen_k)
    if not sim.sm90:
        return spans(a, queries, keys, a.ratio), columns
    found = []
    for i, span in enumerate(spans(a, queries, keys, a.ratio, boundary=1)):
        if span.q1 > span.q0 and span.keys:
            if a.q_causal_offsets is not None:
                require_aligned(_offset_boundary(sim, a), q_causal_offsets=a.q_causal_offsets[i : i + 1])
            found.append(span)
    return found, columns


def _memory(sim: Simulated, a: Arguments, rows: int, columns: int) -> Tensor:
    """What the output holds before the launch, [rows, columns]."""
    if a.out is not None and not a.wrapper.clears_out:
        return a.out.reshape(rows, columns).clone()
    if a.wrapper.masked != "0":
        return torch.full((rows, columns), NONE, device="cpu")
    return torch.zeros(rows, columns, device="cpu") if sim.sm90 else unwritten((rows, columns))


def _write(sim: Simulated, a: Arguments, span: Span, values: Tensor, out: Tensor) -> None:
    """Write one sequence: its visible scores, a filler in the tiles that the kernel walks, nothing in the others."""
    columns = torch.arange(out.shape[1], device="cpu")
    if sim.sm90:
        walked = -(-span.limits(a.ratio) // SM90_TILE)[:, None] * SM90_TILE
    else:
        walked = torch.full((span.q1 - span.q0, 1), -(-span.keys // SM100_TILE) * SM100_TILE, device="cpu")
    filler = torch.full_like(out, NONE if a.wrapper.masked == "-inf" else 0.0)
    shown = torch.nn.functional.pad(visible(span, a.ratio), (0, max(0, out.shape[1] - span.keys)))
    values = torch.nn.functional.pad(values, (0, max(0, out.shape[1] - span.keys)))
    shown, values = shown[:, : out.shape[1]], values[:, : out.shape[1]]
    out.copy_(torch.where(shown, values, torch.where(columns < walked, filler, out)))
    if a.wrapper.past_segment == "-inf":
        out[:, span.keys :] = NONE


def _deliver(sim: Simulated, buffer: Tensor | None, value: Tensor) -> Tensor:
    if buffer is None:
        return value
    require_shape(ValueError, "out", buffer, value.shape)
    require_dtype(ValueError, "out", buffer, "float32")
    if not buffer.is_contiguous() and sim.has("score-out-not-written"):
        return value
    if not sim.sm90 and not sim.since("1.32"):
        require_unit_stride(out=buffer)
    return buffer.copy_(value)
