"""Verdicts on results: error budgets for numbers, and (from `metrics_topk`) recall and regret for selections.

A result is judged against the oracle's float64 numbers, and how much error it may have is taken from
`dsattn.spec.plain` in the same precision: no tolerance is written down anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dsattn.spec.metrics_topk import TopKComparison, compare_topk, tau
from dsattn.spec.oracle import FLOOR_EPS, Exact

__all__ = ["FORWARD_FACTOR", "GRADIENT_FACTOR", "Comparison", "TopKComparison", "compare", "compare_topk", "tau"]

FORWARD_FACTOR = 2.0
"""Times the plain run's error that a forward result may be off."""
GRADIENT_FACTOR = 3.0
"""Times the plain run's error that a gradient may be off."""

# Products of numbers below the normal range are lost or kept as the instruction set likes; this many smallest normal
# numbers of the accumulation dtype (about 1e-35 in fp32) are never an error.
_UNDERFLOW = 1024
# Small enough for the temporaries to stay in cache.
_BLOCK_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Comparison:
    """The verdict on one result.

    Attributes:
        relative_error: the largest over batch entries of ||got - exact|| / ||exact||, over finite places; entries whose
            reference is zero (up to float64 rounding) are left out.
        excess: the largest over rows of error / budget; above 1 the result fails.
        worst_row: the row of that excess, or of the fault that `reason` names; None where no row is to blame.
        worst_batch: the batch entry of `relative_error`, or of the fault; None without batches.
        verdict: whether the result is right.
        reason: what is wrong, "" if nothing is.
        row_shares: float64 [rows], on the CPU: error / budget of every compared row, inf where the fault of `reason`
            has no size; None where no row could be compared.
    """

    relative_error: float
    excess: float
    worst_row: int | None
    worst_batch: int | None
    verdict: bool
    reason: str
    row_shares: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class _Rows:
    """What one pass over the tensors keeps of each row; all of shape [rows]."""

    number: Tensor
    misplaced: Tensor
    excess: Tensor
    error: Tensor
    budget: Tensor
    error_square: Tensor
    exact_square: Tensor
    got_nonzero: Tensor
    exact_nonzero: Tensor


def compare(
    name: str,
    got: Float[Tensor, "*_"],
    exact: Exact,
    plain: Float[Tensor, "*_"],
    *,
    factor: float,
    rows: Sequence[int] | Tensor | None = None,
    batches: Int64[Tensor, " t"] | None = None,
    dtype: torch.dtype | None = None,
) -> Comparison:
    """The verdict on one numeric result: every element of every row against its budget.

        |got - exact| <= factor * max over the row of |plain - exact| + 8 eps * terms

    eps is that of the accumulation dtype (fp32; fp64 for fp64 results). For a result of lower precision the plain run
    is one sample of what rounding to it loses; the maximum counts as no less than its bound, half a unit in the last
    place of the largest number of the row. Holding for each row, this holds for the maximum over each batch entry too.

    Args:
        name: what is compared, for `reason`.
        got: the result.
        exact: the oracle's.
        plain: the plain run's.
        factor: `FORWARD_FACTOR` or `GRADIENT_FACTOR`.
        rows: rows of dim 0 to compare; the others are not looked at. A scalar is one row.
        batches: the batch entry or document of every row, -1 for padding.
        dtype: the dtype that `got` must have.

    Semantics:
        NaN, +inf and -inf must stand where the oracle has them. A batch entry that is all zero while its reference is
        not fails, whatever the reference's size. Padding rows count as rows but in no batch entry.
    """
    if got.shape != exact.value.shape:
        return _failed(f"{name}: shape {tuple(got.shape)}, needed {tuple(exact.value.shape)}")
    if dtype is not None and got.dtype != dtype:
        return _failed(f"{name}: dtype {got.dtype}, needed {dtype}")
    if name == "d_sink":
        # One number per head has no row of its own to take a maximum over: the vector is one row.
        got, plain, exact = got[None], plain[None], Exact(exact.value[None], exact.terms[None])
    count = got.shape[0] if got.ndim else 1
    chosen = torch.arange(count, device="cpu") if rows is None else torch.as_tensor(rows, device="cpu").long()
    if rows is not None and chosen.numel() == 0:
        return _failed(f"{name}: no rows to compare")
    if got.numel() == 0:
        return Comparison(0.0, 0.0, None, None, True, "")
    found = _measure(got, exact, plain, factor, chosen)
    if found.misplaced.any():
        row = _first(found.number, found.misplaced)
        batch = None if batches is None else int(batches[row])
        shares = found.excess.masked_fill(found.misplaced, math.inf)
        reason = f"{name}: NaN or infinity in other places than the oracle's, first in row {row}"
        return _failed(reason, row, batch, shares)
    entry = _entries(found, batches)
    relative, batch, zeroed = _by_batch(found, entry)
    if zeroed is not None:
        where = name if batches is None else f"{name}: batch {zeroed}"
        shares = found.excess.masked_fill((entry == zeroed) & found.exact_nonzero, math.inf)
        batch = None if batches is None else zeroed
        return _failed(f"{where} is all zero and the reference is not", None, batch, shares)
    worst = int(found.excess.argmax())
    excess, row = float(found.excess[worst]), int(found.number[worst])
    reason = ""
    if not excess <= 1.0:
        error, budget = float(found.error[worst]), float(found.budget[worst])
        reason = f"{name}: row {row}: error {error:.3g} is {excess:.3g} times its budget {budget:.3g}"
    batch = None if batches is None else batch
    return Comparison(relative, excess, row, batch, not reason, reason, found.excess)


