"""What is kept of a tensor: little, and nothing that another order of sums would change by more than rounding.

A digest is a JSON object. Of floats it has the places of what is not finite, the largest absolute value, sums of
absolute values over equal parts, and values at places that the shape decides. Of integers it has a hash of all. Of a
selection it has the ids of some rows as sets, since their order and the choice among equal scores are left open.
"""

from __future__ import annotations

import hashlib
import math
import random
from typing import Any

import torch
from torch import Tensor

Digest = dict[str, Any]

NOT_FINITE = ("nan", "+inf", "-inf")
"""Names of the places that a digest of floats has, where there are any."""
PARTS = 16
SAMPLES = 32
NEAR = 2.0**-12
"""Scores this near to the least selected one, relative to the row's largest, may be selected in its place."""
# Padding of a log-sum-exp is larger, and would hide the numbers in any sum.
_FAR = 1e20
# Ids that a digest of a selection keeps, beyond those of one row.
_IDS = 2048
_DIGITS = 6


def name_of(dtype: torch.dtype) -> str:
    """The dtype as in `torch.float32`, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def digest(x: Tensor) -> Digest:
    """The digest of a result; a selection has its own, `selection`."""
    x = x.detach().cpu()
    found = _header(x)
    if not x.dtype.is_floating_point:
        return {**found, "negative": places(x < 0) if x.dtype != torch.bool else None, "hash": hash_of(x)}
    values = x.flatten().double()
    for name, mask in zip(NOT_FINITE, (values.isnan(), values == math.inf, values == -math.inf), strict=True):
        if mask.any():
            found[name] = places(mask)
    finite = values.isfinite()
    sizes = torch.where(finite, values, 0.0).abs()
    at = sampled_places(tuple(x.shape))
    kept = [_short(float(values[i])) if finite[i] else None for i in at]
    sums = [_short(float(part.sum())) for part in sizes.tensor_split(PARTS)]
    return {**found, "max": _short(float(sizes.max()) if len(sizes) else 0.0), "sums": sums, "values": kept}


def selection(ids: Tensor, scores: Tensor, lengths: Tensor) -> Digest:
    """The digest of the ids of a top-k call.

    Args:
        ids: [rows, k], columns of `scores`, negative where unused.
        scores: [rows, columns].
        lengths: [rows], the columns that each row may select from.
    """
    ids, scores, lengths = (x.detach().cpu() for x in (ids, scores, lengths))
    rows = range(len(ids))
    most = max(1, _IDS // max(1, ids.shape[-1]))
    if len(rows) > most:
        rows = sorted(random.Random(f"{tuple(ids.shape)}").sample(rows, most))
    kept = [[row, *_row(ids[row], scores[row, : int(lengths[row])].double())] for row in rows]
    return {**_header(ids), "negative": places(ids < 0), "rows": kept}


def _row(ids: Tensor, scores: Tensor) -> tuple[list[int], list[int]]:
    """The selected columns, ascending, and all columns between which rounding may have decided."""
    chosen = ids[ids >= 0].sort().values
    inside = chosen[chosen < len(scores)].long()
    if not len(inside) or len(inside) >= len(scores):
        return chosen.tolist(), []
    least = scores[inside].min()
    finite = scores[scores.isfinite()].abs()
    reach = NEAR * (finite.max() if len(finite) else 0.0)
    near = (scores == least) | ((scores - least).abs() <= reach)
    return chosen.tolist(), near.nonzero()[:, 0].tolist()


def short(x: Any) -> Any:
    """An argument as a recording has it: of a tensor shape and dtype, and of its numbers a sum or a hash."""
    if not isinstance(x, Tensor):
        return x if x is None or isinstance(x, (bool, int, float, str)) else str(x)
    x = x.detach().cpu()
    found = _header(x)
    if not x.dtype.is_floating_point:
        return {**found, "hash": hash_of(x)}
    values = x.double().abs().flatten()
    values = values[values < _FAR]
    largest = float(values.max()) if len(values) else 0.0
    return {**found, "counted": len(values), "max": _short(largest), "sum": _short(float(values.sum()))}


def sampled_places(shape: tuple[int, ...]) -> list[int]:
    """Which elements of a flat tensor a digest keeps: the same for every tensor of the shape.

    Heads, widths and slots are padded at their ends, so most samples lie near the start of the last two axes.
    """
    count = math.prod(shape)
    if count <= SAMPLES:
        return list(range(count))
    drawn, found = random.Random(f"{shape}"), []
    for number in range(SAMPLES):
        place = 0
        for axis, size in enumerate(shape):
            low = axis >= len(shape) - 2 and number % 4
            at = int((size + 1) ** drawn.random()) - 1 if low else drawn.randrange(size)
            place = place * size + min(at, size - 1)
        found.append(place)
    return found


def places(mask: Tensor) -> list[int | str]:
    """How many elements are set, and a hash of which."""
    return [int(mask.sum()), _hash(_packed(mask))]


def hash_of(x: Tensor) -> str:
    """A hash of all bits of a tensor."""
    return _hash(bits(x))


def bits(x: Tensor) -> Tensor:
    """All bits of a tensor, flat, uint8."""
    return x.detach().contiguous().flatten().view(torch.uint8)


def _header(x: Tensor) -> Digest:
    return {"dtype": name_of(x.dtype), "shape": list(x.shape)}


def _packed(mask: Tensor) -> Tensor:
    flat = mask.flatten().to(torch.int32)
    flat = torch.cat((flat, flat.new_zeros(-len(flat) % 8))).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.int32, device="cpu")).sum(1).to(torch.uint8)


def _hash(data: Tensor) -> str:
    return hashlib.blake2s(bytes(data.tolist()), digest_size=6).hexdigest()


def _short(x: float) -> float:
    return float(f"{x:.{_DIGITS}g}")
