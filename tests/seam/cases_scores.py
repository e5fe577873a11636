"""Calls of the score wrappers: the forward, and the dense and sparse recomputations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from seam.cases import Arguments, Case, Numbers, int32, misaligned, part_of_a_wider, strided

LEFT, RIGHT = [0, 5, 7], [0, 9, 14]


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _forward()
    yield from _dense("dense_indexer_score_recompute")
    yield from _dense("dense_attn_score_recompute")
    yield from _sparse("sparse_indexer_score_recompute")
    yield from _sparse("sparse_attn_score_recompute")


def _batched(b: int, sq: int, sk: int, heads: int = 64, **rest: Any) -> Arguments:
    n = Numbers()
    return {"q": n.normal(b, sq, heads, 128), "k": n.normal(b, sk, 1, 128), "w": n.normal(b, sq, heads), **rest}


def _packed(cu_q: list[int], cu_k: list[int], heads: int = 64, **rest: Any) -> Arguments:
    n, lengths = Numbers(), {}
    for name, cu in (("q", cu_q), ("k", cu_k)):
        lengths[f"cu_seqlens_{name}"] = int32(*cu)
        lengths[f"max_seqlen_{name}"] = max(end - begin for begin, end in pairwise(cu))
    tensors = {"q": n.normal(cu_q[-1], heads, 128), "k": n.normal(cu_k[-1], 1, 128), "w": n.normal(cu_q[-1], heads)}
    return {**tensors, **lengths, **rest}


def _forward() -> Iterator[Case]:
    def case(name: str, make: Any, **rest: Any) -> Case:
        return Case("indexer_forward", name, make, **rest)

    for b in (1, 2, 3):
        for sq, sk, ratio in ((5, 9, 1), (9, 9, 1), (8, 3, 4), (12, 3, 4), (9, 5, 1), (13, 3, 4), (16, 3, 4)):
            for heads in (32, 64):
                yield case(
                    f"b {b}, {sq} x {sk}, ratio {ratio}, {heads} heads, no offsets",
                    lambda b=b, sq=sq, sk=sk, ratio=ratio, heads=heads: _batched(b, sq, sk, heads, ratio=ratio),
                )
    yield case("default ratio", lambda: _batched(1, 8, 3))
    yield case("scale", lambda: _batched(1, 8, 12, ratio=1, sm_scale=0.25))
    for ratio, first in ((1, 0), (1, 3), (2, 2), (4, 5), (1, -2), (1, 40)):
        yield case(
            f"offsets {first}, ratio {ratio}",
            lambda ratio=ratio, first=first: _batched(2, 6, 9, ratio=ratio, q_causal_offsets=int32(first, 0)),
            since=26,
        )
    for heads, ratio, first in ((32, 1, 1), (32, 1, 2), (32, 2, 2), (32, 1, 4), (64, 1, 1), (16, 1, 1), (16, 1, 3)):
        yield case(
            f"offset {first} over tiles, {heads} heads, ratio {ratio}",
            lambda heads=heads, ratio=ratio, first=first: _batched(
                1, 70 * ratio, 75, heads, ratio=ratio, q_causal_offsets=int32(first)
            ),
            arch="sm90" if heads == 16 else None,
            since=27 if heads == 16 else 26,
        )
    for heads in (4, 8, 16, 128, 48):
        yield case(f"{heads} heads", lambda heads=heads: _batched(1, 4, 4, heads, ratio=1), since=27)
    yield case(
        "offsets misaligned", lambda: _batched(1, 4, 4, ratio=1, q_causal_offsets=misaligned(int32(0))), since=26
    )
    yield case("offsets int64", lambda: _batched(1, 4, 4, ratio=1, q_causal_offsets=int32(0).long()), since=26)
    yield case("too few offsets", lambda: _batched(2, 4, 4, ratio=1, q_causal_offsets=int32(0)), since=26)
    yield case("one row", lambda: _batched(2, 1, 6, ratio=1))
    yield case("ratio 0", lambda: _batched(1, 4, 4, ratio=0), since=27)
    yield case("fp32 weights", lambda: _with(_batched(1, 4, 4, ratio=1), w=torch.float32))
    yield case("fp16", lambda: _with(_batched(1, 4, 4, ratio=1), q=torch.float16, k=torch.float16, w=torch.float16))
    yield case("q misaligned", lambda: _changed(_batched(1, 4, 4, ratio=1), "q", misaligned))
    yield case("w strided", lambda: _changed(_batched(1, 4, 4, ratio=1), "w", strided))
    yield case("other tuning", lambda: _batched(1, 4, 4, ratio=1, kv_stage=2), arch="sm90")
    yield case("lse", lambda: _batched(1, 4, 4, ratio=1, return_lse=True), since=27)
    for columns in (4, 5):
        yield case(
            f"own buffer of {columns} columns",
            lambda columns=columns: _batched(1, 4, columns, ratio=1, out=torch.full((1, 4, columns), 7.0)),
            since=27,
        )
    yield case("packed", lambda: _packed(LEFT, RIGHT, ratio=1))
    yield case("packed, ratio 4", lambda: _packed([0, 8, 20], [0, 2, 5], ratio=4))
    yield case("packed, more rows than keys", lambda: _packed([0, 9, 12], [0, 4, 12], ratio=1))
    yield case("packed, an empty segment", lambda: _packed([0, 4, 4, 6], [0, 4, 8, 8], ratio=1))
    yield case("packed, offsets", lambda: _packed(LEFT, RIGHT, ratio=1, q_causal_offsets=int32(4, 1)), since=26)
    yield case("packed, no lengths", lambda: _packed(LEFT, RIGHT, ratio=1, max_seqlen_k=None))
    yield case("packed, longer lengths", lambda: _packed(LEFT, RIGHT, ratio=1, max_seqlen_q=8, max_seqlen_k=12))
    yield case("packed, shorter rows", lambda: _packed(LEFT, RIGHT, ratio=1, max_seqlen_q=3))
    yield case("one cu_seqlens", lambda: _packed(LEFT, RIGHT, ratio=1, cu_seqlens_k=None))
    yield case("cu_seqlens a slice", lambda: _changed(_packed(LEFT, RIGHT, ratio=1), "cu_seqlens_q", misaligned))


def _with(arguments: Arguments, **dtypes: torch.dtype) -> Arguments:
    return {**arguments, **{name: arguments[name].to(dtype) for name, dtype in dtypes.items()}}


def _changed(arguments: Arguments, name: str, change: Any) -> Arguments:
    return {**arguments, name: change(arguments[name])}


def _is_bf16(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16


def _named(wrapper: str, arguments: Arguments) -> Arguments:
    """Arguments of the forward under the names of a dense recomputation."""
    w = arguments.pop("w")
    if "attn" in wrapper:
        return {**arguments, "lse": w.float() + 3, "softmax_scale": 0.1}
    return {**arguments, "weights": w}


def _dense(wrapper: str) -> Iterator[Case]:
    def case(name: str, make: Any, **rest: Any) -> Case:
        return Case(wrapper, name, lambda: _named(wrapper, make()), **rest)

    for b in (1, 2, 3):
        for sq, sk, ratio in ((5, 9, 1), (9, 9, 1), (9, 5, 1), (8, 2, 4), (70, 140, 1), (4, 200, 1)):
            yield case(
                f"b {b}, {sq} x {sk}, ratio {ratio}, no offsets",
                lambda b=b, sq=sq, sk=sk, ratio=ratio: _batched(b, sq, sk, ratio=ratio),
            )
    yield case("one head", lambda: _batched(1, 4, 6, 1), arch="sm90")
    # Blackwell's kernel for the indexer was written for few counts of heads, and does not say so.
    for heads in (2, 16, 32, 48, 128):
        other = {"arch": "sm90"} if "indexer" in wrapper and heads > 32 else {}
        first = {"first": lambda heads=heads: _named(wrapper, _batched(1, 3, 4, heads))} if heads == 128 else {}
        yield case(f"{heads} heads", lambda heads=heads: _batched(1, 4, 6, heads), **first, **other)
    if "indexer" in wrapper:
        yield case("scale", lambda: _batched(1, 4, 6, sm_scale=0.25))
    for offsets in ((0, 0), (3, 1), (-2, 60)):
        yield case(
            f"offsets {offsets}",
            lambda offsets=offsets: _batched(2, 6, 70, q_causal_offsets=int32(*offsets)),
            since=26,
        )
    yield case("offsets misaligned", lambda: _batched(1, 4, 4, q_causal_offsets=misaligned(int32(0))), since=26)
    yield case("one row", lambda: _batched(1, 1, 6))
    yield case("one row after four", lambda: _batched(1, 1, 6), first=lambda: _named(wrapper, _batched(1, 4, 6)))
    for name, columns in (("out", 70), ("denom_out", None)):
        shape = (1, 4) if columns is None else (1, 4, columns)
        yield case(f"own {name}", lambda name=name, shape=shape: {**_batched(1, 4, 70), name: torch.full(shape, 7.0)})
        for change in (strided, part_of_a_wider):
            yield case(
                f"own {name}, {change.__name__}",
                lambda name=name, shape=shape, change=change: {
                    **_batched(1, 4, 70),
                    name: change(torch.full(shape, 7.0)),
                },
            )
    yield case("packed", lambda: _packed(LEFT, RIGHT))
    yield case(
        "packed, long",
        lambda: _packed([0, 5, 75], [0, 150, 300], max_seqlen_k=300),
        defects=("sm100-dense-score-slots",),
    )
    yield case("packed, no lengths", lambda: _packed(LEFT, RIGHT, max_seqlen_q=None, max_seqlen_k=None))
    yield case("packed, longer lengths", lambda: _packed(LEFT, RIGHT, max_seqlen_q=8, max_seqlen_k=12))
    yield case(
        "packed, an empty segment",
        lambda: _packed([0, 4, 4, 6], [0, 4, 8, 8]),
        defects=("sm100-dense-score-slots",),
    )
    yield case("packed, offsets", lambda: _packed(LEFT, RIGHT, q_causal_offsets=int32(4, 1)), since=26)
    yield case("packed, one segment, offsets", lambda: _packed([0, 5], [0, 9], q_causal_offsets=int32(4)), since=26)
    yield case("packed, one row", lambda: _packed([0, 1, 6], [0, 4, 12]))
    yield case("fp16", lambda: {n: x.half() if _is_bf16(x) else x for n, x in _batched(1, 4, 6).items()})
    yield case("cu_seqlens a slice", lambda: _changed(_packed(LEFT, RIGHT), "cu_seqlens_k", misaligned))
    yield case("cu_seqlens int64", lambda: _changed(_packed(LEFT, RIGHT), "cu_seqlens_k", lambda x: x.long()))
    yield case("one cu_seqlens", lambda: _packed(LEFT, RIGHT, cu_seqlens_q=None))


def _slots(
    wrapper: str, b: int, sq: int, sk: int, *, used: int = 5, topk: int = 128, heads: int = 64, width: int = 64
) -> Arguments:
    n, kind = Numbers(), "attn" if "attn" in wrapper else "indexer"
    q, k, w = n.normal(b, sq, heads, width), n.normal(b, sk, width), n.normal(b, sq, heads)
    last = {"lse": w.float() + 3, "softmax_scale": 0.1} if kind == "attn" else {"weights": w}
    return {f"q_{kind}": q, f"k_{kind}": k, **last, "topk_indices": n.ids(b, sq, topk, used=min(used, sk), keys=sk)}


def _global(arguments: Arguments, sk: int) -> Arguments:
    ids = arguments["topk_indices"]
    begin = torch.arange(ids.shape[0])[:, None, None] * sk
    return {**arguments, "topk_indices": torch.where(ids >= 0, ids + begin, -1).to(ids.dtype)}


def _set(arguments: Arguments, *place: int, to: int, **rest: Any) -> Arguments:
    arguments["topk_indices"][place] = to
    return {**arguments, **rest}


def _sparse(wrapper: str) -> Iterator[Case]:
    def case(name: str, make: Any, **rest: Any) -> Case:
        return Case(wrapper, name, make, **rest)

    def slots(*args: Any, **rest: Any) -> Arguments:
        return _slots(wrapper, *args, **rest)

    for b in (1, 2, 3):
        yield case(f"b {b}, local ids", lambda b=b: slots(b, 4, 9))
        yield case(f"b {b}, local ids, said", lambda b=b: {**slots(b, 4, 9), "topk_indices_global": False})
        yield case(f"b {b}, global ids", lambda b=b: _global(slots(b, 4, 9), 9))
        yield case(f"b {b}, global ids, said", lambda b=b: {**_global(slots(b, 4, 9), 9), "topk_indices_global": True})
    yield case("lengths", lambda: {**slots(2, 3, 9), "topk_length": int32(5, 2, 0, 1, 5, 3).view(2, 3)})
    yield case("no slot used", lambda: slots(1, 3, 9, used=0))
    yield case("holes", lambda: _set(slots(1, 3, 9), 0, 0, 1, to=-1))
    yield case(
        "a hole before the length", lambda: _set(slots(1, 3, 9), 0, 0, 1, to=-1, topk_length=int32(5, 5, 5)[None])
    )
    yield case("an id past the keys", lambda: _set(slots(1, 3, 9), 0, 0, 1, to=50))
    for topk in (64, 96, 192, 200, 256, 384):
        yield case(
            f"{topk} slots", lambda topk=topk: slots(1, 3, 300, topk=topk, used=topk), defects=("sm100-score-slots",)
        )
    for heads in (2, 16, 48, 96, 128):
        yield case(f"{heads} heads", lambda heads=heads: slots(1, 3, 9, heads=heads), defects=("sm100-score-slots",))
    yield case("one head", lambda: slots(1, 3, 9, heads=1), arch="sm90")
    inside = ("sm100-attn-score-topk-length", "sm100-score-shared-memory")
    for width, heads in ((512, 64), (512, 128), (576, 64), (576, 128)):
        for topk in (128, 1024) if "attn" in wrapper else ():
            yield case(
                f"lengths, {topk} slots, width {width}, {heads} heads",
                lambda width=width, heads=heads, topk=topk: {
                    **slots(1, 3, 9, topk=topk, heads=heads, width=width),
                    "topk_length": int32(5, 2, 0)[None],
                },
                defects=inside if heads == 128 and width == 512 else inside[:1],
            )
    yield case("one row", lambda: slots(1, 1, 9))
    yield case("one row after two", lambda: slots(1, 1, 9), first=lambda: slots(1, 2, 9))
    yield case("own out", lambda: {**slots(1, 3, 9), "out": torch.full((1, 3, 128), 7.0)})
    for change in (strided, part_of_a_wider):
        yield case(
            f"own out, {change.__name__}",
            lambda change=change: {**slots(1, 3, 9), "out": change(torch.full((1, 3, 128), 7.0))},
        )
    yield case("int64 ids", lambda: _changed(slots(1, 3, 9), "topk_indices", lambda x: x.long()))
    yield case("int64 lengths", lambda: {**slots(1, 3, 9), "topk_length": int32(5, 5, 5)[None].long()})
    yield case("fp16", lambda: {n: x.half() if _is_bf16(x) else x for n, x in slots(1, 3, 9).items()})
    yield case("fp32", lambda: {n: x.float() if _is_bf16(x) else x for n, x in slots(1, 3, 9).items()})
    yield case("ids misaligned", lambda: _changed(slots(1, 3, 9), "topk_indices", misaligned))
