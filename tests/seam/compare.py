"""One call on two frontends, and what a caller sees differently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seam.cases import Arguments, Case

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-4}


@dataclass
class Seen:
    """What one frontend did with a call: its result, or what it raised; and its arguments afterwards."""

    result: Any
    raised: Exception | None
    before: Arguments
    after: Arguments

    @property
    def changed(self) -> set[str]:
        """Names of the arguments that were written to."""
        return {
            name
            for name, value in self.before.items()
            if isinstance(value, Tensor) and not torch.equal(_bits(value), _bits(self.after[name]))
        }


def see(frontend: Any, case: Case) -> Seen:
    """Makes the call."""
    symbol = f"{case.wrapper}_wrapper"
    before, after = case.make(), case.make()
    try:
        if case.first is not None:
            getattr(frontend, symbol)(**case.first())
        return Seen(getattr(frontend, symbol)(**after), None, before, after)
    except Exception as error:
        return Seen(None, error, before, after)


def differences(seam: Seen, simulated: Seen, case: Case) -> Iterator[str]:
    """What the two do differently, as sentences; nothing where they agree."""
    if seam.raised is not None or simulated.raised is not None:
        if type(seam.raised) is not type(simulated.raised):
            yield f"the seam {_told(seam)}; the simulator {_told(simulated)}"
        return
    if seam.changed != simulated.changed:
        yield f"the seam writes to {sorted(seam.changed)}; the simulator to {sorted(simulated.changed)}"
    wanted, got = dict(seam.result.items()), dict(simulated.result.items())
    if list(wanted) != list(got):
        yield f"the seam gives {list(wanted)}; the simulator {list(got)}"
        return
    if case.selects:
        wanted, got = _sorted(wanted, case.selects), _sorted(got, case.selects)
    for name in wanted:
        for text in _tensors(wanted[name], got[name]):
            yield f"{name}: {text}"
        own = [key for key, value in seam.after.items() if value is not None and value is seam.result[name]]
        theirs = [
            key for key, value in simulated.after.items() if value is not None and value is simulated.result[name]
        ]
        if own != theirs:
            yield f"{name}: the seam gives back {own or 'a new tensor'}; the simulator {theirs or 'a new tensor'}"


def _told(seen: Seen) -> str:
    if seen.raised is None:
        return "returns"
    first = next(iter(str(seen.raised).strip().splitlines()), "")
    return f"raises {type(seen.raised).__name__} ({first[:150]})"


def _tensors(wanted: Tensor | None, got: Tensor | None) -> Iterator[str]:
    if wanted is None or got is None:
        if wanted is not got:
            yield f"the seam gives {wanted}; the simulator {got}"
        return
    one, other = ((tuple(x.shape), x.dtype, x.stride()) for x in (wanted, got))
    if one != other:
        yield f"shape, dtype and strides {one}; the simulator's {other}"
        return
    if not wanted.is_floating_point():
        if not torch.equal(wanted, got):
            yield f"{_count(wanted != got)} differ"
        return
    mine, theirs = wanted.double(), got.double()
    for what, place in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        off = place(mine) != place(theirs)
        if off.any():
            yield f"{what} at other places: {_count(off)}, first {off.nonzero()[0].tolist()}"
            return
    finite = mine.isfinite() & theirs.isfinite()
    scale = mine[finite].abs().max() if finite.any() else mine.new_tensor(0.0)
    error = (mine - theirs).abs().masked_fill(~finite, 0.0)
    if (error > TOLERANCE[wanted.dtype] * scale + 1e-7).any():
        yield f"off by {float(error.max()):.2g} of {float(scale):.2g}"


def _count(off: Tensor) -> str:
    return f"{int(off.sum())} of {off.numel()}"


def _sorted(result: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The result with the columns of the named tables in the order of the first one's ids."""
    order = result[names[0]].argsort(dim=-1, stable=True)
    return {
        name: value.gather(-1, order) if name in names and value is not None else value
        for name, value in result.items()
    }


def _bits(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
