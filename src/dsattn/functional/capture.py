"""Writes the inputs of calls to a file, so that they can be judged elsewhere."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dsattn.errors import BadInput, DsattnError, UnsupportedProblem
from dsattn.functional.call import Call, observed
from dsattn.functional.validation import check_integer
from dsattn.layouts import CausalLayout, DeviceLayout
from dsattn.ops.inputs import AttentionInputs, IndexerInputs
from dsattn.spec.captured import CapturedCall, safetensors, write

Source = Callable[[], AbstractContextManager[object]]

_DEFAULT_TOP_K = 2048
_SOURCES: list[Source] = []
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def capture(path: str | os.PathLike[str], *, steps: int = 1) -> Generator[Captured]:
    """A context manager that writes the inputs of the first `steps` complete calls in its block to one file.

        with dsattn.capture("step.safetensors") as captured:
            model(batch)
        # then: dsattn verify --inputs step.safetensors

    A call is complete when both of its sides were seen, the indexer's and the attention's: one `dsa_attention`, one
    `indexer_loss`, or an `indexer_topk` followed by a `sparse_attention` of that many slots or a `dense_attention` of
    that layout. In a model every layer makes such a call, so `steps=2` are the first two layers, not two passes. A loss
    over tensors that were just captured adds its row mask to their call and makes none of its own.

    Args:
        path: the safetensors file, format `dsattn-inputs/1`; it is written when the block ends, and replaces one that
            is there. On several ranks give each its own.
        steps: how many calls to write, at least 1; fewer are written where fewer are made.

    Yields:
        What was seen so far: `captured.steps` is the number of complete calls.

    Semantics:
        Tensors are copied to the CPU when the operator is called: the file holds bit for bit what it was given. BSHD
        tensors are stored packed. A call that selects nothing (dense warm-up) is stored with a top_k of 2048, or of its
        longest window where that is less. An activation checkpoint that runs a layer again makes another call. Calls
        inside compiled graphs are not seen: capture a run that is not compiled; nor are those on meta or fake tensors.
        If the block raises, what was complete is written and the block's error goes on.

    Raises:
        BadInput: `steps` or `path` is no good, or the block ended and nothing complete was seen.
        UnsupportedProblem: out of the operator, where a layout has no segments on the host (`CausalLayout.on_device`).
        BackendMissing: the package safetensors is absent.
    """
    path, steps = Path(path), check_integer("steps", steps, 1)
    safetensors()
    if path.is_dir() or not path.parent.is_dir():
        given = "a folder" if path.is_dir() else "a folder that does not exist"
        raise BadInput(str(path), given=given, needed="a file in a folder that is there")
    captured = Captured(path, steps)
    try:
        with observed(captured._observe), ExitStack() as sources:
            for source in _SOURCES:
                sources.enter_context(source())
            yield captured
    except BaseException as error:
        try:
            captured._write(required=False)
        except DsattnError as another:
            error.add_note(f"dsattn.capture: {another}")
        raise
    captured._write(required=True)


def add_source(source: Source) -> None:
    """Adds calls of another library to what `capture` sees.

    Args:
        source: makes a context manager that is entered for each block of a capture; inside it the library's calls are
            given to `dsattn.functional.call.tell`.
    """
    if source not in _SOURCES:
        _SOURCES.append(source)


class Captured:
    """What a `capture` has seen so far.

    Attributes:
        path: the file that is written when the block ends.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self._limit = limit
        self._steps: list[_Step] = []
        self._seen: Counter[str] = Counter()
        self._closed = False
        # The last selection and the last attention that belong to no step yet.
        self._selection: _Index | None = None
        self._attention: tuple[AttentionInputs, Call] | None = None

    @property
    def steps(self) -> int:
        """The number of complete calls."""
        return len(self._steps)

    def __repr__(self) -> str:
        return f"Captured({self.steps} of {self._limit} steps for {self.path})"

    @torch.no_grad()
    def _observe(self, call: Call) -> None:
        if self._closed or _has_no_numbers(call):
            return
        self._seen[call.operator] += 1
        if isinstance(call.layout, DeviceLayout):
            needed = "a layout whose segments the host knows"
            raise UnsupportedProblem("capture", given="a device layout (CausalLayout.on_device)", needed=needed)
        if call.operator == "indexer_scores" or any(step.add(call) for step in reversed(self._steps)):
            return
        if self.steps == self._limit:
            self._closed, self._selection, self._attention = True, None, None
        elif call.a is None:
            self._selection = _Index.of(call)
        elif call.x is not None:
            self._begin_from_loss(call, call.a)
        else:
            self._begin_from_attention(call, call.a)

    def _begin_from_attention(self, call: Call, a: AttentionInputs) -> None:
        """An attention makes a step with the selection before it, or waits for a loss over the same tensors."""
        index, self._selection, self._attention = self._selection, None, None
        if index is not None and index.leads_to(call):
            self._steps.append(_Step(index, _copied(a), call))
        else:
            self._selection, self._attention = index, (a, call)

    def _begin_from_loss(self, call: Call, a: AttentionInputs) -> None:
        """A loss makes a step alone; what it is not told (k, d_v, the sink) may be known from the calls before."""
        index, before, attention = _Index.of(call), self._selection, self._attention
        self._selection = self._attention = None
        if index is None:
            return
        if index.top_k is None and before is not None and before.layout == index.layout and _same(before.x, index.x):
            index = replace(index, top_k=before.top_k)
        if attention is not None and _same(attention[0], a):
            step = _Step(index, _copied(attention[0]), attention[1])
        else:
            step = _Step(index, _copied(a), call)
        step.add(call)
        self._steps.append(step)

    def _write(self, *, required: bool) -> None:
        """Writes the complete calls.

        Raises:
            BadInput: there is none though some are required, or the file cannot be written.
        """
        if self._steps:
            write(self.path, [step.captured() for step in self._steps])
        elif required:
            seen = ", ".join(f"{count} of {operator}" for operator, count in self._seen.items())
            raise BadInput(
                f"capture to {self.path}",
                given=f"no complete call (calls seen: {seen or 'none'})",
                needed="an indexer's and an attention's side over the same rows",
                fix=None if seen else "calls inside compiled graphs are not seen",
            )


