"""The frontend's DSA as Megatron 0.19 takes it to be: ids count through the batch, queries end where their keys end.

Up to release 1.25 the frontend's defaults said so. Since 1.26 they say something else, and a call has to name both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from dsattn.backends.cudnn.contracts import Contract, contract, distribution, releases
from dsattn.backends.cudnn.namespace import Installed, accepts
from dsattn.backends.cudnn.namespace import find as find_frontend
from dsattn.errors import ContractDrift


def _changed() -> Version:
    """The first release whose causal mask begins at the top left, as major and minor number."""
    masks = ((release, contract(release, "sm100").wrapper("indexer_forward").alignment) for release in releases())
    major, minor = next(release for release, alignment in masks if alignment == "top-left").release[:2]
    return Version(f"{major}.{minor}")


CHANGED = _changed()
"""The release of the frontend that changed both defaults."""
GLOBAL_IDS, OFFSETS = "topk_indices_global", "q_causal_offsets"


@dataclass(frozen=True)
class Rule:
    """What is added to calls of one wrapper.

    Attributes:
        adds: the argument.
        keys: which argument the keys are, counted from 0; the queries are the first.
    """

    adds: str
    keys: int = 1


RULES: dict[str, Rule] = {
    "indexer_forward_wrapper": Rule(OFFSETS),
    "dense_attn_score_recompute_wrapper": Rule(OFFSETS),
    "dense_indexer_score_recompute_wrapper": Rule(OFFSETS),
    "dense_indexer_backward_wrapper": Rule(OFFSETS, keys=2),
    "indexer_backward_wrapper": Rule(GLOBAL_IDS),
}


class RepairedNamespace:
    """A DSA namespace whose wrappers mean what they meant up to release 1.25, however new it is.

    Everything but the wrappers of `RULES` is passed through, assignments too. A call that means the same to all
    releases is passed on as it is; so is every call of a wrapper that does not take the argument in question, unless
    the release is known to be one that needs it.

    Args:
        inner: `cudnn.DSA`, or a stand-in. It is not changed.
        is_on: asked at each use; where it says no, everything is passed through.
    """

    __slots__ = ("_inner", "_is_on", "_wrapped")

    def __init__(self, inner: Any, is_on: Callable[[], bool] = lambda: True) -> None:
        # The usual assignment would go to `inner`.
        for name, value in (("_inner", inner), ("_is_on", is_on), ("_wrapped", {})):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        rule = RULES.get(name)
        if rule is None or not callable(value) or not self._is_on():
            return value
        kept = self._wrapped.get(name)
        if kept is None or kept.__wrapped__ is not value:
            kept = self._wrapped[name] = _repaired(value, name, rule, self._inner)
        return kept

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._inner, name)

    def __dir__(self) -> list[str]:
        return dir(self._inner)

    def __repr__(self) -> str:
        return f"RepairedNamespace({self._inner!r})"


def inner_of(namespace: RepairedNamespace) -> Any:
    """The namespace that was wrapped."""
    return object.__getattribute__(namespace, "_inner")


def release_of(dsa: Any, wrapper: Callable[..., Any]) -> Version | None:
    """The release that a wrapper is of; None where only its signature says what it does.

    It is known of the installed frontend's own wrappers and of simulated ones.
    """
    known = getattr(dsa, "contract", None)
    if isinstance(known, Contract):
        return known.version
    package = str(getattr(inspect.unwrap(wrapper), "__module__", "")).partition(".")[0]
    if package != distribution()["module"]:
        return None
    found = find_frontend()
    return found.version if isinstance(found, Installed) else None


class _Call:
    """The arguments of one call by position and by name.

    Args:
        signature: of what is called, None where it has none that can be read.
        args: what was given by position.
        kwargs: what was given by name.
    """

    def __init__(self, signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._parameters = {} if signature is None else dict(signature.parameters)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, each in self._parameters.items() if each.kind in positional]
        self._given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._in_order = [*args, *(self._given.get(name) for name in names[len(args) :])]

    def names(self, name: str) -> bool:
        """Whether the call gives the argument."""
        return name in self._given

    def at(self, position: int) -> Any:
        """The argument at a position, None where there is none."""
        return self._in_order[position] if position < len(self._in_order) else None

    def get(self, name: str, default: Any) -> Any:
        """The argument of a name, else the parameter's default, else `default`."""
        parameter = self._parameters.get(name)
        if parameter is not None and parameter.default is not inspect.Parameter.empty:
            default = parameter.default
        return self._given.get(name, default)


def _repaired(wrapper: Callable[..., Any], name: str, rule: Rule, dsa: Any) -> Callable[..., Any]:
    """The wrapper with the same signature, and with what its calls leave out."""
    try:
        signature = inspect.signature(wrapper)
    except (TypeError, ValueError):
        signature = None
    taken = accepts(wrapper, rule.adds)

    @wraps(wrapper)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = _Call(signature, args, kwargs)
        needed = None if given.names(rule.adds) else _needed(rule, given)
        if needed is None:
            return wrapper(*args, **kwargs)
        if taken:
            return wrapper(*args, **kwargs, **{rule.adds: needed})
        _check_old(dsa, wrapper, name, rule, needed)
        return wrapper(*args, **kwargs)

    if signature is not None:
        call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _needed(rule: Rule, call: _Call) -> Tensor | bool | None:
    """What the call has to say; None where every release takes it for the same."""
    queries, keys = call.at(0), call.at(rule.keys)
    if not isinstance(queries, Tensor) or not isinstance(keys, Tensor):
        return None
    if rule.adds == GLOBAL_IDS:
        # In a batch of one both id spaces are the same.
        return True if queries.shape[0] > 1 else None
    ratio = call.get("ratio", 1)
    starts_q, starts_k = call.get("cu_seqlens_q", None), call.get("cu_seqlens_k", None)
    if isinstance(starts_q, Tensor) and isinstance(starts_k, Tensor):
        if starts_q is starts_k and ratio == 1:
            return None
        offsets = (starts_k.diff() * ratio - starts_q.diff()).to(torch.int32)
        # Reading them from another device would wait for it; zeros change no number.
        return None if offsets.device.type == "cpu" and not offsets.any() else offsets
    offset = keys.shape[1] * ratio - queries.shape[1]
    if offset == 0:
        return None
    return torch.full(queries.shape[:1], offset, dtype=torch.int32, device=queries.device)


def _check_old(dsa: Any, wrapper: Callable[..., Any], name: str, rule: Rule, needed: Tensor | bool) -> None:
    """Refuse a call that a release cannot be told the meaning of, though it needs to be told.

    Raises:
        ContractDrift: the release is one after the change, and the wrapper does not take the argument.
    """
    release = release_of(dsa, wrapper)
    if release is None or Version(release.base_version) < CHANGED:
        return
    if isinstance(needed, Tensor) and not needed.any():
        return
    meaning = "ids that count through the batch" if rule.adds == GLOBAL_IDS else "queries that end where the keys end"
    raise ContractDrift(
        f"cuDNN frontend {release}: {name}",
        given=f"no parameter {rule.adds}, in a call with {meaning}",
        needed="a release that can be told so",
        fix=f"install a release from {CHANGED} on that has it, or one before {CHANGED}",
    )
