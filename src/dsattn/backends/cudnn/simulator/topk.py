"""The selection kernels, simulated: indexer_top_k, indexer_forward_top_k, local_to_global, compactify."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dsattn.backends.cudnn.simulator.masks import is_packed, visible
from dsattn.backends.cudnn.simulator.scores import forward_spans, masked_scores
from dsattn.backends.cudnn.simulator.state import (
    Arguments,
    Simulated,
    blocks,
    deliver,
    require,
    require_aligned,
    require_dtype,
    require_shape,
    require_within,
)

NONE = float("-inf")
NOWHERE = torch.iinfo(torch.int64).min
# Room for the tie rule below the bits of a score.
TIES = 1 << 31


def radix_keys(scores: Tensor) -> Tensor:
    """The order in which the radix kernel sees scores, int64: as the numbers, but +0 before -0 and NaN by its sign."""
    bits = scores.float().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def best(sim: Simulated, keys: Tensor, candidate: Tensor, k: int, tie_break: int = 0) -> Tensor:
    """Columns of the k largest keys among the candidates, int64 [rows, k]; rows without k candidates give others too.

    Args:
        sim: the release.
        keys: int64 [rows, columns], as from `radix_keys`.
        candidate: bool [rows, columns].
        k: how many, at most the number of columns.
        tie_break: among equal keys 1 takes the smaller column, 2 the larger, 0 any (another at each call).
    """
    columns = torch.arange(keys.shape[1], device="cpu")
    if tie_break == 0:
        order = torch.randint(TIES, keys.shape, generator=sim.random, device="cpu")
    else:
        order = columns if tie_break == 2 else keys.shape[1] - 1 - columns
    return torch.where(candidate, keys * TIES + order, NOWHERE).topk(k).indices


def mixed_slots(sim: Simulated, *tables: Tensor) -> list[Tensor]:
    """The tables with the slots of every row in one random order, as a kernel without a slot order leaves them."""
    order = torch.rand(tables[0].shape, generator=sim.random, device="cpu").argsort(1)
    return [table.gather(1, order) for table in tables]


def indexer_top_k(sim: Simulated, a: Arguments) -> dict[str, Any]:
    """The top_k largest of the first columns of each row, as local ids in no order: {indices, values}."""
    values, lengths = _checked_top_k(sim, a)
    rows, columns = values.shape
    k = int(a.top_k)
    row = torch.arange(rows, device="cpu")
    ends = lengths[row // a.next_n] - a.next_n + row % a.next_n + 1
    require(int(ends.max()) <= columns, RuntimeError, "CUDA error: an illegal memory access was encountered")
    slots = torch.arange(k, device="cpu")
    ids = torch.where(slots < ends[:, None], slots, -1)
    long = (ends > k).nonzero()[:, 0]
    for part in blocks(len(long), columns):
        at = long[part]
        keys, inside = radix_keys(values[at]), torch.arange(columns, device="cpu") < ends[at, None]
        found = best(sim, keys, inside, k, a.tie_break or 0 or int(bool(a.deterministic)))
        if sim.has("top-k-lanes-past-row"):
            found = _with_lanes_past_row(sim, a, values, at, ends[at], found)
        ids[at] = found.sort(1).values if a.deterministic else mixed_slots(sim, found)[0]
    flat = torch.cat((values.flatten(), values.new_full((1,), float("nan"))))
    read = (row[:, None] * columns + ids.clamp(min=0)).clamp(max=flat.numel() - 1)
    chosen = torch.where(ids >= 0, flat[read], NONE)
    return {"indices": ids.int(), "values": chosen if a.return_val else None}


def _checked_top_k(sim: Simulated, a: Arguments) -> tuple[Tensor, Tensor]:
    values, lengths, k = a.input_values, a.seq_lens, int(a.top_k)
    for name in ("input_values", "seq_lens"):
        require_dtype(ValueError, name, getattr(a, name), *a.wrapper.dtypes_of(name))
    require(values.ndim == 2 and lengths.ndim == 1, ValueError, "input_values must be 2-D and seq_lens 1-D")
    require_within(ValueError, "top_k", a.wrapper.top_k, k)
    rows, columns = values.shape
    grouped = rows == lengths.shape[0] * a.next_n
    require(grouped, ValueError, f"n_rows ({rows}) must equal seq_lens.numel() * next_n")
    require(a.tie_break in {None, 0, 1, 2}, ValueError, "tie_break must be 0, 1 or 2")
    empty = ValueError if sim.since("1.32") else RuntimeError
    require(rows > 0 and columns > 0, empty, "input_values has no element")
    compact = "input_values" not in a.wrapper.contiguous or (values.is_contiguous() and lengths.is_contiguous())
    require(compact, ValueError, "expected a compact tensor")
    require_aligned(a.wrapper.alignment_of("input_values"), input_values=values)
    bits = values.element_size() * 8
    per_row = columns * (2 if bits == 32 else 1)
    launched = rows if sim.has("top-k-scratch-overflow") else _rows_of_a_chunk(sim, a, rows, per_row, bits)
    require(launched * per_row < 1 << 31, RuntimeError, "CUDA error: an illegal memory access was encountered")
    if sim.has("top-k-odd"):
        # Its stores go in pairs as soon as a thread has more than one slot to write.
        paired = k > _threads(rows, columns, bits)
        require(not (paired and k % 2), AssertionError, "top_k % vecsize_out == 0")
    return values, lengths


def _rows_of_a_chunk(sim: Simulated, a: Arguments, rows: int, per_row: int, bits: int) -> int:
    """How many rows the releases from 1.26 on give to one launch, when the scratch of all is too large for one."""
    most = (1 << 31) - 1
    if rows * per_row <= most or not sim.has("top-k-chunk-off-by-one"):
        return min(rows, most // per_row)
    step = math.lcm(a.next_n, 256 // bits)
    fit = most // per_row + 1
    return min(rows, fit // step * step) if fit >= step else rows


def _threads(rows: int, columns: int, bits: int) -> int:
    """Threads of one row's block in the releases before 1.27."""
    if rows > 148:
        return 512
    columns = 1 << (columns - 1).bit_length()
    few, many = (2048, 8192) if bits == 32 else (4096, 43008)
    return 1024 if columns >= many else 512 if columns > few else 256


