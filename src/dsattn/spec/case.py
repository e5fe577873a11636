"""What a named case is: one problem with its sizes and options, without numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dsattn.layouts import CausalLayout

CaseOperator = Literal[
    "indexer_scores", "indexer_topk", "sparse_attention", "dense_attention", "indexer_loss", "dsa_attention"
]
Reduction = Literal["mean", "sum"]
Sink = Literal["normal", "zero", "large", "-inf"]
Input = Literal["index_q", "index_k", "weights", "q", "kv", "sink"]

ALL: tuple[CaseOperator, ...] = (
    "indexer_scores",
    "indexer_topk",
    "sparse_attention",
    "dense_attention",
    "indexer_loss",
    "dsa_attention",
)
INDEXER: tuple[CaseOperator, ...] = ("indexer_scores", "indexer_topk", "indexer_loss", "dsa_attention")
SELECTION: tuple[CaseOperator, ...] = ("indexer_scores", "indexer_topk", "dsa_attention")
ATTENTION: tuple[CaseOperator, ...] = ("sparse_attention", "dense_attention", "dsa_attention")
LOSS: tuple[CaseOperator, ...] = ("indexer_loss", "dsa_attention")


WIDE = 450.0
"""Nats over which logits are spread that are "wide"."""


@dataclass(frozen=True)
class Bad:
    """A number of an input that is not finite.

    Attributes:
        name: the input.
        row: its query row, its key row, or a head of the sink.
        column: the place in that row, all other axes made one.
        value: NaN or an infinity.
    """

    name: Input
    row: int
    column: int
    value: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem by name: layout, sizes and options.

    Attributes:
        name: what `--case` takes.
        shows: which fault the case would show, in one line.
        layout: builds the layout.
        batch: b where the tensors are BSHD; None for packed ones.
        index_heads: h_i.
        index_width: d_i.
        heads: h.
        key_width: d_qk.
        value_width: d_v.
        top_k: k.
        index_scale: `scale` of the call; None: (h_i * d_i) ** -0.5, or the power of two below it on the grid.
        relu: `relu` of the call.
        weights: values of the head weights; "opposed": every second head has the queries of the one before it, and a
            weight that takes away all but 2^-6 of what that one adds.
        weights_fp32: whether the head weights stay fp32 when the other inputs are of lower precision.
        scores: "spread": every key differs; "equal": all keys are one row; "plateau": about one key in seven has a
            dot above zero, all others give exactly 0; "repeated": eight different keys in turn; "positive": so is every
            dot; "near": those of a row differ in their last bits; "wide": they fall by `scale` with `ranks`.
        logits: "near" to 0; "far": all of a row and head above 100, or all below -100; "wide": they rise by `WIDE`
            with `ranks`.
        sink: values of the sink; None for a call without one.
        row_mask: "some" rows count in the loss, "none" do, or None for a call without a mask.
        reduction: of the loss.
        num_rows: of the loss, instead of a reduction.
        coeff: of the loss.
        grid: index_q, index_k and weights are multiples of 1/8 in [-1, 1], so every score is exact in fp32 and ids must
            match exactly.
        strided: whether the tensors are views of larger buffers instead of contiguous.
        bad: a number that is not finite, or None.
        gradients: whether a backward follows.
        operators: what the case is run through.
        seed: added to the seed that the name gives.
        tags: words to group cases by.
    """

    name: str
    shows: str
    layout: Callable[[], CausalLayout]
    batch: int | None = None
    index_heads: int = 4
    index_width: int = 32
    heads: int = 4
    key_width: int = 40
    value_width: int = 24
    top_k: int = 8
    index_scale: float | None = None
    relu: bool = True
    weights: Literal["normal", "negative", "opposed"] = "normal"
    weights_fp32: bool = True
    scores: Literal["spread", "equal", "plateau", "repeated", "positive", "near", "wide"] = "spread"
    logits: Literal["near", "far", "wide"] = "near"
    sink: Sink | None = None
    row_mask: Literal["some", "none"] | None = None
    reduction: Reduction = "mean"
    num_rows: int | None = None
    coeff: float = 1.0
    grid: bool = False
    strided: bool = False
    bad: Bad | None = None
    gradients: bool = True
    operators: tuple[CaseOperator, ...] = ALL
    seed: int = 0
    tags: tuple[str, ...] = ()

    @property
    def softmax_scale(self) -> float:
        """`softmax_scale` of the call: d_qk ** -0.5."""
        return self.key_width**-0.5

    @property
    def scale(self) -> float:
        """`scale` of the call; on the grid a power of two, which keeps scores exact."""
        if self.index_scale is not None:
            return self.index_scale
        size = self.index_heads * self.index_width
        return 2.0 ** -math.ceil(math.log2(size) / 2) if self.grid else size**-0.5
