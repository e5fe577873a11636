"""Arguments of the layouts as exact integers; every refusal names the argument and the entry."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex

import torch
from jaxtyping import Int64
from torch import Tensor

from dsattn.errors import BadInput

Integer = SupportsIndex
Integers = Iterable[SupportsIndex] | Tensor
Side = Literal["left", "right"]
Scheme = Literal["zigzag", "contiguous"]
Space = Literal["flat", "local", "seq_major"]

LIMIT = 2**31  # rows and positions are int32 in every kernel


def whole_number(what: str, value: Any, *, low: int = 0, below: int = LIMIT) -> int:
    """The value as a Python int.

    Args:
        what: the argument's name.
        value: anything with `__index__`; numpy's ints and one-element integer tensors are welcome.
        low: the smallest value allowed.
        below: the first value too large.

    Returns:
        The int.

    Raises:
        BadInput: not an integer (bool is none), or out of range.
    """
    needed = f"an integer from {low} to {below - 1}"
    try:
        if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
            raise TypeError("a bool is no count")
        number = operator.index(value)
    except TypeError as cause:
        raise BadInput(what, given=repr(value), needed=needed) from cause
    if not low <= number < below:
        raise BadInput(what, given=number, needed=needed)
    return number


def whole_numbers(
    what: str, value: Any, *, low: int = 0, below: int = LIMIT, length: int | None = None, entry: str | None = None
) -> Int64[Tensor, " n"]:
    """The values as a CPU tensor.

    A tensor on an accelerator is copied once, which waits for that device.

    Args:
        what: the argument's name.
        value: a sequence of ints, or a one-dimensional integer tensor.
        low: the smallest value allowed.
        below: the first value too large.
        length: how many values there must be; None for any number.
        entry: name of one entry, with {} for its index; `what[{}]` if left out.

    Returns:
        The values.

    Raises:
        BadInput: not integers, another number of them, or one out of range.
    """
    numbers = _from_tensor(what, value) if isinstance(value, Tensor) else _from_sequence(what, value)
    if length is not None and len(numbers) != length:
        raise BadInput(what, given=f"{len(numbers)} entries", needed=f"{length} entries")
    bad = first_true((numbers < low) | (numbers >= below))
    if bad is not None:
        name = (entry or what + "[{}]").format(bad)
        raise BadInput(name, given=int(numbers[bad]), needed=f"an integer from {low} to {below - 1}")
    return numbers


def cumulative_lengths(what: str, value: Any) -> Int64[Tensor, " entries"]:
    """Cumulative document lengths [0, len_0, len_0 + len_1, ...] as a CPU tensor.

    Args:
        what: the argument's name.
        value: a sequence of ints or an integer tensor; [0] means no documents.

    Returns:
        The cumulative lengths.

    Raises:
        BadInput: not integers, no entry, a start other than 0, or a decrease.
    """
    cumulative = whole_numbers(what, value)
    if len(cumulative) == 0:
        raise BadInput(what, given="no entries", needed="a leading 0 and one entry for each document")
    if cumulative[0] != 0:
        raise BadInput(f"{what}[0]", given=int(cumulative[0]), needed="0")
    drop = first_true(cumulative.diff() < 0)
    if drop is not None:
        given = f"{int(cumulative[drop + 1])} after {int(cumulative[drop])}"
        raise BadInput(f"{what}[{drop + 1}]", given=given, needed="entries that do not decrease")
    return cumulative


def total_rows(what: str, value: Any, least: int, why: str) -> int:
    """The number of rows of a buffer: the value, or the least that holds everything if it is None.

    Args:
        what: the argument's name.
        value: the number, or None.
        least: the rows in use.
        why: where `least` comes from, for the message.

    Returns:
        The number of rows.

    Raises:
        BadInput: fewer rows than are in use, or not below 2**31.
    """
    rows = whole_number(what, least if value is None else value)
    if rows < least:
        raise BadInput(what, given=rows, needed=f"at least {least}, {why}")
    return rows


def one_of(what: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuses what is not one of the allowed words.

    Args:
        what: the argument's name.
        value: the value to find.
        allowed: the values that exist.

    Raises:
        BadInput: the value is none of them.
    """
    if not isinstance(value, str) or value not in allowed:
        raise BadInput(what, given=repr(value), needed=" or ".join(repr(name) for name in allowed))


def first_true(mask: Tensor) -> int | None:
    """Index of the first True of a one-dimensional CPU mask, None if there is none."""
    return int(mask.to(torch.uint8).argmax()) if mask.any() else None


def _from_tensor(what: str, value: Tensor) -> Tensor:
    integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    if value.ndim != 1 or not integer or value.is_meta:
        given = f"{value.dtype} of shape {list(value.shape)} on {value.device}"
        raise BadInput(what, given=given, needed="a one-dimensional integer tensor with values")
    return value.detach().to(device="cpu", dtype=torch.int64)


def _from_sequence(what: str, value: Any) -> Tensor:
    try:
        entries = list(value)
        if bool in set(map(type, entries)):
            raise TypeError("a bool is no count")
        # map keeps the loop over documents out of the interpreter: 10,000 of them take half a millisecond.
        return torch.tensor(list(map(operator.index, entries)), dtype=torch.int64, device="cpu")
    except TypeError as cause:
        given = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
        raise BadInput(what, given=given, needed="a sequence of integers") from cause
    except (OverflowError, RuntimeError, ValueError) as cause:
        raise BadInput(what, given="an entry that does not fit 64 bits", needed=f"entries below {LIMIT}") from cause
