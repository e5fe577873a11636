"""The checks of every call, made once, before anything is computed: of shapes and dtypes, never of device memory."""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsattn.errors import BadInput
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions

_LARGEST = sys.float_info.max
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_DTYPE_NAMES = "one of torch.bfloat16, torch.float16, torch.float32, torch.float64"


class Rows:
    """The row counts of a call and its form, agreed on by all of its tensors.

    The first tensor says whether the call is packed (batch None) or BSHD; the others must follow it.
    """

    def __init__(self, num_q: int, num_k: int, source: str) -> None:
        self.num_q, self.num_k, self.source = num_q, num_k, source
        self.batch: int | None = None
        self.rows_of_batch = 0
        self.device: torch.device | None = None
        self._form: tuple[str, int | None] | None = None

    def check(self, name: str, x: Any, axes: str, *, keys: bool = False) -> None:
        """That `x` is a tensor [rows, *axes] or [b, rows / b, *axes] with this call's rows, batch and device."""
        _check_tensor(name, x, "a torch.Tensor")
        trailing = len(axes.split())
        packed = f"[{'s' if keys else 't'}, {', '.join(axes.split())}]" if axes else f"[{'s' if keys else 't'}]"
        bshd = packed.replace("[s", "[b, sk").replace("[t", "[b, sq")
        if x.ndim not in (trailing + 1, trailing + 2):
            raise BadInput(name, given=f"shape {list(x.shape)}", needed=f"{packed} or {bshd}")
        batch = None if x.ndim == trailing + 1 else x.shape[0]
        if self._form is None:
            self._form, self.batch = (name, batch), batch
            self.rows_of_batch = 0 if batch is None else x.shape[1]
        elif batch != self._form[1]:
            first, first_batch = self._form
            form = "packed" if first_batch is None else f"BSHD with b = {first_batch}"
            raise BadInput(name, given=f"shape {list(x.shape)}", needed=f"the form of {first}, which is {form}")
        rows = x.shape[0] if batch is None else x.shape[0] * x.shape[1]
        needed, what = (self.num_k, "num_k") if keys else (self.num_q, "num_q")
        if rows != needed:
            raise BadInput(
                name, given=f"{rows} rows (shape {list(x.shape)})", needed=f"{self.source}.{what} = {needed}"
            )
        self.check_device(name, x)

    def check_device(self, name: str, x: Tensor) -> None:
        """That `x` lies where the other tensors of the call lie."""
        if self.device is None:
            self.device = x.device
        elif x.device != self.device:
            raise BadInput(name, given=f"device {x.device}", needed=f"{self.device}, as the other tensors")

    def pack(self, x: Tensor) -> Tensor:
        """[b, rows, ...] -> [b * rows, ...]; packed tensors stay as they are."""
        return x if self.batch is None else x.flatten(0, 1)

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of `pack` for query rows."""
        return x if self.batch is None else x.unflatten(0, (self.batch, self.rows_of_batch))

    def unpack_topk(self, topk: TopK) -> TopK:
        """A packed selection in the form of the call."""
        return topk if self.batch is None else topk._batched(self.batch, self.rows_of_batch)


def rows_of(layout: Any) -> Rows:
    """The row counts that a layout asks for."""
    if not isinstance(layout, CausalLayout):
        raise BadInput("layout", given=_kind(layout), needed="a dsattn.CausalLayout")
    return Rows(layout.num_q, layout.num_k, "layout")


def rows_of_topk(topk: Any) -> Rows:
    """The row counts that a selection asks for."""
    check_topk_type(topk)
    return Rows(topk.num_q, topk.num_k, "topk")


def check_topk_type(topk: Any) -> None:
    """That `topk` is a TopK."""
    if not isinstance(topk, TopK):
        raise BadInput("topk", given=_kind(topk), needed="a dsattn.TopK", fix="TopK.from_ids makes one of plain ids")


def check_topk(rows: Rows, topk: Any) -> TopK:
    """A selection that fits the rows of a call, packed."""
    check_topk_type(topk)
    if (topk.num_q, topk.num_k) != (rows.num_q, rows.num_k):
        needed = f"{rows.source}'s {rows.num_q} query and {rows.num_k} key rows"
        raise BadInput("topk", given=f"num_q = {topk.num_q}, num_k = {topk.num_k}", needed=needed)
    rows.check_device("topk", topk.indices)
    return topk._packed()


def check_indexer(rows: Rows, index_q: Any, index_k: Any, weights: Any, scale: Any, relu: Any) -> IndexerInputs:
    """The indexer's side of a call, packed."""
    rows.check("index_q", index_q, "h_i d_i")
    rows.check("index_k", index_k, "d_i", keys=True)
    rows.check("weights", weights, "h_i")
    heads, width = index_q.shape[-2:]
    if heads < 1 or width < 1:
        raise BadInput("index_q", given=f"shape {list(index_q.shape)}", needed="at least one head and one column")
    _check_axis("index_k", index_k, width, "d_i", "index_q")
    _check_axis("weights", weights, heads, "h_i", "index_q")
    _check_dtype("index_q", index_q)
    if index_k.dtype != index_q.dtype:
        raise BadInput("index_k", given=index_k.dtype, needed=f"{index_q.dtype}, the dtype of index_q")
    if weights.dtype not in (index_q.dtype, torch.float32):
        raise BadInput(
            "weights", given=weights.dtype, needed=f"{index_q.dtype}, the dtype of index_q, or torch.float32"
        )
    check_number("scale", scale)
    check_flag("relu", relu)
    return IndexerInputs(*map(rows.pack, (index_q, index_k, weights)), scale=scale, relu=relu)


