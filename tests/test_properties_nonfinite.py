"""One NaN or inf in one input touches the rows and keys that the semantics name, and changes no bit elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from calls import Arguments, Operators, replaced, results, selection
from hypothesis import given
from strategies import ALL_LAYOUTS, FEW, Problem, random_problem, strategy, two_sequences
from torch import Tensor

import dsattn
from dsattn.ops import products

pytestmark = pytest.mark.usefixtures("each_backend")

OF_QUERIES = ("index_q", "weights", "q")
NAMES = (*OF_QUERIES, "index_k", "kv")


@dataclass(frozen=True)
class Bad:
    """A problem and the element of an input that is replaced."""

    problem: Problem
    dtype: torch.dtype
    name: str
    row: int
    place: float
    value: float

    def spoil(self, a: Arguments) -> Arguments:
        x = getattr(a.x, self.name).clone()
        element = int(self.place * x[0].numel())
        x[self.row].view(-1)[element] = self.value
        return replace(a, x=replace(a.x, **{self.name: x}))


def random_bad(rng: Random) -> Bad:
    problem = random_problem(rng, rng.choice(ALL_LAYOUTS)(rng))
    while not (problem.layout.num_q and problem.layout.num_k):
        problem = random_problem(rng, rng.choice(ALL_LAYOUTS)(rng))
    name = rng.choice(NAMES)
    rows = problem.layout.num_q if name in OF_QUERIES else problem.layout.num_k
    value = rng.choice([torch.nan, torch.nan, torch.inf, -torch.inf])
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float64])
    return Bad(problem, dtype, name, rng.randint(0, rows - 1), rng.random(), value)


class Touched(NamedTuple):
    """The rows of a result in which a bit is another than in the clean run, and those with a NaN."""

    changed: set[int]
    nan: set[int]


def touched_rows(x: Tensor, clean: Tensor) -> Touched:
    x, clean = (y.reshape(-1, 1) if y.ndim < 2 else y.flatten(1) for y in (x, clean))
    return Touched(*(set(bad.any(1).nonzero().flatten().tolist()) for bad in (x != clean, x.isnan())))


def check_bad(example: Bad, ops: Operators = dsattn) -> None:
    problem, layout = example.problem, example.problem.layout
    clean = Arguments.of(problem).to(example.dtype)
    dirty = example.spoil(clean)
    topk, spoiled = (selection(problem, a, layout, ops=ops) for a in (clean, dirty))
    # With the clean selection: a row that selects other keys than before changes in more than its NaN.
    before, after = (results(problem, a, layout, topk, ops=ops) for a in (clean, dirty))
    touched = {name: touched_rows(x, before[name]) for name, x in after.items()}
    chosen = [[key for key in keys if key >= 0] for keys in topk.indices.tolist()]
    mask = [True] * layout.num_q if clean.row_mask is None else clean.row_mask.tolist()
    counted = [keys if counts else [] for keys, counts in zip(chosen, mask, strict=True)]
    visible = [keys if counts else [] for keys, counts in zip(problem.drawn.visible, mask, strict=True)]
    nan = example.value != example.value
    for name, keys in (("sparse", chosen), ("dense", problem.drawn.visible)):
        rows, key_rows = reached(example, keys) if example.name in ("q", "kv") else (set(), set())
        for what, expected in {"out": rows, "lse": rows, "d_q": rows, "d_kv": key_rows}.items():
            assert_reached(f"{name} {what}", touched, expected, exact=nan)
        assert bool(rows) or f"{name} d_sink" not in touched or not touched[f"{name} d_sink"].changed
    for name, keys in (("selected", counted), ("visible", visible)):
        rows, key_rows = reached(example, keys)
        assert_reached(f"{name} loss", touched, {0} if rows else set(), exact=nan)
        assert_reached(f"{name} d_weights", touched, rows, exact=nan)
        # A closed gate of the relu lets nothing of a row through.
        assert_reached(f"{name} d_index_q", touched, rows, exact=nan and not problem.relu)
        assert_reached(f"{name} d_index_k", touched, key_rows, exact=nan and not problem.relu)
    check_scores(example, after["scores"], before["scores"])
    check_selection(example, spoiled.indices.tolist(), topk.indices.tolist())


def reached(example: Bad, keys: list[list[int]]) -> tuple[set[int], set[int]]:
    """The rows that read the bad element when row i reads the key rows keys[i], and all keys that those rows read."""
    of_query = example.name in OF_QUERIES
    rows = {i for i, row in enumerate(keys) if row and (i == example.row if of_query else example.row in row)}
    return rows, {key for i in rows for key in keys[i]}


def assert_reached(what: str, touched: dict[str, Touched], expected: set[int], *, exact: bool) -> None:
    changed, nan = touched[what]
    assert changed <= expected, f"{what}: rows {sorted(changed - expected)} are touched"
    assert not exact or nan == expected, f"{what}: rows {sorted(expected - nan)} hide the NaN"


def check_scores(example: Bad, after: Tensor, before: Tensor) -> None:
    """The bad element is in the scores that read it, and only there."""
    visible = example.problem.drawn.visible
    rows, _ = reached(example, visible) if example.name in ("index_q", "weights", "index_k") else (set(), set())
    pairs = {(i, key) for i in rows for key in visible[i] if example.name != "index_k" or key == example.row}
    changed = {(i, key) for i, key in (after != before).nonzero().tolist()}
    assert changed <= pairs
    assert example.value == example.value or {(i, key) for i, key in after.isnan().nonzero().tolist()} == pairs


def check_selection(example: Bad, after: list[list[int]], before: list[list[int]]) -> None:
    """A NaN is selected: the row of the bad element changes, others do not."""
    visible = example.problem.drawn.visible
    rows, _ = reached(example, visible) if example.name in ("index_q", "weights", "index_k") else (set(), set())
    for row, (new, old) in enumerate(zip(after, before, strict=True)):
        if row not in rows:
            assert new == old, f"row {row} does not read the bad element and selects other keys"
        elif example.value == example.value:
            continue
        elif example.name == "index_k":
            assert example.row in new, f"row {row} does not select the NaN"
            assert set(new) - {example.row} <= set(old)
        else:
            lowest = visible[row][: len(new)]
            assert new == lowest + [-1] * (len(new) - len(lowest)), f"row {row}: all scores are NaN"


@FEW
@given(strategy(random_bad))
def test_a_bad_element_touches_what_reads_it_and_nothing_else(example: Bad) -> None:
    check_bad(example)


def bad(name: str, value: float = torch.nan) -> Bad:
    return Bad(Problem(drawn=two_sequences(), relu=False), torch.float32, name, 6, 0.5, value)


@pytest.mark.usefixtures("on_torch")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "weights"])
def test_a_product_that_spreads_a_nan_is_found(name: str) -> None:
    check_bad(bad(name))
    with mock.patch.object(products, "split_finite", lambda x: (x, None)), pytest.raises(AssertionError):
        check_bad(bad(name))


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("index_k", "indexer_topk"),
        ("index_q", "indexer_topk"),
        ("weights", "indexer_scores"),
        ("kv", "sparse_attention"),
        ("q", "dense_attention"),
        ("kv", "indexer_loss"),
    ],
)
def test_an_operator_that_swallows_a_nan_is_found(name: str, operator: str) -> None:
    def swallowing(*arguments: Any, **options: Any) -> Any:
        clean = [torch.nan_to_num(x) if isinstance(x, Tensor) else x for x in arguments]
        return getattr(dsattn, operator)(*clean, **options)

    check_bad(bad(name))
    with pytest.raises(AssertionError):
        check_bad(bad(name), replaced(operator, swallowing))