def _with_lanes_past_row(
    sim: Simulated, a: Arguments, values: Tensor, at: Tensor, ends: Tensor, found: Tensor
) -> Tensor:
    """The selection of a release in which lanes past the end of the vectorised part count as candidates of -inf.

    A row is read in vectors of `num_copy_bits` from its first aligned element on, a block of threads at a time. Lanes
    of the last block that have no element stand for -inf, with the id that they would have: beyond the row, or among
    its last few, which then come out twice.
    """
    bits = values.element_size() * 8
    vector = a.num_copy_bits // bits
    tile = _threads(values.shape[0], values.shape[1], bits) * vector
    first = (vector - at * values.shape[1] % vector) % vector
    whole = (ends - first) // vector * vector
    lanes = torch.arange(tile, device="cpu")
    beyond = (first + whole)[:, None] + lanes
    there = lanes < (-whole % tile)[:, None]
    least = radix_keys(torch.full_like(beyond, NONE, dtype=torch.float32))
    chosen = values[at].gather(1, found).float()
    # The first pass ranks fp32 as fp16, where all that is below its least number is -inf like a lane.
    chosen = torch.where(chosen.half() == NONE, NONE, chosen)
    keys = torch.cat((radix_keys(chosen), least), 1)
    candidate = torch.cat((torch.ones_like(found, dtype=torch.bool), there), 1)
    return torch.cat((found, beyond), 1).gather(1, best(sim, keys, candidate, found.shape[1]))


