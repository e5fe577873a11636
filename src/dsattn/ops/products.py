"""The three products of every operator, over keys that rows share or that each row has for itself.

Shared keys are [n, d]: one product for all rows of a block, with a mask of who sees what. Keys per row are [c, n, d]:
the gathered keys of each row's selection.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dsattn.ops.numerics import split_finite, spread_bad


def head_dots(queries: Float[Tensor, "c h d"], keys: Tensor) -> Float[Tensor, "c h n"]:
    """queries[i, h] . keys[j] for every row, head and key."""
    if keys.ndim == 3:
        return torch.bmm(queries, keys.transpose(1, 2))
    return (queries.flatten(0, 1) @ keys.T).unflatten(0, queries.shape[:2])


def mix_keys(factors: Float[Tensor, "c h n"], keys: Tensor, seen: Bool[Tensor, "c n"]) -> Float[Tensor, "c h d"]:
    """sum_j factors[i, h, j] * keys[j]; `factors` is 0 where `seen` is False; a bad key touches only who sees it."""
    if keys.ndim == 3:
        return torch.bmm(factors, keys)
    clean, bad = split_finite(keys)
    product = (factors.flatten(0, 1) @ clean).unflatten(0, factors.shape[:2])
    return spread_bad(product, seen, bad)


def mix_queries(
    factors: Float[Tensor, "c h n"],
    queries: Float[Tensor, "c h d"],
    seen: Bool[Tensor, "c n"],
    shared: bool,
) -> Tensor:
    """Sum over heads of factors[i, h, j] * queries[i, h], and over rows too if they share the keys.

    Returns [n, d] for shared keys, [c, n, d] for keys per row; a bad query touches only keys that its row sees.
    """
    if not shared:
        return torch.bmm(factors.transpose(1, 2), queries)
    clean, bad = split_finite(queries)
    product = factors.flatten(0, 1).T @ clean.flatten(0, 1)
    return spread_bad(product, seen.T, None if bad is None else bad.any(1))
