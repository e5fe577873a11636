"""What a check found row by row, small enough to keep with every record: the report draws it and puts it in words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from dsattn.spec.metrics import Comparison, TopKComparison
from dsattn.verify.reference import Reference

Axis = Literal["query row", "key row", "head", "loss"]
Measure = Literal["recall", "share"]

POINTS = 256
"""How many rows of a curve are kept at most."""

_AXES: dict[str, Axis] = {"d_kv": "key row", "d_index_k": "key row", "d_sink": "head", "loss": "loss"}
_MOST_STARTS = 64
_TOLD_RUNS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """One number for every row of one axis of a check.

    Attributes:
        axis: what a row is; "loss" has one.
        measure: "recall" of a selection, or "share" of the error budget, the largest over the results with this axis.
        length: rows that the call has.
        judged: rows that were compared.
        wrong: rows that are not right.
        runs: first and last row of every run of wrong rows.
        starts: where batch entries or documents begin; () where there are too many.
        rows: int32 [n], n <= `POINTS`: the rows that are kept, of every few the worst.
        values: float32 [n]: the number of each, inf where an error has no size.
        faulty: bool [n]: whether each is wrong.
    """

    axis: Axis
    measure: Measure
    length: int
    judged: int
    wrong: int
    runs: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    rows: Tensor
    values: Tensor
    faulty: Tensor

    @property
    def worst(self) -> float:
        """The largest share, or the least recall."""
        return float(self.values.max() if self.measure == "share" else self.values.min())

    @property
    def told(self) -> str:
        """Which rows are wrong, in words."""
        what = "over budget" if self.measure == "share" else "wrong"
        if self.axis == "loss":
            return f"the loss is {what}" if self.wrong else f"the loss is not {what}"
        if self.wrong == 0:
            return f"no {self.axis} of {self.judged} is {what}"
        runs = [str(a) if a == b else f"{a} to {b}" for a, b in self.runs[:_TOLD_RUNS]]
        more = ", ..." if len(self.runs) > _TOLD_RUNS else ""
        return f"{self.wrong} of {self.judged} {self.axis}s {what}: {', '.join(runs)}{more}"


def curves(results: dict[str, Comparison | TopKComparison], reference: Reference) -> tuple[Curve, ...]:
    """The curves of a check: recall first, then one per axis that its results have.

    Args:
        results: the verdict on each result.
        reference: what they were compared with.

    Semantics:
        A result that could not be compared row by row (a wrong shape, none at all) has no part in them.
    """
    made = []
    for found in results.values():
        if isinstance(found, TopKComparison) and found.row_recall is not None and found.row_faulty is not None:
            made.append(_curve("query row", "recall", found.row_recall, found.row_faulty, reference))
    for axis in get_args(Axis):
        mine = [
            found
            for name, found in results.items()
            if isinstance(found, Comparison) and _AXES.get(name, "query row") == axis and found.row_shares is not None
        ]
        shares = [found.row_shares for found in mine if found.row_shares is not None]
        # A result of another length than the axis has was refused by its shape, so equal lengths are the rule.
        if not shares or any(len(x) != len(shares[0]) for x in shares):
            continue
        share = torch.stack(shares).amax(0)
        made.append(_curve(axis, "share", share, ~(share <= 1.0), reference, _blamed(mine)))
    return tuple(curve for curve in made if curve.judged)


def _blamed(results: Iterable[Comparison]) -> set[int]:
    """The rows that failing results name."""
    return {found.worst_row for found in results if not found.verdict and found.worst_row is not None}


def _curve(
    axis: Axis,
    measure: Measure,
    values: Tensor,
    faulty: Tensor,
    reference: Reference,
    blamed: Iterable[int] = (),
) -> Curve:
    rows, length, entry = torch.arange(len(values), device="cpu"), len(values), None
    if axis == "query row":
        rows, length, entry = reference.rows, reference.layout.num_q, reference.row_batches
    elif axis == "key row":
        entry = reference.key_batches
    # A row can be to blame though it was not to be judged: it is not zero and should be.
    added = [row for row in blamed if row not in set(rows.tolist())]
    if added:
        rows = torch.cat([rows, torch.tensor(added, device="cpu")])
        values = torch.cat([values, torch.full((len(added),), math.inf, dtype=values.dtype, device="cpu")])
        faulty = torch.cat([faulty, torch.ones(len(added), dtype=torch.bool, device="cpu")])
        rows, order = rows.sort()
        values, faulty = values[order], faulty[order]
    starts = [] if entry is None else ((entry[1:] != entry[:-1]).nonzero()[:, 0] + 1).tolist()
    whole = Curve(
        axis=axis,
        measure=measure,
        length=length,
        judged=len(rows),
        wrong=int(faulty.sum()),
        runs=_runs(rows, faulty),
        starts=tuple(starts) if len(starts) <= _MOST_STARTS else (),
        rows=rows.int(),
        values=values.float(),
        faulty=faulty,
    )
    return _thinned(whole)


def _runs(rows: Tensor, faulty: Tensor) -> tuple[tuple[int, int], ...]:
    """First and last row of every run; where there are more than a plot can show, of the blocks of rows with one."""
    first, last = rows, rows
    step = 1
    while True:
        edge = torch.diff(torch.nn.functional.pad(faulty.int(), (1, 1)))
        begins, ends = (edge == 1).nonzero()[:, 0], (edge == -1).nonzero()[:, 0] - 1
        if len(begins) <= POINTS // 2:
            return tuple(zip(first[begins].tolist(), last[ends].tolist(), strict=True))
        step *= 2
        first, last = rows[::step], torch.cat([rows[step - 1 :: step], rows[-1:]])[: -(-len(rows) // step)]
        faulty = torch.nn.functional.pad(faulty, (0, len(faulty) % 2)).unflatten(0, (-1, 2)).any(-1)


def _thinned(curve: Curve) -> Curve:
    """Of every few rows the worst, a wrong one before one that is right."""
    count = len(curve.rows)
    step = -(-count // POINTS)
    if step <= 1:
        return curve
    badness = curve.values if curve.measure == "share" else 1.0 - curve.values
    badness = torch.where(curve.faulty, badness + 2.0, badness.clamp(max=1.0))
    badness = torch.nn.functional.pad(badness, (0, -count % step), value=-1.0).unflatten(0, (-1, step))
    kept = badness.argmax(-1) + step * torch.arange(len(badness), device="cpu")
    return replace(curve, rows=curve.rows[kept], values=curve.values[kept], faulty=curve.faulty[kept])
