"""Runs the suite: Megatron's functions on each frontend, as released and after `install()`, one record per check."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Any, Literal

import torch
from packaging.version import Version

from dsattn.backends.cudnn.backend import CudnnBackend
from dsattn.backends.cudnn.namespace import Absence, Namespace, open_installed
from dsattn.backends.cudnn.simulator import SimulatedFrontend
from dsattn.errors import BackendMissing, ContractDrift
from dsattn.integrations import megatron
from dsattn.integrations.megatron_module import DISTRIBUTION, Kernels
from dsattn.integrations.megatron_namespace import CHANGED
from dsattn.integrations.megatron_probe import is_fixed
from dsattn.verify.frontend_defaults.judge import Metrics, gradient_metrics
from dsattn.verify.frontend_defaults.naive import Gradients
from dsattn.verify.frontend_defaults.problems import SparseLoss
from dsattn.verify.megatron_suite import judge
from dsattn.verify.megatron_suite.calls import loss_gradients, select
from dsattn.verify.megatron_suite.host import Host, put
from dsattn.verify.megatron_suite.problems import Selection, losses, selections
from dsattn.verify.megatron_suite.rows import SUITE
from dsattn.verify.megatron_suite.wheel import unpacked
from dsattn.verify.records import Record, Verdict
from dsattn.wheels import Unreachable

RELEASES = ("1.25.0", "1.26.0", "1.29.1", "1.32.0")
"""Releases of the cuDNN frontend that are simulated where none is named."""
NEWEST = "0.19.2"
"""The megatron-core that is downloaded where none is installed or named."""
Caller = Literal["naive", "dsattn"]
CALLERS: tuple[Caller, ...] = ("naive", "dsattn")
Advance = Callable[[str, int, int], object]
"""Told the case at hand, the checks done and all checks."""
_SCORED = ("padding", "slice")


@dataclass(frozen=True)
class Frontend:
    """A frontend to call, as it is sent to Megatron's process.

    Attributes:
        release: the release to simulate; None for the installed one on `device`.
        arch: "sm90" or "sm100", of a simulated one.
        seed: of all that a simulated one leaves open, and of the inputs.
        device: where the inputs are.
    """

    release: str | None
    arch: str
    seed: int
    device: str

    def open(self) -> Namespace:
        """The frontend, as new.

        Raises:
            BackendMissing: none is installed, or it cannot be used.
        """
        if self.release is not None:
            frontend = SimulatedFrontend(self.release, self.arch, self.seed, races=False)
            return Namespace(frontend, frontend.contract.version, self.arch)
        found = open_installed(torch.device(self.device))
        if isinstance(found, Absence):
            raise found.error()
        return found


def run(
    frontend_releases: Sequence[str] = RELEASES,
    megatron_version: str | None = None,
    advance: Advance = lambda *_: None,
    *,
    arch: str = "sm100",
    seed: int = 0,
    device: str | None = None,
) -> list[Record]:
    """A record for every frontend, caller and check; one that is not run where there is no Megatron that is known.

    Args:
        frontend_releases: releases to simulate, as "1.29.1".
        megatron_version: the megatron-core to download, as "0.19.2"; None for the installed one, else the newest known.
        advance: is told the progress.
        arch: "sm90" or "sm100", of simulated releases.
        seed: of the inputs and of all that a release leaves open.
        device: a CUDA device, where the installed frontend runs in place of simulated ones; None for those.

    Semantics:
        Megatron's unmodified functions are called in a process of its own. A naive record is of Megatron as released,
        and passes when it shows what it must: wrong gradients from the second sequence on and low recalls with
        frontends from 1.26 on, low recalls with padding and slices with any. A dsattn record is of Megatron after
        `install()`, with `scorer=True` for padding and slices, and passes when everything is right. So must a naive
        one of a Megatron that is repaired already. Each record's metrics have the release of Megatron under "megatron".

    Raises:
        BadInput: a release that cannot be read or is not on the index, or no such architecture.
        BackendMissing: a release that has no DSA.
    """
    names = list(dict.fromkeys(frontend_releases))
    # Names that nothing has are refused before anything is computed.
    for release in names:
        SimulatedFrontend(release, arch)
    frontends = [Frontend(name, arch, seed, "cpu") for name in names]
    if device is not None:
        frontends = [Frontend(None, arch, seed, device)]
    records: list[Record] = []
    try:
        installed = _installed() if megatron_version is None else None
        version = megatron_version or installed or NEWEST
        with Host(None if installed else unpacked(version)) as host:
            total = len(frontends) * len(cases(seed)) * len(CALLERS)
            for frontend in frontends:
                for case in cases(seed):
                    for caller in CALLERS:
                        records.append(host.call(record_of, frontend, case, caller, version))
                        advance(case, len(records), total)
    except (BackendMissing, ContractDrift, Unreachable) as error:
        records.append(_not_run(str(error)))
    return records


@lru_cache(maxsize=1)
def cases(seed: int) -> dict[str, SparseLoss | Selection]:
    """The checks' inputs by name."""
    return {**losses(seed), **{problem.case: problem for problem in selections(seed)}}


