"""How calls are cut: enough blocks for all threads, small enough for what a block holds to stay in a core's cache."""

from __future__ import annotations

import torch

from dsattn.ops.blocks import Block

# Rows of scores that the selection reads again should still be in the second-level cache of a core.
SCORES_BYTES = 2**20
_ROWS = 64
# Per thread, so that none is left with the last block for long.
_BLOCKS_PER_THREAD = 8
# Sums of d_q of one call.
_RESULT_BYTES = 8 * 2**20
# All accumulators of key gradients together.
_LANES_BYTES = 2**30


def row_blocks(rows: int, row_bytes: int = 1) -> list[Block]:
    """Blocks of query rows whose keys lie anywhere.

    Args:
        rows: how many in all.
        row_bytes: what a row holds until its block is done.
    """
    threads = torch.get_num_threads()
    most = max(1, min(_ROWS, _RESULT_BYTES // row_bytes, rows // (threads * _BLOCKS_PER_THREAD)))
    return [Block(begin, min(begin + most, rows), 0, 0) for begin in range(0, rows, most)]


def lanes(blocks: int, accumulator_bytes: int) -> int:
    """How many accumulators of key gradients a call uses: one for each thread, as memory allows."""
    return max(1, min(torch.get_num_threads(), blocks, _LANES_BYTES // max(1, accumulator_bytes)))
