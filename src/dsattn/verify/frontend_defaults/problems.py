"""Inputs of the suite: what a rank selects from, and two losses whose gradients no order of summation can change."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Self

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int32
from torch import Generator, Tensor

from dsattn.layouts import CausalLayout, context_parallel_positions
from dsattn.spec.metrics import tau
from dsattn.spec.oracle import Rows, indexer_scores, visible_keys

HEADS, WIDTH, TOP_K = 64, 128, 128
SELECTING_HEADS = 32
"""Indexer heads of the selections, which are where the time goes; the backward kernels of Hopper have 64 alone."""
BATCH, ROWS, KEYS = 2, 128, 512
"""Sizes of the dense loss: the rows are the last ones of their keys."""
SELECTED_KEYS = 256
"""Keys of each batch entry that the rows of the sparse loss select from."""
SOFTMAX_SCALE = 2.0
# In 1/64. A row's weights are these in some order, so that their sum is 2.
_WEIGHTS = (-1,) * 16 + (3,) * 48


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What one context-parallel rank selects from: its rows against all keys.

    Attributes:
        case: the name of the check.
        documents: lengths of the documents.
        cp_size: number of ranks.
        cp_rank: this rank.
        index_q: indexer queries, bf16.
        index_k: indexer keys, bf16.
        weights: head weights, bf16.
        layout: who sees whom.
    """

    case: str
    documents: tuple[int, ...]
    cp_size: int
    cp_rank: int
    index_q: Float[Tensor, "t h_i d_i"]
    index_k: Float[Tensor, "s d_i"]
    weights: Float[Tensor, "t h_i"]
    layout: CausalLayout

    @cached_property
    def scores(self) -> Float64[Tensor, "t s"]:
        """The oracle's scores."""
        return indexer_scores(self.index_q, self.index_k, self.weights, self.layout).value

    @cached_property
    def visible(self) -> Rows:
        """The keys that each row sees."""
        return visible_keys(self.layout)

    @cached_property
    def tau(self) -> Float64[Tensor, " t"]:
        """How far from the k-th score a key still counts as right."""
        return tau(self.index_q, self.index_k, self.weights, self.layout)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A micro-batch of the indexer loss, BSHD.

    Attributes:
        index_q: indexer queries, bf16.
        weights: head weights, bf16.
        index_k: indexer keys, bf16.
        q: attention queries, bf16.
        kv: attention keys, bf16.
        lse: log-sum-exp of the attention, natural.
    """

    index_q: Float[Tensor, "b sq h_i d_i"]
    weights: Float[Tensor, "b sq h_i"]
    index_k: Float[Tensor, "b sk d_i"]
    q: Float[Tensor, "b sq h d_qk"]
    kv: Float[Tensor, "b sk d_qk"]
    lse: Float32[Tensor, "b sq h"]

    def entry(self, b: int) -> Self:
        """Batch entry b alone, as a micro-batch of one."""
        return replace(self, **{f.name: getattr(self, f.name)[b : b + 1] for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class SparseLoss(Loss):
    """The loss over selected keys.

    Attributes:
        ids: the selected keys inside their batch entry, ascending.
        target: the teacher over them.
        predict: the student over them.
    """

    ids: Int32[Tensor, "b sq k"]
    target: Float32[Tensor, "b sq k"]
    predict: Float32[Tensor, "b sq k"]


@dataclass(frozen=True, kw_only=True)
class DenseLoss(Loss):
    """The loss over all visible keys; the rows are the last ones of their sequence (bottom-right)."""

    @property
    def offset(self) -> int:
        """The position of the first row."""
        return self.index_k.shape[1] - self.index_q.shape[1]

    def visible(self) -> Bool[Tensor, "sq sk"]:
        """The keys that each row sees."""
        return _visible(self.index_q.shape[1], self.index_k.shape[1])

    def squared(self) -> DenseLoss:
        """The same rows with rows of zeros before them, as many rows as keys: where every alignment says the same."""

        def led(x: Tensor) -> Tensor:
            return torch.cat((x.new_zeros(x.shape[0], self.offset, *x.shape[2:]), x), 1)

        return replace(self, **{name: led(getattr(self, name)) for name in ("index_q", "weights", "q", "lse")})


def selections(seed: int) -> list[Selection]:
    """One document of 512 tokens on one rank, one of 1024 on two, documents of 1024 and 2048 tokens on two."""
    one, two, many = (512,), (1024,), (1024, 2048)
    return [
        _selection("recall-one-document-cp1", one, 1, 0, seed),
        _selection("recall-one-document-cp2-rank0", two, 2, 0, seed + 1),
        _selection("recall-one-document-cp2-rank1", two, 2, 1, seed + 1),
        _selection("recall-documents-cp2-rank0", many, 2, 0, seed + 2),
        _selection("recall-documents-cp2-rank1", many, 2, 1, seed + 2),
    ]


def _selection(case: str, documents: tuple[int, ...], cp_size: int, cp_rank: int, seed: int) -> Selection:
    """The rows of one rank out of normal inputs of the whole stream."""
    rng = torch.Generator("cpu").manual_seed(seed)
    starts = [0, *accumulate(documents)]
    mine = context_parallel_positions(starts, cp_size=cp_size, cp_rank=cp_rank)
    sizes = ((starts[-1], SELECTING_HEADS, WIDTH), (starts[-1], WIDTH), (starts[-1], SELECTING_HEADS))
    q, k, weights = (torch.randn(*size, generator=rng, device="cpu").bfloat16() for size in sizes)
    q, weights = q[mine], weights[mine]
    return Selection(
        case=case,
        documents=documents,
        cp_size=cp_size,
        cp_rank=cp_rank,
        index_q=q,
        index_k=k,
        weights=weights,
        layout=CausalLayout.context_parallel(starts, cp_size=cp_size, cp_rank=cp_rank),
    )


def sparse_loss(seed: int) -> SparseLoss:
    """A micro-batch whose rows, the last ones of 256 keys, select 128 of those they see; numbers as in `dense_loss`."""
    rng = torch.Generator("cpu").manual_seed(seed)
    table = torch.rand(BATCH, ROWS, SELECTED_KEYS, generator=rng, device="cpu")
    ids = table.masked_fill(~_visible(ROWS, SELECTED_KEYS), -1.0).topk(TOP_K).indices.sort(-1).values
    slot = torch.randint(TOP_K, (BATCH, ROWS, 1 + HEADS), generator=rng, device="cpu")
    loss = _loss(rng, ids.gather(-1, slot), SELECTED_KEYS)
    products = torch.einsum("bqhd,bkd->bqhk", loss["index_q"].double(), loss["index_k"].double()).relu()
    scores = torch.einsum("bqhk,bqh->bqk", products, loss["weights"].double()).gather(-1, ids)
    heads = torch.nn.functional.one_hot(slot[..., 1:], TOP_K).sum(-2)
    return SparseLoss(**loss, ids=ids.int(), target=heads.float() / HEADS, predict=scores.softmax(-1).float())


def dense_loss(seed: int) -> DenseLoss:
    """A micro-batch whose rows see all keys before them, made so that right gradients are equal bit for bit.

    The best key of a row stands so far above the others that its student probability is 1 in fp32, and each attention
    head has all its weight on one key, so that the teacher is a multiple of 1/64. Queries, keys and weights are small
    multiples of 1/8 and 1/64. So every sum has few bits and is exact in any order, and so is its rounding to bf16.
    """
    rng = torch.Generator("cpu").manual_seed(seed)
    seen = _visible(ROWS, KEYS).sum(1)
    best = (torch.rand(BATCH, ROWS, 1 + HEADS, generator=rng, device="cpu") * seen[:, None]).long()
    return DenseLoss(**_loss(rng, best, KEYS))


def _visible(rows: int, keys: int) -> Tensor:
    """Which keys the last rows of a sequence see, bool [rows, keys]."""
    return torch.arange(keys, device="cpu") <= torch.arange(keys - rows, keys, device="cpu")[:, None]


def _loss(rng: Generator, best: Tensor, keys: int) -> dict[str, Tensor]:
    """The tensors of a loss in which the indexer likes key best[..., 0] best, and attention head h best[..., 1 + h]."""
    index_k, kv = (torch.randint(-8, 9, (BATCH, keys, WIDTH), generator=rng, device="cpu") / 8 for _ in range(2))
    batch = torch.arange(BATCH, device="cpu")[:, None, None]
    # Each indexer head sees some half of the best key, so that heads differ.
    half = torch.rand(BATCH, ROWS, HEADS, WIDTH, generator=rng, device="cpu") < 0.5
    index_q, q = index_k[batch, best[..., :1]] * half, kv[batch, best[..., 1:]]
    order = torch.rand(BATCH, ROWS, HEADS, generator=rng, device="cpu").argsort(-1)
    return {
        "index_q": index_q.bfloat16(),
        "weights": (torch.tensor(_WEIGHTS, device="cpu")[order] / 64).bfloat16(),
        "index_k": index_k.bfloat16(),
        "q": q.bfloat16(),
        "kv": kv.bfloat16(),
        # All other terms of the sum are below its last bit.
        "lse": SOFTMAX_SCALE * q.square().sum(-1),
    }