def _measure(got: Tensor, exact: Exact, plain: Tensor, factor: float, rows: Tensor) -> _Rows:
    """The statistics of the chosen rows, block by block: the float64 copies of a gradient of q would be large."""
    width = max(1, got.numel() // (got.shape[0] if got.ndim else 1))
    step = max(1, _BLOCK_ELEMENTS // width)
    blocks = [_measure_block(got, exact, plain, factor, block) for block in rows.split(step)]
    return _Rows(*(torch.cat([getattr(block, field) for block in blocks]) for field in _Rows.__dataclass_fields__))


def _measure_block(got: Tensor, exact: Exact, plain: Tensor, factor: float, rows: Tensor) -> _Rows:
    value, terms, mine, yardstick = (_take(x, rows, exact.value.device) for x in (exact.value, exact.terms, got, plain))
    accumulation = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32)
    finite = value.isfinite() & mine.isfinite()
    same = (value == mine) | (value.isnan() & mine.isnan())
    # An infinite input can leave a finite value (a key of probability 0) without finite terms: take the value itself.
    terms = torch.where(terms.isfinite(), terms, torch.where(finite, value.abs(), 0.0))
    floor = FLOOR_EPS * accumulation.eps * terms + _UNDERFLOW * accumulation.smallest_normal
    error = torch.where(finite, (mine - value).abs(), 0.0)
    plain_error = torch.where(finite & yardstick.isfinite(), (yardstick - value).abs(), 0.0)
    finite_value = torch.where(finite, value, 0.0)
    yard = plain_error.amax(-1, keepdim=True)
    if got.dtype.itemsize < torch.float32.itemsize:
        yard = torch.maximum(yard, finite_value.abs().amax(-1, keepdim=True) * (torch.finfo(got.dtype).eps / 2))
    budget = factor * yard + floor
    ratio, worst = (error / budget).max(-1)
    # A reference within its own float64 rounding, or below the least number of the result, may rightly come out as 0.
    smallest = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    least = FLOOR_EPS * torch.finfo(torch.float64).eps * terms + smallest
    return _Rows(
        number=rows,
        misplaced=(~finite & ~same).any(-1).cpu(),
        excess=ratio.cpu(),
        error=error.gather(-1, worst[:, None])[:, 0].cpu(),
        budget=budget.gather(-1, worst[:, None])[:, 0].cpu(),
        error_square=error.square().sum(-1).cpu(),
        exact_square=finite_value.square().sum(-1).cpu(),
        got_nonzero=(finite & (mine != 0)).any(-1).cpu(),
        exact_nonzero=(finite_value.abs() > least).any(-1).cpu(),
    )


def _take(x: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Rows of x as float64 [rows, elements]."""
    x = x.detach()
    x = (x if x.ndim else x[None]).index_select(0, rows.to(x.device))
    return x.to(device, torch.float64).reshape(rows.numel(), -1)


def _entries(found: _Rows, batches: Tensor | None) -> Tensor:
    """The batch entry of each row; without batches all are one."""
    return torch.zeros_like(found.number) if batches is None else batches.to("cpu").long()[found.number]


def _by_batch(found: _Rows, entry: Tensor) -> tuple[float, int | None, int | None]:
    """(largest relative error over batch entries, its entry, the first entry that is zero and should not be)."""
    relative, worst = 0.0, None
    for batch, rows in _groups(entry):
        if not found.exact_nonzero[rows].any():
            continue
        if not found.got_nonzero[rows].any():
            return 0.0, None, batch
        share = math.sqrt(float(found.error_square[rows].sum()) / float(found.exact_square[rows].sum()))
        if worst is None or share > relative:
            relative, worst = share, batch
    return relative, worst, None


def _groups(entry: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Every entry from 0 up with its rows."""
    order = torch.sort(entry, stable=True)
    values, counts = torch.unique_consecutive(order.values, return_counts=True)
    for batch, rows in zip(values.tolist(), order.indices.split(counts.tolist()), strict=True):
        if batch >= 0:
            yield batch, rows


def _first(number: Tensor, faulty: Tensor) -> int:
    return int(number[faulty.nonzero()[0, 0]])


def _failed(
    reason: str, row: int | None = None, batch: int | None = None, row_shares: Tensor | None = None
) -> Comparison:
    return Comparison(math.inf, math.inf, row, batch, False, reason, row_shares)
