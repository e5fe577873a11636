"""Small calls of the public operators for the cuDNN backend on simulated releases, and a frontend that keeps calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from packaging.version import Version
from problems import Tensors, grid_tensors, random_tensors
from torch import Tensor

import dsattn
from dsattn import CausalLayout, TopK
from dsattn.backends import Backend, CudnnBackend
from dsattn.backends.cudnn.namespace import Namespace
from dsattn.backends.cudnn.simulator import SimulatedFrontend
from dsattn.errors import UnsupportedProblem
from dsattn.verify.simulated import Chain, chosen

Results = dict[str, Tensor]
Operator = str
OPERATORS: tuple[Operator, ...] = ("scores", "topk", "attention", "selected", "visible")
DISTINCT = [(one.version, one.arch) for one in chosen(["all"])]
"""One release of each contract, per architecture."""
TORCH = "torch"


@dataclass(frozen=True)
class Call:
    """One call of a wrapper as it was made; tensors are copies from before it."""

    name: str
    positional: tuple[Any, ...]
    given: dict[str, Any]
    original: dict[str, Any]

    def __getitem__(self, parameter: str) -> Any:
        return self.given[parameter]


class Recorder:
    """A DSA namespace that hands calls on to another one and keeps them."""

    def __init__(self, dsa: Any) -> None:
        self._dsa, self._wrappers = dsa, {}
        self.calls: list[Call] = []

    def __getattr__(self, symbol: str) -> Callable[..., Any]:
        if symbol.startswith("__"):
            raise AttributeError(symbol)
        wrapper = getattr(self._dsa, symbol)
        if symbol not in self._wrappers:
            self._wrappers[symbol] = self._keeping(symbol.removesuffix("_wrapper"), wrapper)
        return self._wrappers[symbol]

    def _keeping(self, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            copies = {key: x.clone() if isinstance(x, Tensor) else x for key, x in kwargs.items()}
            self.calls.append(Call(name, args, copies, kwargs))
            return wrapper(*args, **kwargs)

        call.__signature__ = inspect.signature(wrapper)  # type: ignore[attr-defined]
        return call

    def of(self, name: str) -> list[Call]:
        """The calls of one wrapper."""
        return [call for call in self.calls if call.name == name]


def recording(version: str, arch: str, seed: int = 0, *, races: bool = True) -> tuple[Recorder, CudnnBackend]:
    """The backend on a simulated release that keeps its calls."""
    recorder = Recorder(SimulatedFrontend(version, arch, seed, races=races))
    return recorder, CudnnBackend(Namespace(recorder, Version(version), arch))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The inputs and options of all operators over one layout.

    Attributes:
        layout: who sees whom.
        batch: b of a BSHD call.
        weights: dtype of the head weights.
        grid: whether all scores are exact.
        change: applied to the tensors.
        losing: further options of the losses.
        topk: the selection of attention and loss, where it is not the torch backend's.
        gradients: whether there is a backward.
    """

    layout: CausalLayout
    batch: int | None = None
    h_i: int = 2
    d_i: int = 16
    h: int = 2
    d_qk: int = 40
    d_v: int = 24
    top_k: int = 4
    scale: float = 0.5
    softmax_scale: float = 0.3
    dtype: torch.dtype = torch.bfloat16
    weights: torch.dtype = torch.float32
    sink: bool = False
    grid: bool = False
    seed: int = 0
    losing: dict[str, Any] = field(default_factory=dict)
    topk: TopK | None = None
    gradients: bool = True
    change: Callable[[Tensors], Tensors] = lambda x: x

    def tensors(self) -> Tensors:
        """The inputs, packed; the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            make = grid_tensors if self.grid else random_tensors
            x = make(self.layout, h_i=self.h_i, d_i=self.d_i, h=self.h, d_qk=self.d_qk)
        x = Tensors(*(y.to(self.dtype) for y in x.all()))
        x.weights = x.weights.float().to(self.weights)
        return self.change(x)

    def selection(self) -> TopK:
        """What attention and loss run over."""
        if self.topk is not None:
            return self.topk
        scoring: dict[str, Any] = {"scale": self.scale, "backend": TORCH}
        return dsattn.indexer_topk(*self.tensors().index(), self.layout, top_k=self.top_k, **scoring)


def outcome(problem: Problem, operator: Operator, backend: Backend | str) -> Results:
    """The results of one operator with all its gradients, packed; the names of gradients begin with d_.

    Raises:
        UnsupportedProblem: the backend does not take it.
    """
    x = problem.tensors()
    batch = problem.batch
    shaped = x if batch is None else Tensors(*(y.unflatten(0, (batch, len(y) // max(1, batch))) for y in x.all()))
    leaves = Tensors(*(y.detach().requires_grad_(problem.gradients) for y in shaped.all()))
    scoring: dict[str, Any] = {"scale": problem.scale, "backend": backend}
    if operator == "topk":
        topk = dsattn.indexer_topk(
            *shaped.index(), problem.layout, top_k=problem.top_k, return_scores=True, **scoring
        )._packed()
        kept = topk.scores
        assert kept is not None
        return {"ids": topk.indices, "lengths": topk.lengths, "kept": kept}
    if operator == "scores":
        return {"scores": dsattn.indexer_scores(*shaped.index(), problem.layout, **scoring)}
    rows = problem.batch is not None
    topk = problem.selection()
    topk = topk if problem.batch is None else topk._batched(problem.batch)
    if operator == "attention":
        results = _attention(problem, leaves, topk, backend)
    else:
        options: dict[str, Any] = {"softmax_scale": problem.softmax_scale, **scoring, **problem.losing}
        loss = dsattn.indexer_loss(
            *leaves.all(), problem.layout, topk=topk if operator == "selected" else None, **options
        )
        if problem.gradients:
            loss.backward()
        results = {"loss": loss.detach()}
    for name, leaf in vars(leaves).items():
        if leaf.grad is not None:
            results[f"d_{name}"] = leaf.grad.flatten(0, 1) if rows else leaf.grad
    return results


def _attention(problem: Problem, leaves: Tensors, topk: TopK, backend: Backend | str) -> Results:
    generator = torch.Generator("cpu").manual_seed(problem.seed + 1)
    sink = torch.randn(problem.h, generator=generator).requires_grad_(problem.gradients) if problem.sink else None
    options: dict[str, Any] = {"value_dim": problem.d_v, "softmax_scale": problem.softmax_scale, "sink": sink}
    out, lse = dsattn.sparse_attention(leaves.q, leaves.kv, topk, return_lse=True, backend=backend, **options)
    # Not contiguous, as a transpose behind the operator sends it.
    d_out = torch.randn(*reversed(out.shape), generator=generator).to(out.dtype).permute(*reversed(range(out.ndim)))
    if problem.gradients:
        out.backward(d_out)
    rows = problem.batch is not None
    found = {"out": out.detach(), "lse": lse}
    found = {name: value.flatten(0, 1) if rows else value for name, value in found.items()}
    return found if sink is None or sink.grad is None else {**found, "d_sink": sink.grad}


def on(backend: CudnnBackend) -> Backend:
    """The backend, with torch for the direction of an operator that the release does not have."""
    return Chain(backend)


def tried(problem: Problem, operator: Operator, backend: Backend) -> Results | str:
    """The results of one operator, or why the backend refuses it."""
    try:
        return outcome(problem, operator, backend)
    except UnsupportedProblem as error:
        return str(error)


def differences(problem: Problem, operator: Operator, backend: Backend) -> list[str] | None:
    """Results that differ from the torch backend's by more than they may; None if the problem is refused."""
    got = tried(problem, operator, backend)
    if isinstance(got, str):
        return None
    return unequal(got, outcome(problem, operator, TORCH), noise(problem, operator))


