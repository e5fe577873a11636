"""What comes out when a kernel is wrong in a known way: the oracle's numbers for another question."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsattn.backends.trust.answers import Values, attended, loss_options, values_of
from dsattn.backends.trust.problems import Sample
from dsattn.layouts import CausalLayout, Segment
from dsattn.ops.inputs import AttentionInputs, IndexerInputs
from dsattn.spec import oracle
from dsattn.spec.oracle import Rows

Cause = tuple[str, Callable[[], Sequence[Values]]]

LOCAL = "ids were read as local"
_ALIGNMENTS = ("matches top-left alignment", "matches bottom-right alignment")


def tail_of(block: int) -> str:
    """The cause's name."""
    return f"tail slots unwritten: those past the last whole block of {block}"


def lengths(sample: Sample) -> Tensor:
    """Keys of each row."""
    return torch.tensor([len(keys) for keys in sample.support], dtype=torch.int64, device="cpu")


def counted_rows(sample: Sample) -> int:
    """Rows that take part in the loss."""
    seeing, mask = lengths(sample) > 0, sample.options.row_mask
    return int((seeing if mask is None else seeing & mask).sum())


def alignments(sample: Sample) -> Iterator[tuple[str, CausalLayout]]:
    """The layout with another causal alignment, in which rows see fewer keys than they should, by the cause's name."""
    for name in _ALIGNMENTS:
        for whole in (False, True):
            layout = realigned(sample.layout, top_left=name == _ALIGNMENTS[0], whole=whole)
            if layout != sample.layout:
                yield name, layout


def of_alignment(sample: Sample) -> Iterator[Cause]:
    """Another causal alignment."""
    for name, layout in alignments(sample) if sample.kind == "visible" else ():
        yield name, lambda layout=layout: [_with_layout(sample, layout)]


