"""Why a result is wrong: the known ways to be wrong are computed, and the one that the result matches is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dsattn.backends.trust import alternatives
from dsattn.backends.trust.alternatives import Cause, tail_of
from dsattn.backends.trust.answers import Values
from dsattn.backends.trust.problems import Sample
from dsattn.spec import oracle
from dsattn.spec.oracle import Rows

NO_CAUSE = "no known cause"
BLOCKS = (1024, 512, 256, 128, 64, 32, 16, 8)
_PER_ROW = ("scores", "out", "lse", "d_q", "d_index_q", "d_weights")
# Of a row's largest number: far above any rounding, far below what a known cause changes.
_NEAR = 2.0**-5


def likely_cause(sample: Sample, got: Values, right: Values) -> str:
    """The known cause that explains every wrong result, or "no known cause".

    Args:
        sample: the problem.
        got: the results, float64; of `indexer_topk` the ids.
        right: what they must be; of `indexer_topk` its table of scores.
    """
    if sample.operator == "indexer_topk":
        return next((name for name, holds in _of_selections(sample, got, right["scores"]) if holds()), NO_CAUSE)
    for name, compute in _candidates(sample, right):
        if explains(compute(), got, right):
            return _named(name, got, right)
    wrong = _wrong_rows(sample, got, right)
    return _by_factor(sample, got, right) or _by_windows(sample, wrong) or _by_tail(sample, wrong) or NO_CAUSE


def explains(alternatives: Sequence[Values], got: Values, right: Values) -> bool:
    """Whether each result is right or one of the alternatives', and at least one is an alternative's alone."""
    told = False
    for name, value in right.items():
        if name not in got:
            return False
        if near(got[name], value):
            continue
        like = [each[name] for each in alternatives if name in each and near(got[name], each[name])]
        if not like:
            return False
        told |= not all(bool(each.isnan().all()) for each in like)
    return told


def near(got: Tensor, wanted: Tensor) -> bool:
    """Whether all numbers are nearly those wanted; what is wanted as NaN may be anything."""
    return got.shape == wanted.shape and (got.numel() == 0 or bool(_near_rows(got, wanted).all()))


def _near_rows(got: Tensor, wanted: Tensor) -> Tensor:
    """`near` for each row."""
    rows = got.shape[0] if got.ndim else 1
    got, wanted = got.reshape(rows, -1), wanted.reshape(rows, -1)
    finite = torch.where(wanted.isfinite(), wanted.abs(), 0.0)
    size = finite.amax(1, keepdim=True) if finite.numel() else finite
    # A row that cancels to almost nothing is held to what the others are made of.
    room = _NEAR * size + _NEAR**2 * finite.max() if finite.numel() else finite
    return (wanted.isnan() | (got == wanted) | ((got - wanted).abs() <= room)).all(1)


def _candidates(sample: Sample, right: Values) -> Iterator[Cause]:
    yield from alternatives.of_alignment(sample)
    yield from alternatives.of_ids(sample)
    yield from alternatives.of_scale(sample, right)
    yield from alternatives.of_lse(sample, right)
    yield from alternatives.of_sink(sample, right)
    yield from alternatives.of_mask(sample, right)
    yield from alternatives.of_tail(sample, BLOCKS)


def _named(name: str, got: Values, right: Values) -> str:
    """The cause in words: where it shows, if ids were read as local."""
    if name != alternatives.LOCAL:
        return name
    forward = [one for one in right if not one.startswith("d_")]
    if all(near(got[one], right[one]) for one in forward):
        return f"batch 1 gradient is zero: {name}"
    return f"batch 1 is wrong in the forward: {name}"


def _by_factor(sample: Sample, got: Values, right: Values) -> str | None:
    """Another divisor: all gradients of a loss, which is itself right, are one factor off."""
    if sample.operator != "indexer_loss" or "d_index_q" not in right or not near(got["loss"], right["loss"]):
        return None
    norm = right["d_index_q"].square().sum()
    factor = float((got["d_index_q"] * right["d_index_q"]).sum() / norm) if norm > 0 else math.nan
    if not math.isfinite(factor) or factor == 0:
        return None
    scaled = {name: value * factor for name, value in right.items() if name.startswith("d_")}
    if not explains([scaled], got, right):
        return None
    rows, counted = sample.layout.num_q, alternatives.counted_rows(sample)
    # Rows of a launch are not just those of the call.
    known = [rows / counted, counted / rows, rows, 1 / rows, counted, 1 / counted]
    what = "divisor (all rows)" if any(abs(factor / one - 1) < 0.25 for one in known) else "another factor"
    return f"{what}: gradients are {factor:.3g} times what they should be"


def _wrong_rows(sample: Sample, got: Values, right: Values) -> Tensor:
    """Which rows have a result that is not nearly right."""
    wrong = torch.zeros(len(sample.support), dtype=torch.bool, device="cpu")
    for name in _PER_ROW:
        if name in right:
            wrong |= ~_near_rows(got[name], right[name])
    return wrong


def _counts(sample: Sample, rows: Rows) -> Tensor:
    """Keys of each row that takes part."""
    counts = torch.tensor([len(keys) for keys in rows], dtype=torch.int64, device="cpu")
    mask = sample.options.row_mask
    return counts if mask is None or sample.operator != "indexer_loss" else torch.where(mask, counts, 0)


def _by_windows(sample: Sample, wrong: Tensor) -> str | None:
    """Hidden keys may spoil a row in any way: just the rows that another alignment hides keys from are wrong."""
    if sample.kind == "selected":
        return None
    for name, layout in alternatives.alignments(sample):
        hidden = _counts(sample, oracle.visible_keys(layout)) < _counts(sample, sample.support)
        if bool(hidden.any()) and torch.equal(wrong, hidden):
            return name
    return None


def _by_tail(sample: Sample, wrong: Tensor) -> str | None:
    """Slots past the last whole block hold anything: just the rows that use them are wrong."""
    if sample.kind != "selected" or sample.top_k is None:
        return None
    counts = _counts(sample, sample.support)
    for block in BLOCKS:
        beyond = counts > sample.top_k // block * block
        # Rows with many slots that are right say that it is the last ones.
        some = (counts > sample.top_k // 4) & ~beyond
        if bool(beyond.any()) and bool(some.any()) and torch.equal(wrong, beyond):
            return tail_of(block)
    return None


def _of_selections(sample: Sample, got: Values, scores: Tensor) -> Iterator[tuple[str, Callable[[], bool]]]:
    """The known ways in which a selection is wrong, each with a test of the ids."""
    rows = got["topk"] if sample.judged is None else got["topk"][sample.judged]
    mine = [row[row >= 0].long() for row in rows]
    wanted = alternatives.selected(scores, sample)

    def is_like(found: Callable[[], list[Tensor]]) -> Callable[[], bool]:
        return lambda: all(torch.equal(a, b) for a, b in zip(mine, found(), strict=True))

    if is_like(lambda: wanted)():
        yield "scale dropped", lambda: _is_unscaled(sample, got, scores, wanted)
        return
    for name, found in alternatives.of_selection(sample, scores):
        yield name, is_like(found)
    for block in BLOCKS:
        yield tail_of(block), lambda block=block: _lacks_tail(mine, wanted, (sample.top_k or 1) // block * block)


def _is_unscaled(sample: Sample, got: Values, scores: Tensor, wanted: list[Tensor]) -> bool:
    """Whether the right keys come with scores that lack the scale."""
    if "topk_scores" not in got or sample.x is None:
        return False
    rows = got["topk_scores"] if sample.judged is None else got["topk_scores"][sample.judged]
    pairs = zip(rows, scores, wanted, strict=True)
    scale = sample.x.scale
    return all(near(row[: len(keys)] * scale, all_scores[keys]) for row, all_scores, keys in pairs)


def _lacks_tail(mine: list[Tensor], wanted: list[Tensor], written: int) -> bool:
    """Whether rows lack as many of their keys as they have beyond the slots that are written, and no other row does.

    What the memory held instead may be one of them.
    """
    lacking = False
    for got, right in zip(mine, wanted, strict=True):
        lost, missing = max(0, len(right) - written), int((~torch.isin(right, got)).sum())
        extra = int((~torch.isin(got, right)).sum())
        if missing not in (lost, lost - 1, 0) or extra > lost:
            return False
        lacking |= missing > 0
    return lacking