def compared(
    problem: Problem, operator: Operator, version: str, arch: str, seed: int = 0
) -> tuple[Recorder, list[str] | None]:
    """The calls and the differences of a release, without gradients where those are refused; None if all is refused."""
    recorder, found = Recorder(None), None
    for gradients in (True, False):
        recorder, backend = recording(version, arch, seed)
        found = differences(replace(problem, gradients=gradients), operator, on(backend))
        if found is not None:
            break
    return recorder, found


def noise(problem: Problem, operator: Operator) -> float:
    """What rounding may leave of a gradient that is 0 otherwise.

    The backward of the attention takes sum_j prob * d_prob from the product of the rounded output with its gradient.
    """
    if operator != "attention":
        return 1e-5
    x = problem.tensors()
    largest = [float(y.abs().max()) if y.numel() else 0.0 for y in (x.q, x.kv)]
    return abs(problem.softmax_scale) * problem.d_v**0.5 * 2**-7 * largest[1] * max(largest)


EXACT, FP32 = ("ids", "lengths"), ("scores", "kept", "loss", "lse")


def unequal(got: Results, wanted: Results, noise: float = 1e-5) -> list[str]:
    """The results of which a number is off by more than its share of the largest one, and the noise."""
    assert got.keys() == wanted.keys()
    found = []
    for name, x in got.items():
        y = wanted[name]
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            found.append(f"{name}: {x.dtype} {list(x.shape)}, wanted {y.dtype} {list(y.shape)}")
            continue
        x, y = x.double(), y.double()
        off = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs()).nan_to_num(torch.inf)
        worst = float(off.max()) if off.numel() else 0.0
        finite = y[y.isfinite()]
        size = float(finite.abs().max()) if finite.numel() else 0.0
        allowed = 0.0 if name in EXACT else 1e-5 * (1 + size) if name in FP32 else 1e-2 * size + noise
        if not worst <= allowed:
            found.append(f"{name}: off by {worst:.3g} of {size:.3g}")
    return found
