"""What is timed, as data: named works with their sizes, and the sizes that run where none are asked for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal, get_args

from dsattn.bench import calls, sizes
from dsattn.bench.calls import Make
from dsattn.bench.peers import megatron, transformers
from dsattn.bench.peers.peer import Peer
from dsattn.bench.sizes import Sizes
from dsattn.errors import BadInput

Suite = Literal["cpu", "peers"]
SUITES: tuple[Suite, ...] = get_args(Suite)
DTYPES = ("fp32", "bf16")
"""Dtypes that can be timed, by the short names that `dsattn.verify` has for them."""

MOST_FLOPS = 2.3e12
"""A call with more is not timed unless its number of rows is asked for."""
_ROWS = (1024, 2048, 4096, 8192, 16384, 32768)
_POINTS = 3


@dataclass(frozen=True, kw_only=True)
class Work:
    """One thing that is timed.

    Attributes:
        name: what `--work` takes.
        shows: what runs, in one line.
        suite: where it belongs.
        checks: what `dsattn verify` has to find right before a speed is told, as operators of verify.
        sizes: of the call.
        make: makes the call with its inputs.
        flops: of its matrix products, for sizes and rows.
        rows: numbers of rows that run unless others are asked for; None: up to `MOST_FLOPS`.
        dtypes: that run unless others are asked for.
        asked: whether it runs only where it is named.
        warm: rows of the call that is made before the timed one, at most.
        peer: what dsattn is compared with, None in the suite cpu.
    """

    name: str
    shows: str
    suite: Suite = "cpu"
    checks: tuple[str, ...]
    sizes: Sizes
    make: Make
    flops: Callable[[Sizes, int], int]
    rows: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = DTYPES
    asked: bool = False
    warm: int = 256
    peer: Peer | None = None

    def default_rows(self) -> tuple[int, ...]:
        """The numbers of rows that run unless others are asked for: the most that is allowed, and two below it."""
        if self.rows is not None:
            return self.rows
        allowed = [rows for rows in _ROWS if self.flops(self.sizes, rows) <= MOST_FLOPS]
        return tuple(reversed(allowed[::-2][:_POINTS]))

    def line(self) -> tuple[str, ...]:
        """What `--list` tells of it: suite, name, rows, dtypes, sizes and what runs."""
        rows = ",".join(map(str, self.default_rows()))
        cut = self.rows is None and max(self.default_rows()) < max(_ROWS)
        notes = {f"; more tokens pass {MOST_FLOPS / 1e12:g} Tflop": cut, "; only where it is named": self.asked}
        told = "".join([self.shows, *(note for note, holds in notes.items() if holds)])
        return self.suite, self.name, rows, ",".join(self.dtypes), str(self.sizes), told


_INDEX = Sizes(index_heads=64, index_width=128, top_k=2048)
_SPARSE_16 = Sizes(heads=16, key_width=576, value_width=512, top_k=2048)
_SPARSE_128 = Sizes(heads=128, key_width=576, value_width=512, top_k=2048)
_DENSE = Sizes(heads=16, key_width=576, value_width=512)
_LAYER = Sizes(index_heads=8, index_width=64, heads=8, key_width=576, value_width=512, top_k=256)
_SMALL = Sizes(index_heads=8, index_width=64, heads=8, key_width=96, value_width=64, top_k=256)
_LONG = Sizes(index_heads=8, index_width=64, heads=8, key_width=576, value_width=512, top_k=512)
_SPARSE, _WHOLE = ("sparse_attention",), ("dsa_attention:selected",)


def _all() -> list[Work]:
    return [
        Work(name="indexer-scores", shows="indexer scores, 1,024 rows at a time, thrown away",
             checks=("indexer_scores",), sizes=_INDEX, make=calls.scores, flops=sizes.scores),
        Work(name="indexer-topk", shows="indexer scores and their exact top-k",
             checks=("indexer_topk",), sizes=_INDEX, make=calls.topk, flops=sizes.scores),
        Work(name="sparse-16", shows="sparse attention forward over random keys, 16 heads",
             checks=_SPARSE, sizes=_SPARSE_16, make=calls.sparse, flops=sizes.sparse),
        Work(name="sparse-16-backward", shows="its backward",
             checks=_SPARSE, sizes=_SPARSE_16, make=calls.sparse_backward, flops=sizes.sparse_backward),
        Work(name="sparse-128", shows="sparse attention forward over random keys, 128 heads",
             checks=_SPARSE, sizes=_SPARSE_128, make=calls.sparse, flops=sizes.sparse),
        Work(name="sparse-128-backward", shows="its backward",
             checks=_SPARSE, sizes=_SPARSE_128, make=calls.sparse_backward, flops=sizes.sparse_backward),
        Work(name="dense-16", shows="dense attention forward, 16 heads",
             checks=("dense_attention",), sizes=_DENSE, make=calls.dense, flops=sizes.dense),
        Work(name="loss-selected", shows="indexer loss over random keys, forward and backward",
             checks=("indexer_loss:selected",), sizes=_LAYER, make=calls.loss_selected, flops=sizes.loss_selected),
        Work(name="loss-visible", shows="indexer loss over all visible keys, forward and backward",
             checks=("indexer_loss:visible",), sizes=_LAYER, make=calls.loss_visible, flops=sizes.loss_visible),
        Work(name="dsa-selected", shows="dsa_attention, loss over the selected keys, forward and backward",
             checks=_WHOLE, sizes=_LAYER, make=calls.layer_selected, flops=sizes.layer_selected),
        Work(name="dsa-visible", shows="dsa_attention, loss over all visible keys, forward and backward",
             checks=(*_WHOLE, "indexer_loss:visible"), sizes=_LAYER, make=calls.layer_visible,
             flops=sizes.layer_visible),
        Work(name="dsa-long", shows="as dsa-selected, for its memory at 65,536 tokens",
             checks=_WHOLE, sizes=_LONG, make=calls.layer_selected, flops=sizes.layer_selected, rows=(65536,),
             dtypes=("bf16",), asked=True),
        Work(name="megatron", shows="a layer's DSAttention with the sparse indexer loss, forward and backward",
             suite="peers", checks=_WHOLE, sizes=_LAYER, make=megatron.call, flops=sizes.layer_selected,
             rows=(4096, 8192), dtypes=("bf16",), warm=512, peer=megatron.PEER),
        Work(name="transformers", shows="a layer's DeepseekV32Attention with its indexer, forward and backward",
             suite="peers", checks=_WHOLE, sizes=_SMALL, make=transformers.call, flops=sizes.layer_selected,
             rows=(4096,), dtypes=("fp32",), warm=512, peer=transformers.PEER),
        Work(name="transformers-wide", shows="the same with DeepSeek-V3.2's widths of a head",
             suite="peers", checks=_WHOLE, sizes=_LAYER, make=partial(transformers.call, shape=transformers.WIDE),
             flops=sizes.layer_selected, rows=(4096,), dtypes=("fp32",), warm=512, peer=transformers.PEER),
    ]  # fmt: skip


WORKS: dict[str, Work] = {work.name: work for work in _all()}
"""Every work by its name."""


def chosen(suite: Suite, names: Sequence[str]) -> list[Work]:
    """The works of a suite that some name stands for, in their order; all but those that want to be named for none.

    Args:
        suite: the suite.
        names: names of works, with `*` for any text.

    Raises:
        BadInput: a name that stands for none.
    """
    works = [work for work in WORKS.values() if work.suite == suite]
    if not names:
        return [work for work in works if not work.asked]
    found: set[str] = set()
    for name in names:
        fits = {work.name for work in works if work.name == name or (fnmatchcase(work.name, name) and not work.asked)}
        if not fits:
            near = difflib.get_close_matches(name, [work.name for work in works], n=3)
            fix = f"near to it: {', '.join(near)}" if near else "`dsattn bench --list` shows them"
            raise BadInput("--work", given=repr(name), needed=f"a work of the suite {suite}", fix=fix)
        found |= fits
    return [work for work in works if work.name in found]
