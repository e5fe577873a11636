"""How a call is cut into blocks of query rows, and how the blocks are run.

A block is a range of query rows with the one range of key rows that holds all their windows, so keys beyond its causal
end are never scored. Blocks are the unit of memory (the largest buffer is one block of scores) and of parallelism.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from dsattn.layouts import CausalLayout, DeviceLayout

B = TypeVar("B")

# One buffer of scores. On the CPU it should stay in the shared cache; an accelerator wants large launches.
_CPU_BYTES = 16 * 2**20
_ACCELERATOR_BYTES = 256 * 2**20
# Gradient accumulators of key size: more of them run more blocks at once, but each is a whole key buffer.
_MAX_LANES = 8
_LANE_BYTES = 256 * 2**20
# Short documents are put in one block up to this many keys: per-block overhead costs more than the masked products.
_MERGED_KEYS = 512


@dataclass(frozen=True)
class Block:
    """Query rows [q_begin, q_end) and the key rows [k_begin, k_end) that hold all their windows."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int


def buffer_bytes(device: torch.device) -> int:
    """How large one buffer of scores may be on `device`."""
    return _CPU_BYTES if device.type == "cpu" else _ACCELERATOR_BYTES


def blocks_for(layout: CausalLayout, entry_bytes: int, budget: int) -> tuple[Block, ...]:
    """The blocks that cover every query row that may see a key, in row order; see `plan_blocks`."""
    if isinstance(layout, DeviceLayout):
        sizes = layout.num_q, layout.num_k, layout.ratio, layout.max_len, layout.documents
        return plan_blind(*sizes, entry_bytes, budget)
    return plan_blocks(layout, entry_bytes, budget)


@lru_cache(maxsize=64)
def plan_blind(
    num_q: int, num_k: int, ratio: int, max_len: int, documents: int, entry_bytes: int, budget: int, max_rows: int = 64
) -> tuple[Block, ...]:
    """Blocks for packed documents of unknown lengths: key ranges that hold any window of up to `max_len` rows."""
    blocks, row = [], 0
    # A document of any length starts its keys at most one key per earlier document before where its rows start.
    lost = documents if ratio > 1 else 0
    while row < num_q:
        widest = max(1, min(num_k, max_len // ratio + lost + max_rows))
        rows = min(max_rows, num_q - row, max(1, budget // (entry_bytes * widest)))
        begin = max(0, (row - max_len + 1) // ratio - lost)
        end = min(num_k, (row + rows) // ratio)
        if end > begin:
            blocks.append(Block(row, row + rows, begin, end))
        row += rows
    return tuple(blocks)


@lru_cache(maxsize=64)
def plan_blocks(layout: CausalLayout, entry_bytes: int, budget: int, max_rows: int = 64) -> tuple[Block, ...]:
    """The blocks that cover every query row that sees a key, in row order.

    Args:
        layout: who sees whom.
        entry_bytes: bytes held per (query row, key) pair of a block, e.g. heads * 4.
        budget: bytes that one block may hold; a single row may need more.
        max_rows: upper limit on the rows of a block.
    """
    blocks: list[Block] = []
    open_block: Block | None = None
    for q_start, q_len, k_start, k_len, q_offset in layout._table.tolist():
        # Leading rows of a segment with a negative offset see nothing.
        row = max(0, layout.ratio - 1 - q_offset)
        while row < q_len and k_len > 0:

            def causal_end(last: int, k_len: int = k_len, q_offset: int = q_offset) -> int:
                return min(max((q_offset + last + 1) // layout.ratio, 0), k_len)

            rows = min(max_rows, q_len - row)
            rows = min(rows, max(1, budget // (entry_bytes * causal_end(row + rows - 1))))
            piece = Block(q_start + row, q_start + row + rows, k_start, k_start + causal_end(row + rows - 1))
            merged = _merge(open_block, piece, entry_bytes, budget, max_rows)
            if merged is None and open_block is not None:
                blocks.append(open_block)
            open_block = merged or piece
            row += rows
    if open_block is not None:
        blocks.append(open_block)
    return tuple(blocks)


def _merge(a: Block | None, b: Block, entry_bytes: int, budget: int, max_rows: int) -> Block | None:
    """One block for both, or None where that would score too much that nobody sees."""
    if a is None:
        return None
    union = Block(a.q_begin, b.q_end, min(a.k_begin, b.k_begin), max(a.k_end, b.k_end))
    rows, keys = union.q_end - union.q_begin, union.k_end - union.k_begin
    fits = rows <= max_rows and keys <= _MERGED_KEYS and rows * keys * entry_bytes <= budget
    return union if fits else None


def even_blocks(rows: int, row_bytes: int, budget: int, max_rows: int = 64) -> list[tuple[int, int]]:
    """Row ranges of one size that cover `rows`, each within the budget (a single row may need more)."""
    step = max(1, min(max_rows, budget // max(1, row_bytes)))
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def lanes_for(device: torch.device, blocks: int, accumulator_bytes: int) -> int:
    """How many accumulators of `accumulator_bytes` a backward uses.

    It depends on the shapes alone, never on the number of threads: so gradients are the same bit for bit for any
    number of threads.
    """
    if device.type != "cpu":
        return 1
    return max(1, min(_MAX_LANES, blocks, _LANE_BYTES // max(1, accumulator_bytes)))


def run_lanes(work: Callable[[int], None], lanes: int, device: torch.device) -> None:
    """Calls work(lane) for every lane, without gradients; on the CPU on as many threads as PyTorch may use.

    Each lane runs its products on one thread: small products do not scale over threads, and the bits of a product may
    depend on the number of threads.
    """
    inference = torch.is_inference_mode_enabled()

    def guarded(lane: int) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            work(lane)

    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        for lane in range(lanes):
            guarded(lane)
        return
    for _ in _pool(threads).map(guarded, range(lanes)):
        pass


def on_one_thread(compute: Callable[[], Tensor], device: torch.device) -> Tensor:
    """compute() as a lane runs it: a sum over rows has the same bits for any number of threads."""
    results: list[Tensor] = []
    run_lanes(lambda _: results.append(compute()), 1, device)
    return results[0]


def run_blocks(work: Callable[[B], None], blocks: Sequence[B], device: torch.device) -> None:
    """Calls work(block) for every block, each writing its own rows; see `run_lanes`."""
    run_lanes(lambda i: work(blocks[i]), len(blocks), device)


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """A pool of `threads` workers whose PyTorch operators each run on one thread."""
    pool = ThreadPoolExecutor(threads, "dsattn", initializer=_use_one_thread)
    started = threading.Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(started.wait)
    started.wait()
    # The call in each worker also wrote the process-wide default, which threads started later would read.
    torch.set_num_threads(threads)
    return pool


def _use_one_thread() -> None:
    # The first operator of a thread would take the process-wide number over; asking for it does that now.
    torch.get_num_threads()
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork: the child starts its own.
    os.register_at_fork(after_in_child=_pool.cache_clear)
