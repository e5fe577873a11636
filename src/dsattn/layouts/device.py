"""Packed documents whose lengths only the device knows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from jaxtyping import Int
from torch import Tensor

from dsattn.errors import BadInput, UnsupportedProblem
from dsattn.layouts.causal import CausalLayout
from dsattn.layouts.checks import Integer, whole_number


@dataclass(frozen=True, init=False, eq=False, repr=False)
class DeviceLayout(CausalLayout):
    """What `CausalLayout.on_device` builds: `_table` holds cu_seqlens [n + 1], on its device, instead of segments.

    Two of them are equal only if they are the same object: comparing their values would wait for the device.
    """

    max_len: int

    @classmethod
    def of(cls, cu_seqlens: Tensor, num_q: int, num_k: int, ratio: int, max_len: int) -> DeviceLayout:
        """The layout of arguments that were checked before."""
        layout = object.__new__(cls)
        fields = {"_table": cu_seqlens, "num_q": num_q, "num_k": num_k, "ratio": ratio, "max_len": max_len}
        for name, value in fields.items():
            object.__setattr__(layout, name, value)
        return layout

    @property
    def documents(self) -> int:
        """How many documents cu_seqlens can hold, empty ones included."""
        return max(0, self._table.shape[0] - 1)

    @cached_property
    def segments(self) -> NoReturn:
        """Not known on the host."""
        raise self._unknown("segments")

    @property
    def table(self) -> NoReturn:
        """Not known on the host."""
        raise self._unknown("table")

    def slice_queries(self, begin: Integer, end: Integer) -> NoReturn:
        """Not known on the host."""
        raise self._unknown("slice_queries")

    def _key_ranges(self) -> NoReturn:
        raise self._unknown("id space 'local'")

    def _wire(self) -> tuple[Tensor, list[int]]:
        return self._table, [self.num_q, self.num_k, self.ratio, self.max_len]

    def _shared_bounds(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        start, end = self._device_bounds()
        target = torch.device("cpu" if device is None else device)
        return start.to(target), end.to(target)

    def _device_bounds(self) -> tuple[Tensor, Tensor]:
        """Windows of all rows, made on the device of cu_seqlens without waiting for it."""
        with torch.inference_mode(False):
            cu = self._table.to(torch.int64, copy=True)
            lengths = cu.diff()
            keys = lengths // self.ratio
            _assert_true((cu[:1] == 0).all() & (lengths >= 0).all(), "cu_seqlens starts at 0 and does not decrease")
            _assert_true((lengths <= self.max_len).all(), "no document is longer than max_len")
            _assert_true((cu[-1:] <= self.num_q).all() & (keys.sum() <= self.num_k), "documents fit num_q and num_k")
            rows = torch.arange(self.num_q, device=cu.device)
            # The document of each row; rows behind the last one see nothing, as if theirs were empty.
            document = torch.searchsorted(cu[1:].contiguous(), rows, right=True)
            first_key = torch.cat([keys.new_zeros(1), keys.cumsum(0)])
            count = torch.minimum((rows - cu[document] + 1) // self.ratio, _padded(keys)[document])
            start = torch.where(count > 0, first_key[document], 0)
            return start.to(torch.int32), (start + count).to(torch.int32)

    def _unknown(self, what: str) -> UnsupportedProblem:
        return UnsupportedProblem(what, given="a device layout, whose documents the host does not know")

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        sizes = f"num_q={self.num_q}, num_k={self.num_k}, max_len={self.max_len}, ratio={self.ratio}"
        return f"CausalLayout.on_device({self.documents} documents on {self._table.device}, {sizes})"


def device_layout(cu_seqlens: Int[Tensor, " n"], num_q: Any, num_k: Any, max_len: Any, ratio: Any) -> DeviceLayout:
    """The checked arguments of `CausalLayout.on_device` as a layout."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        given = f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else None
        raise BadInput(
            "cu_seqlens", given=given or type(cu_seqlens).__name__, needed="an int32 or int64 tensor [n + 1]"
        )
    if not len(cu_seqlens):
        raise BadInput("cu_seqlens", given="no entry", needed="at least the leading 0")
    num_q, num_k = whole_number("num_q", num_q), whole_number("num_k", num_k)
    max_len, ratio = whole_number("max_len", max_len), whole_number("ratio", ratio, low=1)
    layout = DeviceLayout.of(cu_seqlens, num_q, num_k, ratio, max_len)
    if cu_seqlens.device.type == "cpu":
        # Wrong lengths show here, where they can be looked at without waiting.
        layout._shared_bounds()
    return layout


def _padded(keys: Tensor) -> Tensor:
    return torch.cat([keys, keys.new_zeros(1)])


def _assert_true(condition: Tensor, needed: str) -> None:
    """BadInput where looking costs nothing, else an assertion that the device makes."""
    if condition.device.type != "cpu":
        torch._assert_async(condition, f"CausalLayout.on_device: {needed}")
    elif not condition:
        raise BadInput("cu_seqlens", needed=needed)
