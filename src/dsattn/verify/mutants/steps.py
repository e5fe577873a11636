"""What a mutant of the cuDNN backend is: a simulated release called with one of the backend's `Steps` gone wrong.

A step is needed on some releases, in calls of some wrappers. So each mutant stands for one place where the step has to
show: a wrapper of a release on an architecture, the check that calls it, and a named case. `cudnn` has the faults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dsattn.backends import Backend
from dsattn.backends.cudnn.backend import CudnnBackend
from dsattn.backends.cudnn.steps import Steps
from dsattn.verify.simulated import Release

RIGHT = Steps()
"""The steps as they are."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a step is needed.

    Attributes:
        wrapper: whose calls are wrong; the calls of others are right where the step is told whose they are.
        release: the simulated release and its architecture, as "1.30.0 sm90".
        check: the check that shows it.
        case: the named case in which it must show.
    """

    wrapper: str
    release: str
    check: str
    case: str


@dataclass(frozen=True, kw_only=True)
class StepFault:
    """One step that does something else, which makes one mutant of each place.

    Attributes:
        name: what is wrong.
        imitates: what a caller of the frontend would have done or seen.
        step: the method of `Steps`.
        wrong: takes its place, with the same arguments.
        places: where it has to show.
        dtype: short name of the inputs' dtype: that of the kernels.
    """

    name: str
    imitates: str
    step: str
    wrong: Callable[..., Any]
    places: tuple[Place, ...]
    dtype: str = "bf16"


class Faulty(Steps):
    """Steps with a fault in the calls of one wrapper."""

    def __init__(self, fault: StepFault, wrapper: str) -> None:
        right = getattr(RIGHT, fault.step)
        told = next(iter(inspect.signature(right).parameters)) == "name"

        def step(*given: Any, **options: Any) -> Any:
            mine = not told or given[0] == wrapper
            return (fault.wrong if mine else right)(*given, **options)

        setattr(self, fault.step, step)


class CudnnMutant:
    """The cuDNN backend on a simulated release with a fault in one place.

    Args:
        fault: what is wrong.
        place: where.

    Attributes:
        name: fault and place.
        part: the place alone.
        checks: the check that may catch it.
        cases: the cases that it is run through.
        backend: the release with the fault.
        control: the same release without it.
    """

    def __init__(self, fault: StepFault, place: Place) -> None:
        self.fault, self.place = fault, place
        self.part = f"{place.wrapper} of {place.release}"
        self.name = f"{fault.name} in {self.part}"
        self.checks, self.cases = (place.check,), (place.case,)
        version, arch = place.release.split()
        self.control = Release(version=version, arch=arch)
        self.backend = Release(version=version, arch=arch, make=partial(_broken, fault, place.wrapper))


def _broken(fault: StepFault, wrapper: str, version: str, arch: str) -> Backend:
    return CudnnBackend.simulated(version, arch, steps=Faulty(fault, wrapper))
