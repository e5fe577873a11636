"""What Megatron's functions are given: rows of a context-parallel rank, and indexer losses of several sequences."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dsattn.layouts import CausalLayout
from dsattn.spec.metrics import tau
from dsattn.spec.oracle import Rows, indexer_scores, visible_keys
from dsattn.verify.frontend_defaults.problems import SparseLoss, sparse_loss

HEADS, WIDTH, TOP_K = 32, 128, 32


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What one context-parallel rank selects from: its rows against all keys, padding at the end of both.

    Attributes:
        case: the name of the check.
        documents: lengths of the documents.
        cp_size: number of ranks.
        cp_rank: this rank.
        rows: the rows of the rank that a tensor-parallel slice has; None for all.
        index_q: indexer queries, bf16.
        index_k: indexer keys, bf16.
        weights: head weights, bf16.
    """

    case: str
    documents: tuple[int, ...]
    cp_size: int
    cp_rank: int
    rows: tuple[int, int] | None
    index_q: Float[Tensor, "t h_i d_i"]
    index_k: Float[Tensor, "s d_i"]
    weights: Float[Tensor, "t h_i"]

    @property
    def starts(self) -> list[int]:
        """Where each document starts, and where the last one ends."""
        return [0, *accumulate(self.documents)]

    @property
    def local_rows(self) -> int:
        """Rows of the whole rank, padding included."""
        return self.index_k.shape[0] // self.cp_size

    @cached_property
    def layout(self) -> CausalLayout:
        """Who sees whom, of the rows that are of a document; they come first."""
        whole = CausalLayout.context_parallel(
            self.starts, cp_size=self.cp_size, cp_rank=self.cp_rank, num_k=self.index_k.shape[0]
        )
        return whole if self.rows is None else whole.slice_queries(*self.rows)

    @cached_property
    def scores(self) -> Float64[Tensor, "t s"]:
        """The oracle's scores of those rows."""
        return indexer_scores(*self._real(), self.layout).value

    @cached_property
    def visible(self) -> Rows:
        """The keys that each of them sees."""
        return visible_keys(self.layout)

    @cached_property
    def tau(self) -> Float64[Tensor, " t"]:
        """How far from the k-th score a key still counts as right."""
        return tau(*self._real(), self.layout)

    def _real(self) -> tuple[Tensor, Tensor, Tensor]:
        count = self.layout.num_q
        return self.index_q[:count].cpu(), self.index_k.cpu(), self.weights[:count].cpu()

    def to(self, device: torch.device) -> Selection:
        """The same on a device."""
        names = ("index_q", "index_k", "weights")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def selections(seed: int) -> list[Selection]:
    """One and many documents on two and four ranks; padding that no document covers; a slice of a rank's rows."""
    many, more = (256, 512), (256, 768, 512)
    return [
        *(selection(f"one-document-cp2-rank{r}", (512,), 2, r, seed) for r in range(2)),
        *(selection(f"documents-cp2-rank{r}", many, 2, r, seed + 1) for r in range(2)),
        *(selection(f"one-document-cp4-rank{r}", (512,), 4, r, seed) for r in range(4)),
        *(selection(f"documents-cp4-rank{r}", more, 4, r, seed + 2) for r in range(4)),
        *(selection(f"padding-cp2-rank{r}", (400,), 2, r, seed, keys=512) for r in range(2)),
        *(selection(f"slice-cp2-rank{r}", many, 2, r, seed + 1, rows=(96, 192)) for r in range(2)),
    ]


def selection(
    case: str,
    documents: tuple[int, ...],
    cp_size: int,
    cp_rank: int,
    seed: int,
    *,
    keys: int | None = None,
    rows: tuple[int, int] | None = None,
) -> Selection:
    """The rows of one rank and all keys, normal numbers.

    Args:
        case: the name of the check.
        documents: lengths of the documents.
        cp_size: number of ranks.
        cp_rank: this rank.
        seed: of the numbers.
        keys: key rows, if there are padding rows after the documents' own.
        rows: the rows of the rank that a tensor-parallel slice has.
    """
    rng = torch.Generator("cpu").manual_seed(seed)
    keys = keys or sum(documents)
    count = keys // cp_size if rows is None else rows[1] - rows[0]
    sizes = ((count, HEADS, WIDTH), (keys, WIDTH), (count, HEADS))
    q, k, weights = (torch.randn(*size, generator=rng, device="cpu").bfloat16() for size in sizes)
    return Selection(
        case=case,
        documents=documents,
        cp_size=cp_size,
        cp_rank=cp_rank,
        rows=rows,
        index_q=q,
        index_k=k,
        weights=weights,
    )


def losses(seed: int) -> dict[str, SparseLoss]:
    """Indexer losses of micro-batches of two and three sequences, whose right gradients are equal bit for bit."""
    two, third = sparse_loss(seed), sparse_loss(seed + 1).entry(0)
    three = {f.name: torch.cat((getattr(two, f.name), getattr(third, f.name))) for f in fields(SparseLoss)}
    return {"loss-b2": two, "loss-b3": SparseLoss(**three)}
