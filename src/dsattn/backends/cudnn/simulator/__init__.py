"""A CPU stand-in for the DSA namespace of any cuDNN frontend release, with that release's defaults, gates and defects.

It is written from the contract of the releases (contracts.toml and the wheels' source), in plain torch on CPU tensors,
and shares no code with the operators or the oracle. What a release leaves open it fills in the least convenient way:
memory that nothing was written to is NaN, and the order of slots, of equal scores and of sums comes from a seed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dsattn.backends.cudnn.contracts import Contract, Parameter, Wrapper, contract
from dsattn.backends.cudnn.simulator.attention import sparse_attention_backward, sparse_attention_forward
from dsattn.backends.cudnn.simulator.backward import dense_indexer_backward, indexer_backward
from dsattn.backends.cudnn.simulator.dense import dense_attn_scores, dense_indexer_scores
from dsattn.backends.cudnn.simulator.scores import indexer_forward
from dsattn.backends.cudnn.simulator.sparse import sparse_attn_scores, sparse_indexer_scores
from dsattn.backends.cudnn.simulator.state import Arguments, Result, Simulated
from dsattn.backends.cudnn.simulator.topk import compactify, indexer_forward_top_k, indexer_top_k, local_to_global
from dsattn.errors import BadInput

if TYPE_CHECKING:
    from packaging.version import Version

Kernel = Callable[[Simulated, Arguments], dict[str, Any]]

KERNELS: dict[str, Kernel] = {
    "indexer_forward": indexer_forward,
    "indexer_top_k": indexer_top_k,
    "indexer_forward_top_k": indexer_forward_top_k,
    "local_to_global": local_to_global,
    "compactify": compactify,
    "sparse_indexer_score_recompute": sparse_indexer_scores,
    "sparse_attn_score_recompute": sparse_attn_scores,
    "dense_indexer_score_recompute": dense_indexer_scores,
    "dense_attn_score_recompute": dense_attn_scores,
    "indexer_backward": indexer_backward,
    "dense_indexer_backward": dense_indexer_backward,
    "sparse_attention_backward": sparse_attention_backward,
    "sparse_attention_forward": sparse_attention_forward,
}
# Defects of the table that one device of one size cannot show.
NOT_SHOWN: dict[str, str] = {
    "attn-bwd-current-device": "needs two devices of different architectures",
    "cache-ignores-device": "needs two devices",
}


class SimulatedFrontend:
    """The DSA wrappers of one release on one architecture, as attributes: `frontend.indexer_forward_wrapper(...)`.

    A wrapper that the release does not have is an AttributeError. Each has the release's own signature, and a call that
    does not fit it is a TypeError. A result is read as `result["scores"]`; iterating it gives the values. Inputs that
    the release refuses raise what it raises; a hang is a RuntimeError. Tensors are CPU tensors, and nothing is recorded
    for autograd.

    Args:
        version: the release, as "1.29.1".
        arch: "sm90" (Hopper) or "sm100" (Blackwell).
        seed: of all that the release leaves open.
        races: whether the release's race conditions strike, at every call that can meet them, or never.
        rounds: whether what was computed enters a further product rounded to 16 bits, as matrix units take it. Without,
            the numbers tell apart what the release means and what it rounds.

    Raises:
        BackendMissing: the release has no DSA.
        BadInput: `version` cannot be read, or no such architecture.
    """

    def __init__(self, version: str, arch: str, seed: int = 0, *, races: bool = True, rounds: bool = False) -> None:
        self.contract: Contract = contract(_parsed(version), arch)
        self._state = Simulated(self.contract, seed, races=races, rounds=rounds)
        self._wrappers = {wrapper.symbol: _callable(self._state, wrapper) for wrapper in self.contract.wrappers}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") or name not in self.__dict__.get("_wrappers", {}):
            raise AttributeError(f"cudnn.DSA has no attribute {name!r}")
        return self._wrappers[name]

    def __dir__(self) -> list[str]:
        return sorted(self._wrappers)


def _parsed(version: str) -> Version:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version)
    except InvalidVersion:
        raise BadInput("version", given=repr(version), needed="a release, as '1.29.1'") from None


def _signature(wrapper: Wrapper) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                parameter.name,
                inspect.Parameter.KEYWORD_ONLY if parameter.keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=_default(parameter),
            )
            for parameter in wrapper.parameters
        ]
    )


def _default(parameter: Parameter) -> Any:
    """The default as an object, or its source text where it is an expression."""
    if parameter.required:
        return inspect.Parameter.empty
    try:
        return parameter.value
    except BadInput:
        return parameter.default


def _callable(state: Simulated, wrapper: Wrapper) -> Callable[..., Any]:
    signature, kernel = _signature(wrapper), KERNELS.get(wrapper.name)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if not wrapper.runs:
            kind = NotImplementedError if wrapper.name == "indexer_forward_top_k" else RuntimeError
            raise kind(f"{wrapper.name} requires SM100+ compute capability, found {state.contract.arch}")
        if kernel is None:
            raise NotImplementedError(f"the simulator has the signature of {wrapper.name} only")
        with torch.no_grad(), torch.device("cpu"):
            return Result(kernel(state, Arguments(wrapper, bound.arguments)))

    call.__name__ = call.__qualname__ = wrapper.symbol
    call.__doc__ = (
        f"`cudnn.DSA.{wrapper.symbol}` of release {state.contract.version} on {state.contract.arch}, simulated."
    )
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call
