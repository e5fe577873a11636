"""Calls of the indexer's backward wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from seam.cases import Arguments, Case, Numbers, int32, misaligned, strided


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _losses("indexer_backward", sparse)
    yield from _losses("dense_indexer_backward", dense)
    yield from _buffers("indexer_backward", sparse)
    yield from _buffers("dense_indexer_backward", dense)
    yield from _ids()
    yield from _sizes()
    yield from _layouts()


def _one() -> torch.Tensor:
    return torch.tensor([0.5], device="cpu")


def sparse(b: int = 2, rows: int = 3, keys: int = 9, *, topk: int = 128, heads: int = 64, **rest: Any) -> Arguments:
    """A call over local ids."""
    n, used = Numbers(), min(5, keys)
    ids = n.ids(b, rows, topk, used=used, keys=keys)
    scores = [torch.zeros(b, rows, topk) for _ in range(2)]
    for table in scores:
        table[..., :used] = n.normal(b, rows, used, dtype=torch.float32).softmax(-1)
    return {
        "index_q": n.normal(b, rows, heads, 128),
        "weights": n.normal(b, rows, heads) / 8,
        "index_k": n.normal(b, keys, 128),
        "attn_score": scores[0],
        "index_score": scores[1],
        "topk_indices": ids,
        "grad_loss": _one(),
        **rest,
    }


def flat(arguments: Arguments) -> Arguments:
    """The same with ids of the flat keys."""
    ids, keys = arguments["topk_indices"], arguments["index_k"].shape[1]
    begin = torch.arange(ids.shape[0])[:, None, None] * keys
    return {**arguments, "topk_indices": torch.where(ids >= 0, ids + begin, -1).int()}


def dense(b: int = 2, rows: int = 5, keys: int = 9, *, heads: int = 64, **rest: Any) -> Arguments:
    """A call over raw scores, whose sums are those of all keys."""
    n = Numbers()
    raw, mass = n.normal(b, rows, keys, dtype=torch.float32), n.normal(b, rows, keys, dtype=torch.float32).exp()
    return {
        "index_q": n.normal(b, rows, heads, 128),
        "weights": n.normal(b, rows, heads) / 8,
        "index_k": n.normal(b, keys, 128),
        "attn_score": mass,
        "attn_l1norm": mass.sum(-1),
        "index_score": raw,
        "index_lse": raw.logsumexp(-1),
        "grad_loss": _one(),
        **rest,
    }


def _losses(wrapper: str, make: Any) -> Iterator[Case]:
    def case(name: str, **rest: Any) -> Case:
        return Case(wrapper, name, lambda: make(**rest))

    yield case("grad_loss a number", grad_loss=0.5)
    yield case("grad_loss whole", grad_loss=2)
    yield case("grad_loss of no dimension", grad_loss=torch.tensor(0.5))
    yield case("grad_loss bf16", grad_loss=_one().bfloat16())
    yield case("grad_loss of two", grad_loss=torch.tensor([0.5, 0.5]))
    yield Case(wrapper, "no grad_loss", lambda: _without(make(), "grad_loss"))
    yield case("loss_coeff", loss_coeff=3.0)
    yield case("sm_scale", sm_scale=0.25)
    yield Case(wrapper, "a student below e^-100", lambda: _tiny(make()))
    yield Case(wrapper, "a teacher of 0", lambda: {**make(), "attn_score": torch.zeros_like(make()["attn_score"])})


def _without(arguments: Arguments, name: str) -> Arguments:
    del arguments[name]
    return arguments


def _tiny(arguments: Arguments) -> Arguments:
    raw = "index_lse" in arguments
    arguments["index_score"][..., 1] = -150.0 if raw else 1e-44
    return arguments


def _buffers(wrapper: str, make: Any) -> Iterator[Case]:
    def like(name: str, dtype: torch.dtype, change: Any = lambda x: x) -> Arguments:
        arguments = make()
        source = {"d_index_q": "index_q", "d_weights": "weights", "d_index_k": "index_k"}[name]
        return {**arguments, name: change(torch.full(arguments[source].shape, 3.0, dtype=dtype))}

    for name in ("d_index_q", "d_weights", "d_index_k"):
        for dtype in (torch.bfloat16, torch.float32):
            yield Case(wrapper, f"own {name} {dtype}", lambda name=name, dtype=dtype: like(name, dtype))
        yield Case(wrapper, f"own strided {name}", lambda name=name: like(name, torch.bfloat16, strided))
    for name in ("index_q", "weights", "index_k", "attn_score", "index_score"):
        yield Case(wrapper, f"{name} strided", lambda name=name: {**make(), name: strided(make()[name])})
        yield Case(wrapper, f"{name} misaligned", lambda name=name: {**make(), name: misaligned(make()[name])})


def _ids() -> Iterator[Case]:
    def case(name: str, make: Any, **rest: Any) -> Case:
        return Case("indexer_backward", name, make, **rest)

    for b in (1, 2, 3):
        yield case(f"b {b}, local ids", lambda b=b: sparse(b))
        yield case(f"b {b}, global ids", lambda b=b: flat(sparse(b)))
        for said in (False, True):
            text = "global" if said else "local"
            yield case(f"b {b}, local ids, said {text}", lambda b=b, s=said: sparse(b, topk_indices_global=s), since=26)
            yield case(
                f"b {b}, global ids, said {text}", lambda b=b, s=said: flat(sparse(b, topk_indices_global=s)), since=26
            )
    yield case("an id past the keys", lambda: _set(sparse(1), 20))
    yield case("one row", lambda: sparse(2, 1))


def _set(arguments: Arguments, to: int) -> Arguments:
    arguments["topk_indices"][0, 0, 1] = to
    return arguments


def _sizes() -> Iterator[Case]:
    for topk in (64, 192, 256, 384, 512, 640):
        yield Case("indexer_backward", f"{topk} slots", lambda topk=topk: sparse(topk=topk))
    for heads in (16, 32):
        yield Case("indexer_backward", f"{heads} heads", lambda heads=heads: sparse(heads=heads))
        yield Case("dense_indexer_backward", f"{heads} heads", lambda heads=heads: dense(heads=heads))
    yield Case("indexer_backward", "no such backend", lambda: sparse(backend="other"), since=28)
    yield Case("indexer_backward", "blocks of 64", lambda: sparse(topk=192, block_I=64))
    yield Case("indexer_backward", "fp32 weights", lambda: {**sparse(), "weights": sparse()["weights"].float()})
    yield Case(
        "indexer_backward", "one target too few", lambda: {**sparse(), "attn_score": sparse()["attn_score"][:, :2]}
    )
    yield Case("dense_indexer_backward", "fp32 weights", lambda: {**dense(), "weights": dense()["weights"].float()})


def _packed(cu_q: list[int], cu_k: list[int], **rest: Any) -> Arguments:
    one, longest = dense(1, cu_q[-1], cu_k[-1]), max(b - a for a, b in pairwise(cu_k))
    one = {name: value if name == "grad_loss" else value[0] for name, value in one.items()}
    scores = {name: one[name][:, :longest].contiguous() for name in ("attn_score", "index_score")}
    cu = {"cu_seqlens_q": int32(*cu_q), "cu_seqlens_k": int32(*cu_k)}
    return {**one, **scores, **cu, **rest}


def _layouts() -> Iterator[Case]:
    def case(name: str, make: Any, **rest: Any) -> Case:
        return Case("dense_indexer_backward", name, make, **rest)

    for b in (1, 2, 3):
        for rows, keys, ratio in ((5, 9, 1), (9, 9, 1), (9, 5, 1), (8, 2, 4), (12, 2, 4), (6, 140, 1)):
            yield case(
                f"b {b}, {rows} x {keys}, ratio {ratio}",
                lambda b=b, rows=rows, keys=keys, ratio=ratio: dense(b, rows, keys, ratio=ratio),
            )
    for offsets in ((0, 0), (3, 1), (-2, 60)):
        yield case(f"offsets {offsets}", lambda o=offsets: dense(2, 6, 70, q_causal_offsets=int32(*o)), since=26)
    yield case("one row", lambda: dense(1, 1, 6))
    lengths = {"max_seqlen_q": 5, "max_seqlen_k": 9}
    yield case("packed", lambda: _packed([0, 5, 7], [0, 9, 14], **lengths))
    yield case("packed, no lengths", lambda: _packed([0, 5, 7], [0, 9, 14]))
    yield case("packed, more rows than keys", lambda: _packed([0, 9, 12], [0, 4, 12], max_seqlen_q=9, max_seqlen_k=8))
    yield case("packed, an empty segment", lambda: _packed([0, 4, 4, 6], [0, 4, 8, 8], max_seqlen_q=4, max_seqlen_k=4))
    yield case(
        "packed, offsets", lambda: _packed([0, 5, 7], [0, 9, 14], q_causal_offsets=int32(4, 1), **lengths), since=26
    )
    yield case("one cu_seqlens", lambda: _packed([0, 5, 7], [0, 9, 14], cu_seqlens_k=None, **lengths))
    yield case(
        "cu_seqlens a slice",
        lambda: _packed([0, 5, 7], [0, 9, 14], **{**lengths, "cu_seqlens_q": misaligned(int32(0, 5, 7))}),
    )
