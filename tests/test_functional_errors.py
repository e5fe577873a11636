"""What wrong calls are told; nothing is computed for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from problems import random_tensors
from refusals import Kind, check_message, check_refused
from torch import Tensor

from dsattn import (
    BackendMissing,
    BadInput,
    CausalLayout,
    DsattnError,
    TopK,
    UnsupportedProblem,
    backends,
    dense_attention,
    dsa_attention,
    explain,
    indexer_loss,
    indexer_scores,
    indexer_topk,
    sparse_attention,
)
from dsattn.backends import Backend, TorchBackend, choose, find, ordered
from dsattn.spec.problem import Problem

pytestmark = pytest.mark.usefixtures("no_shape_checks")

LAYOUT = CausalLayout.batched(2, 12)
OTHER = CausalLayout.batched(2, 13)
SELECTION = TopK(torch.zeros(24, 1, dtype=torch.int32), torch.ones(24, dtype=torch.int32), num_q=24, num_k=24)
OF_MORE_KEYS = TopK(SELECTION.indices, SELECTION.lengths, num_q=24, num_k=30)
OF_FEWER_ROWS = TopK(SELECTION.indices[:12], SELECTION.lengths[:12], num_q=12, num_k=24)
ELSEWHERE = SELECTION.to("meta")
TRUE = torch.ones(24, dtype=torch.bool)


def arguments() -> dict[str, Any]:
    """Everything that any operator takes, right; what may have a gradient asks for it."""
    x = random_tensors(LAYOUT).requires_grad_()
    return {
        "index_q": x.index_q,
        "index_k": x.index_k,
        "weights": x.weights,
        "q": x.q,
        "kv": x.kv,
        "layout": LAYOUT,
        "topk": SELECTION,
        "top_k": 5,
        "scale": 1.0,
        "relu": True,
        "return_scores": False,
        "value_dim": 16,
        "softmax_scale": 0.2,
        "sink": torch.zeros(4, requires_grad=True),
        "return_lse": False,
        "lse": torch.zeros(24, 4),
        "coeff": 1.0,
        "reduction": "mean",
        "num_rows": None,
        "row_mask": TRUE.clone(),
        "tp_group": None,
        "attend": "selected",
        "loss": "selected",
        "backend": "torch",
    }


OPERATORS: tuple[Callable[..., Any], ...] = (
    indexer_scores,
    indexer_topk,
    sparse_attention,
    dense_attention,
    indexer_loss,
    dsa_attention,
)
DTYPES = "one of torch.bfloat16, torch.float16, torch.float32, torch.float64"
Q_SHAPES, INDEX_Q_SHAPES = "[t, h, d_qk] or [b, sq, h, d_qk]", "[t, h_i, d_i] or [b, sq, h_i, d_i]"

# Kinds that every operator with the argument refuses in the same words.
KINDS: list[Kind] = [
    Kind("index_q", None, "None", "a torch.Tensor"),
    Kind("index_q", [1.0], "list", "a torch.Tensor"),
    Kind("index_q", torch.zeros(24, 16), "shape [24, 16]", INDEX_Q_SHAPES),
    Kind("index_q", torch.zeros(1, 2, 12, 3, 16), "shape [1, 2, 12, 3, 16]", INDEX_Q_SHAPES),
    Kind("index_q", torch.zeros(23, 3, 16), "23 rows", "layout.num_q = 24"),
    Kind("index_q", torch.zeros(24, 3, 16, dtype=torch.int32), "torch.int32", DTYPES),
    Kind("index_q", torch.zeros(24, 3, 16, dtype=torch.complex64), "torch.complex64", DTYPES),
    Kind("index_q", torch.zeros(24, 3, 16, dtype=torch.float8_e4m3fn), "torch.float8_e4m3fn", DTYPES),
    Kind("index_q", torch.zeros(24, 0, 16), "shape [24, 0, 16]", "at least one head"),
    Kind("index_q", torch.zeros(24, 3, 0), "shape [24, 3, 0]", "at least one head and one column"),
    Kind("index_q", torch.zeros(24, 3, 16).to_sparse(), "layout torch.sparse_coo", "a dense tensor"),
    Kind("index_k", None, "None", "a torch.Tensor"),
    Kind("index_k", torch.zeros(24), "shape [24]", "[s, d_i] or [b, sk, d_i]"),
    Kind("index_k", torch.zeros(24, 15), "shape [24, 15]", "d_i = 16 as in index_q"),
    Kind("index_k", torch.zeros(23, 16), "23 rows", "layout.num_k = 24"),
    Kind("index_k", torch.zeros(24, 16).double(), "torch.float64", "torch.float32, the dtype of index_q"),
    Kind("index_k", torch.zeros(24, 16, device="meta"), "device meta", "cpu, as the other tensors"),
    Kind("weights", None, "None", "a torch.Tensor"),
    Kind("weights", torch.zeros(24, 2), "shape [24, 2]", "h_i = 3 as in index_q"),
    Kind("weights", torch.zeros(25, 3), "25 rows", "layout.num_q = 24"),
    Kind("weights", torch.zeros(24, 3).double(), "torch.float64", "the dtype of index_q, or torch.float32"),
    Kind("weights", torch.zeros(24, 3).half(), "torch.float16", "the dtype of index_q, or torch.float32"),
    Kind("weights", torch.zeros(24, 3, device="meta"), "device meta", "cpu, as the other tensors"),
    Kind("layout", [0, 12, 24], "list", "a dsattn.CausalLayout"),
    Kind("layout", None, "None", "a dsattn.CausalLayout"),
    Kind("scale", torch.tensor(1.0), "Tensor", "a float"),
    Kind("scale", float("nan"), "nan", "a finite float"),
    Kind("scale", 10**400, "1000", "a finite float"),
    Kind("scale", True, "True of type bool", "a float"),
    Kind("relu", 1, "1 of type int", "True or False"),
    Kind("relu", None, "None", "True or False"),
    Kind("top_k", 0, "0", "at least 1"),
    Kind("top_k", -3, "-3", "at least 1"),
    Kind("top_k", 2**31, str(2**31), f"below {2**31}"),
    Kind("top_k", 2.0, "2.0 of type float", "an int"),
    Kind("top_k", True, "True of type bool", "an int"),
    Kind("top_k", torch.tensor(3), "Tensor", "an int"),
    Kind("return_scores", "yes", "'yes' of type str", "True or False"),
    Kind("q", None, "None", "a torch.Tensor"),
    Kind("q", torch.zeros(24, 24), "shape [24, 24]", Q_SHAPES),
    Kind("q", torch.zeros(25, 4, 24), "25 rows", "num_q = 24"),
    Kind("q", torch.zeros(24, 4, 24, dtype=torch.int64), "torch.int64", DTYPES),
    Kind("q", torch.zeros(24, 0, 24), "shape [24, 0, 24]", "at least one head and one column"),
    Kind("q", torch.nested.nested_tensor([torch.zeros(4, 24)], layout=torch.jagged), "nested", "a dense tensor"),
    Kind("kv", None, "None", "a torch.Tensor"),
    Kind("kv", torch.zeros(24, 23), "shape [24, 23]", "d_qk = 24 as in q"),
    Kind("kv", torch.zeros(23, 24), "23 rows", "num_k = 24"),
    Kind("kv", torch.zeros(24, 24).bfloat16(), "torch.bfloat16", "torch.float32, the dtype of q"),
    Kind("kv", torch.zeros(24, 24, device="meta"), "device meta", "cpu, as the other tensors"),
    Kind("kv", torch.zeros(24, 24).to_sparse(), "layout torch.sparse_coo", "a dense tensor"),
    Kind("topk", torch.zeros(24, 5), "Tensor", "a dsattn.TopK"),
    Kind("value_dim", 0, "0", "at least 1"),
    Kind("value_dim", 25, "25", "at most d_qk = 24"),
    Kind("value_dim", 16.0, "16.0 of type float", "an int"),
    Kind("softmax_scale", None, "None", "a float"),
    Kind("softmax_scale", float("inf"), "inf", "a finite float"),
    Kind("softmax_scale", 1j, "complex", "a float"),
    Kind("sink", 0.0, "0.0 of type float", "a torch.Tensor or None"),
    Kind("sink", torch.zeros(3), "shape [3]", "[h] = [4]"),
    Kind("sink", torch.zeros(24, 4), "shape [24, 4]", "[h] = [4]"),
    Kind("sink", torch.zeros(4).bfloat16(), "torch.bfloat16", "torch.float32 for kv of torch.float32"),
    Kind("sink", torch.zeros(4).double(), "torch.float64", "torch.float32 for kv of torch.float32"),
    Kind("sink", torch.zeros(4, device="meta"), "device meta", "cpu, as the other tensors"),
    Kind("return_lse", None, "None", "True or False"),
    Kind("lse", 0.0, "0.0 of type float", "a torch.Tensor"),
    Kind("lse", torch.zeros(24, 3), "shape [24, 3]", "h = 4 as in q"),
    Kind("lse", torch.zeros(23, 4), "23 rows", "layout.num_q = 24"),
    Kind("lse", torch.zeros(24, 4).bfloat16(), "torch.bfloat16", "torch.float32 or torch.float64"),
    Kind("lse", torch.zeros(24, 4, device="meta"), "device meta", "cpu, as the other tensors"),
    Kind("coeff", "1", "'1' of type str", "a float"),
    Kind("coeff", float("inf"), "inf", "a finite float"),
    Kind("reduction", "batchmean", "'batchmean'", "'mean', 'sum'"),
    Kind("reduction", None, "None", "'mean', 'sum'"),
    Kind("num_rows", 0, "0", "at least 1"),
    Kind("num_rows", 2**63, str(2**63), f"below {2**63}"),
    Kind("num_rows", 2.5, "2.5 of type float", "an int"),
    Kind("num_rows", torch.zeros(2), "torch.float32 of shape [2]", "one number"),
    Kind("num_rows", torch.tensor(True), "torch.bool", "one number"),
    Kind("num_rows", torch.tensor(3, device="meta"), "device meta", "cpu, as the other tensors"),
    Kind("row_mask", [True] * 24, "list", "a torch.Tensor"),
    Kind("row_mask", torch.ones(24), "torch.float32", "torch.bool"),
    Kind("row_mask", torch.ones(23, dtype=torch.bool), "23 rows", "num_q = 24"),
    Kind("row_mask", torch.ones(24, 4, 6, dtype=torch.bool), "shape [24, 4, 6]", "[t] or [b, sq]"),
    Kind("row_mask", TRUE.to("meta"), "device meta", "cpu, as the other tensors"),
    Kind("tp_group", "world", "'world' of type str", "ProcessGroup or None"),
    Kind("attend", "dense", "'dense'", "'selected', 'visible'"),
    Kind("attend", None, "None", "'selected', 'visible'"),
    Kind("loss", "kl", "'kl'", "'none', 'selected', 'visible'"),
    Kind("backend", "cuda", "'cuda'", "'auto', 'cudnn', 'flash_mla', 'cpu', 'torch'"),
    Kind("backend", None, "NoneType", "a name of backends()"),
]

# Kinds that show at another argument, or in words of the operator's own.
OWN: list[tuple[Callable[..., Any], Kind]] = [
    (indexer_topk, Kind("index_q", torch.zeros(2, 12, 3, 16), "shape [24, 16]", "form of index_q", named="index_k")),
    (dense_attention, Kind("q", torch.zeros(4, 6, 4, 24), "shape [24, 24]", "BSHD with b = 4", named="kv")),
    (dense_attention, Kind("kv", torch.zeros(2, 12, 24), "shape [2, 12, 24]", "the form of q, which is packed")),
    (indexer_loss, Kind("lse", torch.zeros(2, 12, 4), "shape [2, 12, 4]", "the form of index_q, which is packed")),
    (dsa_attention, Kind("row_mask", TRUE.view(2, 12), "shape [2, 12]", "the form of q, which is packed")),
    (indexer_scores, Kind("layout", OTHER, "24 rows", "layout.num_q = 26", named="index_q")),
    (dense_attention, Kind("layout", OTHER, "24 rows", "layout.num_q = 26", named="q")),
    (sparse_attention, Kind("topk", None, "None", "a dsattn.TopK")),
    (sparse_attention, Kind("topk", OF_MORE_KEYS, "24 rows", "topk.num_k = 30", named="kv")),
    (sparse_attention, Kind("topk", OF_FEWER_ROWS, "24 rows", "topk.num_q = 12", named="q")),
    (sparse_attention, Kind("topk", ELSEWHERE, "device meta", "cpu, as the other tensors")),
    (indexer_loss, Kind("topk", OF_MORE_KEYS, "num_k = 30", "layout's 24 query and 24 key rows")),
    (indexer_loss, Kind("topk", OF_FEWER_ROWS, "num_q = 12", "layout's 24 query and 24 key rows")),
    (dsa_attention, Kind("topk", ELSEWHERE, "device meta", "cpu, as the other tensors")),
]


def calls(kind: Kind) -> list[tuple[Callable[..., Any], Kind]]:
    """The kind for every operator that takes its argument."""
    return [(operator, kind) for operator in OPERATORS if kind.argument in names_of(operator)]


def names_of(operator: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(operator).parameters)


def right_for(operator: Callable[..., Any]) -> dict[str, Any]:
    """Right arguments of an operator; `dsa_attention` selects anew unless `topk` is put in."""
    every = arguments()
    return {name: every[name] for name in names_of(operator) if (operator, name) != (dsa_attention, "topk")}


TABLE = [call for kind in KINDS for call in calls(kind)] + OWN


@pytest.mark.parametrize(
    ("operator", "kind"),
    TABLE,
    ids=[f"{operator.__name__}-{kind.argument}-{i}" for i, (operator, kind) in enumerate(TABLE)],
)
def test_a_wrong_argument_is_named_and_nothing_is_computed_or_changed(operator: Callable[..., Any], kind: Kind) -> None:
    wrong = right_for(operator) | {kind.argument: kind.value}
    work = check_refused(kind, lambda: operator(**wrong), wrong.values())
    if kind.argument == "backend":
        # Which one runs is asked where it would run; by then the call is inside an operator of PyTorch.
        work = [name for name in work if not name.startswith("dsattn.") and "tensor" not in name]
    assert work == []


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)
def test_every_argument_has_a_kind_and_the_right_ones_pass(operator: Callable[..., Any]) -> None:
    operator(**right_for(operator))
    assert {kind.argument for f, kind in TABLE if f is operator} == set(names_of(operator))


def test_there_are_many_kinds() -> None:
    assert len({(kind.argument, kind.given, kind.needed) for _, kind in TABLE}) >= 100


@pytest.mark.parametrize("kind", KINDS, ids=[f"{kind.argument}-{i}" for i, kind in enumerate(KINDS)])
def test_explain_refuses_what_the_operators_refuse(kind: Kind) -> None:
    if kind.argument == "backend":
        return  # explain asks all of them
    for operator, _ in calls(kind):
        with pytest.raises(BadInput) as caught:
            explain(operator.__name__, **(right_for(operator) | {kind.argument: kind.value}))
        check_message(kind, caught.value)


def test_num_rows_and_a_reduction_exclude_each_other() -> None:
    kind = Kind("num_rows", 3, "together with reduction='sum'", "one of the two")
    for operator in (indexer_loss, dsa_attention):
        wrong = right_for(operator) | {"num_rows": 3, "reduction": "sum"}
        assert check_refused(kind, partial(operator, **wrong), wrong.values()) == []


@pytest.mark.parametrize(
    "kind",
    [
        Kind("top_k", 0, "0", "at least 1"),
        Kind("topk", "none", "'none' of type str", "a dsattn.TopK"),
        Kind("topk", OF_MORE_KEYS, "num_k = 30", "24 key rows"),
        Kind("index_q", torch.zeros(23, 3, 16), "23 rows", "layout.num_q = 24"),
        Kind("index_k", None, "None", "a torch.Tensor"),
        Kind("scale", "1", "'1' of type str", "a float"),
        Kind("relu", 0, "0 of type int", "True or False"),
        Kind("row_mask", torch.ones(24), "torch.float32", "torch.bool"),
        Kind("coeff", None, "None", "a float"),
    ],
    ids=lambda kind: kind.argument,
)
def test_dsa_attention_looks_at_what_it_has_no_use_for(kind: Kind) -> None:
    right: dict[str, Any] = right_for(dsa_attention) | {"attend": "visible", "loss": "none", "top_k": None}
    dsa_attention(**right)
    wrong = right | {kind.argument: kind.value}
    assert check_refused(kind, partial(dsa_attention, **wrong), wrong.values()) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.argument in ("scale", "relu")])
def test_dsa_attention_looks_at_options_of_an_indexer_that_is_not_there(kind: Kind) -> None:
    without: dict[str, Any] = dict.fromkeys(("index_q", "index_k", "weights", "top_k"))
    right: dict[str, Any] = right_for(dsa_attention) | without | {"topk": SELECTION, "loss": "none"}
    dsa_attention(**right)
    wrong = right | {kind.argument: kind.value}
    assert check_refused(kind, partial(dsa_attention, **wrong), wrong.values()) == []


@pytest.mark.parametrize("missing", ["index_q", "index_k", "weights", "top_k"])
def test_dsa_attention_says_what_a_selection_needs(missing: str) -> None:
    with pytest.raises(BadInput) as caught:
        dsa_attention(**(right_for(dsa_attention) | {missing: None}))
    assert caught.value.what == missing


RIGHT = Kind("q", None, "None", "a torch.Tensor")


def refusing(step: Callable[[Tensor], Any], kind: Kind = RIGHT) -> list[str]:
    """What is found of a call that takes a step with its input before it refuses."""
    x = torch.zeros(2, requires_grad=True)

    def call() -> None:
        step(x)
        raise BadInput("q", given="None", needed="a torch.Tensor")

    return check_refused(kind, call, [x])


def test_work_before_a_refusal_is_found() -> None:
    assert refusing(lambda x: x.view(1, 2)) == []
    assert refusing(lambda x: x.detach() + 1) == ["aten.add.Tensor"]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda x: x.detach().add_(0), "written to"),
        (lambda x: x.data.copy_(torch.ones(2)), "changed"),
        (lambda x: x.sum().backward(), "gradient appeared"),
        (lambda x: x.requires_grad_(False), "requires_grad"),
    ],
)
def test_a_change_before_a_refusal_is_found(step: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        refusing(step)


@pytest.mark.parametrize("change", [{"argument": "kv"}, {"given": "list"}, {"needed": "an int"}])
def test_another_message_is_found(change: dict[str, str]) -> None:
    with pytest.raises(AssertionError):
        refusing(lambda x: x, replace(RIGHT, **change))


class _Picky(Backend):
    """Present, but refuses everything."""

    name = "picky"
    cause: str | None = None

    def missing(self) -> str | None:
        return self.cause

    def supports(self, problem: Problem) -> str | None:
        return f"{problem.operator} has more than 0 rows"


class _Absent(_Picky):
    name = "absent"
    cause = "package picky is not installed"


PROBLEM = Problem(operator="dense_attention", num_q=1, num_k=1, device=torch.device("cpu"))


def test_auto_takes_the_first_that_says_yes_and_warns_once_of_those_passed_over() -> None:
    order = [_Absent(), _Picky(), TorchBackend()]
    with pytest.warns(UserWarning, match="runs on 'torch' because 'picky' does not take it: dense_attention has more"):
        assert choose(PROBLEM, "auto", order).name == "torch"
    assert choose(PROBLEM, "auto", order).name == "torch"  # a second warning would be an error here


def test_a_named_backend_never_falls_back() -> None:
    order = [_Absent(), _Picky(), TorchBackend()]
    with pytest.raises(UnsupportedProblem, match=r"dense_attention on backend 'picky'.*more than 0 rows"):
        choose(PROBLEM, "picky", order)
    with pytest.raises(BackendMissing, match=r"'absent'.*package picky is not installed"):
        choose(PROBLEM, "absent", order)
    with pytest.raises(BadInput, match="'auto', 'absent', 'picky', 'torch'"):
        choose(PROBLEM, "Torch", order)
    with pytest.raises(UnsupportedProblem, match="picky: dense_attention has more"):
        choose(PROBLEM, "auto", order[:2])
    assert find("torch", ordered()).name == "torch"


def test_backends_lists_what_is_usable() -> None:
    assert backends() in (("cpu", "torch"), ("torch",))


def test_errors_survive_pickling() -> None:
    import pickle

    error = BadInput("q", given="shape [1]", needed="[t, h, d_qk]", fix="reshape it")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, BadInput)
    assert isinstance(again, ValueError)
    assert isinstance(again, DsattnError)
    assert str(again) == str(error) == "q: given shape [1]; needed [t, h, d_qk]; reshape it"
    assert (again.what, again.given, again.needed, again.fix) == ("q", "shape [1]", "[t, h, d_qk]", "reshape it")
