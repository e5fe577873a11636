"""The sparse score kernels, simulated: the student over selected keys, and the teacher over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsattn.backends.cudnn.simulator.math import attention_mass, indexer_scores
from dsattn.backends.cudnn.simulator.state import (
    PROCESSORS,
    Arguments,
    Simulated,
    blocks,
    require,
    require_aligned,
    require_dtype,
    require_grid,
    require_shape,
    require_unit_stride,
    require_within,
    unwritten,
)

# What the kernels add to, or ask of, the sum that they divide by.
EPSILON = 1e-10
# Slots that one pass of Hopper's threads covers.
SM90_PASS = 128
# Slots of a block of Blackwell's kernels; half of that in the attention's, but for the sizes that it is tuned for.
SM100_BLOCK = 128
TUNED = {(heads, width) for heads in (64, 128) for width in (512, 576)}


Score = Callable[[Tensor, Tensor, Tensor], Tensor]


class Slots(NamedTuple):
    """The slots of all rows, each [rows, slots]: the flat key, whether it is loaded, and whether the slot counts."""

    key: Tensor
    loaded: Tensor
    counts: Tensor


def sparse_indexer_scores(sim: Simulated, a: Arguments) -> dict[str, Any]:
    """Softmax of the indexer scores over the slots of each row: {predict}."""
    slots = _checked_slots(sim, a, a.q_indexer, a.k_indexer, a.weights, is_attention=False)

    def score(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return indexer_scores(sim, q, keys, weights, 1.0)

    values = _slot_values(sim, slots, a.q_indexer, a.k_indexer, a.weights, score)
    values = values.masked_fill(~slots.counts, -torch.inf)
    peak = values.amax(1, keepdim=True)
    mass = torch.where(slots.counts & (peak != -torch.inf), torch.exp(values - peak), 0.0)
    return {"predict": _out(sim, a, _divided(sim, a, mass, threshold=0.0))}


def sparse_attn_scores(sim: Simulated, a: Arguments) -> dict[str, Any]:
    """Attention mass of the slots of each row, summed over the heads, divided by its sum: {target}."""
    slots = _checked_slots(sim, a, a.q_attn, a.k_attn, a.lse, is_attention=True)

    def score(q: Tensor, keys: Tensor, lse: Tensor) -> Tensor:
        return attention_mass(sim, q, keys, lse, float(a.softmax_scale))

    mass = _slot_values(sim, slots, a.q_attn, a.k_attn, a.lse, score).masked_fill(~slots.counts, 0.0)
    return {"target": _out(sim, a, _divided(sim, a, mass, threshold=EPSILON))}


def _divided(sim: Simulated, a: Arguments, mass: Tensor, *, threshold: float) -> Tensor:
    """The masses of each row divided by their sum, with the guard of the architecture."""
    slots = mass.shape[1]
    whole = slots // SM90_PASS * SM90_PASS if sim.sm90 else slots
    total = mass[:, :whole][:, sim.order(whole)].sum(1, keepdim=True)
    result = torch.zeros_like(mass) if a.wrapper.tail == "zero" else unwritten(mass.shape)
    if sim.sm90:
        result[:, :whole] = mass[:, :whole] / (total + EPSILON)
    else:
        # The comparison is false for NaN, too: such a row is 0 in the teacher.
        result[:, :whole] = torch.where((total > threshold) | (total.isnan() & (threshold == 0.0)), mass / total, 0.0)
    return result


def _slot_values(sim: Simulated, slots: Slots, q: Tensor, k: Tensor, aux: Tensor, score: Score) -> Tensor:
    """The score of every slot, [rows, slots]; a key that is not loaded is zeros on Hopper, stale on Blackwell."""
    q, k, aux = q.flatten(0, 1), k.flatten(0, 1), aux.flatten(0, 1)
    if sim.strikes("sm100-score-race") and len(q) > PROCESSORS:
        # The next query of the same block overwrites the weights of the one before while they are read.
        aux = torch.cat((aux[PROCESSORS:], aux[len(aux) - PROCESSORS :]))
    values = torch.empty(slots.key.shape, device="cpu")
    for rows in blocks(q.shape[0], slots.key.shape[1] * (q.shape[1] + q.shape[2])):
        keys = k[slots.key[rows].clamp(0, max(k.shape[0] - 1, 0))].float()
        keys = torch.where(slots.loaded[rows, :, None], keys, 0.0)
        values[rows] = score(q[rows], keys, aux[rows])
    if sim.sm90:
        return values
    width = slots.key.shape[1]
    if sim.has("sm100-score-slots") and (width & (width - 1) or 512 % q.shape[1]):
        values.fill_(torch.nan)
    return values.masked_fill(~slots.loaded, torch.nan)


def _checked_slots(sim: Simulated, a: Arguments, q: Tensor, k: Tensor, aux: Tensor, *, is_attention: bool) -> Slots:
    name = "lse" if is_attention else "weights"
    ids, length = a.topk_indices, a.topk_length
    suffix = "attn" if is_attention else "indexer"
    for argument in (f"q_{suffix}", f"k_{suffix}", name):
        require_dtype(ValueError, argument, getattr(a, argument), *a.wrapper.dtypes_of(argument))
    require_dtype(ValueError, "topk_indices", ids, *a.wrapper.dtypes_of("topk_indices"))
    ranks = (q.ndim, k.ndim, aux.ndim, ids.ndim)
    require(ranks == (4, 3, 3, 3), ValueError, f"q, k, {name}, topk_indices must have 4, 3, 3, 3 dimensions")
    batch, rows, heads, width = q.shape
    require_shape(ValueError, "k", k, (batch, k.shape[1], width))
    require_shape(ValueError, name, aux, (batch, rows, heads))
    require(ids.shape[:2] == (batch, rows), ValueError, f"topk_indices leading dims must be {(batch, rows)}")
    if length is not None:
        require_dtype(ValueError, "topk_length", length, *a.wrapper.dtypes_of("topk_length"))
        require_shape(ValueError, "topk_length", length, (batch, rows))
    require_within(AssertionError, "heads", a.wrapper.heads, heads)
    require_within(AssertionError, "head_dim", a.wrapper.widths, width)
    require_grid(a.wrapper, batch=batch, rows=rows)
    block, reads_length = _attention_blocks(sim, heads, width, ids.shape[2]) if is_attention else (SM100_BLOCK, True)
    if not reads_length:
        length = None
    broken = is_attention and length is not None and sim.has("sm100-attn-score-topk-length")
    require(not broken, RuntimeError, "the kernel does not compile: a copy out of tensor memory stands in a branch")
    too_much = is_attention and sim.has("sm100-score-shared-memory") and (heads, width) == (128, 512)
    require(not too_much, RuntimeError, "CUDA error: out of shared memory")
    if sim.sm90:
        # More slots than that are taken, whole passes of them are computed.
        text = "Expected size in shape to be strictly positive, but got 0"
        require(ids.shape[2] >= SM90_PASS, ValueError, text)
    else:
        require(ids.shape[2] % block == 0, AssertionError, f"topk ({ids.shape[2]}) must be a multiple of {block}")
    require_aligned(q=q, k=k, topk_indices=ids, topk_length=length, **({} if sim.sm90 else {name: aux}))
    scale = float(a.softmax_scale) if is_attention else 1.0
    sim.launch(a.wrapper, (width, heads, ids.shape[2], scale, length is not None, bool(a.topk_indices_global)), rows)
    return _slots(ids.long(), length, k.shape[1], bool(a.topk_indices_global))


def _attention_blocks(sim: Simulated, heads: int, width: int, slots: int) -> tuple[int, bool]:
    """Slots of a block of Blackwell's attention kernel without topk_length, and whether the wrapper passes that on.

    It does where the kernel with topk_length is tuned to other tiles. Both are the same rule in every release.
    """
    if sim.sm90 or (heads, width) not in TUNED:
        large = sim.since("1.32") and (heads, width) == (96, 576)
        return (SM100_BLOCK if large else SM100_BLOCK // 2), sim.sm90
    return SM100_BLOCK, (heads, width) != (128, 512) or slots > 512


def _slots(ids: Tensor, length: Tensor | None, keys: int, is_global: bool) -> Slots:
    batch = torch.arange(ids.shape[0], device="cpu")[:, None, None] * keys
    local = ids - batch if is_global else ids
    loaded = (local >= 0) & (local < keys)
    slot = torch.arange(ids.shape[2], device="cpu")
    counts = ids >= 0 if length is None else slot < length[..., None]
    return Slots(*((local + batch).flatten(0, 1), loaded.flatten(0, 1), counts.flatten(0, 1)))


def _out(sim: Simulated, a: Arguments, value: Tensor) -> Tensor:
    value = value.view(a.topk_indices.shape)
    if a.out is None:
        return value
    require_shape(ValueError, "out", a.out, value.shape)
    require_dtype(ValueError, "out", a.out, "float32")
    if not a.out.is_contiguous() and sim.has("score-out-not-written"):
        return value
    if not sim.sm90 and not sim.since("1.32"):
        require_unit_stride(out=a.out)
    return a.out.copy_(value)
