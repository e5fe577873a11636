"""Verdicts on selections: recall and regret against float64 scores, as sets, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from dsattn.layouts import CausalLayout
from dsattn.spec.oracle import Exact, Rows, indexer_topk, visible_keys


@dataclass(frozen=True)
class TopKComparison:
    """The verdict on one selection.

    Attributes:
        recall_mean: the mean over rows that see a key.
        recall_min: the least over rows.
        regret: the largest over rows of (sum of the best scores - sum of the selected) / sum of |best|; rows with a
            score that is not finite are left out.
        rows_with_boundary_ties: rows whose k-th and next score are equal.
        worst_row: the row that `reason` names, else the row of `recall_min`; None where there is no row.
        verdict: whether the selection is right.
        reason: what is wrong, "" if nothing is.
        row_recall: float64 [rows], on the CPU: the recall of every compared row, 1 where it sees nothing; None where
            no row could be compared.
        row_faulty: bool [rows], on the CPU: whether anything is wrong in the row; None with `row_recall`.
    """

    recall_mean: float
    recall_min: float
    regret: float
    rows_with_boundary_ties: int
    worst_row: int | None
    verdict: bool
    reason: str
    row_recall: Tensor | None = field(default=None, compare=False, repr=False)
    row_faulty: Tensor | None = field(default=None, compare=False, repr=False)


def tau(
    index_q: Float[Tensor, "t h_i d_i"],
    index_k: Float[Tensor, "s d_i"],
    weights: Float[Tensor, "t h_i"],
    layout: CausalLayout,
    *,
    scale: float = 1.0,
    rows: Sequence[int] | Tensor | None = None,
) -> Float64[Tensor, " r"]:
    """How far an fp32 score of each row may lie from the float64 one: keys this near to the k-th score count as right.

        tau = 2 * h_i * sqrt(d_i) * u * |scale| * sum_h |weights| |index_q_h| max_j |index_k_j|

    over the visible keys j, with u = 2^-24 (2^-53 for fp64 inputs). Norms that are not finite are left out: scores made
    of them are NaN or infinite, and those are compared exactly.

    Args:
        index_q: indexer queries.
        index_k: indexer keys.
        weights: head weights.
        layout: who sees whom.
        scale: multiplies the head sum.
        rows: query rows to compute; the result is then [len(rows)].
    """
    heads, width = index_q.shape[1:]
    unit = 2.0**-53 if index_q.dtype == torch.float64 else 2.0**-24
    visible = visible_keys(layout)
    chosen = range(layout.num_q) if rows is None else [int(row) for row in rows]
    key_norm = _finite(index_k.double().norm(dim=-1))
    head_sum = (_finite(weights.double().abs()) * _finite(index_q.double().norm(dim=-1))).sum(-1)
    result = torch.zeros(len(chosen), dtype=torch.float64, device=index_q.device)
    for place, row in enumerate(chosen):
        if visible[row].numel():
            result[place] = head_sum[row] * key_norm[visible[row].to(index_q.device)].max()
    return 2 * heads * width**0.5 * unit * abs(scale) * result


@dataclass(frozen=True)
class _Table:
    """The float64 side of a comparison, on one device, one line per compared row.

    `rank` maps scores to finite numbers in selection order: NaN to the largest number, infinities just inside, so that
    subtracting tau leaves those alone; invisible keys are -inf.
    """

    score: Tensor
    rank: Tensor
    visible: Tensor
    need: Tensor
    kth: Tensor
    tau: Tensor


@dataclass(frozen=True)
class _Selection:
    """The judged side: ids [rows, k] with 0 in unused slots, used [rows, k], and its score per slot."""

    ids: Tensor
    used: Tensor
    score: Tensor


def compare_topk(
    topk_indices: Int[Tensor, "t k"],
    topk_lengths: Int[Tensor, " t"],
    scores: Exact | Float64[Tensor, "r s"],
    visible: Rows,
    *,
    top_k: int,
    tau: Float64[Tensor, " r"],
    exact_ids: bool = False,
    returned_scores: Float[Tensor, "t k"] | None = None,
    rows: Sequence[int] | Tensor | None = None,
) -> TopKComparison:
    """The verdict on a selection.

        recall of a row = (need - max(wrong, missing)) / need,   need = min(top_k, visible)

    `wrong`: slots that hold no visible key of score >= k-th score - tau, or hold one again, or hold nothing;
    `missing`: keys with score > k-th score + tau that are not selected.

    Args:
        topk_indices: the selected key rows, -1 in unused slots.
        topk_lengths: used slots per row.
        scores: the oracle's table, one line per compared row.
        visible: the visible keys of each compared row.
        top_k: keys to select.
        tau: the allowance of each compared row.
        exact_ids: whether the ids must be the oracle's (inputs on a dyadic grid, where every score is exact).
        returned_scores: the scores of the slots, where the operator gave them.
        rows: the rows of `topk_indices` that are compared, in the order of `scores`; None for all of them.

    Semantics:
        The count must be right, ids in range, ascending and once each, and unused slots -1; `returned_scores` must be
        within tau, and -inf in unused slots. NaN scores stand first and are equal to each other.
    """
    table = _table(scores.value if isinstance(scores, Exact) else scores, visible, top_k, tau)
    device, count = table.score.device, len(table.score)
    numbers = torch.arange(count, device=device) if rows is None else torch.as_tensor(rows, device=device).long()
    t = topk_indices.shape[0]
    shapes = [tuple(topk_indices.shape), tuple(topk_lengths.shape)]
    if shapes != [(t, top_k), (t,)] or len(numbers) != count or (rows is None and t != count):
        return TopKComparison(0.0, 0.0, 0.0, 0, None, False, f"shapes {shapes} for {count} rows and top_k {top_k}")
    ids = topk_indices.to(device).long().index_select(0, numbers)
    lengths = topk_lengths.to(device).long().index_select(0, numbers)
    faults = _shape_faults(ids, lengths, table)
    selection = _selection(ids, lengths, table)
    recall = _recall(selection, table)
    if exact_ids:
        faults.append(("ids differ from the oracle's", _differs(ids, table, visible, top_k)))
    if returned_scores is not None:
        mine = returned_scores.detach().to(device, torch.float64).index_select(0, numbers)
        faults += _score_faults(mine, selection, table)
    faults.append(("wrong or missing keys", recall < 1.0))
    reason, worst = "", int(recall.argmin()) if count else None
    for what, faulty in faults:
        if faulty.any():
            worst = int(faulty.nonzero()[0, 0])
            reason = f"row {int(numbers[worst])}: {what} ({int(faulty.sum())} rows)"
            break
    seeing = recall[table.need > 0]
    return TopKComparison(
        recall_mean=float(seeing.mean()) if seeing.numel() else 1.0,
        recall_min=float(seeing.min()) if seeing.numel() else 1.0,
        regret=_regret(selection, table),
        rows_with_boundary_ties=int(((table.rank >= table.kth[:, None]).sum(-1) > table.need)[table.need > 0].sum()),
        worst_row=None if worst is None else int(numbers[worst]),
        verdict=not reason,
        reason=reason,
        row_recall=recall.cpu(),
        row_faulty=torch.stack([faulty for _, faulty in faults]).any(0).cpu(),
    )


def _table(scores: Tensor, visible: Rows, top_k: int, tau: Tensor) -> _Table:
    device, (count, s) = scores.device, scores.shape
    counts = torch.tensor([len(keys) for keys in visible], dtype=torch.int64, device=device)
    seen = torch.zeros(count, s, dtype=torch.bool, device=device)
    if visible:
        seen[torch.arange(count, device=device).repeat_interleave(counts), torch.cat(visible).to(device)] = True
    largest = torch.finfo(torch.float64).max
    rank = torch.nan_to_num(scores, nan=largest, posinf=largest / 2, neginf=-largest / 2).masked_fill(~seen, -torch.inf)
    need = counts.clamp(max=top_k)
    best = rank.topk(min(top_k, s), dim=-1).values if s else rank
    kth = torch.full((count,), torch.inf, dtype=torch.float64, device=device)
    some = need > 0
    kth[some] = best[some].gather(-1, need[some, None] - 1)[:, 0]
    return _Table(scores, rank, seen, need, kth, tau.to(device, torch.float64))


def _shape_faults(ids: Tensor, lengths: Tensor, table: _Table) -> list[tuple[str, Tensor]]:
    """Faults that can be seen without scores, as (what, [rows])."""
    used = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    outside = used & ((ids < 0) | (ids >= table.score.shape[1]))
    ordered = ids.masked_fill(~used, -1).sort(-1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1)
    falling = ((ids[:, 1:] < ids[:, :-1]) & used[:, 1:]).any(-1)
    return [
        ("count is not min(top_k, visible)", lengths != table.need),
        ("an id is out of range", outside.any(-1)),
        ("a key is selected twice", twice),
        ("ids are not ascending", falling),
        ("an unused slot is not -1", (~used & (ids != -1)).any(-1)),
    ]


def _selection(ids: Tensor, lengths: Tensor, table: _Table) -> _Selection:
    s = table.score.shape[1]
    used = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]) & (ids >= 0) & (ids < s)
    ids = ids.masked_fill(~used, 0)
    score = table.score.gather(-1, ids) if s else torch.zeros_like(ids, dtype=torch.float64)
    return _Selection(ids, used, score)


def _recall(selection: _Selection, table: _Table) -> Tensor:
    """The recall of each row, 1 for a row that sees nothing."""
    if table.score.shape[1] == 0:
        return torch.ones(len(table.score), dtype=torch.float64, device=table.score.device)
    chosen = torch.zeros(table.score.shape, dtype=torch.int64, device=table.score.device)
    chosen = chosen.scatter_add(-1, selection.ids, selection.used.long()) > 0
    good = table.rank >= (table.kth - table.tau)[:, None]
    # Keys that are not visible rank below everything, so they are neither right nor missing.
    right = (chosen & good).sum(-1)
    wrong = torch.maximum(selection.used.sum(-1), table.need) - right
    missing = (~chosen & (table.rank > (table.kth + table.tau)[:, None])).sum(-1)
    recall = (table.need - torch.maximum(wrong, missing)).clamp(min=0).double() / table.need.clamp(min=1)
    return torch.where(table.need > 0, recall, 1.0)


def _differs(ids: Tensor, table: _Table, visible: Rows, top_k: int) -> Tensor:
    """Rows whose slots are not the oracle's, -1 included."""
    wanted = torch.full_like(ids, -1)
    for row, keys in enumerate(indexer_topk(table.score, visible, top_k=top_k)):
        wanted[row, : len(keys)] = keys
    return (ids != wanted).any(-1)


