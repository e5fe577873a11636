"""Sizes that the kernels were written for, and tensors padded to them; padding takes no part in any result."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsattn.backends.cudnn.contracts import Limits

INDEX_WIDTH = 128
# Widths of a key row; a value is its first 512 columns at most.
KEY_WIDTHS = (512, 576)
VALUE_WIDTH = 512
# Numbers of heads that each kind of kernel is called with, where its limits allow them.
SCORE_HEADS = (32, 64, 128, 256)
ATTENTION_HEADS = (16, 32, 64, 128)
BLOCK_SLOTS = 128
# Every data pointer is moved to a multiple of this, the most that any wrapper asks for.
ALIGNMENT = 32
# Elements of one tensor that a 32-bit index reaches.
INDEXABLE = (1 << 31) - 1
# Query rows of one launch where they are a dimension of its grid.
GRID_ROWS = 65_535
_BUCKETS_PER_OCTAVE = 8
_LEAST_PROCESSORS = 132


def fitting_heads(count: int, choices: tuple[int, ...], limits: Limits | None) -> int | None:
    """The least number of heads, at least `count`, that is a choice within the limits; None if there is none."""
    fine = (heads for heads in choices if heads >= count and (limits is None or limits.allows(heads)))
    return next(fine, None)


def fitting_width(width: int) -> int | None:
    """The least width of a key row that the kernels have, at least `width`; None if there is none."""
    return next((fit for fit in KEY_WIDTHS if fit >= width), None)


def slots_for(top_k: int, *, power_of_two: bool) -> int:
    """Slots of a call for `top_k`: whole blocks, a power of two of them if asked for."""
    blocks = max(1, -(-top_k // BLOCK_SLOTS))
    return BLOCK_SLOTS * (1 << (blocks - 1).bit_length() if power_of_two else blocks)


def bucket(count: int) -> int:
    """`count` rounded up to one of few sizes, at most an eighth above it, where every size compiles a kernel."""
    step = max(BLOCK_SLOTS, (1 << count.bit_length()) // (2 * _BUCKETS_PER_OCTAVE))
    return -(-count // step) * step


def padded(x: Tensor, *, rows: int | None = None, heads: int | None = None, width: int | None = None) -> Tensor:
    """x [rows, ...] with zeros (False, 0) at the ends of its rows, heads (dim 1) and width (last dim)."""
    if width is not None and x.shape[-1] != width:
        x = F.pad(x, (0, width - x.shape[-1]))
    if heads is not None and x.shape[1] != heads:
        x = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, heads - x.shape[1]))
    if rows is not None and x.shape[0] != rows:
        x = F.pad(x, (*(0, 0) * (x.ndim - 1), 0, rows - x.shape[0]))
    return x


def ready(x: Tensor) -> Tensor:
    """x contiguous, its data on the boundary that launches ask for."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def processors() -> int:
    """Blocks that the current GPU runs at a time, one per multiprocessor; of the smallest Blackwell without a GPU."""
    if not torch.cuda.is_available():
        return _LEAST_PROCESSORS
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
