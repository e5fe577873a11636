"""What a wrong call is told, and that it left everything as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsattn import BadInput, TopK


@dataclass(frozen=True)
class Kind:
    """One kind of bad input.

    Attributes:
        argument: which argument is wrong.
        value: what is passed for it.
        given: text that the message has before "needed".
        needed: text that it has after.
        named: the argument that the message begins with, where it is another: the first that does not fit this one.
    """

    argument: str
    value: Any
    given: str
    needed: str
    named: str | None = None


class Work(TorchDispatchMode):
    """Lists the operators of PyTorch that run under it, but for views and questions of form, which compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        view = not schema.is_mutable and all(result.alias_info is not None for result in schema.returns)
        if not view and not str(func).startswith("prim."):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def check_refused(kind: Kind, call: Callable[[], Any], inputs: Iterable[Any]) -> list[str]:
    """Makes a wrong call and looks at its error and at all its inputs; the operators of PyTorch that it ran."""
    tensors = list(_tensors(inputs))
    before = [(x._version, x.requires_grad, _bits(x)) for x in tensors]
    with Work() as work, pytest.raises(BadInput) as caught:
        call()
    for x, (version, requires_grad, bits) in zip(tensors, before, strict=True):
        assert x._version == version, "an input was written to"
        assert x.requires_grad == requires_grad, "requires_grad changed"
        assert not x.is_leaf or x.grad is None, "a gradient appeared"
        now = _bits(x)
        assert (now is None) == (bits is None)
        assert now is None or bits is None or torch.equal(now, bits), "an input changed"
    check_message(kind, caught.value)
    return work.names


def check_message(kind: Kind, error: BadInput) -> None:
    """The error names the argument, what was given and what is needed."""
    message = str(error)
    named = kind.named or kind.argument
    assert error.what.split("[")[0] == named, message
    assert kind.argument in message or kind.named is not None
    head, _, needed = message.partition("; needed ")
    assert head.startswith(f"{error.what}: given "), message
    assert kind.given in head.removeprefix(error.what), message
    assert kind.needed in needed, message


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, TopK):
            yield from (x for x in (value.indices, value.lengths, value.scores) if x is not None)


def _bits(x: Tensor) -> Tensor | None:
    """A copy of the bytes of a tensor; None where there are none that can be looked at."""
    if x.layout != torch.strided or x.is_nested or x.is_meta or x.numel() == 0:
        return None
    return x.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
