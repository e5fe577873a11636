"""Live calls of kernels held to the oracle, in a few rows of every n-th call."""

from __future__ import annotations

import re
import threading
from collections import Counter

import torch
from torch import Tensor

from dsattn.backends import Backend
from dsattn.backends.base import AttentionGradients, IndexerGradients
from dsattn.backends.trust import capturing
from dsattn.backends.trust.rows import LiveCall, disagreement
from dsattn.errors import BadInput, ContractDrift
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.spec.problem import Problem

_ROWS = 4
_LOCK = threading.Lock()
_active: tuple[Audit, ...] = ()


class Audit:
    """A running audit, made by `audit`; as a context manager it stops at its end.

    Attributes:
        checked: how many calls were checked so far.
    """

    def __init__(self, every: int) -> None:
        self.checked = 0
        self._every = every
        self._calls: Counter[str] = Counter()
        self._draw = torch.Generator(device="cpu").manual_seed(every)

    def stop(self) -> None:
        """Ends the audit."""
        global _active
        with _LOCK:
            _active = tuple(each for each in _active if each is not self)

    def __enter__(self) -> Audit:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _turn(self, title: str, count: int) -> Tensor | None:
        """The rows of a call to check, ascending; None where it is not its turn."""
        with _LOCK:
            self._calls[title] += 1
            if self._calls[title] % self._every or count == 0:
                return None
            self.checked += 1
            return torch.randint(0, count, (_ROWS,), generator=self._draw, dtype=torch.int64, device="cpu").unique()


def audit(every: int = 1000) -> Audit:
    """An audit that runs from now on: 4 random rows of every n-th call of each kernel are held to plain PyTorch.

    The self-check is one small problem, so it sees neither races nor what goes wrong at large sizes only. This looks at
    the calls that are really made. Used as a function it runs until `stop`, as a context manager until its end.

    Args:
        every: which calls of each operator and direction are checked: the n-th, the 2n-th and so on.

    Returns:
        The audit.

    Semantics:
        Rows are drawn on the host by a generator of its own. Looked at are scores, selections, outputs, log-sum-exps
        and the gradients that a row has for itself: not those of keys and sinks, which are sums over all rows, and no
        loss without gradients or with a tensor-parallel group. Rows with an input that is not finite are left out. A
        checked call waits for the device, and takes memory for float64 copies of the keys that its rows see. Calls
        that are captured into a graph are not counted. The results of a call that is right are not touched.

    Raises:
        BadInput: `every` is no int of at least 1.
        ContractDrift: raised by the call that is checked, where a row is not what plain PyTorch makes of it; the
            message names operator, backend and rows.
    """
    global _active
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise BadInput("every", given=repr(every), needed="an int of at least 1")
    started = Audit(every)
    with _LOCK:
        _active = (*_active, started)
    return started


def watched(backend: Backend) -> Backend:
    """The backend, or while an audit runs one that does the same and is looked at."""
    return _Watched(backend, _active) if _active and backend.checked else backend


class _Watched(Backend):
    """A backend whose results are shown to the audits."""

    def __init__(self, inner: Backend, audits: tuple[Audit, ...]) -> None:
        self.name, self._inner, self._audits = inner.name, inner, audits

    def missing(self) -> str | None:
        return self._inner.missing()

    def supports(self, problem: Problem) -> str | None:
        return self._inner.supports(problem)

    def indexer_scores(self, x: IndexerInputs, layout: CausalLayout) -> Tensor:
        table = self._inner.indexer_scores(x, layout)
        self._show(LiveCall(operator="indexer_scores", x=x, layout=layout), scores=table)
        return table

    def indexer_scores_backward(self, x: IndexerInputs, layout: CausalLayout, d_scores: Tensor) -> IndexerGradients:
        found = self._inner.indexer_scores_backward(x, layout, d_scores)
        call = LiveCall(operator="indexer_scores", backward=True, x=x, layout=layout, upstream=d_scores)
        self._show(call, d_index_q=found[0], d_weights=found[2])
        return found

    def indexer_topk(self, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        topk = self._inner.indexer_topk(x, layout, top_k, return_scores)
        self._show(LiveCall(operator="indexer_topk", x=x, layout=layout, top_k=top_k), topk=topk)
        return topk

    def sparse_attention(self, a: AttentionInputs, topk: TopK) -> tuple[Tensor, Tensor]:
        out, lse = self._inner.sparse_attention(a, topk)
        self._show(LiveCall(operator="sparse_attention", a=a, topk=topk), out=out, lse=lse)
        return out, lse

    def sparse_attention_backward(
        self, a: AttentionInputs, topk: TopK, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> AttentionGradients:
        found = self._inner.sparse_attention_backward(a, topk, out, lse, d_out)
        self._show(LiveCall(operator="sparse_attention", backward=True, a=a, topk=topk, upstream=d_out), d_q=found[0])
        return found

    def dense_attention(self, a: AttentionInputs, layout: CausalLayout) -> tuple[Tensor, Tensor]:
        out, lse = self._inner.dense_attention(a, layout)
        self._show(LiveCall(operator="dense_attention", a=a, layout=layout), out=out, lse=lse)
        return out, lse

    def dense_attention_backward(
        self, a: AttentionInputs, layout: CausalLayout, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> AttentionGradients:
        found = self._inner.dense_attention_backward(a, layout, out, lse, d_out)
        self._show(
            LiveCall(operator="dense_attention", backward=True, a=a, layout=layout, upstream=d_out), d_q=found[0]
        )
        return found

    def indexer_loss(
        self,
        x: IndexerInputs,
        a: AttentionInputs,
        layout: CausalLayout,
        topk: TopK | None,
        lse: Tensor | None,
        options: LossOptions,
        with_gradients: bool,
    ) -> tuple[Tensor, IndexerGradients | None]:
        loss, gradients = self._inner.indexer_loss(x, a, layout, topk, lse, options, with_gradients)
        if gradients is not None and options.tp_group is None:
            call = LiveCall(operator="indexer_loss", x=x, a=a, layout=layout, topk=topk, options=options)
            self._show(call, d_index_q=gradients[0], d_weights=gradients[2])
        return loss, gradients

    def _show(self, call: LiveCall, **results: Tensor | TopK) -> None:
        """Has the audits whose turn it is look at some rows.

        Raises:
            ContractDrift: a row is wrong.
        """
        if capturing(call.device):
            return
        title = f"the backward of {call.operator}" if call.backward else call.operator
        for each in self._audits:
            rows = each._turn(title, call.num_q)
            found = "" if rows is None else disagreement(call, rows, results)
            if found and rows is not None:
                raise ContractDrift(
                    f"audit of {title} on backend {self.name!r}",
                    given=f"{_renumbered(found, rows.tolist())} of {call.num_q}",
                    needed="what plain PyTorch computes",
                    fix='pass backend="torch", and report the release and the sizes',
                )


def _renumbered(found: str, rows: list[int]) -> str:
    """What a comparison said, with the call's own numbers of the rows that it was given."""
    told = re.sub(r"\brow (\d+)\b", lambda match: f"row {rows[int(match[1])]}", found)
    return f"{told}; looked at rows {', '.join(map(str, rows))}"