def realigned(layout: CausalLayout, *, top_left: bool, whole: bool) -> CausalLayout:
    """The layout with one alignment for all segments in place of their offsets, where it shows less.

    Args:
        layout: the right one.
        top_left: whether every segment begins at its first position; else it ends at its last.
        whole: whether its rows and keys count as they are; else rows before the first position, and keys that no row
            sees, are cut off before.
    """
    ratio, found = layout.ratio, []
    for s in layout.segments:
        skipped = 0 if whole else max(0, -s.q_offset)
        keys = s.k_len if whole else max(0, min(s.k_len, (s.q_offset + s.q_len) // ratio))
        rows = s.q_len - skipped
        if rows <= 0 or keys <= 0:
            continue
        offset = 0 if top_left else keys * ratio - rows
        # What it shows more is masked after the call.
        found.append(Segment(s.q_start + skipped, rows, s.k_start, keys, min(offset, s.q_offset + skipped)))
    return CausalLayout.from_segments(found, num_q=layout.num_q, num_k=layout.num_k, ratio=ratio)


def _with_layout(sample: Sample, layout: CausalLayout) -> Values:
    support = oracle.visible_keys(layout)
    x, a = sample.x, sample.a
    if sample.operator != "indexer_loss" or x is None or a is None:
        return values_of(replace(sample, layout=layout, support=support))
    # The log-sum-exp is right, so a row's teacher is what is left of the right one.
    mass = oracle.head_probabilities(a.q, a.kv, sample.support, softmax_scale=a.softmax_scale)
    teacher = [part[: len(keys)] for part, keys in zip(mass, support, strict=True)]
    found = _loss(sample, x, a, support, teacher)
    seen = torch.tensor([len(keys) for keys in support], dtype=torch.int64, device="cpu")
    # Nobody says what a hidden key adds to the loss, nor what becomes of a row whose keys are all hidden.
    return _unknown_rows(found, (lengths(sample) > 0) & (seen == 0))


def of_ids(sample: Sample) -> Iterator[Cause]:
    """Ids of batch 1 with the keys of batch 0 added once more: they lie beyond the buffer, and are dropped."""
    if sample.kind != "selected" or int(sample.row_entries.max()) < 1:
        return
    later = sample.row_entries > 0
    support = [keys[:0] if bool(gone) else keys for keys, gone in zip(sample.support, later, strict=True)]
    if sample.operator != "indexer_loss" or sample.x is None or sample.a is None:
        yield LOCAL, lambda: [values_of(replace(sample, support=support))]
        return
    x, a = sample.x, sample.a

    def zeroed() -> Values:
        found = _loss(sample, x, a, support, None)
        if "d_weights" in found:
            # The weights' gradient of such a row may be the student's alone.
            found["d_weights"][later] = torch.nan
        return found

    def flat() -> Values:
        # Keys that are not loaded count as zeros, with equal logits.
        mass = oracle.head_probabilities(a.q, a.kv, sample.support, softmax_scale=a.softmax_scale)
        teacher = [torch.ones_like(part) if bool(gone) else part for part, gone in zip(mass, later, strict=True)]
        return _loss(sample, x, a, sample.support, teacher)

    yield LOCAL, lambda: [zeroed()]
    yield LOCAL, lambda: [flat()]


def of_scale(sample: Sample, right: Values) -> Iterator[Cause]:
    """A scale that is taken for 1, or for what kernels take by themselves."""
    x, a = sample.x, sample.a
    if x is not None:
        yield "scale dropped", lambda: _without_scale(sample, x, right)
    if a is None:
        return
    for scale in (1.0, *(width**-0.5 for width in (a.kv.shape[1], 512, 576))):
        other = replace(a, softmax_scale=scale)
        if sample.backward:
            yield "scale dropped", lambda other=other: [_attention_gradients(sample, other, given=a)]
        else:
            yield "scale dropped", lambda other=other: [values_of(replace(sample, a=other))]


def _without_scale(sample: Sample, x: IndexerInputs, right: Values) -> Sequence[Values]:
    """The scale may be dropped in the scores, in their gradients, or in both."""
    scores = values_of(replace(sample, x=replace(x, scale=1.0)))
    gradients = {name: value / x.scale for name, value in right.items() if name.startswith("d_")}
    return scores, gradients, {name: value * x.scale for name, value in scores.items() if name.startswith("d_")}


def of_lse(sample: Sample, right: Values) -> Iterator[Cause]:
    """A log-sum-exp in base 2, returned or expected."""
    if "lse" in right:
        yield "lse is base 2", lambda: [{"lse": right["lse"] * math.log2(math.e)}]
    a, x = sample.a, sample.x
    if a is None:
        return
    if sample.backward:
        yield "lse is base 2: it is read as such", lambda: [_attention_gradients(sample, a, given=a, nats=math.log(2))]
    elif x is not None:
        yield "lse is base 2: it is read as such", lambda: [_loss(sample, x, a, sample.support, _base_two(sample, a))]


def of_sink(sample: Sample, right: Values) -> Iterator[Cause]:
    """A sink that is not there, or that is in the log-sum-exp too."""
    a = sample.a
    if a is None or a.sink is None or sample.x is not None:
        return
    bare = replace(a, sink=None)
    if sample.backward:
        nothing = {"d_sink": torch.zeros_like(right["d_sink"])}
        yield "sink dropped", lambda: [_attention_gradients(sample, bare, given=a) | nothing]
        return
    sink = a.sink.double()
    yield "sink dropped", lambda: [values_of(replace(sample, a=bare))]
    yield "the sink is in lse", lambda: [{"lse": torch.logaddexp(right["lse"], sink)}]


def of_mask(sample: Sample, right: Values) -> Iterator[Cause]:
    """Unseen keys of a table that hold 0."""
    scores = right.get("scores")
    if scores is not None:
        yield "masked entries are 0", lambda: [{"scores": scores.masked_fill(scores == -torch.inf, 0.0)}]


def of_tail(sample: Sample, blocks: Sequence[int]) -> Iterator[Cause]:
    """Slots past the last whole block that are not looked at."""
    if sample.kind != "selected" or sample.top_k is None:
        return
    for block in blocks:
        written = sample.top_k // block * block
        if written == sample.top_k:
            continue
        support = [keys[:written] for keys in sample.support]
        yield tail_of(block), lambda support=support: [_shortened(sample, support)]


def _shortened(sample: Sample, support: Rows) -> Values:
    x, a = sample.x, sample.a
    if x is not None and a is not None:
        mass = oracle.head_probabilities(a.q, a.kv, sample.support, softmax_scale=a.softmax_scale)
        teacher = [part[: len(keys)] for part, keys in zip(mass, support, strict=True)]
        return _loss(sample, x, a, support, teacher)
    if sample.backward and a is not None:
        return _attention_gradients(replace(sample, support=support), a, given=a, whole=sample)
    return values_of(replace(sample, support=support))


def selected(scores: Tensor, sample: Sample, visible: Rows | None = None) -> Rows:
    """The oracle's selection of the judged rows of a table."""
    return oracle.indexer_topk(scores, sample.support if visible is None else visible, top_k=sample.top_k or 1)


def of_selection(sample: Sample, scores: Tensor) -> Iterator[tuple[str, Callable[[], Rows]]]:
    """The known wrong selections of the judged rows."""
    x = sample.x
    if x is None:
        return
    for name, layout in alignments(sample):
        yield name, lambda layout=layout: selected(_table(sample, x, layout), sample)
        yield name, lambda layout=layout: selected(_table(sample, x, layout), sample, _windows(sample, layout))
    yield "masked entries are 0", lambda: _among_zeros(sample, scores, longer_than=sample.top_k or 1)
    yield "masked entries are 0", lambda: _among_zeros(sample, scores, longer_than=0)
    yield LOCAL, lambda: _local(sample, scores)
    yield "ties go to the highest key row", lambda: _last_of_ties(sample, scores)


def _table(sample: Sample, x: IndexerInputs, layout: CausalLayout) -> Tensor:
    options = {"scale": x.scale, "relu": x.relu, "rows": sample.judged}
    return oracle.indexer_scores(x.index_q, x.index_k, x.weights, layout, **options).value


def _windows(sample: Sample, layout: CausalLayout) -> Rows:
    rows = oracle.visible_keys(layout)
    return rows if sample.judged is None else [rows[int(row)] for row in sample.judged]


def _among_zeros(sample: Sample, scores: Tensor, longer_than: int) -> Rows:
    """The seen keys among the first of all keys of a launch, whose unseen ones count as 0, in rows of many keys."""
    widest, found = max(segment.k_len for segment in sample.layout.segments), []
    for row, keys in zip(scores, sample.support, strict=True):
        if len(keys) <= longer_than:
            found.append(keys)
            continue
        padded = torch.cat((row[keys], torch.zeros(max(0, widest - len(keys)), dtype=row.dtype, device=row.device)))
        places = torch.arange(len(padded), device=row.device)
        chosen = oracle.indexer_topk(padded[None], [places], top_k=sample.top_k or 1)[0]
        found.append(keys[chosen[chosen < len(keys)]])
    return found


def _local(sample: Sample, scores: Tensor) -> Rows:
    """The right keys, counted from the first key of their document."""
    first = {int(entry): int((sample.key_entries == entry).nonzero()[0]) for entry in sample.key_entries.unique()}
    rows = sample.row_entries if sample.judged is None else sample.row_entries[sample.judged]
    return [keys - first.get(int(entry), 0) for keys, entry in zip(selected(scores, sample), rows, strict=True)]


def _last_of_ties(sample: Sample, scores: Tensor) -> Rows:
    turned = [scores.shape[1] - 1 - keys.flip(0) for keys in sample.support]
    return [(scores.shape[1] - 1 - keys).flip(0) for keys in selected(scores.flip(1), sample, turned)]


def _loss(sample: Sample, x: IndexerInputs, a: AttentionInputs, support: Rows, teacher: Rows | None) -> Values:
    """The loss over another support or with another teacher, weighted as the right one."""
    options: dict[str, Any] = {
        **loss_options(sample, x, a),
        "num_rows": max(1, counted_rows(sample)),
        "teacher": teacher,
    }
    found = oracle.indexer_loss(x.index_q, x.index_k, x.weights, a.q, a.kv, support, **options)
    return {name: number.value for name, number in found.items() if sample.gradients or name == "loss"}


def _unknown_rows(found: Values, rows: Tensor) -> Values:
    """Results in which some rows may be anything, and with them all that is added up over rows."""
    result = {name: torch.full_like(value, torch.nan) for name, value in found.items()}
    for name in ("d_index_q", "d_weights"):
        if name in found:
            result[name] = found[name].masked_fill(rows.view(-1, *(1,) * (found[name].ndim - 1)), torch.nan)
    return result


def _base_two(sample: Sample, a: AttentionInputs) -> Rows:
    """The teacher where exp(logit - lse) is computed with lse taken for a number of base 2."""
    found = []
    for row, keys in enumerate(sample.support):
        logit = a.softmax_scale * (a.q[row].double() @ a.kv[keys].double().T)
        lse = logit.logsumexp(-1, keepdim=True)
        found.append(torch.exp(logit - lse * math.log(2)).sum(0))
    return found


def _attention_gradients(
    sample: Sample, a: AttentionInputs, *, given: AttentionInputs, nats: float = 1.0, whole: Sample | None = None
) -> Values:
    """Gradients of a backward that is given the right output and log-sum-exp and does something else with them.

    Args:
        sample: the problem, with the keys that the backward looks at.
        a: the scale and the sink that it uses.
        given: those of the forward.
        nats: natural units in one unit of the log-sum-exp, as it is read.
        whole: the problem of the forward, where it is another.
    """
    if sample.upstream is None:
        return {}
    out, lse = (x.double() for x in attended(whole or sample, given))
    q, kv, d_out = a.q.double(), a.kv.double(), sample.upstream.double()
    d_q, d_kv = torch.zeros_like(q), torch.zeros_like(kv)
    total = lse if a.sink is None else torch.logaddexp(lse, a.sink.double())
    delta = (d_out * out).sum(-1)
    for row, keys in enumerate(sample.support):
        key = kv[keys]
        p = torch.exp(a.softmax_scale * (q[row] @ key.T) - nats * total[row][:, None])
        d_logit = a.softmax_scale * p * (d_out[row] @ key[:, : a.value_dim].T - delta[row][:, None])
        d_q[row] = d_logit @ key
        d_kv.index_add_(0, keys, d_logit.T @ q[row])
        d_kv[:, : a.value_dim].index_add_(0, keys, p.T @ d_out[row])
    return {"d_q": d_q, "d_kv": d_kv}
