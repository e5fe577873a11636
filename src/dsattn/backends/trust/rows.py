"""Some rows of a live call, held to the oracle as a call of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsattn.backends.trust.answers import Expected, answers
from dsattn.backends.trust.check import Results, judge
from dsattn.backends.trust.problems import Sample
from dsattn.backends.trust.quiet import undisturbed
from dsattn.layouts import CausalLayout, Segment, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.spec.oracle import Exact, Rows
from dsattn.spec.problem import Operator


@dataclass(frozen=True, kw_only=True)
class LiveCall:
    """A call as a backend was given it.

    Attributes:
        operator: which operator.
        backward: whether its backward.
        layout: who sees whom; None where a selection says it.
        topk: the selection that the call runs over; None where it runs over all visible keys.
        x: the indexer's side.
        a: the attention's side.
        top_k: slots of a selection that is made.
        upstream: gradient that comes in, one entry per row.
        options: of the loss.
    """

    operator: Operator
    backward: bool = False
    layout: CausalLayout | None = None
    topk: TopK | None = None
    x: IndexerInputs | None = None
    a: AttentionInputs | None = None
    top_k: int | None = None
    upstream: Tensor | None = None
    options: LossOptions | None = None

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.x.index_q.device if self.a is None and self.x is not None else self._attention.kv.device

    @property
    def num_q(self) -> int:
        """Query rows."""
        return self.x.index_q.shape[0] if self.a is None and self.x is not None else self._attention.q.shape[0]

    @property
    def _attention(self) -> AttentionInputs:
        if self.a is None:
            raise ValueError("a call without inputs")
        return self.a


def disagreement(call: LiveCall, rows: Tensor, results: Results) -> str:
    """What is wrong in some rows of the results; "" if nothing is, or if an input of theirs is not finite.

    Args:
        call: the call.
        rows: int64, on the CPU, ascending and once each.
        results: of the call, those that have an entry per row.
    """
    with undisturbed(call.device):
        keys = _keys(call, rows)
        used = torch.cat(keys).unique()
        sample = _sample(call, rows, keys, used)
        if not _finite(sample):
            return ""
        expected = {
            name: _on_host(number)
            for name, number in answers(sample).items()
            if name in results or call.operator == "indexer_topk"
        }
        taken = {name: _taken(name, x, rows, used) for name, x in results.items()}
        return judge(sample, taken, expected)


def _keys(call: LiveCall, rows: Tensor) -> Rows:
    """The key rows of each row, on the CPU."""
    if call.topk is not None:
        at = rows.to(call.topk.indices.device)
        ids, lengths = call.topk.indices[at].cpu().long(), call.topk.lengths[at].tolist()
        return [row[:count] for row, count in zip(ids, lengths, strict=True)]
    if call.layout is None:
        raise ValueError("a call that does not say which keys it runs over")
    start, end = (bound[rows.to(bound.device)].tolist() for bound in call.layout._shared_bounds(call.device))
    return [torch.arange(a, b, dtype=torch.int64, device="cpu") for a, b in zip(start, end, strict=True)]


def _sample(call: LiveCall, rows: Tensor, keys: Rows, used: Tensor) -> Sample:
    """The rows as a call of their own, against the keys that they use."""
    at, of = rows.to(call.device), used.to(call.device)
    support = [torch.searchsorted(used, each) for each in keys]
    # A window is one range of the keys in use, too.
    segments = [
        Segment(place, 1, int(each[0]), len(each), len(each) - 1)
        for place, each in enumerate(support)
        if len(each) and call.topk is None
    ]
    x, a = call.x, call.a
    if x is not None:
        x = replace(x, index_q=x.index_q[at], index_k=x.index_k[of], weights=x.weights[at])
    if a is not None:
        a = replace(a, q=a.q[at], kv=a.kv[of])
    upstream = None if call.upstream is None else call.upstream[at]
    if upstream is not None and call.operator == "indexer_scores":
        upstream = upstream[:, of]
    return Sample(
        operator=call.operator,
        backward=call.backward,
        kind="visible" if call.topk is None else "selected",
        layout=CausalLayout.from_segments(segments, num_q=len(rows), num_k=len(used)),
        support=support,
        x=x,
        a=a,
        top_k=call.top_k,
        options=LossOptions() if call.options is None else _options(call, call.options, at),
        upstream=upstream,
        gradients=call.operator == "indexer_loss",
        exact_ids=False,
        row_entries=torch.zeros(len(rows), dtype=torch.int64, device="cpu"),
        key_entries=torch.zeros(len(used), dtype=torch.int64, device="cpu"),
    )


def _options(call: LiveCall, options: LossOptions, at: Tensor) -> LossOptions:
    """The loss's options for some rows: weighted as in the whole call."""
    mask, count = options.row_mask, options.num_rows
    if count is None and options.reduction == "mean":
        if call.topk is not None:
            counted = call.topk.lengths > 0
        elif call.layout is not None:
            start, end = call.layout._shared_bounds(call.device)
            counted = end > start
        else:
            raise ValueError("a loss that does not say which keys it runs over")
        count = max(1, int((counted if mask is None else counted & mask).sum()))
    return replace(options, num_rows=count, row_mask=None if mask is None else mask[at])


def _finite(sample: Sample) -> bool:
    tensors = [] if sample.x is None else [sample.x.index_q, sample.x.index_k, sample.x.weights]
    tensors += [] if sample.a is None else [sample.a.q, sample.a.kv]
    tensors += [x for x in (sample.upstream, None if sample.a is None else sample.a.sink) if x is not None]
    return all(bool(x.isfinite().all()) for x in tensors)


def _taken(name: str, result: Tensor | TopK, rows: Tensor, used: Tensor) -> Tensor | TopK:
    """The rows of a result, on the CPU; keys by their number among those in use."""
    if isinstance(result, TopK):
        at = rows.to(result.indices.device)
        ids, lengths = result.indices[at].cpu().long(), result.lengths[at].cpu()
        places = torch.searchsorted(used, ids.clamp(min=0)).clamp(max=max(0, len(used) - 1))
        # An id that no row may see is out of range, and so it stays.
        known = (ids >= 0) & (used[places] == ids) if len(used) else torch.zeros_like(ids, dtype=torch.bool)
        ids = torch.where(known, places, torch.where(ids < 0, ids, len(used))).int()
        scores = None if result.scores is None else result.scores[at].cpu()
        return TopK._trusted(ids, lengths, scores, len(rows), len(used))
    taken = result[rows.to(result.device)].cpu()
    return taken[:, used] if name == "scores" else taken


def _on_host(number: Expected) -> Expected:
    return Expected(Exact(number.exact.value.cpu(), number.exact.terms.cpu()), number.plain.cpu())
