"""Attention by the native kernels, over selected or visible keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsattn.backends.cpu import blocks as cut
from dsattn.backends.cpu.build import dtype_for
from dsattn.backends.cpu.kernels import PAD, Keys, call, operand
from dsattn.ops.attention import taken_by_sink
from dsattn.ops.blocks import on_one_thread, run_blocks, run_lanes
from dsattn.ops.inputs import AttentionInputs

_FEW_NUMBERS = 64


def attend(a: AttentionInputs, keys: Keys) -> tuple[Tensor, Tensor]:
    """Output [t, h, d_v] in kv's dtype and log-sum-exp [t, h] in the dtype of sums."""
    out, lse = _attend(a, keys, plan(a.kv.dtype, a.q.shape[1], a.value_dim)[0])
    return out[..., : a.value_dim].to(a.kv.dtype).contiguous(), lse


def _attend(a: AttentionInputs, keys: Keys, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As the kernels for `dtype` write them: the output padded, in that dtype."""
    t, heads, _ = a.q.shape
    kv = operand(a.kv, dtype)
    q, scale = scaled(operand(a.q, dtype), a.softmax_scale)
    width, values = kv.shape[1], -(-a.value_dim // PAD) * PAD
    # Rows without keys stay as they are here.
    out = torch.zeros(t, heads, values, dtype=dtype, device=q.device)
    lse = torch.full((t, heads), -torch.inf, dtype=a.dtype, device=q.device)
    sink = None if a.sink is None else a.sink.detach().to(a.dtype).contiguous()

    def work(block: cut.Block) -> None:
        rows, sizes = (block.q_begin, block.q_end), (heads, width, values)
        call("attend", dtype, q, kv, *keys.arguments, sink, out, lse, *rows, *sizes, scale)

    run_blocks(work, cut.row_blocks(t), q.device)
    return out, lse


def scaled(queries: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and a scale that is not negative with the same logits."""
    return (-queries, -scale) if scale < 0 else (queries, scale)


def plan(dtype: torch.dtype, heads: int, value_dim: int) -> tuple[torch.dtype, bool]:
    """The dtype of the kernels, and whether a backward computes the output again, unrounded.

    delta = d_out . out loses what `out` lost when it was rounded. In fp16, numbers below the least normal one have lost
    most of their digits; and where a row has few numbers, their roundings do not cancel.
    """
    few = dtype == torch.bfloat16 and heads * value_dim < _FEW_NUMBERS
    return torch.float32 if few else dtype_for(dtype), few or dtype == torch.float16


def attend_backward(
    a: AttentionInputs, keys: Keys, out: Tensor, lse: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of q, kv and sink (None without one), in their dtypes."""
    (t, heads, _), s = a.q.shape, a.kv.shape[0]
    dtype, again = plan(a.kv.dtype, heads, a.value_dim)
    if again:
        out, lse = _attend(a, keys, dtype)
    q, kv, out, d_out = (operand(x, dtype) for x in (a.q, a.kv, out, d_out))
    width, values = kv.shape[1], out.shape[2]
    lse = lse.to(a.dtype).contiguous()
    total = lse if a.sink is None else torch.logaddexp(lse, a.sink.detach().to(a.dtype))
    d_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
    delta = torch.zeros(t, heads, dtype=a.dtype, device=q.device)

    def work(block: cut.Block, d_kv: Tensor) -> None:
        rows, sizes = (block.q_begin, block.q_end), (s, heads, width, values)
        tensors = q, kv, *keys.arguments, out, total, d_out, d_q, d_kv, delta
        call("attend_backward", dtype, *tensors, *rows, *sizes, a.softmax_scale)

    blocks = cut.row_blocks(t, heads * width * a.dtype.itemsize)
    d_kv = summed(work, blocks, (s, width), a.dtype)[:, : a.kv.shape[1]].to(a.kv.dtype).contiguous()
    d_sink = None
    if a.sink is not None:
        d_rows = -taken_by_sink(lse, a.sink) * delta
        d_sink = on_one_thread(lambda: d_rows.sum(0), q.device).to(a.sink.dtype)
    return d_q[..., : a.q.shape[2]].to(a.q.dtype).contiguous(), d_kv, d_sink


def summed(
    work: Callable[[cut.Block, Tensor], None], blocks: list[cut.Block], shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """The key gradient that `work(block, total)` adds up block by block, in as many totals as threads, then in one."""
    totals = [
        torch.zeros(shape, dtype=dtype, device="cpu") for _ in range(cut.lanes(len(blocks), _bytes(shape, dtype)))
    ]

    def lane_work(lane: int) -> None:
        for block in blocks[lane :: len(totals)]:
            work(block, totals[lane])

    run_lanes(lane_work, len(totals), totals[0].device)
    for other in totals[1:]:
        totals[0] += other
    return totals[0]


def _bytes(shape: tuple[int, int], dtype: torch.dtype) -> int:
    return shape[0] * shape[1] * dtype.itemsize
