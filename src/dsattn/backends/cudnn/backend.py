"""The `cudnn` backend: the DSA wrappers of any cuDNN frontend since 1.24, exact whatever the release's defaults."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

from dsattn.backends.base import AttentionGradients, Backend, IndexerGradients, Launch
from dsattn.backends.cudnn.calls import Calls
from dsattn.backends.cudnn.contracts import releases
from dsattn.backends.cudnn.folding import Fold, folds, table_elements
from dsattn.backends.cudnn.launches import launches
from dsattn.backends.cudnn.losses import selected_loss, visible_loss
from dsattn.backends.cudnn.namespace import Absence, Namespace, installed_identity, open_installed
from dsattn.backends.cudnn.refusals import refusal
from dsattn.backends.cudnn.steps import Steps
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.attention import attend_backward
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.ops.support import Selected
from dsattn.ops.topk import choose, compact
from dsattn.spec.problem import Problem

# exp(-this) times any number of an output's size is far from overflow.
_LEAST_LSE = -60.0


class CudnnBackend(Backend):
    """The frontend's kernels on Hopper and Blackwell.

    Args:
        namespace: the wrappers to call, on CPU tensors where they are a stand-in; None for the installed frontend,
            which is found when it is first asked for.
        steps: what makes the calls exact; only a mutant gives others.
    """

    name = "cudnn"

    def __init__(self, namespace: Namespace | None = None, steps: Steps | None = None) -> None:
        self._given, self._steps = namespace, steps or Steps()
        # A stand-in is here to be looked at, right or wrong; who wants it checked sets this.
        self.checked = namespace is None

    @classmethod
    def simulated(
        cls,
        version: str,
        arch: str,
        seed: int = 0,
        *,
        races: bool = True,
        rounds: bool = False,
        steps: Steps | None = None,
    ) -> CudnnBackend:
        """The backend over a CPU stand-in for a release; see `SimulatedFrontend`.

        Args:
            version: the release, as "1.29.1".
            arch: "sm90" or "sm100".
            seed: of all that the release leaves open.
            races: whether its race conditions strike.
            rounds: whether it rounds as matrix units do.
            steps: see the class.
        """
        from dsattn.backends.cudnn.simulator import SimulatedFrontend

        frontend = SimulatedFrontend(version, arch, seed, races=races, rounds=rounds)
        return cls(Namespace(frontend, frontend.contract.version, arch), steps)

    def missing(self) -> str | None:
        """Not installed, cannot be imported, or no usable GPU; None if the frontend can be used."""
        found = self._given or _installed(None)
        return str(found) if isinstance(found, Absence) else None

    def about(self) -> str:
        """The release and the architecture, and whether the release's contract was read."""
        found = self._given or _installed(None)
        if isinstance(found, Absence):
            return ""
        known = "" if found.contract.known else f", newer than the contracts known here: taken for {releases()[-1]}"
        return f"frontend {found.version} on {found.arch}{known}"

    def namespace_for(self, device: torch.device) -> Namespace:
        """The wrappers for tensors on `device`.

        Raises:
            BackendMissing: there are none.
        """
        found = self._given or _installed(device)
        if isinstance(found, Absence):
            raise found.error()
        return found

    def supports(self, problem: Problem) -> str | None:
        """Why the installed release does not take the problem on this architecture; None if it does."""
        if self._given is None and problem.device.type != "cuda":
            return f"tensors on {problem.device}; the kernels run on CUDA devices"
        found = self._given or _installed(problem.device)
        return str(found) if isinstance(found, Absence) else refusal(problem, found)

    def non_finite(self, problem: Problem) -> str | None:
        """The kernels' relu turns NaN into 0, and what they make of infinities is not known."""
        return (
            "the kernels take NaN of index_q and index_k for 0, and what others make of NaN and infinities is not known"
        )

    def launches(self, problem: Problem) -> frozenset[Launch]:
        """See `Backend.launches`."""
        return launches(problem, self.namespace_for(problem.device).contract)

    def identity(self, device: torch.device) -> dict[str, str] | None:
        """See `Backend.identity`: the versions of the frontend and its DSL, and a digest of the DSA's sources."""
        return None if self._given is not None else installed_identity()

    def rounds(self, problem: Problem) -> str | None:
        """The real kernels do; a stand-in does not."""
        if self._given is not None:
            return None
        return "the kernels round the gradient of every dot to bfloat16 before they multiply by keys and queries"

    def indexer_scores(self, x: IndexerInputs, layout: CausalLayout) -> Tensor:
        """See `Backend.indexer_scores`; the release's own mask is not trusted."""
        table = torch.full((layout.num_q, layout.num_k), -torch.inf, dtype=x.dtype, device=x.index_q.device)
        with self._on(x.index_q.device) as calls:
            for fold, scores in _score_tables(calls, x, layout):
                for piece, rows, _ in fold.parts():
                    columns = slice(0, piece.k_end - piece.k_begin)
                    table[piece.q_begin : piece.q_end, piece.k_begin : piece.k_end] = scores[rows, columns]
        return table

    def indexer_topk(self, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        """See `Backend.indexer_topk`."""
        device = x.index_q.device
        ids = torch.full((layout.num_q, top_k), -1, dtype=torch.int32, device=device)
        kept = torch.full((layout.num_q, top_k), -torch.inf, dtype=x.dtype, device=device) if return_scores else None
        start, end = layout._shared_bounds(device)
        with self._on(device) as calls:
            for fold, scores in _score_tables(calls, x, layout):
                columns = _selected(calls, fold, scores, top_k)
                unused = columns < 0
                first = fold.first_keys(device)[:, None]
                fold.place_queries((columns + first).masked_fill(unused, -1), ids)
                if kept is not None:
                    values = scores.gather(1, columns.clamp(min=0).long()).masked_fill(unused, -torch.inf)
                    fold.place_queries(values, kept)
        return TopK._trusted(ids, (end - start).clamp(max=top_k), kept, num_q=layout.num_q, num_k=layout.num_k)

    def sparse_attention(self, a: AttentionInputs, topk: TopK) -> tuple[Tensor, Tensor]:
        """See `Backend.sparse_attention`."""
        if _nothing(a.q, a.kv, topk.indices):
            out = a.q.new_zeros(*a.q.shape[:2], a.value_dim)
            return out, torch.full(a.q.shape[:2], -torch.inf, dtype=a.dtype, device=a.q.device)
        with self._on(a.q.device) as calls:
            out, lse = calls.attention(a.q, a.kv, topk.indices, topk.lengths, a.softmax_scale, a.sink)
        return out[..., : a.value_dim].contiguous(), lse

    def sparse_attention_backward(
        self, a: AttentionInputs, topk: TopK, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> AttentionGradients:
        """See `Backend.sparse_attention_backward`; the sink goes into the log-sum-exp, and its gradient is ours."""
        if _nothing(a.q, a.kv, topk.indices):
            return torch.zeros_like(a.q), torch.zeros_like(a.kv), None if a.sink is None else torch.zeros_like(a.sink)
        total = lse if a.sink is None else _with_sink(lse, a.sink)
        with self._on(a.q.device) as calls:
            if calls.has("sm90-attn-bwd-tail") and bool(((total < _LEAST_LSE) & (total != -torch.inf)).any()):
                return attend_backward(a, Selected(topk.indices, topk.lengths, topk.num_k), d_out)
            d_q, d_kv = calls.attention_backward(
                a.q, a.kv, out, d_out, total, topk.indices, topk.lengths, a.softmax_scale
            )
        d_sink = None
        if a.sink is not None:
            delta = (d_out.float() * out.float()).sum(-1)
            taken = torch.sigmoid(a.sink - lse).masked_fill(lse == -torch.inf, 0)
            d_sink = -(taken * delta).sum(0)
        return d_q, d_kv.to(a.kv.dtype), d_sink

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
        """See `Backend.indexer_loss`; without `lse` the log-sum-exp is computed in plain PyTorch."""
        if _nothing(x.index_q, x.index_k):
            zeros = torch.zeros_like(x.index_q), torch.zeros_like(x.index_k), torch.zeros_like(x.weights)
            return x.index_q.new_zeros((), dtype=x.dtype), zeros if with_gradients else None
        positive = self._steps.positive(x)
        with self._on(x.index_q.device) as calls:
            if topk is None:
                loss, gradients = visible_loss(calls, positive, a, layout, lse, options, with_gradients)
            else:
                support = Selected(topk.indices, topk.lengths, topk.num_k)
                loss, gradients = selected_loss(calls, positive, a, support, layout, lse, options, with_gradients)
        if gradients is not None and positive is not x:
            gradients = (*gradients[:2], -gradients[2])
        return loss, gradients

    @contextmanager
    def _on(self, device: torch.device) -> Generator[Calls]:
        """The calls for tensors on `device`, which is the current one meanwhile: kernels are compiled for that."""
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield Calls(self.namespace_for(device), self._steps)


@cache
def _installed(device: torch.device | None) -> Namespace | Absence:
    return open_installed(device)


def _score_tables(calls: Calls, x: IndexerInputs, layout: CausalLayout) -> Iterator[tuple[Fold, Tensor]]:
    """Every launch of the layout with its scores [T, max_keys], -inf at unseen keys and never -0."""
    x = calls.steps.positive(x)
    elements = table_elements(x.index_q.device)
    for fold in folds(layout, squared=calls.squared("indexer_forward"), elements=elements):
        table = calls.scores(
            fold.queries(x.index_q), fold.keys(x.index_k), fold.queries(x.weights), fold, float(x.scale)
        )
        seen = fold.seen(table.device)
        yield fold, calls.steps.masked("indexer_forward", calls.steps.ranked(table), seen, -torch.inf)


def _selected(calls: Calls, fold: Fold, scores: Tensor, top_k: int) -> Tensor:
    """The columns that each folded row selects, int32 [T, top_k], ascending, -1 in unused slots at the end."""
    seen, lengths = fold.seen(scores.device), fold.lengths(scores.device)
    if fold.max_keys <= top_k:
        slots = torch.arange(top_k, dtype=torch.int32, device=scores.device)
        return torch.where(slots < lengths[:, None], slots, -1)
    counts = lengths.clamp(max=top_k)
    if calls.has("top-k-lanes-past-row"):
        # The kernel selects columns outside of a row whose scores lie below the least of fp16.
        return _columns(choose(scores, seen, counts, top_k), scores, top_k)
    columns, values, ties = calls.top_k(scores, lengths.clamp(min=1), top_k)
    used = (columns >= 0) & (columns < lengths[:, None])
    if not ties:
        return _columns(calls.steps.repaired(scores, seen, columns, values, used, counts), scores, top_k)
    last = torch.where(used, columns, fold.max_keys).sort(1).values
    return last.masked_fill_(last == fold.max_keys, -1)


def _columns(chosen: Tensor, scores: Tensor, top_k: int) -> Tensor:
    """The columns of a mask [T, n], int32 [T, top_k]."""
    columns = torch.full((len(chosen), top_k), -1, dtype=torch.int32, device=chosen.device)
    compact(chosen, 0, scores, columns, None)
    return columns


def _with_sink(lse: Tensor, sink: Tensor) -> Tensor:
    """logaddexp(lse, sink), -inf for rows without a key."""
    return torch.logaddexp(lse, sink.to(lse.dtype)).masked_fill(lse == -torch.inf, -torch.inf)


def _nothing(*tensors: Tensor) -> bool:
    """Whether there is nothing to launch: no query row, no key row or no slot."""
    return any(x.numel() == 0 for x in tensors)
