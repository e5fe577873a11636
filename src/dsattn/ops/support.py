"""Which keys each row runs over: its selection, or all keys that it sees. Attention and loss are written once for both.

A support cuts the call into blocks and gives, per block, the keys of its rows and who sees which of them; and it adds
key gradients of a block into a buffer of key size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from dsattn.layouts import CausalLayout
from dsattn.ops.blocks import Block, blocks_for, buffer_bytes, even_blocks, lanes_for, run_lanes

# On the CPU gathered keys, as large as a block, should leave room in the shared cache for what they are gathered from.
_GATHERED_SHARE = 4
# Widths of blocks with gathered keys: products have few shapes, see `ops.products`.
_GRID = 256


class Support(ABC):
    """The keys of each query row of a call with `num_q` query rows and `num_k` key rows."""

    shared: bool

    @property
    @abstractmethod
    def num_q(self) -> int:
        """t."""

    @property
    @abstractmethod
    def num_k(self) -> int:
        """s."""

    @abstractmethod
    def blocks(self, pair_bytes: int, key_bytes: int) -> Sequence[Block]:
        """Blocks that cover every row with a key.

        Args:
            pair_bytes: bytes that the operator holds per (row, key) pair of a block.
            key_bytes: bytes of the key rows it reads, per key.
        """

    @abstractmethod
    def seen(self, block: Block) -> Bool[Tensor, "c n"]:
        """Which of the block's keys each of its rows sees."""

    @abstractmethod
    def keys(self, block: Block, source: Tensor, dtype: torch.dtype) -> Tensor:
        """The block's key rows of `source` [s, d]: [n, d] if rows share them, else [c, n, d]."""

    @abstractmethod
    def accumulator(self, width: int, dtype: torch.dtype) -> Tensor:
        """A zero buffer that `add` adds key gradients to; its first `num_k` rows are the gradient."""

    @abstractmethod
    def add(self, block: Block, total: Tensor, d_keys: Tensor) -> None:
        """Adds the gradient of the block's keys (shaped as `keys`) to `total`."""

    @abstractmethod
    def masked(self, row_mask: Bool[Tensor, " t"]) -> Support:
        """The same support in which rows with False have no keys."""

    @abstractmethod
    def has_keys(self) -> Bool[Tensor, " t"]:
        """Which rows have at least one key."""


