"""Releases of the frontend that do not exist: 1.32.0, simulated, with one thing changed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from dsattn.backends.cudnn.backend import CudnnBackend
from dsattn.backends.cudnn.namespace import Namespace
from dsattn.backends.cudnn.simulator import SimulatedFrontend

Change = Callable[[Callable[..., Any], dict[str, Any]], Any]

DENSE = ("indexer_forward", "dense_indexer_score_recompute", "dense_attn_score_recompute", "dense_indexer_backward")


class MadeUp:
    """The wrappers of 1.32.0 with some changed: a change is given the wrapper and the arguments of the call."""

    def __init__(self, arch: str, changes: Mapping[str, Change]) -> None:
        self.frontend, self.changes = SimulatedFrontend("1.32.0", arch), dict(changes)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        inner = getattr(self.frontend, name)
        change = self.changes.get(name.removesuffix("_wrapper"))
        if change is None:
            return inner

        @functools.wraps(inner)
        def call(**kwargs: Any) -> Any:
            return change(inner, kwargs)

        return call


def release(version: str, arch: str, changes: Mapping[str, Change], *, checked: bool = True) -> CudnnBackend:
    """The backend on a made-up release; it has to show itself right before use unless `checked` is False."""
    backend = CudnnBackend(Namespace(MadeUp(arch, changes), Version(version), arch))
    backend.checked = checked
    return backend


def _lengths(kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Rows and keys of each sequence of a dense call."""
    if kwargs.get("cu_seqlens_q") is not None:
        return kwargs["cu_seqlens_q"].diff(), kwargs["cu_seqlens_k"].diff()
    q, k = (kwargs[a] if a in kwargs else kwargs[b] for a, b in (("q", "index_q"), ("k", "index_k")))
    return torch.full((q.shape[0],), q.shape[1]), torch.full((q.shape[0],), k.shape[1])


def bottom_right(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Offsets are taken and not read: the last row sees all keys."""
    rows, keys = _lengths(kwargs)
    return inner(**(kwargs | {"q_causal_offsets": (keys * kwargs["ratio"] - rows).int()}))


def top_left(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Offsets are taken and not read: the first row sees the first key."""
    return inner(**(kwargs | {"q_causal_offsets": None}))


def flipped_default(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Without offsets the last row sees all keys; with them nothing has changed."""
    return bottom_right(inner, kwargs) if kwargs.get("q_causal_offsets") is None else inner(**kwargs)


def returns_base_two(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """The log-sum-exp comes out in base 2."""
    result = inner(**kwargs)
    result["lse"] = result["lse"] * math.log2(math.e)
    return result


def reads_base_two(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """The log-sum-exp that goes in is taken for one of base 2."""
    return inner(**(kwargs | {"lse": kwargs["lse"] * math.log(2)}))


def masked_with_zero(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Columns past a row's length are read, as 0."""
    values, lengths = kwargs["input_values"], kwargs["seq_lens"]
    inside = torch.arange(values.shape[1]) < lengths[:, None]
    all_columns = torch.full_like(lengths, values.shape[1])
    return inner(**(kwargs | {"input_values": values.masked_fill(~inside, 0.0), "seq_lens": all_columns}))


def filled_with_zero(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Unseen entries of a table of scores are 0."""
    result = inner(**kwargs)
    name = "scores" if "scores" in result else "out"
    result[name] = torch.where(result[name] == -torch.inf, 0.0, result[name])
    return result


def local_ids(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Ids are local to their batch entry, whatever the call says."""
    return inner(**(kwargs | {"topk_indices_global": False}))


def unwritten_tail(name: str, block: int, garbage: float) -> Change:
    """Slots past the last whole block hold what the memory held."""

    def change(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        result = inner(**kwargs)
        slots = result[name].shape[-1]
        result[name][..., slots // block * block :] = garbage
        return result

    return change


def unread_tail(block: int) -> Change:
    """Slots past the last whole block are not looked at."""

    def change(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        whole = kwargs["topk_idxs"].shape[-1] // block * block
        return inner(**(kwargs | {"topk_length": kwargs["topk_length"].clamp(max=whole)}))

    return change


def without(name: str, value: Any = None) -> Change:
    """An argument is not read."""
    return lambda inner, kwargs: inner(**(kwargs | {name: value}))


def scaled(factor: Callable[[dict[str, Any]], float], *names: str) -> Change:
    """Some results are a factor off, which the arguments decide."""

    def change(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        result = inner(**kwargs)
        for name in names:
            result[name] = result[name] * factor(kwargs)
        return result

    return change
