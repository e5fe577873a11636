"""The calls that are made of the seam and of the simulator, to be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        wrapper: its name in the contracts.
        name: what is special about it.
        make: its arguments, new ones at each call and always the same.
        arch: the only architecture that it is for.
        since: the first release that it is for, as a minor version.
        until: the first release that it is not for.
        first: arguments of a call that is made before.
        selects: names of results whose columns have no order.
        defects: those inside of the kernel that the case meets, which an emulated kernel does not have: where the
            release has one, nothing is compared.
    """

    wrapper: str
    name: str
    make: Callable[[], Arguments]
    arch: str | None = None
    since: int = 0
    until: int = 1000
    first: Callable[[], Arguments] | None = None
    selects: tuple[str, ...] = ()
    defects: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.wrapper}: {self.name}"


@dataclass
class Numbers:
    """Random numbers, the same ones for the same seed."""

    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(device="cpu").manual_seed(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cpu").to(dtype)

    def ids(self, *shape: int, used: int, keys: int) -> Tensor:
        """`used` different ids below `keys` in each row, then -1."""
        rows = shape[:-1]
        table = torch.full(shape, -1, dtype=torch.int32, device="cpu")
        order = torch.rand((*rows, keys), generator=self.generator, device="cpu").argsort(-1)[..., :used]
        table[..., : order.shape[-1]] = order[..., : shape[-1]]
        return table


def int32(*values: int) -> Tensor:
    """A small tensor."""
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def misaligned(x: Tensor) -> Tensor:
    """The same values 4 bytes past a boundary."""
    step = max(1, 4 // x.element_size())
    buffer = torch.zeros(x.numel() + step, dtype=x.dtype, device="cpu")
    return buffer[step:].view(x.shape).copy_(x)


def strided(x: Tensor) -> Tensor:
    """The same values as every second column of a wider tensor."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device="cpu")
    return wide[..., ::2].copy_(x)


def part_of_a_wider(x: Tensor) -> Tensor:
    """The same values as the first columns of a wider tensor."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 4, dtype=x.dtype, device="cpu")
    return wide[..., : x.shape[-1]].copy_(x)


def every() -> Iterator[Case]:
    """All cases."""
    from seam import cases_attention, cases_backward, cases_scores, cases_selection

    for part in (cases_scores, cases_selection, cases_backward, cases_attention):
        yield from part.cases()