@dataclass(frozen=True)
class Visible(Support):
    """Every key that the layout lets a row see: windows [start, end)."""

    layout: CausalLayout
    start: Tensor
    end: Tensor
    shared = True

    @staticmethod
    def of(layout: CausalLayout, device: torch.device) -> Visible:
        """The windows of `layout` on `device`."""
        return Visible(layout, *layout._shared_bounds(device))

    @property
    def num_q(self) -> int:
        """t."""
        return self.layout.num_q

    @property
    def num_k(self) -> int:
        """s."""
        return self.layout.num_k

    def blocks(self, pair_bytes: int, key_bytes: int) -> Sequence[Block]:  # noqa: D102
        return blocks_for(self.layout, pair_bytes, buffer_bytes(self.start.device))

    def seen(self, block: Block) -> Bool[Tensor, "c n"]:  # noqa: D102
        keys = torch.arange(block.k_begin, block.k_end, dtype=self.start.dtype, device=self.start.device)
        rows = slice(block.q_begin, block.q_end)
        return (keys >= self.start[rows, None]) & (keys < self.end[rows, None])

    def keys(self, block: Block, source: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: D102
        return source[block.k_begin : block.k_end].to(dtype)

    def accumulator(self, width: int, dtype: torch.dtype) -> Tensor:  # noqa: D102
        return torch.zeros(self.num_k, width, dtype=dtype, device=self.start.device)

    def add(self, block: Block, total: Tensor, d_keys: Tensor) -> None:  # noqa: D102
        total[block.k_begin : block.k_end] += d_keys

    def masked(self, row_mask: Bool[Tensor, " t"]) -> Visible:  # noqa: D102
        return Visible(self.layout, self.start * row_mask, self.end * row_mask)

    def has_keys(self) -> Bool[Tensor, " t"]:  # noqa: D102
        return self.end > self.start


@dataclass(frozen=True)
class Selected(Support):
    """The keys of a selection: ids int32 [t, k] with -1 in unused slots at the end, lengths int32 [t]."""

    ids: Tensor
    lengths: Tensor
    key_rows: int
    shared = False

    @property
    def num_q(self) -> int:
        """t."""
        return self.ids.shape[0]

    @property
    def num_k(self) -> int:
        """s."""
        return self.key_rows

    def blocks(self, pair_bytes: int, key_bytes: int) -> Sequence[Block]:  # noqa: D102
        device, width = self.ids.device, self.ids.shape[1]
        on_cpu, gathered = device.type == "cpu", key_bytes > 0
        budget = buffer_bytes(device) // (_GATHERED_SHARE if on_cpu and gathered else 1)
        ranges = even_blocks(self.num_q, width * (pair_bytes + key_bytes), budget)
        if not on_cpu:
            return [Block(begin, end, 0, width) for begin, end in ranges] if self.num_k else []
        # On the CPU it costs nothing to look how many slots are used.
        used = [int(self.lengths[begin:end].max()) for begin, end in ranges]
        grid = _GRID if gathered else 1
        ends = [min(width, -(-most // grid) * grid) for most in used]
        return [Block(*rows, 0, end) for rows, end in zip(ranges, ends, strict=True) if end]

    def seen(self, block: Block) -> Bool[Tensor, "c n"]:  # noqa: D102
        slots = torch.arange(block.k_end, dtype=self.lengths.dtype, device=self.ids.device)
        return slots < self.lengths[block.q_begin : block.q_end, None]

    def keys(self, block: Block, source: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: D102
        ids = self.ids[block.q_begin : block.q_end, : block.k_end]
        # index_select: advanced indexing gathers whole rows 3 to 10 times slower on CPUs.
        rows = source.index_select(0, ids.clamp(min=0).flatten()).to(dtype).view(*ids.shape, -1)
        # An unused slot must not bring in what stands in key row 0: it may be NaN, and 0 * NaN is NaN.
        if ids.device.type != "cpu":
            return rows.masked_fill_(~self.seen(block)[:, :, None], 0)
        for row, used in zip(rows.unbind(), self.lengths[block.q_begin : block.q_end].tolist(), strict=True):
            if used < block.k_end:
                row[used:] = 0
        return rows

    def accumulator(self, width: int, dtype: torch.dtype) -> Tensor:  # noqa: D102
        # One more row takes what unused slots give.
        return torch.zeros(self.num_k + 1, width, dtype=dtype, device=self.ids.device)

    def add(self, block: Block, total: Tensor, d_keys: Tensor) -> None:  # noqa: D102
        ids = self.ids[block.q_begin : block.q_end, : block.k_end]
        # int64: on CPUs twice as fast as with int32.
        rows = torch.where(self.seen(block), ids.long(), self.num_k)
        total.index_add_(0, rows.flatten(), d_keys.flatten(0, 1))

    def masked(self, row_mask: Bool[Tensor, " t"]) -> Selected:  # noqa: D102
        return Selected(self.ids, self.lengths * row_mask, self.key_rows)

    def has_keys(self) -> Bool[Tensor, " t"]:  # noqa: D102
        return self.lengths > 0


def accumulate(
    support: Support,
    blocks: Sequence[Block],
    widths: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    work: Callable[[Block, Sequence[Tensor]], None],
    lanes: int | None = None,
) -> list[Tensor]:
    """Key gradients [s, width] for each of `widths`, to which `work(block, totals)` adds block by block.

    Blocks are dealt out to lanes, each with totals of its own, which are then summed in order: the result is the same
    bit for bit for the same number of lanes, which depends on shapes alone unless it is given.

    Args:
        support: makes the totals.
        blocks: what to work on.
        widths: columns of each total.
        dtype: of the totals.
        device: of the totals.
        work: adds one block's share.
        lanes: how many; None for `lanes_for`. With one, blocks run strictly in order.
    """
    total_bytes = sum(widths) * support.num_k * dtype.itemsize
    lanes = lanes_for(device, len(blocks), total_bytes) if lanes is None else lanes
    totals = [[support.accumulator(width, dtype) for width in widths] for _ in range(lanes)]

    def lane_work(lane: int) -> None:
        for block in blocks[lane::lanes]:
            work(block, totals[lane])

    run_lanes(lane_work, lanes, device)
    for other in totals[1:]:
        for total, part in zip(totals[0], other, strict=True):
            total += part
    return [total[: support.num_k] for total in totals[0]]