def indexer_forward_top_k(sim: Simulated, a: Arguments) -> dict[str, Any]:
    """The best keys of each row without the score matrix: {indices, logits[, softmax][, lse]}."""
    k, packed = int(a.top_k), is_packed(a, ValueError)
    require_within(ValueError, "top_k", a.wrapper.top_k, k)
    wants_lse = a.return_lse or a.lse_out is not None
    refused = a.microbatch_rows > 0 and (wants_lse or a.q_causal_offsets is not None)
    require(not refused, NotImplementedError, "microbatch_rows > 0 is not supported with lse or q_causal_offsets")
    found = forward_spans(a, packed, ValueError, TypeError)
    if not packed and 0 < a.microbatch_rows < a.q.shape[1]:
        whole = a.microbatch_rows % a.ratio == 0 and a.q.shape[1] % a.ratio == 0
        require(whole, ValueError, "microbatching requires multiples of ratio")
    q, keys, w = a.q.flatten(0, -3), a.k.flatten(0, -3)[:, 0], a.w.flatten(0, -2)
    ids = torch.full((q.shape[0], k), -1, device="cpu")
    logits = torch.full((q.shape[0], k), NONE, device="cpu")
    lse = torch.full((q.shape[0],), NONE, device="cpu")
    for span in found:
        rows = slice(span.q0, span.q1)
        scores = masked_scores(sim, a, span, q, keys, w)
        shown = visible(span, a.ratio)
        slots = min(k, span.keys)
        if slots == 0 or scores.shape[0] == 0:
            continue
        at = best(sim, radix_keys(scores), shown, slots, int(bool(a.deterministic)))
        # Used slots stand first; among themselves they have no order.
        order = torch.where(shown.gather(1, at), torch.rand(at.shape, generator=sim.random, device="cpu"), 2.0)
        at = at.gather(1, order.argsort(1))
        used = shown.gather(1, at)
        base = span.k0 if a.topk_indices_global else 0
        ids[rows, :slots] = torch.where(used, at + base, -1)
        logits[rows, :slots] = torch.where(used, scores.gather(1, at), NONE)
        lse[rows] = scores.logsumexp(1)
    shape = a.q.shape[:-2]
    result = {
        "indices": deliver(ids.view(*shape, k), a.out_indices, torch.int32),
        "logits": deliver(logits.view(*shape, k), a.out_logits, torch.float32),
    }
    if a.return_softmax is not False or a.softmax_out is not None:
        softmax = torch.where(ids >= 0, logits.softmax(1), 0.0)
        result["softmax"] = deliver(softmax.view(*shape, k), a.softmax_out, torch.float32)
    if wants_lse:
        result["lse"] = deliver(lse.view(shape), a.lse_out, torch.float32)
    return result


def local_to_global(sim: Simulated, a: Arguments) -> dict[str, Any]:
    """Local ids plus where the keys of their sequence begin; negative ones become -1: {indices}."""
    ids, packed = a.local_indices, is_packed(a, ValueError)
    require(ids.is_contiguous(), ValueError, "local_indices must be a contiguous CUDA tensor")
    require_dtype(TypeError, "local_indices", ids, *a.wrapper.dtypes_of("local_indices"))
    require(ids.ndim == (2 if packed else 3), ValueError, f"local_indices must be {2 if packed else 3}D")
    require_aligned(local_indices=ids)
    if packed:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            tensor = getattr(a, name)
            fine = tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.ndim == 1
            require(fine, ValueError, f"{name} must be a contiguous 1D CUDA int32 tensor")
        require_shape(ValueError, "cu_seqlens_k", a.cu_seqlens_k, a.cu_seqlens_q.shape)
        require_aligned(cu_seqlens_q=a.cu_seqlens_q, cu_seqlens_k=a.cu_seqlens_k)
        rows = torch.arange(ids.shape[0], dtype=torch.int32, device="cpu")
        sequence = (torch.searchsorted(a.cu_seqlens_q, rows, right=True) - 1).clamp(0, a.cu_seqlens_q.numel() - 2)
        begin = a.cu_seqlens_k[sequence][:, None]
    else:
        begin = torch.arange(ids.shape[0], device="cpu")[:, None, None] * int(a.seqlen_k)
    return {"indices": torch.where(ids >= 0, ids + begin, -1).int()}


def compactify(sim: Simulated, a: Arguments) -> dict[str, Any]:
    """The ids of each row that are not negative, in their order, then -1, and their number: {indices, topk_length}."""
    require_dtype(TypeError, "idxs", a.indices, *a.wrapper.dtypes_of("indices"))
    require(a.indices.ndim in {2, 3}, ValueError, "idxs must be a 2D or 3D CUDA tensor")
    ids = a.indices.contiguous().flatten(0, -2)
    require_aligned(idxs=ids)
    valid = ids >= 0
    order = (~valid).byte().argsort(dim=1, stable=True)
    return {"indices": torch.where(valid, ids, -1).gather(1, order), "topk_length": valid.sum(1, dtype=torch.int32)}
