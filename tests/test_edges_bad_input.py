"""Every argument of every public name that is no operator: what a wrong one is told.

At least one kind per argument stands here, so that none is forgotten. The operators have a table of their own; the
rules of layouts and selections one by one are in `test_layouts_errors` and `test_topk_ids`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from problems import random_tensors
from refusals import Kind, check_refused

import dsattn
from dsattn import (
    BadInput,
    CausalLayout,
    Segment,
    TopK,
    attach_loss,
    context_parallel_positions,
    explain,
    gather_order,
)

pytestmark = pytest.mark.usefixtures("no_shape_checks")

LAYOUT = CausalLayout.packed([0, 2, 4])
CU = [0, 8, 16]
TOP = 2**31


def i32(x: Any) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


def selection() -> TopK:
    return TopK(i32([[0], [1], [2], [3]]), i32([1, 1, 1, 1]), num_q=4, num_k=4)


def of(method: str, selected: bool = False) -> Callable[..., Any]:
    """A method of an object that is made anew for every call."""
    return lambda **arguments: getattr(selection() if selected else CausalLayout.packed([0, 4]), method)(**arguments)


# Each callable with right arguments, all that it has.
PUBLIC: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "CausalLayout.batched": (
        CausalLayout.batched,
        {"b": 2, "q_len": 4, "k_len": None, "q_offset": None, "ratio": 1, "lengths": [4, 2], "side": "left"},
    ),
    "CausalLayout.packed": (
        CausalLayout.packed,
        {
            "cu_seqlens_q": CU,
            "cu_seqlens_k": CU,
            "q_offset": 0,
            "ratio": 1,
            "num_q": 24,
            "num_k": 24,
            "cu_seqlens_padded": [0, 12, 24],
        },
    ),
    "CausalLayout.context_parallel": (
        CausalLayout.context_parallel,
        {"cu_seqlens": CU, "cp_size": 2, "cp_rank": 1, "scheme": "zigzag", "ratio": 1, "num_q": 9, "num_k": 16},
    ),
    "CausalLayout.from_segments": (
        CausalLayout.from_segments,
        {"segments": [Segment(0, 4, 0, 4, 0)], "num_q": 4, "num_k": 4, "ratio": 1},
    ),
    "CausalLayout.on_device": (
        CausalLayout.on_device,
        {"cu_seqlens": i32(CU), "num_q": 16, "num_k": 16, "max_len": 8, "ratio": 1},
    ),
    "CausalLayout.slice_queries": (of("slice_queries"), {"begin": 1, "end": 3}),
    "TopK": (
        TopK,
        {
            "indices": i32([[0], [1]]),
            "lengths": i32([1, 1]),
            "scores": torch.zeros(2, 1),
            "num_q": 2,
            "num_k": 2,
        },
    ),
    "TopK.from_ids": (TopK.from_ids, {"ids": i32([[0], [1], [2], [3]]), "layout": LAYOUT, "space": "flat"}),
    "TopK.to_ids": (of("to_ids", selected=True), {"layout": LAYOUT, "space": "local"}),
    "context_parallel_positions": (
        context_parallel_positions,
        {"cu_seqlens": CU, "cp_size": 2, "cp_rank": 0, "scheme": "contiguous"},
    ),
    "gather_order": (gather_order, {"cu_seqlens": CU, "cp_size": 2, "scheme": "zigzag"}),
    "attach_loss": (
        attach_loss,
        {"out": torch.zeros(2, requires_grad=True), "loss": torch.zeros((), requires_grad=True), "scale": 1.0},
    ),
}

WRONG: list[tuple[str, Kind]] = [
    ("CausalLayout.batched", Kind("b", 2.0, "2.0", "an integer from 0")),
    ("CausalLayout.batched", Kind("q_len", -1, "-1", "an integer from 0")),
    ("CausalLayout.batched", Kind("k_len", 4, "k_len 4", "neither k_len nor a ratio", named="lengths")),
    ("CausalLayout.batched", Kind("q_offset", TOP, str(TOP), "an integer from")),
    ("CausalLayout.batched", Kind("ratio", 0, "0", "an integer from 1")),
    ("CausalLayout.batched", Kind("lengths", 3, "3", "a sequence of integers")),
    ("CausalLayout.batched", Kind("side", "both", "'both'", "'left' or 'right'")),
    ("CausalLayout.packed", Kind("cu_seqlens_q", [2, 8, 16], "2", "0")),
    ("CausalLayout.packed", Kind("cu_seqlens_k", [0, 8, 4], "4 after 8", "entries that do not decrease")),
    ("CausalLayout.packed", Kind("q_offset", [0], "1 entries", "2 entries")),
    ("CausalLayout.packed", Kind("ratio", None, "None", "an integer from 1")),
    ("CausalLayout.packed", Kind("num_q", 20, "20", "at least 24")),
    ("CausalLayout.packed", Kind("num_k", 20, "20", "at least 24")),
    ("CausalLayout.packed", Kind("cu_seqlens_padded", [0, 4, 24], "room for 4 query rows", "room for its 8")),
    ("CausalLayout.context_parallel", Kind("cu_seqlens", [0, 8, 14], "document 1 of 6 rows", "2 * cp_size = 4")),
    ("CausalLayout.context_parallel", Kind("cp_size", 0, "0", "an integer from 1")),
    ("CausalLayout.context_parallel", Kind("cp_rank", 2, "2", "an integer from 0 to 1")),
    ("CausalLayout.context_parallel", Kind("scheme", None, "None", "'zigzag' or 'contiguous'")),
    ("CausalLayout.context_parallel", Kind("ratio", True, "True", "an integer from 1")),
    ("CausalLayout.context_parallel", Kind("num_q", 7, "7", "at least 8")),
    ("CausalLayout.context_parallel", Kind("num_k", 15, "15", "at least 16")),
    ("CausalLayout.from_segments", Kind("segments", None, "NoneType", "a sequence of Segment")),
    ("CausalLayout.from_segments", Kind("segments", 5, "int", "a sequence of Segment")),
    ("CausalLayout.from_segments", Kind("segments", [(0, 4, 0, 4, 0)], "(0, 4, 0, 4, 0)", "a Segment")),
    ("CausalLayout.from_segments", Kind("segments", [Segment(0, 5, 0, 4, 0)], "= 5", "num_q = 4")),
    ("CausalLayout.from_segments", Kind("segments", [Segment(0, 3, 0, 4, 0)] * 2, "[0, 3)", "do not overlap")),
    ("CausalLayout.from_segments", Kind("num_q", 3, "q_start + q_len = 4", "num_q = 3", named="segments")),
    ("CausalLayout.from_segments", Kind("num_k", 3.5, "3.5", "an integer from 0")),
    ("CausalLayout.from_segments", Kind("ratio", -1, "-1", "an integer from 1")),
    ("CausalLayout.on_device", Kind("cu_seqlens", CU, "list", "an int32 or int64 tensor")),
    ("CausalLayout.on_device", Kind("cu_seqlens", torch.zeros(3), "torch.float32", "an int32 or int64 tensor")),
    ("CausalLayout.on_device", Kind("num_q", -1, "-1", "an integer from 0")),
    ("CausalLayout.on_device", Kind("num_k", "16", "'16'", "an integer from 0")),
    ("CausalLayout.on_device", Kind("max_len", TOP, str(TOP), "an integer from 0")),
    ("CausalLayout.on_device", Kind("ratio", 0, "0", "an integer from 1")),
    ("CausalLayout.slice_queries", Kind("begin", 4, "4", "an integer from 0 to 3")),
    ("CausalLayout.slice_queries", Kind("end", 5, "5", "an integer from 0 to 4")),
    ("TopK", Kind("indices", i32([[0], [2]]), "2 in a row", "[0, num_k = 2)")),
    ("TopK", Kind("lengths", i32([1, 2]), "2", "from 0 to k = 1")),
    ("TopK", Kind("scores", torch.zeros(2, 2), "shape [2, 2]", "shape [2, 1]")),
    ("TopK", Kind("num_q", 3, "3", "2, the rows of indices")),
    ("TopK", Kind("num_k", None, "None", "an integer from 0")),
    ("TopK.from_ids", Kind("ids", i32([[0], [0], [2], [0]]), "key row 0", "key rows in [2, 4)")),
    ("TopK.from_ids", Kind("layout", [0, 2, 4], "list", "a dsattn.CausalLayout")),
    ("TopK.from_ids", Kind("space", "bshd", "'bshd'", "'flat' or 'local' or 'seq_major'")),
    ("TopK.to_ids", Kind("layout", None, "NoneType", "a dsattn.CausalLayout")),
    ("TopK.to_ids", Kind("layout", CausalLayout.packed([0, 5]), "num_q 5", "num_q 4 and num_k 4")),
    ("TopK.to_ids", Kind("space", 1, "1", "'flat' or 'local' or 'seq_major'")),
    ("context_parallel_positions", Kind("cu_seqlens", [0, 8, 15], "15", "divides by cp_size = 2")),
    ("context_parallel_positions", Kind("cp_size", 2.0, "2.0", "an integer from 1")),
    ("context_parallel_positions", Kind("cp_rank", -1, "-1", "an integer from 0 to 1")),
    ("context_parallel_positions", Kind("scheme", "ring", "'ring'", "'zigzag' or 'contiguous'")),
    ("gather_order", Kind("cu_seqlens", None, "None", "a sequence of integers")),
    ("gather_order", Kind("cp_size", 0, "0", "an integer from 1")),
    ("gather_order", Kind("scheme", 0, "0", "'zigzag' or 'contiguous'")),
    ("attach_loss", Kind("out", 1.0, "float", "a torch.Tensor")),
    ("attach_loss", Kind("out", torch.zeros(2, dtype=torch.int64), "torch.int64", "a floating-point dtype")),
    ("attach_loss", Kind("loss", None, "NoneType", "a torch.Tensor")),
    ("attach_loss", Kind("loss", torch.zeros(1), "shape [1]", "a scalar")),
    ("attach_loss", Kind("loss", torch.tensor(1), "torch.int64", "a floating-point dtype")),
    ("attach_loss", Kind("scale", torch.zeros(2), "shape [2]", "one real number")),
    ("attach_loss", Kind("scale", torch.tensor(1j), "torch.complex64", "one real number")),
    ("attach_loss", Kind("scale", float("inf"), "inf", "a finite float")),
]


@pytest.mark.parametrize(
    ("name", "kind"), WRONG, ids=[f"{name}-{kind.argument}-{i}" for i, (name, kind) in enumerate(WRONG)]
)
def test_a_wrong_argument_is_named_and_nothing_changes(name: str, kind: Kind) -> None:
    function, right = PUBLIC[name]
    wrong = right | {kind.argument: kind.value}
    check_refused(kind, partial(function, **wrong), wrong.values())


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_has_a_kind_and_the_right_ones_pass(name: str) -> None:
    function, right = PUBLIC[name]
    function(**right)
    public: Any = dsattn
    for part in name.split("."):
        public = getattr(public, part)
    parameters = set(inspect.signature(public).parameters) - {"self"}
    assert set(right) == parameters
    assert {kind.argument for other, kind in WRONG if other == name} == parameters


def test_no_public_callable_is_forgotten() -> None:
    methods = {f"{c.__name__}.{name}" for c in (CausalLayout, TopK) for name in vars(c) if not name.startswith("_")}
    # Properties and fields take nothing; a device is for PyTorch to know.
    takes_nothing = {"segments", "table", "scores"}
    methods -= {f"{c.__name__}.{name}" for c in (CausalLayout, TopK) for name in takes_nothing}
    methods -= {"CausalLayout.bounds", "TopK.to"}
    assert methods == {name for name in PUBLIC if "." in name}
    data = {"CausalLayout", "Segment", "DSAOutput", "TopK"}
    errors = {name for name in dsattn.__all__ if name.endswith(("Input", "Error", "Problem", "Missing", "Drift"))}
    operators = {name for name in dsattn.__all__ if name.startswith(("indexer_", "dense_", "sparse_", "dsa_"))}
    elsewhere = {"audit", "backends", "capture", "explain", "prepare"}
    assert set(dsattn.__all__) - data - errors - operators - elsewhere == {
        name for name in PUBLIC if "_" in name and "." not in name
    }


@pytest.mark.parametrize(
    "operator", ["topk", None, ["indexer_topk"], dsattn.indexer_topk], ids=lambda x: type(x).__name__
)
def test_explain_wants_the_name_of_an_operator(operator: Any) -> None:
    x = random_tensors(LAYOUT)
    with pytest.raises(BadInput) as caught:
        explain(operator, *x.index(), LAYOUT, top_k=3)
    assert caught.value.what == "operator"
    assert repr(operator) in str(caught.value)
    assert "one of 'indexer_scores', 'indexer_topk'" in str(caught.value)


def test_a_layout_is_built_by_its_ways_only() -> None:
    with pytest.raises(BadInput, match=r"build a layout by CausalLayout\.batched"):
        CausalLayout(torch.zeros(0, 5, dtype=torch.int64), 0, 0, 1)
