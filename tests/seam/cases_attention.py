"""Calls of the sparse attention wrappers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from seam.cases import Arguments, Case, Numbers, int32, misaligned, strided


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _backward()
    yield from _forward()


def _call(
    rows: int = 3, keys: int = 9, *, heads: int = 64, width: int = 512, slots: int = 64, **rest: Any
) -> Arguments:
    n = Numbers()
    return {
        "q": n.normal(rows, heads, width) / 4,
        "kv": n.normal(keys, width) / 4,
        "out": n.normal(rows, heads, 512) / 4,
        "dout": n.normal(rows, heads, 512) / 4,
        "lse": n.normal(rows, heads, dtype=torch.float32) + 3,
        "attn_sink": n.normal(heads, dtype=torch.float32),
        "topk_idxs": n.ids(rows, slots, used=min(5, keys), keys=keys),
        **rest,
    }


def _backward() -> Iterator[Case]:
    def case(name: str, make: Any, **rest: Any) -> Case:
        return Case("sparse_attention_backward", name, make, **rest)

    for width in (512, 576):
        for heads in (2, 16, 32, 64, 96, 128):
            yield case(f"width {width}, {heads} heads", lambda w=width, h=heads: _call(heads=h, width=w))
    yield case("width 256", lambda: _call(width=256), since=27)
    yield case("one head", lambda: _call(heads=1), arch="sm90")
    yield case("scale", lambda: _call(softmax_scale=0.1))
    yield case("lengths", lambda: _call(topk_length=int32(5, 2, 1)))
    yield case("a row without keys", lambda: _call(topk_length=int32(5, 0, 1)), since=29)
    yield case("ids past the keys", lambda: _set(_call(), 20), since=29)
    yield case("a length past the slots", lambda: _call(slots=64, topk_length=int32(90, 2, 1)), since=29)
    yield case("no sink", lambda: _call(attn_sink=torch.full((64,), -math.inf)))
    yield case("lse inf in a row", lambda: _filled(_call(), math.inf), since=29)
    yield case("lse -inf in a row", lambda: _filled(_call(), -math.inf), since=29)
    yield case("100 slots", lambda: _call(slots=100))
    yield case("128 slots, 128 heads", lambda: _call(slots=128, heads=128))
    for name in ("dq", "dkv"):
        like = {"dq": "q", "dkv": "kv"}[name]
        yield case(f"own {name}", lambda n=name, k=like: {**_call(), n: torch.full_like(_call()[k], 3.0)})
        yield case(
            f"own strided {name}", lambda n=name, k=like: {**_call(), n: strided(torch.full_like(_call()[k], 3.0))}
        )
        yield case(
            f"own {name} fp32",
            lambda n=name, k=like: {**_call(), n: torch.full_like(_call()[k], 3.0).float()},
            arch="sm100",
        )
    for name in ("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs"):
        yield case(f"{name} misaligned", lambda n=name: {**_call(), n: misaligned(_call()[n])})
        yield case(f"{name} strided", lambda n=name: {**_call(), n: strided(_call()[n])})
    yield case("fp16", lambda: {n: x.half() if x.dtype == torch.bfloat16 else x for n, x in _call().items()})
    yield case("fp32", lambda: {n: x.float() if x.dtype == torch.bfloat16 else x for n, x in _call().items()})
    yield case("kv of another width", lambda: _call(kv=Numbers().normal(9, 576)), since=27)
    yield case("ids int64", lambda: _call(topk_idxs=_call()["topk_idxs"].long()))
    yield case("deterministic", lambda: _call(deterministic=True), since=29)
    yield case("deterministic, 48 heads", lambda: _call(heads=48, deterministic=True), since=29)


def _set(arguments: Arguments, to: int) -> Arguments:
    arguments["topk_idxs"][0, 1] = to
    return arguments


def _filled(arguments: Arguments, value: float) -> Arguments:
    arguments["lse"][1] = value
    return arguments


def _forward() -> Iterator[Case]:
    def case(name: str, make: Any) -> Case:
        return Case("sparse_attention_forward", name, lambda: _kept(make()), arch="sm100", since=29)

    yield Case("sparse_attention_forward", "on Hopper", lambda: _kept(_call()), arch="sm90", since=29)
    for heads, width in ((64, 512), (64, 576), (128, 512), (128, 576), (32, 512)):
        yield case(f"width {width}, {heads} heads", lambda h=heads, w=width: _call(heads=h, width=w))
    yield case("no sink", lambda: _call(attn_sink=None))
    yield case("scale", lambda: _call(softmax_scale=0.1))
    yield case("100 slots", lambda: _call(slots=100))
    yield case("lengths", lambda: _call(topk_length=int32(5, 0, 1)))
    yield case("holes", lambda: _set(_call(), -1))
    yield case("ids past the keys", lambda: _set(_call(), 20))
    yield case("no rows", lambda: _call(0))
    yield case("no slots", lambda: _call(slots=0))
    for count in (64, 512):
        yield case(f"indexer_topk {count}", lambda count=count: _call(slots=512, indexer_topk=count))
    for name in ("q", "kv", "attn_sink", "topk_idxs"):
        yield case(f"{name} misaligned", lambda n=name: {**_call(), n: misaligned(_call()[n])})
        yield case(f"{name} strided", lambda n=name: {**_call(), n: strided(_call()[n])})
    yield case("fp32", lambda: {n: x.float() if x.dtype == torch.bfloat16 else x for n, x in _call().items()})
    yield case("ids int64", lambda: _call(topk_idxs=_call()["topk_idxs"].long()))


def _kept(arguments: Arguments) -> Arguments:
    return {name: value for name, value in arguments.items() if name not in ("out", "dout", "lse")}
