"""Which rows a context-parallel rank owns, and how gathered rows go back to global order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from dsattn.errors import BadInput
from dsattn.layouts.checks import Integer, Integers, Scheme, cumulative_lengths, first_true, one_of, whole_number


class Pieces(NamedTuple):
    """What a rank owns, in local order: runs of consecutive rows of one document (some may be empty)."""

    document: Int64[Tensor, " n"]
    start: Int64[Tensor, " n"]
    """Global row of the run's first row."""
    length: Int64[Tensor, " n"]


def rank_pieces(cumulative: Int64[Tensor, " entries"], cp_size: int, cp_rank: int, scheme: Scheme) -> Pieces:
    """The runs of rows of one rank.

    Args:
        cumulative: checked cumulative lengths of the documents.
        cp_size: number of ranks.
        cp_rank: this rank.
        scheme: "zigzag" or "contiguous".

    Returns:
        The pieces.

    Raises:
        BadInput: unknown scheme, or lengths that do not divide.
    """
    one_of("scheme", scheme, ("zigzag", "contiguous"))
    return (_zigzag if scheme == "zigzag" else _contiguous)(cumulative, cp_size, cp_rank)


def context_parallel_positions(
    cu_seqlens: Integers, *, cp_size: Integer, cp_rank: Integer, scheme: Scheme = "zigzag"
) -> Int64[Tensor, " t"]:
    """The global row of every local row of a rank, in local order (CPU).

    Two ranks, one document of eight rows; the digit is the rank that owns the row:

        zigzag      0 0 1 1 1 1 0 0     rank 0: 0 1 6 7     rank 1: 2 3 4 5
        contiguous  0 0 0 0 1 1 1 1     rank 0: 0 1 2 3     rank 1: 4 5 6 7

    Args:
        cu_seqlens: cumulative document lengths of the whole stream, [0, ...].
        cp_size: number of ranks, at least 1.
        cp_rank: this rank, 0 <= cp_rank < cp_size.
        scheme: "zigzag": of each document, in 2 * cp_size equal chunks, chunk cp_rank and its mirror image
            2 * cp_size - 1 - cp_rank. "contiguous": the whole stream in cp_size equal parts, wherever documents end.

    Returns:
        The positions.

    Raises:
        BadInput: a bad argument, or lengths that do not divide.
    """
    cp_size, cp_rank = check_rank(cp_size, cp_rank)
    pieces = rank_pieces(cumulative_lengths("cu_seqlens", cu_seqlens), cp_size, cp_rank, scheme)
    local_start = pieces.length.cumsum(0) - pieces.length
    shift = torch.repeat_interleave(pieces.start - local_start, pieces.length)
    return shift + torch.arange(len(shift), device="cpu")


def gather_order(cu_seqlens: Integers, *, cp_size: Integer, scheme: Scheme = "zigzag") -> Int64[Tensor, " s"]:
    """The index that puts rank-major gathered rows in global order (CPU).

    With `gathered = torch.cat([rows of rank 0, rows of rank 1, ...])`, `gathered.index_select(0, order)` is the
    stream as one rank would hold it.

    Args:
        cu_seqlens: cumulative document lengths of the whole stream, [0, ...].
        cp_size: number of ranks, at least 1.
        scheme: as in `context_parallel_positions`.

    Returns:
        A permutation of the rows of the stream.

    Raises:
        BadInput: a bad argument, or lengths that do not divide.
    """
    cp_size = whole_number("cp_size", cp_size, low=1)
    cumulative = cumulative_lengths("cu_seqlens", cu_seqlens)
    ranks = [
        context_parallel_positions(cumulative, cp_size=cp_size, cp_rank=rank, scheme=scheme) for rank in range(cp_size)
    ]
    positions = torch.cat(ranks)
    return torch.empty_like(positions).index_copy_(0, positions, torch.arange(len(positions), device="cpu"))


def check_rank(cp_size: Integer, cp_rank: Integer) -> tuple[int, int]:
    """The number of ranks and this rank as ints.

    Args:
        cp_size: number of ranks, at least 1.
        cp_rank: this rank.

    Returns:
        Both.

    Raises:
        BadInput: not integers or out of range.
    """
    size = whole_number("cp_size", cp_size, low=1)
    return size, whole_number("cp_rank", cp_rank, below=size)


def _zigzag(cumulative: Tensor, cp_size: int, cp_rank: int) -> Pieces:
    chunks = 2 * cp_size
    lengths = cumulative.diff()
    odd = first_true(lengths % chunks != 0)
    if odd is not None:
        raise BadInput(
            "cu_seqlens",
            given=f"document {odd} of {int(lengths[odd])} rows",
            needed=f"lengths that divide by 2 * cp_size = {chunks} (scheme 'zigzag')",
            fix="pad each document, or use scheme='contiguous'",
        )
    chunk = lengths // chunks
    front = cumulative[:-1] + cp_rank * chunk
    back = cumulative[:-1] + (chunks - 1 - cp_rank) * chunk
    document = torch.arange(len(lengths), device="cpu")
    return Pieces(*(torch.stack(pair, 1).flatten() for pair in ((document, document), (front, back), (chunk, chunk))))


def _contiguous(cumulative: Tensor, cp_size: int, cp_rank: int) -> Pieces:
    total = int(cumulative[-1])
    if total % cp_size:
        raise BadInput(
            "cu_seqlens[-1]",
            given=total,
            needed=f"a total that divides by cp_size = {cp_size} (scheme 'contiguous')",
            fix="pad the stream",
        )
    part = total // cp_size
    begin = cumulative[:-1].clamp(min=cp_rank * part)
    end = cumulative[1:].clamp(max=(cp_rank + 1) * part)
    return Pieces(torch.arange(len(begin), device="cpu"), begin, (end - begin).clamp(min=0))
