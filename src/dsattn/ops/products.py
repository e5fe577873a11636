"""The three products of every operator, over keys that rows share or that each row has for itself.

Shared keys are [n, d]: one product for all rows of a block, with a mask of who sees what. Keys per row are [c, n, d]:
the gathered keys of each row's selection.

Large fp32 products on x86 CPUs run by oneDNN, which uses AVX-512 on all of them. MKL, which is behind `@`, does so on
Intel's alone: elsewhere it has half the speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dsattn.ops.numerics import split_finite, spread_bad

# From so many multiplications on a product goes to oneDNN.
_LARGE = 2**22
# oneDNN compiles code for every shape and keeps it (0.3 ms, 0.6 MB). So numbers of keys and rows, which vary, are cut
# into parts of one size, one part on a grid, and a rest that does not go there.
_PART = 1024
_GRID = 64
# It adds the terms of a sum one by one: errors grow with their number. Those of dots become factors in a softmax.
_DOT_TERMS = 192


def head_dots(queries: Float[Tensor, "c h d"], keys: Tensor, short_sums: bool = True) -> Float[Tensor, "c h n"]:
    """queries[i, h] . keys[j] for every row, head and key.

    Args:
        queries: of the rows.
        keys: of all rows or per row.
        short_sums: whether rounding errors of long sums would be felt, as where results are not rounded to 16 bits.
    """
    shared, (rows, heads, d) = keys.ndim == 2, queries.shape
    large = _large(keys, heads * d * keys.shape[-2] * (rows if shared else 1))
    width = _DOT_TERMS if large and short_sums else d
    dots = _shared_dots if shared else _row_dots
    pairs = zip(queries.split(width, -1), keys.split(width, -1), strict=True)
    return reduce(Tensor.add_, (dots(*pair, large) for pair in pairs)).contiguous()


def mix_keys(
    factors: Float[Tensor, "c h n"], keys: Tensor, seen: Bool[Tensor, "c n"], width: int | None = None
) -> Float[Tensor, "c h d"]:
    """sum_j factors[i, h, j] * keys[j, :width]; `factors` is 0 where `seen` is False.

    A bad key touches only who sees it.
    """
    if keys.ndim == 3:
        if not _large(keys, factors[0].numel() * keys.shape[2]):
            return torch.bmm(factors, keys[..., :width])
        # Columns are cut off at the end: a right factor with gaps would have to be copied.
        return _by_row(lambda f, k: _long_product(f, k, True)[:, :width], factors, keys)
    clean, bad = split_finite(keys[:, :width])
    product = _long_product(factors.flatten(0, 1), clean, _large(clean, factors[:, :, 0].numel() * clean.numel()))
    return spread_bad(product.unflatten(0, factors.shape[:2]), seen, bad)


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
        if not _large(factors, factors[0].numel() * queries.shape[2]):
            return torch.bmm(factors.transpose(1, 2), queries)
        return _by_row(lambda f, q: _product(f.T, q, True), factors, queries)
    clean, bad = split_finite(queries)
    by_key, rows = factors.flatten(0, 1).T, clean.flatten(0, 1)
    large = _large(rows, rows.numel() * len(by_key))
    product = torch.cat([_long_product(by_key[part], rows, large) for part in _parts(len(by_key), large)])
    return spread_bad(product, seen.T, None if bad is None else bad.any(1))


def _shared_dots(queries: Float[Tensor, "c h d"], keys: Float[Tensor, "n d"], large: bool) -> Float[Tensor, "c h n"]:
    rows = queries.flatten(0, 1)
    dots = [_product(rows, keys[part].T, large) for part in _parts(len(keys), large)]
    return (dots[0] if len(dots) == 1 else torch.cat(dots, 1)).unflatten(0, queries.shape[:2])


def _row_dots(queries: Float[Tensor, "c h d"], keys: Float[Tensor, "c n d"], large: bool) -> Float[Tensor, "c h n"]:
    if not large:
        return torch.bmm(queries, keys.transpose(1, 2))
    if queries.shape[1] >= _GRID:
        return _by_row(lambda q, k: _product(q, k.T, True), queries, keys)
    # Few queries are the faster right factor.
    return _by_row(lambda q, k: _product(k, q.T, True).T, queries, keys)


def _long_product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], large: bool) -> Float[Tensor, "m n"]:
    """a @ b, where k may be any number."""
    return reduce(Tensor.add_, (_product(a[:, part], b[part], large) for part in _parts(len(b), large)))


def _product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], large: bool) -> Float[Tensor, "m n"]:
    """a @ b; as part of a large product by oneDNN, if its shape is one of few."""
    if not large or any(size % (8 if size < _PART // 2 else _GRID) for size in (*a.shape, b.shape[1])):
        return a @ b
    # Gaps between the rows of `a` are fine, all others make it many times slower.
    if not (a.T.is_contiguous() or (a.stride(1) == 1 and a.stride(0) >= a.shape[1])):
        a = a.contiguous()
    if not (b.is_contiguous() or b.T.is_contiguous()):
        b = b.contiguous()
    return _onednn()(a, b.T, None, "none", [], "")


def _large(x: Tensor, multiplications: int) -> bool:
    """Whether a product of tensors like `x` is one for oneDNN."""
    fits = multiplications >= _LARGE and x.dtype == torch.float32 and x.device.type == "cpu"
    return fits and _onednn() is not None


@lru_cache(maxsize=1)
def _onednn() -> Any:
    """The operator of PyTorch that runs one product by oneDNN; None if there is none, or not on an x86 CPU."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX") or not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _parts(n: int, large: bool) -> list[slice]:
    """Ranges of `_PART`, one of what is left of it on the grid, and one of the rest; all in one if it is not large."""
    if not large:
        return [slice(0, n)]
    ends = [*range(_PART, n + 1, _PART), n // _GRID * _GRID, n]
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True) if end > begin]


def _by_row(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """product(a[i], b[i]) for every row; that of a single row is not copied."""
    rows = [product(*pair) for pair in zip(a.unbind(), b.unbind(), strict=True)]
    return torch.stack(rows) if len(rows) > 1 else rows[0][None]
