"""Named cases at the edges: chunks of a sequence, near ties, huge numbers, NaN and infinity, nothing at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dsattn.layouts import CausalLayout, Segment
from dsattn.spec.case import INDEXER, SELECTION, WIDE, Bad, Case, CaseOperator

CHUNKS = (0, 20, 47, 75)
"""Where the chunks of the prefilled sequence of the cases "prefill-chunk-*" begin, and where the last one ends."""


def edge_cases() -> list[Case]:
    """All cases of this file."""
    return [*_prefill(), *_compressed(), *_overlapping(), *_selection(), *_wide(), *_non_finite(), *_nothing()]


def _prefill() -> list[Case]:
    def chunk(number: int) -> Case:
        begin, end = CHUNKS[number : number + 2]
        return Case(
            name=f"prefill-chunk-{number}",
            shows=f"rows {begin} to {end} of a sequence against the keys so far",
            layout=lambda: CausalLayout.batched(1, end - begin, end, q_offset=begin),
            batch=1,
            tags=("bshd", "prefill"),
        )

    def case(name: str, shows: str, batch: int, layout: Callable[[], CausalLayout]) -> Case:
        tag = "prefill" if batch == 1 else "decode"
        return Case(name=name, shows=shows, layout=layout, batch=batch, tags=("bshd", tag))

    return [
        *map(chunk, range(len(CHUNKS) - 1)),
        case("prefill-past-1", "a past of one key: a tile of 64 keys ends within the causal edge of four rows", 1,
             lambda: CausalLayout.batched(1, 70, 71, q_offset=1)),
        case("decode-2", "two queries per sequence, with different pasts", 4,
             lambda: CausalLayout.batched(4, 2, 64, q_offset=[62, 0, 17, 40])),
        case("decode-3", "three queries per sequence; a past beyond the keys, and one not yet begun", 4,
             lambda: CausalLayout.batched(4, 3, 48, q_offset=[45, 0, 90, -2])),
        case("decode-ratio-4", "compressed keys: the same past may show one key more to the next query", 3,
             lambda: CausalLayout.batched(3, 3, 16, q_offset=[61, 1, 30], ratio=4)),
    ]  # fmt: skip


def _compressed() -> list[Case]:
    def case(name: str, shows: str, layout: Callable[[], CausalLayout]) -> Case:
        return Case(name=name, shows=shows, layout=layout, top_k=5, tags=("packed", "ratio"))

    whole = CausalLayout.packed
    return [
        case("ratio-4-short", "documents shorter than a compressed key have none",
             lambda: whole([0, 1, 4, 9, 12, 75, 82], ratio=4, num_q=85, num_k=19)),
        case("ratio-4-prefill", "chunks that begin and end inside of a compressed key",
             lambda: whole([0, 10, 37], [0, 7, 22], q_offset=[18, 35], ratio=4)),
        case("ratio-4-gaps", "documents at padded places, whose lengths do not divide by four",
             lambda: whole([0, 10, 13, 50], cu_seqlens_padded=[0, 12, 20, 60], ratio=4, num_q=60, num_k=15)),
    ]  # fmt: skip


def _overlapping() -> list[Case]:
    """More rows than a block of queries has, so that key gradients of several blocks meet."""

    def case(name: str, shows: str, num_k: int, *segments: tuple[int, int, int, int, int]) -> Case:
        return Case(
            name=name,
            shows=shows,
            layout=lambda: CausalLayout.from_segments([Segment(*s) for s in segments], num_q=140, num_k=num_k),
            sink="normal",
            tags=("packed", "overlap"),
        )

    return [
        case("shared-prefix", "sequences that share their first keys: key gradients add", 60,
             (0, 45, 0, 50, 5), (45, 45, 0, 50, 5), (95, 45, 0, 60, 15)),
        case("overlap", "key ranges that overlap in part, in another order than the queries", 70,
             (0, 40, 30, 40, 2), (40, 50, 0, 45, 0), (90, 1, 25, 10, 9), (91, 48, 20, 35, 4)),
    ]  # fmt: skip


def _selection() -> list[Case]:
    def case(name: str, shows: str, **options: Any) -> Case:
        options = {"layout": lambda: CausalLayout.packed([0, 17, 80]), **options}
        return Case(name=name, shows=shows, **options)

    near: dict[str, Any] = {"scores": "near", "index_heads": 16, "index_width": 32, "heads": 2, "top_k": 256}
    near["layout"] = lambda: CausalLayout.batched(1, 6, 4096, q_offset=4090)
    below: dict[str, Any] = {"weights": "negative", "index_heads": 64, "index_width": 128, "heads": 2}
    return [
        case("k-2048", "the real number of slots for a few keys", top_k=2048, tags=("top-k",)),
        # Without a loss: six rows are too few for the budgets of 4,096 key gradients.
        case("near-ties", "4096 scores within 2^-10 of each other: any of those within tau will do", **near,
             index_scale=2.0**-7, coeff=0.0, operators=SELECTION, tags=("top-k", "ties")),
        case("near-ties-grid", "4096 scores within 2^-10 of each other, all exact: the very ids", **near,
             index_scale=2.0**-8, coeff=0.0, grid=True, operators=SELECTION, tags=("top-k", "ties")),
        case("far-below", "all scores far below the least of fp16, a number that masks are made of", **below,
             scores="positive", index_scale=2.0**5, operators=("indexer_topk",), tags=("top-k",)),
        # Most rows see all keys of their document: no budget of a key hangs on the rounding of few rows.
        case("far-below-grid", "all scores far below the least of fp16, a few nats apart: exact ids", **below,
             scores="near", index_scale=2.0**4, grid=True, operators=INDEXER, tags=("top-k", "ties"),
             layout=lambda: CausalLayout.packed([0, 40, 80], [0, 24, 48], q_offset=11)),
    ]  # fmt: skip


def _wide() -> list[Case]:
    return [
        Case(
            name="wide",
            shows="spread over more than 300 nats: the teacher's mass is where the student has none that fp32 can hold",
            # Every row sees every key: no budget hangs on the rounding of one exp.
            layout=lambda: CausalLayout.packed([0, 40], [0, 64], q_offset=63),
            scores="wide",
            logits="wide",
            index_scale=WIDE,
            top_k=48,
            tags=("softmax", "loss"),
        )
    ]


def _non_finite() -> list[Case]:
    """Two documents in one block, and padding: what one row or key holds must not reach the others beside it."""

    def case(name: str, bad: Bad, shows: str, operators: tuple[CaseOperator, ...]) -> Case:
        return Case(
            name=name,
            shows=shows,
            layout=lambda: CausalLayout.packed([0, 20, 50], num_q=52, num_k=51),
            sink="normal",
            bad=bad,
            operators=operators,
            tags=("non-finite",),
        )

    nan, inf = math.nan, math.inf
    # What becomes of inf in a gradient of the indexer hangs on the zero that meets it first. Tests say who is touched.
    index: tuple[CaseOperator, ...] = ("indexer_scores", "indexer_topk", "indexer_loss", "dsa_attention")
    attention: tuple[CaseOperator, ...] = ("sparse_attention", "dense_attention", "indexer_loss", "dsa_attention")
    return [
        case("nan-index-q", Bad("index_q", 33, 40, nan), "a row of NaN scores selects its first keys", index),
        case("nan-index-k", Bad("index_k", 30, 3, nan), "every row that sees the key selects it", index),
        # Not its score table: a key with a shut gate stays finite beside terms that are not, and has no floor in fp64.
        case("nan-weights", Bad("weights", 33, 1, nan), "a row of NaN scores selects its first keys", index[1:]),
        case("nan-q", Bad("q", 33, 70, nan), "one row and the keys it reads, though a sink stands beside", attention),
        case("nan-kv-value", Bad("kv", 30, 3, nan), "the rows that read the key, in its value", attention),
        case("nan-kv-key", Bad("kv", 30, 33, nan), "the rows that read the key, beyond its value", attention),
        case("inf-sink", Bad("sink", 1, 0, inf), "a sink that takes everything of its head", attention),
        case("nan-sink", Bad("sink", 1, 0, nan), "one head of every row that has a key", attention),
        case("inf-index-q", Bad("index_q", 33, 40, inf), "a row of scores that are inf, NaN or 0", ("indexer_topk",)),
        case("inf-index-k", Bad("index_k", 30, 3, inf), "scores of inf come first", ("indexer_topk",)),
        case("minus-inf-weights", Bad("weights", 33, 1, -inf), "keys of score -inf are still keys", ("indexer_topk",)),
        case("inf-q", Bad("q", 33, 70, inf), "logits of both infinities in one row", attention),
        case("inf-kv-value", Bad("kv", 30, 3, inf), "an infinite value, and logits of both signs", attention),
        case("minus-inf-kv-key", Bad("kv", 30, 33, -inf), "logits of both infinities in one column", attention),
    ]


def _nothing() -> list[Case]:
    def case(name: str, shows: str, num_q: int, num_k: int) -> Case:
        return Case(
            name=name,
            shows=shows,
            layout=lambda: CausalLayout.from_segments([], num_q=num_q, num_k=num_k),
            sink="normal",
            row_mask="some",
            tags=("empty",),
        )

    return [
        case("no-queries", "t = 0: keys that nobody asks for", 0, 9),
        case("no-keys", "s = 0: rows with nothing to see", 6, 0),
        case("nothing", "t = 0 and s = 0", 0, 0),
    ]