def record_of(kernels: Kernels, frontend: Frontend, case: str, caller: Caller, version: str) -> Record:
    """The record of one check, made in Megatron's process."""
    problem = cases(frontend.seed)[case]
    metrics: Metrics = {}
    namespace, trace = None, None
    try:
        namespace = frontend.open()
        metrics = _measured(kernels, frontend, namespace, problem, case, caller)
        old = Version(namespace.version.base_version) < CHANGED
        scored, released = case.startswith(_SCORED), caller == "naive"
        fixed = released and is_fixed(kernels.names)
        if released and not fixed and (scored or not old):
            reasons = judge.is_faulty(case, metrics, old=old)
        else:
            # Nobody knows what a later Megatron makes of padding and slices.
            reasons = [] if fixed and scored else judge.is_right(metrics)
        verdict: Verdict = "fail" if reasons else "pass"
    except BackendMissing as error:
        verdict, reasons = "not run", [str(error)]
    except Exception as error:
        verdict, reasons = "fail", [f"{type(error).__name__}: {error}"]
        trace = traceback.format_exc()
    return Record(
        suite=SUITE,
        case=case,
        operator="indexer_loss:selected" if isinstance(problem, SparseLoss) else "indexer_topk",
        backend="cudnn",
        device=frontend.device,
        dtype="bf16",
        verdict=verdict,
        reason="; ".join(reasons),
        metrics={"megatron": version, **metrics},
        simulated=frontend.release is not None,
        release=frontend.release if namespace is None else str(namespace.version),
        arch=None if namespace is None else namespace.arch,
        caller=caller,
        traceback=trace,
    )


def _measured(
    kernels: Kernels, frontend: Frontend, namespace: Namespace, problem: Any, case: str, caller: Caller
) -> Metrics:
    """The numbers of what Megatron's functions make of a problem."""
    simulated, device = frontend.release is not None, torch.device(frontend.device)
    put(kernels, namespace.dsa, namespace.arch if simulated else None)
    backend = CudnnBackend(namespace) if simulated else "auto"
    try:
        with (
            megatron.install(scorer=case.startswith(_SCORED), backend=backend) if caller == "dsattn" else nullcontext()
        ):
            if isinstance(problem, Selection):
                return judge.selection_metrics(*select(kernels, problem.to(device))[:2], problem)
            found = loss_gradients(kernels, _moved(problem, device))
        return gradient_metrics(found, _one_by_one(kernels, problem, device))
    finally:
        put(kernels, None)


def _one_by_one(kernels: Kernels, problem: SparseLoss, device: torch.device) -> Gradients:
    """The right gradients: in calls for one sequence both id spaces are one."""
    alone = [loss_gradients(kernels, _moved(problem.entry(b), device)) for b in range(len(problem.index_q))]
    return Gradients(*(torch.cat(parts) for parts in zip(*alone, strict=True)))


def _moved(problem: SparseLoss, device: torch.device) -> SparseLoss:
    return replace(problem, **{f.name: getattr(problem, f.name).to(device) for f in fields(problem)})


def _installed() -> str | None:
    try:
        return version_of(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def _not_run(reason: str) -> Record:
    return Record(
        suite=SUITE,
        case="",
        operator="",
        backend="cudnn",
        device="cpu",
        dtype="",
        verdict="not run",
        reason=reason,
    )
