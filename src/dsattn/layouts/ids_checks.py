"""The checks of a selection that a caller built: many conditions on the device, one wait for all the answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsattn.errors import BadInput


class Rule(NamedTuple):
    """A condition on the entries of a selection."""

    what: str
    needed: str
    first: int
    """Slot of the mask's first column."""
    bad: Tensor
    """bool [t, slots]: the entries that break the rule."""


def first_bad_rows(masks: Iterable[Tensor]) -> list[int | None]:
    """For each mask (bool [t, slots], True = bad) the first row with a bad entry, None if there is none.

    Waits for the device once, however many masks there are.
    """
    bad = torch.stack([mask.any(-1) for mask in masks])
    rows = bad.shape[1]
    if rows == 0:
        return [None] * len(bad)
    row = torch.arange(rows, device=bad.device)
    return [None if first == rows else first for first in torch.where(bad, row, rows).amin(1).tolist()]


def entry_name(what: str, row: int, slot: int | None, shape: torch.Size) -> str:
    """An entry of flattened [t, k] or [b, sq, k] values as a reader would index it."""
    at = [row] if len(shape) == 2 else [row // shape[1], row % shape[1]]
    return f"{what}[{', '.join(map(str, at if slot is None else [*at, slot]))}]"


def check_form(indices: Any, lengths: Any, scores: Any) -> None:
    """Refuses wrong shapes, dtypes and devices of a TopK, which are known without waiting for a device.

    Args:
        indices: int32 [t, k] or [b, sq, k].
        lengths: int32, the shape of indices without the last axis.
        scores: None, or fp32 or fp64 of the shape of indices.

    Raises:
        BadInput: one of them is something else.
    """
    check_tensor("indices", indices, (torch.int32,), ("[t, k]", "[b, sq, k]"))
    check_has_values("indices", indices)
    check_tensor("lengths", lengths, (torch.int32,), ("[t]", "[b, sq]"))
    _check_like("lengths", lengths, indices.shape[:-1], indices)
    if scores is not None:
        check_tensor("scores", scores, (torch.float32, torch.float64), ("[t, k]", "[b, sq, k]"))
        _check_like("scores", scores, indices.shape, indices)


def check_tensor(what: str, value: Any, dtypes: tuple[torch.dtype, ...], shapes: tuple[str, ...]) -> None:
    """Refuses what is no dense tensor of one of the dtypes and shapes.

    Args:
        what: the argument's name.
        value: the argument.
        dtypes: the dtypes it may have.
        shapes: the shapes it may have, as text; the number of axes is checked.

    Raises:
        BadInput: not a tensor, or another dtype or number of axes.
    """
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    needed = f"a tensor, {names}, {' or '.join(shapes)}"
    if not isinstance(value, Tensor):
        raise BadInput(what, given=type(value).__name__, needed=needed)
    if value.layout != torch.strided:
        raise BadInput(what, given=f"layout {value.layout}", needed=f"a dense tensor, {names}, {' or '.join(shapes)}")
    if value.dtype not in dtypes or value.ndim not in [shape.count(",") + 1 for shape in shapes]:
        raise BadInput(what, given=f"{value.dtype} of shape {list(value.shape)}", needed=needed)


def check_has_values(what: str, value: Tensor) -> None:
    """Refuses a tensor whose entries cannot be looked at.

    Args:
        what: the argument's name.
        value: the argument.

    Raises:
        BadInput: a meta tensor.
    """
    if value.is_meta:
        raise BadInput(what, given="a meta tensor", needed="a tensor with values")


def check_values(indices: Tensor, lengths: Tensor, scores: Tensor | None, num_k: int) -> None:
    """Refuses wrong entries of a TopK whose form is right; waits for the device once.

    Args:
        indices: int32 [t, k] or [b, sq, k].
        lengths: int32, the used slots of each row.
        scores: None, or the score of each slot.
        num_k: key rows of the call.

    Raises:
        BadInput: an entry breaks a rule of TopK; the message names the first row that does.
    """
    k = indices.shape[-1]
    ids, counts = indices.flatten(0, -2), lengths.flatten()
    flat_scores = None if scores is None else scores.flatten(0, -2)
    rows = first_bad_rows(rule.bad for rule in _rules(ids, counts, flat_scores, num_k))
    for i, row in enumerate(rows):
        if row is None:
            continue
        # The same rules on the one row say which entry it was.
        one = slice(row, row + 1)
        rule = list(_rules(ids[one], counts[one], None if flat_scores is None else flat_scores[one], num_k))[i]
        slot = rule.first + int(rule.bad[0].to(torch.uint8).argmax())
        if rule.what == "lengths":
            raise BadInput(entry_name("lengths", row, None, indices.shape), given=int(counts[row]), needed=rule.needed)
        values = ids if rule.what == "indices" else flat_scores
        raise BadInput(
            entry_name(rule.what, row, slot, indices.shape),
            given=f"{_entry(values, row, slot)} in a row of length {int(counts[row])} (k = {k})",
            needed=rule.needed,
            fix="TopK.from_ids takes ids in any order" if rule.what == "indices" else None,
        )


def _rules(ids: Tensor, counts: Tensor, scores: Tensor | None, num_k: int) -> Iterator[Rule]:
    """The rules one after the other, so that their masks need not live at the same time."""
    k = ids.shape[1]
    counts = counts[:, None]
    used = torch.arange(k, device=ids.device, dtype=torch.int32) < counts
    yield Rule("lengths", f"a number of used slots from 0 to k = {k}", 0, (counts < 0) | (counts > k))
    yield Rule("indices", f"key rows in [0, num_k = {num_k}) in used slots", 0, used & ((ids < 0) | (ids >= num_k)))
    ascending = "strictly ascending key rows (so no duplicates) in used slots"
    yield Rule("indices", ascending, 1, used[:, 1:] & (ids[:, 1:] <= ids[:, :-1]))
    yield Rule("indices", "-1 in unused slots", 0, ~used & (ids != -1))
    if scores is not None:
        yield Rule("scores", "-inf in unused slots", 0, ~used & (scores != -torch.inf))


def _check_like(what: str, value: Tensor, shape: torch.Size, indices: Tensor) -> None:
    if value.shape != shape or value.device != indices.device:
        raise BadInput(
            what,
            given=f"shape {list(value.shape)} on {value.device}",
            needed=f"shape {list(shape)} on {indices.device}, as indices {list(indices.shape)} has it",
        )


def _entry(values: Tensor | None, row: int, slot: int) -> str:
    if values is None:
        return "nothing"
    previous = f" after {values[row, slot - 1].item()}" if slot else ""
    return f"{values[row, slot].item()}{previous}"