def _score_faults(mine: Tensor, selection: _Selection, table: _Table) -> list[tuple[str, Tensor]]:
    """Faults of the returned scores, as (what, [rows])."""
    near = (mine - selection.score).abs() <= table.tau[:, None]
    same = near | (mine == selection.score) | (mine.isnan() & selection.score.isnan())
    return [
        ("a returned score is off by more than tau", (selection.used & ~same).any(-1)),
        ("the score of an unused slot is not -inf", (~selection.used & (mine != -torch.inf)).any(-1)),
    ]


def _regret(selection: _Selection, table: _Table) -> float:
    """The largest share of score mass that a row lost; tau keeps a row of zero scores from dividing by 0."""
    if table.score.numel() == 0:
        return 0.0
    best = table.rank.topk(min(int(table.need.max()), table.rank.shape[1]), dim=-1).values
    wanted = torch.arange(best.shape[1], device=best.device) < table.need[:, None]
    best = best.masked_fill(~wanted, 0.0)
    mine = selection.score.masked_fill(~selection.used, 0.0)
    usable = table.score.isfinite().logical_or(~table.visible).all(-1) & mine.isfinite().all(-1) & (table.need > 0)
    lost = (best.sum(-1) - mine.sum(-1))[usable]
    scale = torch.maximum(best.abs().sum(-1), table.tau)[usable]
    share = torch.where(lost > 0, lost / scale, 0.0)
    return float(share.max()) if share.numel() else 0.0


def _finite(x: Tensor) -> Tensor:
    """Zero where x is not finite."""
    return torch.where(x.isfinite(), x, 0.0)
