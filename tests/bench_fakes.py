"""Stand-ins for processes that measure: figures that are made up, and results of peers that agree or do not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dsattn.bench.child import Measurement
from dsattn.bench.children import ChildFailed
from dsattn.bench.gate import Gate
from dsattn.bench.peers.peer import Peer, Place
from dsattn.bench.run import Bench, Item, items
from dsattn.bench.sizes import Sizes
from dsattn.bench.works import WORKS, Work

GIGA = 1e9
SIZES = Sizes(index_heads=2, index_width=8, heads=2, key_width=12, value_width=8, top_k=4)


def measurement(wall: float = 1.0, cpu: float = 2.0, above: int = 1000, gradients: int = 100) -> Measurement:
    return Measurement(
        wall=wall, cpu=cpu, start=10, held=50, peak=50 + above, inputs=40, gradients=gradients, exact=True
    )


@dataclass
class Launch:
    """Answers every question from what it was given, and keeps the questions.

    Attributes:
        figures: measurements by what runs; the next one at each call, the last one for ever.
        peaks: flop/s, the next one at each question.
        results: what a runner writes, by name.
        broken: what runs and dies.
    """

    figures: dict[str, Sequence[Measurement]] = field(default_factory=dict)
    peaks: Iterator[float] = field(default_factory=lambda: iter([10 * GIGA] * 99))
    results: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    asked: list[dict[str, Any]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    def __call__(self, question: str, place: Place) -> dict[str, Any]:
        found = json.loads(question)
        self.asked.append(found)
        self.places.append(place)
        if "peak" in found:
            return {"peak": next(self.peaks), "source": "registers"}
        runner = found["runner"]
        if runner in self.broken:
            raise ChildFailed("the process was killed, as where memory runs out")
        if found["results"] is not None:
            save_file(self.results.get(runner, {"out": torch.ones(3)}), Path(found["results"]))
        mine = self.figures.get(runner, [measurement()])
        before = sum(other.get("runner") == runner for other in self.asked) - 1
        return asdict(mine[min(before, len(mine) - 1)])

    @property
    def ran(self) -> list[str]:
        """What ran, in order."""
        return [question.get("runner", "peak") for question in self.asked]


PEER = Peer("fast", "fastpack", "1.2.3", "Driven\nby hand.", lambda: Place(path=(Path("fastpack"),)))


def peer_work(**options: Any) -> Work:
    """A work that is compared with a peer."""
    base = WORKS["megatron"]
    return replace(base, name="beside", rows=(64,), dtypes=("fp32",), sizes=SIZES, peer=PEER, **options)


class Open(Gate):
    """Lets everything through."""

    def reason(self, work: Work, backend: str, dtype: str) -> str | None: ...

    def unsupported(self, work: Work, backend: str, dtype: str) -> str | None: ...


def bench(launch: Launch, **options: Any) -> Bench:
    given: dict[str, Any] = {"rounds": 3, "threads": 2, "gate": Open(), **options}
    return Bench(launch=launch, **given)


def small(*names: str, **options: Any) -> list[Item]:
    """Works at 64 tokens in fp32 on the backend torch."""
    given: dict[str, Any] = {"rows": [64], "dtypes": ["fp32"], "backends": ["torch"], **options}
    return items([WORKS[name] for name in names], **given)
