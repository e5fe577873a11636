"""Each case at the edges is green for the right backend, and red for one with the fault that it is there to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn.backends import TorchBackend
from dsattn.layouts import CausalLayout, Segment, TopK
from dsattn.ops import loss as loss_ops
from dsattn.ops import topk as topk_ops
from dsattn.ops.inputs import AttentionInputs, IndexerInputs
from dsattn.spec.case import Case
from dsattn.spec.cases import CASES
from dsattn.spec.cases_edges import edge_cases
from dsattn.spec.inputs import inputs
from dsattn.verify.records import Record
from dsattn.verify.reference import References
from dsattn.verify.run import run, tasks
from dsattn.verify.subject import Subject

NAMED = {case.name: case for case in CASES}
REFERENCES = References(keep=None)


class Off(TorchBackend):
    """The torch backend; the subclasses have one fault each."""

    name = "off"


class Relaid(Off):
    """Layouts are replaced by others."""

    def __init__(self, change: Callable[[CausalLayout], CausalLayout]) -> None:
        self.change = change

    def indexer_topk(self, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        return super().indexer_topk(x, self.change(layout), top_k, return_scores)

    def dense_attention(self, a: AttentionInputs, layout: CausalLayout) -> tuple[Tensor, Tensor]:
        return super().dense_attention(a, self.change(layout))


def resegmented(change: Callable[[Segment], Segment]) -> Relaid:
    def changed(layout: CausalLayout) -> CausalLayout:
        segments = list(map(change, layout.segments))
        return CausalLayout.from_segments(segments, num_q=layout.num_q, num_k=layout.num_k, ratio=layout.ratio)

    return Relaid(changed)


def past_of_the_first(layout: CausalLayout) -> CausalLayout:
    segments = [replace(s, q_offset=layout.segments[0].q_offset) for s in layout.segments]
    return CausalLayout.from_segments(segments, num_q=layout.num_q, num_k=layout.num_k, ratio=layout.ratio)


class LastSegmentWins(Off):
    """Key gradients of a later segment replace those of an earlier one."""

    def dense_attention_backward(self, a: Any, layout: Any, out: Any, lse: Any, d_out: Tensor) -> Any:
        d_q, d_kv, d_sink = super().dense_attention_backward(a, layout, out, lse, d_out)
        for s in layout.segments:
            alone = torch.zeros_like(d_out)
            alone[s.q_start : s.q_start + s.q_len] = d_out[s.q_start : s.q_start + s.q_len]
            keys = slice(s.k_start, s.k_start + s.k_len)
            d_kv[keys] = super().dense_attention_backward(a, layout, out, lse, alone)[1][keys]
        return d_q, d_kv, d_sink


class Scored(Off):
    """Scores are changed before the top-k."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.change = change

    def indexer_topk(self, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        right = topk_ops.choose

        def wrong(scores: Tensor, seen: Tensor, counts: Tensor, top_k: int) -> Tensor:
            scores = self.change(scores, seen)
            # What is not seen may be chosen now.
            return right(scores, torch.ones_like(seen) if scores.isinf().any() else seen, counts, top_k)

        topk_ops.choose = wrong
        try:
            return super().indexer_topk(x, layout, top_k, return_scores)
        finally:
            topk_ops.choose = right


def rounded(dtype: torch.dtype) -> Scored:
    return Scored(lambda scores, _: scores.to(dtype).to(scores.dtype))


class MaskOfFp16(Off):
    """Keys that a row does not see get the least score of fp16 instead of none."""

    def indexer_topk(self, x: Any, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        table = super().indexer_scores(x, layout)
        table = table.masked_fill(table == -torch.inf, torch.finfo(torch.float16).min)
        topk = super().indexer_topk(x, layout, top_k, return_scores)
        for row, length in enumerate(topk.lengths.tolist()):
            topk.indices[row, :length] = table[row].topk(length).indices.sort().values
        return topk


class SlotsOfZero(Off):
    """Unused slots hold key 0."""

    def indexer_topk(self, x: Any, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        topk = super().indexer_topk(x, layout, top_k, return_scores)
        topk.indices.clamp_(min=0)
        return topk


class Divergence(Off):
    """The divergence of rows is computed otherwise."""

    def __init__(self, name: str, wrong: Callable[..., Any]) -> None:
        self.fault, self.wrong = name, wrong

    def indexer_loss(self, *arguments: Any, **options: Any) -> Any:
        right = getattr(loss_ops, self.fault)
        setattr(loss_ops, self.fault, partial(self.wrong, right))
        try:
            return super().indexer_loss(*arguments, **options)
        finally:
            setattr(loss_ops, self.fault, right)


def with_epsilon(right: Any, teacher: Tensor, scores: Tensor, lse: Tensor, seen: Tensor) -> Tensor:
    student = (scores - lse[:, None]).exp()
    return (teacher * ((teacher + 1e-10).log() - (student + 1e-10).log())).masked_fill(~seen, 0).sum(1)


def where_there_is_mass(right: Any, x: Any, block: Any, keys: Any, d_scores: Tensor, seen: Tensor) -> Any:
    """The gradient as autograd has it of log(softmax): where the student underflows, nothing arrives."""
    student = torch.softmax(loss_ops.block_scores(x, block, keys).masked_fill(~seen, -torch.inf), -1)
    return right(x, block, keys, d_scores * (student > 0), seen)


class Clean(Off):
    """What is not finite is replaced by zeros."""

    def indexer_topk(self, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        clean = [torch.nan_to_num(y, posinf=0, neginf=0) for y in (x.index_q, x.index_k, x.weights)]
        x = replace(x, index_q=clean[0], index_k=clean[1], weights=clean[2])
        return super().indexer_topk(x, layout, top_k, return_scores)

    def sparse_attention(self, a: AttentionInputs, topk: TopK) -> tuple[Tensor, Tensor]:
        clean = [torch.nan_to_num(y, posinf=0, neginf=0) for y in (a.q, a.kv)]
        sink = None if a.sink is None else torch.nan_to_num(a.sink, posinf=0)
        return super().sparse_attention(replace(a, q=clean[0], kv=clean[1], sink=sink), topk)


class Spreads(Off):
    """A number that is not finite reaches all keys, or all rows, of its block."""

    def indexer_topk(self, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        topk = super().indexer_topk(x, layout, top_k, return_scores)
        # All rows of the second document, but for those that see too little, select their first keys.
        topk.indices[28:50] = torch.arange(20, 28, dtype=torch.int32)
        return topk

    def sparse_attention_backward(self, a: Any, topk: TopK, out: Tensor, lse: Tensor, d_out: Tensor) -> Any:
        d_q, d_kv, d_sink = super().sparse_attention_backward(a, topk, out, lse, d_out)
        return d_q, torch.where(d_kv.isfinite().all(), d_kv, torch.nan), d_sink


class EmptyIsNaN(Off):
    """A row without keys gets the softmax of nothing."""

    def dense_attention(self, a: Any, layout: Any) -> tuple[Tensor, Tensor]:
        out, lse = super().dense_attention(a, layout)
        return out.masked_fill((lse == -torch.inf)[..., None], torch.nan), lse


class TileLeaks(Off):
    """A tile of 64 keys that the last of four rows sees whole is taken whole for the first one."""

    def indexer_scores(self, x: IndexerInputs, layout: CausalLayout) -> Tensor:
        table = super().indexer_scores(x, layout)
        table[60, 62] = 0.0
        return table


def ceiled(segment: Segment) -> Segment:
    return replace(segment, q_offset=segment.q_offset + 3)


def from_zero(segment: Segment) -> Segment:
    return replace(segment, q_offset=0)


# The fault of each case, in the check that must find it.
FAULTS: dict[str, list[tuple[str, Off]]] = {
    "prefill-chunk-0": [("dense_attention", resegmented(lambda s: replace(s, q_offset=s.k_len)))],
    "prefill-chunk-1": [("indexer_topk", resegmented(from_zero)), ("dense_attention", resegmented(from_zero))],
    "prefill-chunk-2": [("indexer_topk", resegmented(from_zero)), ("dense_attention", resegmented(from_zero))],
    "prefill-past-1": [("indexer_scores", TileLeaks()), ("dense_attention", resegmented(from_zero))],
    "decode-2": [("dense_attention", Relaid(past_of_the_first)), ("dense_attention", resegmented(from_zero))],
    "decode-3": [
        ("dense_attention", Relaid(past_of_the_first)),
        ("dense_attention", resegmented(lambda s: replace(s, q_offset=max(0, s.q_offset)))),
    ],
    "decode-ratio-4": [("dense_attention", Relaid(past_of_the_first)), ("dense_attention", resegmented(ceiled))],
    "ratio-4-short": [("dense_attention", resegmented(ceiled))],
    "ratio-4-prefill": [("dense_attention", resegmented(ceiled))],
    "ratio-4-gaps": [("dense_attention", resegmented(ceiled))],
    "shared-prefix": [("dense_attention", LastSegmentWins())],
    "overlap": [("dense_attention", LastSegmentWins())],
    "k-2048": [("indexer_topk", SlotsOfZero())],
    "near-ties": [("indexer_topk", rounded(torch.bfloat16)), ("indexer_topk", rounded(torch.float16))],
    "near-ties-grid": [("indexer_topk", rounded(torch.bfloat16)), ("indexer_topk", rounded(torch.float16))],
    "far-below": [("indexer_topk", MaskOfFp16()), ("indexer_topk", rounded(torch.float16))],
    "far-below-grid": [("indexer_topk", MaskOfFp16()), ("indexer_topk", rounded(torch.float16))],
    "wide": [
        ("indexer_loss:selected", Divergence("row_kl", with_epsilon)),
        ("indexer_loss:visible", Divergence("row_kl", with_epsilon)),
        ("indexer_loss:selected", Divergence("block_scores_backward", where_there_is_mass)),
        ("indexer_loss:visible", Divergence("block_scores_backward", where_there_is_mass)),
    ],
    "nan-index-q": [("indexer_topk", Clean()), ("indexer_topk", Spreads())],
    "nan-index-k": [("indexer_topk", Clean()), ("indexer_topk", Spreads())],
    "nan-weights": [("indexer_topk", Clean()), ("indexer_topk", Spreads())],
    "nan-q": [("sparse_attention", Clean()), ("sparse_attention", Spreads())],
    "nan-kv-value": [("sparse_attention", Clean()), ("sparse_attention", Spreads())],
    "nan-kv-key": [("sparse_attention", Clean()), ("sparse_attention", Spreads())],
    "nan-sink": [("sparse_attention", Clean())],
    "inf-sink": [("sparse_attention", Clean())],
    "inf-index-q": [("indexer_topk", Clean()), ("indexer_topk", Spreads())],
    "inf-index-k": [("indexer_topk", Clean()), ("indexer_topk", Spreads())],
    "minus-inf-weights": [("indexer_topk", Clean()), ("indexer_topk", Spreads())],
    "inf-q": [("sparse_attention", Clean()), ("sparse_attention", Spreads())],
    "inf-kv-value": [("sparse_attention", Clean()), ("sparse_attention", Spreads())],
    "minus-inf-kv-key": [("sparse_attention", Clean()), ("sparse_attention", Spreads())],
    "no-keys": [("dense_attention", EmptyIsNaN())],
}


def records(case: Case, backend: TorchBackend, dtype: str = "fp32") -> dict[str, Record]:
    subject = Subject(suite="quick", case=case, make_inputs=partial(inputs, case))
    found = tasks([subject], [backend], torch.device("cpu"), [dtype])
    return {record.operator: record for record in run(found, REFERENCES)}


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("case", edge_cases(), ids=lambda case: case.name)
def test_the_right_backend_is_green(case: Case, dtype: str) -> None:
    found = records(case, TorchBackend(), dtype)
    assert found
    assert {record.verdict for record in found.values()} == {"pass"}, [r.reason for r in found.values() if r.reason]


@pytest.mark.parametrize(
    ("name", "check", "backend"),
    [(name, *fault) for name, faults in FAULTS.items() for fault in faults],
)
def test_its_own_fault_turns_a_case_red(name: str, check: str, backend: Off) -> None:
    record = records(NAMED[name], backend)[check]
    assert record.verdict == "fail"
    assert record.traceback is None, record.traceback


def test_every_edge_has_a_fault() -> None:
    nothing_to_get_wrong = {"no-queries", "nothing"}
    assert {case.name for case in edge_cases()} == set(FAULTS) | nothing_to_get_wrong