def check_attention(
    rows: Rows, q: Any, kv: Any, value_dim: Any, softmax_scale: Any, sink: Any = None
) -> AttentionInputs:
    """The attention's side of a call, packed; `value_dim` None where values are not read."""
    rows.check("q", q, "h d_qk")
    rows.check("kv", kv, "d_qk", keys=True)
    heads, width = q.shape[-2:]
    if heads < 1 or width < 1:
        raise BadInput("q", given=f"shape {list(q.shape)}", needed="at least one head and one column")
    _check_axis("kv", kv, width, "d_qk", "q")
    _check_dtype("q", q)
    if kv.dtype != q.dtype:
        raise BadInput("kv", given=kv.dtype, needed=f"{q.dtype}, the dtype of q")
    check_number("softmax_scale", softmax_scale)
    if value_dim is None:
        value_dim = width
    value_dim = check_integer("value_dim", value_dim, 1)
    if value_dim > width:
        raise BadInput("value_dim", given=value_dim, needed=f"at most d_qk = {width}: values are columns of kv")
    if sink is not None:
        _check_sink(rows, sink, heads, kv.dtype)
    return AttentionInputs(rows.pack(q), rows.pack(kv), value_dim, softmax_scale, sink)


def _check_sink(rows: Rows, sink: Any, heads: int, dtype: torch.dtype) -> None:
    _check_tensor("sink", sink, "a torch.Tensor or None")
    if tuple(sink.shape) != (heads,):
        raise BadInput("sink", given=f"shape {list(sink.shape)}", needed=f"[h] = [{heads}]")
    needed = torch.float64 if dtype == torch.float64 else torch.float32
    if sink.dtype != needed:
        raise BadInput("sink", given=sink.dtype, needed=f"{needed} for kv of {dtype}")
    rows.check_device("sink", sink)


