"""Named cases: the smallest problems that show a fault, with their sizes and options but without numbers.

`dsattn.spec.inputs` makes the tensors of a case; verify, the tests and the benchmarks share both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dsattn.layouts import CausalLayout, Segment
from dsattn.spec.case import ALL, ATTENTION, INDEXER, LOSS, SELECTION, Case, Sink
from dsattn.spec.cases_edges import edge_cases

__all__ = ["ALL", "ATTENTION", "CASES", "INDEXER", "LOSS", "SELECTION", "Case"]


def _batched() -> list[Case]:
    def case(name: str, shows: str, layout: Callable[[], CausalLayout], batch: int, **options: Any) -> Case:
        return Case(name=name, shows=shows, layout=layout, batch=batch, tags=("bshd",), **options)

    lengths = [40, 1, 23]
    return [
        case("bshd-b1", "one square causal sequence", lambda: CausalLayout.batched(1, 96), 1, sink="normal"),
        case("bshd-b3", "ids are flat key rows: batch entries do not mix", lambda: CausalLayout.batched(3, 40), 3),
        case("rect-bottom-right", "fewer queries than keys, the last query sees the last key",
             lambda: CausalLayout.batched(2, 20, 52, q_offset=32), 2),
        case("rect-top-left", "fewer queries than keys, the first query sees the first key",
             lambda: CausalLayout.batched(2, 20, 52, q_offset=0), 2),
        case("rect-more-queries", "more queries than keys: the last rows see all keys",
             lambda: CausalLayout.batched(2, 40, 16, q_offset=0), 2),
        case("decode", "one query per sequence, each with its own past",
             lambda: CausalLayout.batched(4, 1, 64, q_offset=[63, 0, 17, 40]), 4),
        case("padded-right", "padding after each sequence sees nothing and is never seen",
             lambda: CausalLayout.batched(3, 40, lengths=lengths, side="right"), 3, row_mask="some"),
        case("padded-left", "padding before each sequence sees nothing and is never seen",
             lambda: CausalLayout.batched(3, 40, lengths=lengths, side="left"), 3, row_mask="some"),
    ]  # fmt: skip


def _packed() -> list[Case]:
    def case(name: str, shows: str, layout: Callable[[], CausalLayout], **options: Any) -> Case:
        options = {"tags": ("packed",), **options}
        return Case(name=name, shows=shows, layout=layout, **options)

    documents = [0, 13, 14, 60, 77, 120]
    whole = CausalLayout.packed
    return [
        case("packed", "documents of different lengths do not mix", lambda: whole(documents), sink="normal"),
        case("packed-empty-one-tail", "empty and one-token documents, and a padding tail",
             lambda: whole([0, 0, 1, 40, 40, 41, 90], num_q=100, num_k=104), row_mask="some"),
        case("packed-gaps", "documents that start at padded places",
             lambda: whole([0, 30, 41, 80], cu_seqlens_padded=[0, 32, 48, 88], num_q=96, num_k=96)),
        case("packed-offset", "chunked prefill: each document has a past of its own",
             lambda: whole([0, 10, 40], [0, 30, 100], q_offset=[20, 40])),
        case("packed-long", "a document of several blocks of rows", lambda: whole([0, 3, 200]), top_k=33),
        case("many-keys", "a window of several tiles of keys",
             lambda: CausalLayout.batched(1, 12, 2600, q_offset=2588), top_k=300, index_heads=2, heads=2),
        case("one-row", "a single query with a single key", lambda: whole([0, 1])),
        case("all-padding", "no row sees a key: zero results, zero gradients, loss 0",
             lambda: CausalLayout.from_segments([], num_q=6, num_k=9), sink="normal"),
        case("no-key-row", "rows between others that see no key",
             lambda: CausalLayout.from_segments(
                 [Segment(0, 9, 0, 9, 0), Segment(9, 4, 9, 0, 0), Segment(15, 17, 9, 17, 0)], num_q=34, num_k=26
             ), sink="normal"),
        case("negative-offset", "leading rows see nothing",
             lambda: CausalLayout.from_segments(
                 [Segment(0, 30, 0, 24, -7), Segment(30, 20, 24, 20, -1)], num_q=50, num_k=44
             ), sink="normal"),
        case("ratio-4", "one compressed key per four tokens",
             lambda: whole([0, 50, 53, 120], ratio=4), top_k=5, tags=("packed", "ratio")),
        case("ratio-4-bshd", "compressed keys of a batch",
             lambda: CausalLayout.batched(2, 64, ratio=4), batch=2, top_k=5, tags=("bshd", "ratio")),
        case("ratio-4-offset", "compressed keys whose past does not divide by four",
             lambda: CausalLayout.batched(2, 30, 20, q_offset=[49, 2], ratio=4), batch=2, tags=("bshd", "ratio")),
        *(
            case(f"slice-{name}", f"query rows {begin} to {end} of many documents, against all keys",
                 lambda begin=begin, end=end: whole(documents).slice_queries(begin, end), tags=("packed", "slice"))
            for name, begin, end in (("head", 0, 40), ("middle", 40, 70), ("tail", 70, 120))
        ),
    ]  # fmt: skip


def _context_parallel() -> list[Case]:
    documents = {
        ("zigzag", "one"): [0, 64],
        ("zigzag", "many"): [0, 8, 32, 32, 72],
        ("contiguous", "one"): [0, 64],
        ("contiguous", "many"): [0, 10, 10, 37, 38, 72],
    }

    def layout(cu_seqlens: list[int], size: int, rank: int, scheme: Any, ratio: int = 1) -> Callable[[], CausalLayout]:
        return lambda: CausalLayout.context_parallel(cu_seqlens, cp_size=size, cp_rank=rank, scheme=scheme, ratio=ratio)

    cases = [
        Case(
            name=f"cp{size}-{scheme}-{count}-rank{rank}",
            shows=f"rank {rank} of {size}, {scheme}, {count} document{'s' if count == 'many' else ''}",
            layout=layout(cu_seqlens, size, rank, scheme),
            heads=2,
            tags=("cp",),
        )
        for size in (2, 4)
        for (scheme, count), cu_seqlens in documents.items()
        for rank in range(size)
    ]
    ratio = Case(
        name="cp2-zigzag-ratio-4",
        shows="compressed keys under context parallelism",
        layout=layout([0, 32, 96], 2, 1, "zigzag", ratio=4),
        top_k=5,
        tags=("cp", "ratio"),
    )
    return [*cases, ratio]


def _selection() -> list[Case]:
    def case(name: str, shows: str, **options: Any) -> Case:
        layout = options.pop("layout", lambda: CausalLayout.packed([0, 17, 80]))
        options = {"tags": ("top-k",), **options}
        return Case(name=name, shows=shows, layout=layout, **options)

    grid: dict[str, Any] = {"grid": True, "tags": ("top-k", "ties")}
    return [
        case("k-1", "the single best key", top_k=1),
        case("k-odd", "an odd number of keys", top_k=7),
        case("k-all", "as many slots as the longest window has keys", top_k=63),
        case("k-more", "more slots than keys: unused slots stay -1", top_k=100),
        case("grid", "exact scores: ids match exactly", **grid),
        case("all-equal", "all scores of a row equal: the lowest key rows win", scores="equal", **grid),
        case("repeated-keys", "keys that repeat: ties across the boundary", scores="repeated", **grid),
        case("plateau", "more keys at exactly 0 than slots", scores="plateau", weights="normal", **grid),
        case("negative-weights", "weights all negative: the best scores are -0, which counts as +0",
             scores="plateau", weights="negative", weights_fp32=False, **grid),
        case("no-relu", "dots without the relu", relu=False, operators=INDEXER),
        case("no-relu-grid", "dots without the relu, exact ids", relu=False, operators=SELECTION, **grid),
        case("weights-low", "weights of the inputs' dtype", weights_fp32=False, operators=INDEXER),
        case("weights-opposed", "heads that nearly cancel: what is left hangs on the last bits of fp32 weights",
             weights="opposed", operators=INDEXER),
        case("negative-scale", "scale below 0: the relu gates on the dot, not on its sign times the scale's",
             index_scale=-0.1, operators=INDEXER),
        case("unscaled", "scale 1: large scores, a student near one-hot", index_scale=1.0, operators=INDEXER),
    ]  # fmt: skip


def _heads() -> list[Case]:
    def case(name: str, shows: str, **options: Any) -> Case:
        return Case(name=name, shows=shows, layout=lambda: CausalLayout.packed([0, 9, 24]), tags=("heads",), **options)

    return [
        *(
            case(f"index-heads-{h_i}", f"{h_i} indexer heads of real width", index_heads=h_i, index_width=128, heads=2,
                 top_k=6, operators=INDEXER)
            for h_i in (1, 8, 24, 32, 64)
        ),
        *(
            case(f"heads-{h}", f"{h} attention heads", heads=h, key_width=56, value_width=48, top_k=6, index_heads=2,
                 operators=(*ATTENTION, "indexer_loss"))
            for h in (1, 8, 24, 64, 128)
        ),
        case("widths-deepseek", "DeepSeek-V3.2's heads and widths", index_heads=64, index_width=128, heads=128,
             key_width=576, value_width=512, sink="normal"),
        case("widths-glm", "GLM-5's heads and widths", index_heads=32, index_width=128, heads=64,
             key_width=576, value_width=512),
        case("value-is-key", "values as wide as keys", value_width=40, operators=ATTENTION),
    ]  # fmt: skip


def _options() -> list[Case]:
    def layout() -> CausalLayout:
        return CausalLayout.packed([0, 17, 17, 64], num_q=66)

    def crowded() -> CausalLayout:
        return CausalLayout.packed([0, 40], [0, 24], q_offset=23)

    sinks: list[tuple[Sink, str]] = [
        ("-inf", "a sink of -inf changes nothing"),
        ("zero", "a sink of 0 takes its share of the softmax"),
        ("large", "a sink far above the logits: tiny outputs, no overflow"),
        ("normal", "a sink among the logits"),
    ]
    losses: list[tuple[str, dict[str, Any]]] = [
        ("mean", {"reduction": "mean"}),
        ("sum", {"reduction": "sum"}),
        ("num-rows", {"num_rows": 1000}),
    ]
    cases = [
        Case(name=f"sink-{sink.strip('-')}", shows=shows, layout=layout, sink=sink, operators=ATTENTION, tags=("sink",))
        for sink, shows in sinks
    ]
    for name, options in losses:
        base = Case(
            name=f"loss-{name}",
            shows=f"the loss divided as {name} says",
            layout=layout,
            coeff=0.3,
            operators=LOSS,
            tags=("loss",),
            **options,
        )
        masked = replace(base, name=f"loss-{name}-masked", shows=f"{base.shows}, with a row mask", row_mask="some")
        cases += [base, masked]
    base = replace(cases[-1], num_rows=None, row_mask=None)
    return [
        *cases,
        # Every key has many rows and every row many keys: no budget hangs on the rounding of one exp.
        Case(name="far-logits", shows="logits so far from 0 that exp leaves fp32, upwards and downwards",
             layout=crowded, logits="far", sink="normal", top_k=20, tags=("softmax",)),
        Case(name="far-scores", shows="scores so far from 0 that exp leaves fp32",
             layout=crowded, index_scale=8.0, top_k=20, operators=INDEXER, tags=("softmax",)),
        Case(name="strided", shows="views of larger buffers: rows that do not follow each other in memory",
             layout=layout, strided=True, sink="normal", row_mask="some", tags=("strides",)),
        Case(name="no-gradients", shows="evaluation: nothing asks for a gradient", gradients=False, batch=2,
             layout=lambda: CausalLayout.batched(2, 40, 16, q_offset=0), row_mask="some", sink="normal",
             tags=("bshd", "evaluation")),
        replace(base, name="loss-all-masked", shows="no row counts: loss 0, zero gradients", row_mask="none"),
        replace(base, name="loss-coeff-0", shows="coefficient 0: loss exactly 0, exact zero gradients", coeff=0.0),
    ]  # fmt: skip


CASES: tuple[Case, ...] = (
    *_batched(),
    *_packed(),
    *_context_parallel(),
    *_selection(),
    *_heads(),
    *_options(),
    *edge_cases(),
)
