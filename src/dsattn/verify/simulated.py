"""Simulated releases of the cuDNN frontend, and what `backend="auto"` makes of a backend that lacks a direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain as joined

import torch
from torch import Tensor

from dsattn.backends import Backend, TorchBackend
from dsattn.backends.base import AttentionGradients, IndexerGradients
from dsattn.backends.cudnn.contracts import Contract, releases
from dsattn.backends.cudnn.contracts_table import ARCHS
from dsattn.backends.cudnn.simulator import SimulatedFrontend
from dsattn.errors import BadInput, DsattnError
from dsattn.layouts import CausalLayout, TopK
from dsattn.ops.inputs import AttentionInputs, IndexerInputs, LossOptions
from dsattn.spec.problem import WITH_BACKWARD, Problem

ALL = "all"


class Chain(Backend):
    """A backend of kernels, and the torch backend for the one direction of an operator that it lacks.

    Forward and backward of a call may run on different backends, and with `backend="auto"` they do. A named backend
    refuses such a call, so what it has of it would never be checked.

    Args:
        inner: the backend of kernels.
        release: release of the kernel library, None where there is none.
        arch: the architecture stood in for, None without a stand-in.
        simulated: whether a stand-in for the kernel library runs.

    Attributes:
        by_torch: the parts that torch ran so far, as "sparse_attention forward".

    Semantics:
        What `inner` takes, it runs. A forward that it does not take runs on torch where its backward may follow and
        `inner` takes that; a backward that it does not take runs on torch where `inner` takes the forward. Every other
        problem that `inner` does not take is refused with its reason.
    """

    def __init__(
        self, inner: Backend, *, release: str | None = None, arch: str | None = None, simulated: bool = False
    ) -> None:
        self.name, self.release, self.arch, self.simulated = inner.name, release, arch, simulated
        self._inner, self._torch = inner, TorchBackend()
        self._chosen: dict[tuple[str, bool], Backend] = {}
        self.by_torch: list[str] = []

    @classmethod
    def of(cls, inner: Backend, device: torch.device) -> Chain:
        """The chain of a backend that is usable here, with the release of its kernel library where it knows one."""
        namespace_for = getattr(inner, "namespace_for", None)
        try:
            release = None if namespace_for is None else str(namespace_for(device).version)
        except DsattnError:
            # Not on this device: the backend itself says so when it is asked.
            release = None
        return cls(inner, release=release)

    def missing(self) -> str | None:
        """That of the inner backend."""
        return self._inner.missing()

    def supports(self, problem: Problem) -> str | None:
        """Why the inner backend does not take `problem`; None if torch runs it in its place."""
        reason = self._inner.supports(problem)
        chosen = self._torch if reason is not None and self._takes_the_other(problem) else self._inner
        # An operator is called right after its problem was put, and is not told of it.
        self._chosen[problem.operator, problem.backward] = chosen
        return reason if chosen is self._inner else None

    def non_finite(self, problem: Problem) -> str | None:
        """That of the backend which runs the problem."""
        backend = self._torch if self._inner.supports(problem) is not None else self._inner
        return backend.non_finite(problem)

    def rounds(self, problem: Problem) -> str | None:
        """The inner backend's answer, where it runs the direction."""
        return None if self._inner.supports(problem) is not None else self._inner.rounds(problem)

    def _takes_the_other(self, problem: Problem) -> bool:
        """Whether the inner backend takes the other direction of the call, and there is one."""
        if problem.operator not in WITH_BACKWARD or not (problem.backward or problem.requires_grad):
            return False
        return self._inner.supports(replace(problem, backward=not problem.backward)) is None

    def _of(self, operator: str, *, backward: bool = False) -> Backend:
        chosen = self._chosen.get((operator, backward), self._inner)
        part = f"{operator} {'backward' if backward else 'forward'}"
        if chosen is self._torch and part not in self.by_torch:
            self.by_torch.append(part)
        return chosen

    def indexer_scores(self, x: IndexerInputs, layout: CausalLayout) -> Tensor:
        """See `Backend.indexer_scores`."""
        return self._of("indexer_scores").indexer_scores(x, layout)

    def indexer_scores_backward(self, x: IndexerInputs, layout: CausalLayout, d_scores: Tensor) -> IndexerGradients:
        """See `Backend.indexer_scores_backward`."""
        return self._of("indexer_scores", backward=True).indexer_scores_backward(x, layout, d_scores)

    def indexer_topk(self, x: IndexerInputs, layout: CausalLayout, top_k: int, return_scores: bool) -> TopK:
        """See `Backend.indexer_topk`."""
        return self._of("indexer_topk").indexer_topk(x, layout, top_k, return_scores)

    def sparse_attention(self, a: AttentionInputs, topk: TopK) -> tuple[Tensor, Tensor]:
        """See `Backend.sparse_attention`."""
        return self._of("sparse_attention").sparse_attention(a, topk)

    def sparse_attention_backward(
        self, a: AttentionInputs, topk: TopK, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> AttentionGradients:
        """See `Backend.sparse_attention_backward`."""
        return self._of("sparse_attention", backward=True).sparse_attention_backward(a, topk, out, lse, d_out)

    def dense_attention(self, a: AttentionInputs, layout: CausalLayout) -> tuple[Tensor, Tensor]:
        """See `Backend.dense_attention`."""
        return self._of("dense_attention").dense_attention(a, layout)

    def dense_attention_backward(
        self, a: AttentionInputs, layout: CausalLayout, out: Tensor, lse: Tensor, d_out: Tensor
    ) -> AttentionGradients:
        """See `Backend.dense_attention_backward`."""
        return self._of("dense_attention", backward=True).dense_attention_backward(a, layout, out, lse, d_out)

    def indexer_loss(
        self,
        x: IndexerInputs,
        a: AttentionInputs,
        layout: CausalLayout,
        topk: TopK | None,
        lse: Tensor | None,
        options: LossOptions,
        with_gradients: bool,
    ) -> tuple[Tensor, IndexerGradients | None]:
        """See `Backend.indexer_loss`."""
        return self._of("indexer_loss").indexer_loss(x, a, layout, topk, lse, options, with_gradients)


def simulated_cudnn(version: str, arch: str) -> Backend:
    """The cuDNN backend on a stand-in for a release."""
    from dsattn.backends.cudnn.backend import CudnnBackend

    return CudnnBackend.simulated(version, arch)


@dataclass(frozen=True, kw_only=True)
class Release:
    """A release of the cuDNN frontend to simulate on an architecture.

    Attributes:
        version: the release.
        arch: "sm90" or "sm100".
        same: releases that were asked for too and have the same contract, so this one stands for them.
        known: whether the table of contracts was made from it; one that is newer has the contract of the newest there.
        make: the backend on a stand-in; may be sent to another process, so it is a function of a module.
    """

    version: str
    arch: str
    same: tuple[str, ...] = ()
    known: bool = True
    make: Callable[[str, str], Backend] = field(default=simulated_cudnn, repr=False)

    def chain(self) -> Chain:
        """The backend as verify runs it, as new: what the stand-in draws at random does not depend on earlier calls."""
        return Chain(self.make(self.version, self.arch), release=self.version, arch=self.arch, simulated=True)


def chosen(versions: Sequence[str], archs: Sequence[str] = ()) -> list[Release]:
    """The releases to simulate, oldest first, per architecture; of those with equal contracts one stands for all.

    Args:
        versions: releases, or "all" for every one that the table of contracts was made from.
        archs: "sm90", "sm100"; empty: both.

    Raises:
        BadInput: a version that cannot be read, or no such architecture.
        BackendMissing: a release that has no DSA.
    """
    names = joined.from_iterable(map(str, releases()) if version == ALL else (version,) for version in versions)
    wanted = list(dict.fromkeys(names))
    for arch in archs:
        if arch not in ARCHS:
            raise BadInput("--arch", given=repr(arch), needed=f"one of {', '.join(ARCHS)}")
    return [one for arch in ARCHS if arch in (archs or ARCHS) for one in _distinct(wanted, arch)]


def _distinct(versions: Sequence[str], arch: str) -> list[Release]:
    # The newest release of the table comes last and stands for those that do the same.
    contracts = sorted((_contract(version, arch) for version in versions), key=lambda one: one.version)
    groups: dict[Contract, list[Contract]] = {}
    for one in contracts:
        groups.setdefault(one, []).append(one)
    result = []
    for group in groups.values():
        first = max(group, key=lambda one: (one.known, one.version))
        same = tuple(dict.fromkeys(str(one.version) for one in group if one.version != first.version))
        result.append(Release(version=str(first.version), arch=arch, same=same, known=first.known))
    return result


def _contract(version: str, arch: str) -> Contract:
    return SimulatedFrontend(version, arch).contract


def notes(chosen: Sequence[Release]) -> list[str]:
    """What a report says of the releases: which one stands for which, and which are newer than the table."""
    newest = releases()[-1]
    found: dict[str, list[str]] = {}
    for one in chosen:
        said = []
        if one.same:
            said.append(f"{one.version} stands for {', '.join(one.same)} too: the same contract")
        if not one.known:
            said.append(
                f"{one.version} is not in the table of contracts, which ends with {newest}; it is read by that table"
            )
        for text in said:
            found.setdefault(text, []).append(one.arch)
    archs = {one.arch for one in chosen}
    return [text if set(where) == archs else f"{text} ({', '.join(where)})" for text, where in found.items()]