@dataclass(frozen=True)
class _Index:
    """An indexer's side; its tensors are copies on the CPU."""

    operator: str
    x: IndexerInputs
    layout: CausalLayout
    top_k: int | None

    @classmethod
    def of(cls, call: Call) -> _Index | None:
        if call.x is None or call.layout is None:
            return None
        return cls(call.operator, _copied(call.x), call.layout, call.top_k)

    def leads_to(self, call: Call) -> bool:
        """Whether an attention can be over this selection, or over all keys of its layout."""
        if call.topk is None:
            return call.layout == self.layout
        rows = call.topk.num_q, call.topk.num_k
        return rows == (self.layout.num_q, self.layout.num_k) and call.top_k == self.top_k


class _Step:
    """A complete call; what follows over the same tensors may add to it.

    Args:
        index: the indexer's side.
        a: the attention's side, copies on the CPU.
        call: where that is from; a loss is told neither the value's width nor the sink.
    """

    def __init__(self, index: _Index, a: AttentionInputs, call: Call) -> None:
        self.index, self.a = index, a
        self.row_mask: Tensor | None = None
        self._whole = call.operator != "indexer_loss"
        self._operators = [index.operator, call.operator]
        form = "packed" if call.batch is None else f"BSHD with b = {call.batch}"
        device = "cpu" if call.a is None else call.a.q.device
        self._place = f"{form}, {device}, torch {torch.__version__}"

    def add(self, call: Call) -> bool:
        """Whether a call is over the tensors of the step; what it knows of them is kept."""
        if call.a is None or (call.x is None and self._whole) or not _same(self.a, call.a):
            return False
        if call.x is None:
            sink = None if call.a.sink is None else _copy(call.a.sink)
            self.a, self._whole = replace(self.a, value_dim=call.a.value_dim, sink=sink), True
        elif not _same(self.index.x, call.x):
            return False
        elif call.options is not None and call.options.row_mask is not None:
            self.row_mask = _copy(call.options.row_mask)
        self._operators.append(call.operator)
        return True

    def captured(self) -> CapturedCall:
        """The step in the form that is written."""
        x, a, layout, top_k = self.index.x, self.a, self.index.layout, self.index.top_k
        if top_k is None:
            start, end = layout.bounds()
            longest = int((end - start).max()) if layout.num_q else 0
            top_k = max(1, min(_DEFAULT_TOP_K, longest))
        return CapturedCall(
            index_q=x.index_q,
            index_k=x.index_k,
            weights=x.weights,
            q=a.q,
            kv=a.kv,
            layout=layout,
            top_k=top_k,
            value_dim=a.value_dim,
            softmax_scale=float(a.softmax_scale),
            scale=float(x.scale),
            relu=x.relu,
            sink=a.sink,
            row_mask=self.row_mask,
            source=f"dsattn.capture: {', '.join(dict.fromkeys(self._operators))}; {self._place}",
        )


_Side = TypeVar("_Side", IndexerInputs, AttentionInputs)


def _copied(side: _Side) -> _Side:
    """The same inputs on the CPU, whatever becomes of these."""
    tensors = {f.name: x for f in fields(side) if isinstance(x := getattr(side, f.name), Tensor)}
    return replace(side, **{name: _copy(x) for name, x in tensors.items()})


def _copy(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x.detach())


def _same(side: _Side, other: _Side) -> bool:
    """Whether two calls have the same tensors, bit for bit, and scales; sinks and value widths may differ."""
    if isinstance(side, IndexerInputs):
        names, options = ("weights", "index_k", "index_q"), ("scale", "relu")
    else:
        names, options = ("kv", "q"), ("softmax_scale",)
    if any(getattr(side, name) != getattr(other, name) for name in options):
        return False
    return all(_equal(getattr(side, name), getattr(other, name)) for name in names)


def _equal(x: Tensor, y: Tensor) -> bool:
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    bits = _BITS[x.element_size()]
    return torch.equal(x.detach().view(bits), y.detach().to(x.device).view(bits))


def _has_no_numbers(call: Call) -> bool:
    """Whether a call is on meta or fake tensors, as those that `explain` makes are."""
    side = call.x.index_q if call.x is not None else call.a.q if call.a is not None else None
    return side is None or side.is_meta or isinstance(torch.empty(0, device="cpu"), FakeTensor)
