"""What the simulated kernels share: the release, its freedom (seeded), refusals, memory as a kernel leaves it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dsattn.backends.cudnn.contracts import Contract, Limits, Wrapper

# The frontend compiles its kernels for pointers on 16-byte boundaries, and the launch refuses any other.
LAUNCH_ALIGNMENT = 16
# Blocks that a Blackwell GPU runs at a time: more query rows than this share one after the other.
PROCESSORS = 148
# Elements of the largest temporary of one step; rows are taken in blocks to stay under it.
STEP_ELEMENTS = 1 << 23


class Result(dict[str, Any]):
    """A wrapper's result as the frontend returns it: read by key or position, iterating gives the values.

    It has no attributes for its keys.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(list(self.values()))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return list(self.values())[key]
        return super().__getitem__(key)


class Arguments:
    """The arguments of one call by name, defaults filled in; a parameter that the release does not have is None.

    Args:
        wrapper: what the release's wrapper does.
        arguments: name -> value.
    """

    def __init__(self, wrapper: Wrapper, arguments: dict[str, Any]) -> None:
        self.__dict__.update(arguments)
        self.wrapper = wrapper

    def __getattr__(self, name: str) -> Any:
        return None


class Simulated:
    """One release on one architecture: its contract, and what the contract leaves open, drawn from a seed.

    What a GPU decides anew at each launch (the order of atomics, which of several equal scores wins) is drawn from
    `random`, which moves on with every call. What a release always does alike, but promises nowhere (the order of a
    sum), is drawn from the seed alone, so that the same call gives the same bits.

    Args:
        contract: what the release does.
        seed: the seed of everything that the contract leaves open.
        races: whether the release's race conditions strike, at every call that can meet them, or never.
        rounds: whether factors of second products are rounded to 16 bits.
    """

    def __init__(self, contract: Contract, seed: int, *, races: bool, rounds: bool) -> None:
        self.contract, self.seed, self.races, self.rounds = contract, seed, races, rounds
        self.random = torch.Generator(device="cpu").manual_seed(seed)
        self.compiled: set[tuple[Any, ...]] = set()

    @property
    def sm90(self) -> bool:
        """Whether this is Hopper; Blackwell otherwise."""
        return self.contract.arch == "sm90"

    def since(self, release: str) -> bool:
        """Whether the simulated release is `release` (as "1.27") or later, for what is not worth a row of the table."""
        return tuple(self.contract.version.release[:2]) >= tuple(int(part) for part in release.split("."))

    def has(self, defect: str) -> bool:
        """Whether the release has the defect on this architecture."""
        return self.contract.defect(defect) is not None

    def strikes(self, race: str) -> bool:
        """Whether the release has the race condition and it strikes."""
        return self.races and self.has(race)

    def launch(self, wrapper: Wrapper, key: tuple[Any, ...], rows: int) -> None:
        """Compile the kernel of `key` at its first call; on Hopper one query row breaks that for some."""
        breaks = rows == 1 and any(
            defect.id.startswith("sm90-sq1-") for defect in self.contract.defects_of(wrapper.name)
        )
        require(not breaks or (wrapper.name, *key) in self.compiled, RuntimeError, "Expected strides[leading_dim] == 1")
        self.compiled.add((wrapper.name, *key))

    def factor(self, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """What was computed, as it enters a further product on matrix units."""
        return x.to(dtype).float() if self.rounds else x

    def coin(self, question: str) -> bool:
        """An answer that stays the same for this seed, to a question that the contract leaves open."""
        return random.Random(f"{self.seed}:{question}").random() < 0.5

    def order(self, count: int) -> Tensor:
        """The order in which a sum of `count` terms runs: always the same for this seed."""
        return torch.randperm(count, generator=torch.Generator(device="cpu").manual_seed(self.seed))

    def shuffled(self, count: int) -> Tensor:
        """An order that is another one at each call, as that of atomics."""
        return torch.randperm(count, generator=self.random)


def require(holds: bool, kind: type[Exception], text: str) -> None:
    """Raise `kind` unless `holds`: a refusal with the exception class that the release uses."""
    if not holds:
        raise kind(text)


def require_dtype(kind: type[Exception], name: str, tensor: Tensor, *dtypes: str) -> None:
    """Refuse a tensor of another dtype than those named, as in "bfloat16"."""
    fine = str(tensor.dtype).removeprefix("torch.") in dtypes
    require(fine, kind, f"{name} must be {' or '.join(dtypes)}, got {tensor.dtype}")


def require_shape(kind: type[Exception], name: str, tensor: Tensor, shape: Iterable[int]) -> None:
    """Refuse a tensor of another shape."""
    shape = tuple(shape)
    require(tuple(tensor.shape) == shape, kind, f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def require_within(kind: type[Exception], name: str, limits: Limits | None, count: int) -> None:
    """Refuse a count that the release does not take."""
    require(limits is None or limits.allows(count), kind, f"{name} must be {limits}, got {count}")


def require_grid(wrapper: Wrapper, *, batch: int, rows: int) -> None:
    """Refuse what does not fit the kernel's launch grid."""
    fits = batch <= (wrapper.max_batch or batch) and rows <= (wrapper.max_rows or rows)
    require(fits, RuntimeError, "CUDA error: invalid configuration argument")


def require_aligned(boundary: int = LAUNCH_ALIGNMENT, /, **tensors: Tensor | None) -> None:
    """Refuse, as the launch does, a tensor that does not start on a `boundary`-byte boundary."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.numel() and tensor.data_ptr() % boundary:
            raise ValueError(f"Misaligned Tensor data on argument {name}: expected {boundary} bytes")


def require_unit_stride(**tensors: Tensor | None) -> None:
    """Refuse, as the compiler does at the first call, a tensor whose last dimension is strided."""
    for tensor in tensors.values():
        if tensor is not None:
            require(
                tensor.stride(-1) == 1, RuntimeError, f"Expected strides[leading_dim] == 1, got {tensor.stride(-1)}"
            )


def unwritten(shape: Iterable[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that nothing was written to: every value is NaN."""
    return torch.full(tuple(shape), float("nan"), dtype=dtype, device="cpu")


def destroy(*buffers: Tensor) -> None:
    """Overwrite what a kernel uses as scratch."""
    for buffer in buffers:
        buffer.fill_(float("nan"))


def deliver(value: Tensor, buffer: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The caller's buffer with the value in it, or a new tensor of `dtype` without one."""
    if buffer is None:
        return value.to(dtype)
    return buffer.copy_(value)


def blocks(rows: int, elements_per_row: int) -> Iterator[slice]:
    """Row ranges whose temporaries stay under the limit of one step."""
    step = max(1, STEP_ELEMENTS // max(1, elements_per_row))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))
