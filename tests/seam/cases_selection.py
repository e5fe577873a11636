"""Calls of the selecting wrappers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from seam.cases import Arguments, Case, Numbers, int32, misaligned, strided


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _top_k()
    yield from _global_ids()
    yield from _compact()
    yield from _fused()


def _rows(rows: int, columns: int, k: int, *lengths: int, **rest: Any) -> Arguments:
    values = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0), device="cpu")
    return {"input_values": values, "seq_lens": int32(*(lengths or [columns] * rows)), "top_k": k, **rest}


def _top_k() -> Iterator[Case]:
    def case(name: str, make: Any, **rest: Any) -> Case:
        return Case("indexer_top_k", name, make, selects=("indices", "values"), **rest)

    yield case("long rows", lambda: _rows(3, 64, 8))
    yield case("short rows", lambda: _rows(3, 64, 8, 0, 5, 8))
    yield case("prefixes", lambda: _rows(3, 64, 8, 20, 9, 64))
    yield case("groups of two", lambda: _rows(4, 64, 8, 20, 30, next_n=2))
    yield case("groups that do not fit", lambda: _rows(3, 64, 8, 20, next_n=2))
    yield case("no values", lambda: _rows(3, 64, 8, return_val=False))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        # bf16 of 64 random numbers has ties: whole numbers have none.
        yield case(
            f"{dtype}", lambda dtype=dtype: {**_rows(1, 64, 8), "input_values": torch.arange(64.0)[None].to(dtype)}
        )
    yield case("lengths int64", lambda: {**_rows(3, 64, 8), "seq_lens": int32(64, 64, 64).long()})
    for k in (0, 1, 2048, 2049):
        yield case(f"top_k {k}", lambda k=k: _rows(2, 2100, k))
    yield case("strided", lambda: {**_rows(3, 64, 8), "input_values": strided(_rows(3, 64, 8)["input_values"])})
    yield case("misaligned", lambda: {**_rows(3, 64, 8), "input_values": misaligned(_rows(3, 64, 8)["input_values"])})
    yield case("-inf in front", lambda: _masked(_rows(3, 64, 8)))
    yield case("no rows", lambda: {**_rows(1, 64, 8), "input_values": torch.zeros(0, 64), "seq_lens": int32()})
    yield case("no columns", lambda: {**_rows(1, 64, 8, 0), "input_values": torch.zeros(1, 0)}, since=32)
    for rule in (1, 2, 3):
        yield case(
            f"ties by rule {rule}",
            lambda rule=rule: {**_rows(2, 64, 8, tie_break=rule), "input_values": torch.ones(2, 64)},
            since=31,
        )


def _masked(arguments: Arguments) -> Arguments:
    arguments["input_values"][:, :20] = -math.inf
    return arguments


def _global_ids() -> Iterator[Case]:
    def case(name: str, make: Any) -> Case:
        return Case("local_to_global", name, make)

    def ids() -> torch.Tensor:
        return Numbers().ids(2, 3, 8, used=5, keys=9)

    def packed(**rest: Any) -> Arguments:
        cu = {"cu_seqlens_q": int32(0, 4, 6), "cu_seqlens_k": int32(0, 9, 20)}
        return {"local_indices": ids().flatten(0, 1), "seqlen_k": 9, **cu, **rest}

    yield case("bshd", lambda: {"local_indices": ids(), "seqlen_k": 9})
    yield case("int64", lambda: {"local_indices": ids().long(), "seqlen_k": 9})
    yield case("int16", lambda: {"local_indices": ids().short(), "seqlen_k": 9})
    yield case("strided", lambda: {"local_indices": strided(ids()), "seqlen_k": 9})
    yield case("misaligned", lambda: {"local_indices": misaligned(ids()), "seqlen_k": 9})
    yield case("packed", lambda: packed())
    yield case(
        "packed, an empty segment", lambda: packed(cu_seqlens_q=int32(0, 4, 4, 6), cu_seqlens_k=int32(0, 9, 9, 20))
    )
    yield case("packed, int64 cu_seqlens", lambda: packed(cu_seqlens_q=int32(0, 4, 6).long()))
    yield case("one cu_seqlens", lambda: packed(cu_seqlens_k=None))
    yield case("two dimensions", lambda: {"local_indices": ids()[0], "seqlen_k": 9})


def _compact() -> Iterator[Case]:
    def case(name: str, make: Any) -> Case:
        return Case("compactify", name, make)

    def holes() -> torch.Tensor:
        table = Numbers().ids(2, 3, 8, used=5, keys=9)
        table[..., 1] = -1
        return table

    yield case("three dimensions", lambda: {"indices": holes()})
    yield case("two dimensions", lambda: {"indices": holes()[0]})
    yield case("one dimension", lambda: {"indices": holes()[0, 0]})
    yield case("int64", lambda: {"indices": holes().long()})
    yield case("strided", lambda: {"indices": strided(holes())})
    yield case("nothing used", lambda: {"indices": torch.full((2, 3, 8), -1, dtype=torch.int32)})


def _fused() -> Iterator[Case]:
    def case(name: str, make: Any, **rest: Any) -> Case:
        selects = ("indices", "logits", "softmax")
        return Case("indexer_forward_top_k", name, make, since=27, selects=selects, **rest)

    def batched(b: int, sq: int, sk: int, **rest: Any) -> Arguments:
        n = Numbers()
        tensors = {"q": n.normal(b, sq, 64, 128), "k": n.normal(b, sk, 1, 128), "w": n.normal(b, sq, 64)}
        return {**tensors, "top_k": 4, "ratio": 1, **rest}

    def packed(**rest: Any) -> Arguments:
        n = Numbers()
        tensors = {"q": n.normal(7, 64, 128), "k": n.normal(14, 1, 128), "w": n.normal(7, 64)}
        cu = {"cu_seqlens_q": int32(0, 5, 7), "cu_seqlens_k": int32(0, 9, 14), "max_seqlen_q": 5, "max_seqlen_k": 9}
        return {**tensors, **cu, "top_k": 4, "ratio": 1, **rest}

    for b in (1, 2, 3):
        yield case(f"b {b}", lambda b=b: batched(b, 5, 9))
    yield case("local ids", lambda: batched(2, 5, 9, topk_indices_global=False))
    yield case("no softmax", lambda: batched(2, 5, 9, return_softmax=False))
    yield case("lse", lambda: batched(2, 5, 9, return_lse=True))
    yield case("offsets", lambda: batched(2, 5, 9, q_causal_offsets=int32(3, 0)))
    yield case("more rows than keys", lambda: batched(1, 9, 5))
    yield case("ratio 4", lambda: batched(1, 8, 2, ratio=4))
    yield case("deterministic", lambda: batched(1, 5, 9, deterministic=True))
    yield case("microbatches", lambda: batched(2, 8, 8, microbatch_rows=4))
    yield case("microbatches with offsets", lambda: batched(1, 8, 8, microbatch_rows=4, q_causal_offsets=int32(0)))
    yield case("microbatches that do not fit", lambda: batched(1, 8, 4, ratio=4, microbatch_rows=6))
    yield case("packed", lambda: packed())
    yield case("packed, local ids", lambda: packed(topk_indices_global=False))
    yield case("packed, offsets", lambda: packed(q_causal_offsets=int32(4, 1)))
    yield case("packed, no lengths", lambda: packed(max_seqlen_q=None, max_seqlen_k=None))
    yield case("top_k 0", lambda: batched(1, 5, 9, top_k=0))
    yield case("fp32 weights", lambda: {**batched(1, 5, 9), "w": Numbers().normal(1, 5, 64).float()})