def check_loss(rows: Rows, *, coeff: Any, reduction: Any, num_rows: Any, row_mask: Any, tp_group: Any) -> LossOptions:
    """What turns the KL of rows into the loss, with a packed row mask."""
    check_number("coeff", coeff)
    check_choice("reduction", reduction, ("mean", "sum"))
    if isinstance(num_rows, Tensor):
        if num_rows.numel() != 1 or num_rows.dtype == torch.bool or num_rows.is_complex():
            raise BadInput("num_rows", given=f"{num_rows.dtype} of shape {list(num_rows.shape)}", needed="one number")
        rows.check_device("num_rows", num_rows)
        num_rows = num_rows.detach().reshape(())
    elif num_rows is not None:
        num_rows = check_integer("num_rows", num_rows, 1, 2**63)
    if num_rows is not None and reduction != "mean":
        raise BadInput("num_rows", given=f"together with reduction={reduction!r}", needed="one of the two")
    if row_mask is not None:
        rows.check("row_mask", row_mask, "")
        if row_mask.dtype != torch.bool:
            raise BadInput("row_mask", given=row_mask.dtype, needed="torch.bool, True where a row counts")
        row_mask = rows.pack(row_mask)
    if tp_group is not None and not (dist.is_available() and isinstance(tp_group, dist.ProcessGroup)):
        raise BadInput("tp_group", given=_kind(tp_group), needed="a torch.distributed.ProcessGroup or None")
    return LossOptions(coeff, reduction, num_rows, row_mask, tp_group)


def check_lse(rows: Rows, lse: Any, a: AttentionInputs) -> Tensor | None:
    """The log-sum-exp of an attention over the same keys, packed."""
    if lse is None:
        return None
    rows.check("lse", lse, "h")
    _check_axis("lse", lse, a.q.shape[1], "h", "q")
    if lse.dtype not in (torch.float32, torch.float64):
        raise BadInput("lse", given=lse.dtype, needed="torch.float32 or torch.float64")
    return rows.pack(lse.detach())


def check_integer(name: str, value: Any, lowest: int, limit: int = 2**31) -> int:
    """`value` as an int that is at least `lowest` and below `limit`; bools and floats are refused."""
    try:
        # Not of a tensor: to read its number would wait for its device.
        # And not of a plain int: under `torch.compile` that would compile again for every value.
        plain = type(value) is int
        number = value if plain else None if isinstance(value, (bool, Tensor)) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise BadInput(name, given=_kind(value), needed=f"an int of at least {lowest}")
    if number < lowest:
        raise BadInput(name, given=number, needed=f"at least {lowest}")
    if number >= limit:
        raise BadInput(name, given=number, needed=f"below {limit}")
    return number


def check_number(name: str, value: Any) -> None:
    """That `value` is a finite Python number."""
    if isinstance(value, (bool, Tensor)) or not isinstance(value, (int, float)):
        raise BadInput(name, given=_kind(value), needed="a float")
    # A comparison, which `torch.compile` can trace for a number that changes; false for NaN and huge ints too.
    if not -_LARGEST <= value <= _LARGEST:
        raise BadInput(name, given=value, needed="a finite float")


def check_flag(name: str, value: Any) -> None:
    """That `value` is a bool."""
    if not isinstance(value, bool):
        raise BadInput(name, given=_kind(value), needed="True or False")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """That `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise BadInput(name, given=repr(value), needed=f"one of {', '.join(map(repr, choices))}")


def _check_tensor(name: str, x: Any, needed: str) -> None:
    if not isinstance(x, Tensor):
        raise BadInput(name, given=_kind(x), needed=needed)
    if x.layout != torch.strided or x.is_nested:
        given = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise BadInput(name, given=given, needed="a dense tensor (torch.strided)")


def _check_axis(name: str, x: Tensor, size: int, axis: str, source: str) -> None:
    if x.shape[-1] != size:
        raise BadInput(name, given=f"shape {list(x.shape)}", needed=f"{axis} = {size} as in {source}")


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise BadInput(name, given=x.dtype, needed=_DTYPE_NAMES)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return (
        f"{value!r} of type {type(value).__name__}"
        if isinstance(value, (bool, int, float, str))
        else type(value).__name__
    )
