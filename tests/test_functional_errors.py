"""What wrong calls are told; nothing is computed for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import random_tensors
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


def arguments() -> dict[str, Any]:
    """Everything that any operator takes, right."""
    x = random_tensors(LAYOUT)
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
        "sink": torch.zeros(4),
        "return_lse": False,
        "lse": torch.zeros(24, 4),
        "coeff": 1.0,
        "reduction": "mean",
        "num_rows": None,
        "row_mask": torch.ones(24, dtype=torch.bool),
        "tp_group": None,
        "attend": "selected",
        "loss": "selected",
        "backend": "torch",
    }


INDEXER = ("index_q", "index_k", "weights", "layout", "scale", "relu", "backend")
LOSS = ("coeff", "reduction", "num_rows", "row_mask", "tp_group")
OPERATORS: dict[Callable[..., Any], tuple[str, ...]] = {
    indexer_scores: INDEXER,
    indexer_topk: (*INDEXER, "top_k", "return_scores"),
    sparse_attention: ("q", "kv", "topk", "value_dim", "softmax_scale", "sink", "return_lse", "backend"),
    dense_attention: ("q", "kv", "layout", "value_dim", "softmax_scale", "sink", "return_lse", "backend"),
    indexer_loss: (*INDEXER, *LOSS, "q", "kv", "softmax_scale", "topk", "lse"),
    dsa_attention: (*INDEXER, *LOSS, "q", "kv", "softmax_scale", "value_dim", "sink", "attend", "loss", "top_k"),
}

WRONG: list[tuple[str, Any, str]] = [
    ("index_q", None, "given None"),
    ("index_q", [1.0], "given list"),
    ("index_q", torch.zeros(24, 3), r"shape \[24, 3\]"),
    ("index_q", torch.zeros(23, 3, 16), "layout.num_q = 24"),
    ("index_q", torch.zeros(24, 3, 16, dtype=torch.int32), "torch.int32"),
    ("index_q", torch.zeros(24, 3, 16, dtype=torch.float8_e4m3fn), "float8"),
    ("index_q", torch.zeros(24, 0, 16), "at least one head"),
    ("index_q", torch.zeros(24, 3, 0), "at least one head"),
    ("index_k", torch.zeros(24, 15), "d_i = 16"),
    ("index_k", torch.zeros(23, 16), "layout.num_k = 24"),
    ("index_k", torch.zeros(2, 12, 16), "needed the form of"),
    ("index_k", torch.zeros(24, 16).double(), "torch.float32, the dtype of index_q"),
    ("index_k", torch.zeros(24, 16, device="meta"), "device meta"),
    ("weights", torch.zeros(24, 2), "h_i = 3"),
    ("weights", torch.zeros(24, 3).double(), "or torch.float32"),
    ("weights", torch.zeros(24, 3).half(), "or torch.float32"),
    ("layout", [0, 12, 24], "given list"),
    ("layout", OTHER, "needed layout.num_q = 26"),
    ("scale", torch.tensor(1.0), "given Tensor"),
    ("scale", float("nan"), "finite"),
    ("scale", True, "of type bool"),
    ("relu", 1, "True or False"),
    ("top_k", 0, "at least 1"),
    ("top_k", 2.0, "of type float"),
    ("top_k", True, "of type bool"),
    ("top_k", torch.tensor(3), "given Tensor"),
    ("return_scores", "yes", "True or False"),
    ("q", torch.zeros(24, 24), r"\[t, h, d_qk\] or \[b, sq, h, d_qk\]"),
    ("q", torch.zeros(4, 6, 4, 24), "BSHD|packed|num_k"),
    ("q", torch.zeros(25, 4, 24), "num_q = 24"),
    ("q", torch.zeros(24, 4, 24, dtype=torch.int64), "int64"),
    ("kv", torch.zeros(24, 23), "d_qk = 24"),
    ("kv", torch.zeros(24, 24).bfloat16(), "the dtype of q"),
    ("kv", torch.zeros(24, 24, device="meta"), "device meta"),
    ("topk", torch.zeros(24, 5), "given Tensor"),
    ("topk", TopK(SELECTION.indices, SELECTION.lengths, num_q=24, num_k=30), "num_k"),
    ("value_dim", 0, "at least 1"),
    ("value_dim", 25, "at most d_qk = 24"),
    ("value_dim", 16.0, "of type float"),
    ("softmax_scale", None, "a float"),
    ("softmax_scale", float("inf"), "finite"),
    ("sink", 0.0, "of type float"),
    ("sink", torch.zeros(3), r"\[h\] = \[4\]"),
    ("sink", torch.zeros(4).bfloat16(), "torch.float32"),
    ("sink", torch.zeros(4, device="meta"), "device meta"),
    ("return_lse", None, "True or False"),
    ("lse", torch.zeros(24, 3), "h = 4"),
    ("lse", torch.zeros(24, 4).bfloat16(), "float32"),
    ("coeff", "1", "a float"),
    ("coeff", float("inf"), "finite"),
    ("reduction", "batchmean", "'mean', 'sum'"),
    ("num_rows", 0, "at least 1"),
    ("num_rows", 2.5, "of type float"),
    ("num_rows", torch.zeros(2), "one number"),
    ("row_mask", torch.ones(24), "torch.bool"),
    ("row_mask", torch.ones(23, dtype=torch.bool), "num_q = 24"),
    ("row_mask", torch.ones(2, 12, dtype=torch.bool), "form of"),
    ("tp_group", "world", "ProcessGroup"),
    ("attend", "dense", "'selected', 'visible'"),
    ("loss", "kl", "'none', 'selected', 'visible'"),
    ("backend", "cuda", "'auto', 'torch'"),
]


def calls(argument: str) -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """The operators that take `argument`, each with right arguments."""
    right = arguments()
    return [(f, {name: right[name] for name in names}) for f, names in OPERATORS.items() if argument in names]


@pytest.mark.parametrize(("argument", "value", "message"), WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)])
def test_a_wrong_argument_is_named_before_anything_runs(
    argument: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("indexer_scores", "indexer_topk", "sparse_attention", "dense_attention", "indexer_loss"):

        def refuse(*_: object, name: str = name) -> None:
            pytest.fail(f"{name} ran")

        monkeypatch.setattr(TorchBackend, name, refuse)
    found = calls(argument)
    assert found
    for operator, right in found:
        with pytest.raises(BadInput, match=message) as caught:
            operator(**(right | {argument: value}))
        # A layout of other sizes shows at the first tensor, a tensor of another form at the second.
        allowed = (argument, "index_q", "q", "weights", "index_k", "kv")
        assert caught.value.what.split("[")[0] in allowed
        if not isinstance(value, (CausalLayout, TopK, Tensor)):
            assert caught.value.what == argument


def test_the_right_arguments_pass() -> None:
    for operator, names in OPERATORS.items():
        right = arguments()
        operator(**{name: right[name] for name in names})


def test_num_rows_and_a_reduction_exclude_each_other() -> None:
    right = {name: arguments()[name] for name in OPERATORS[indexer_loss]}
    with pytest.raises(BadInput, match="one of the two"):
        indexer_loss(**(right | {"num_rows": 3, "reduction": "sum"}))


@pytest.mark.parametrize("missing", ["index_q", "index_k", "weights", "top_k"])
def test_dsa_attention_says_what_a_selection_needs(missing: str) -> None:
    right = {name: arguments()[name] for name in OPERATORS[dsa_attention]}
    with pytest.raises(BadInput) as caught:
        dsa_attention(**(right | {missing: None}))
    assert caught.value.what == missing


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
    assert backends() == ("torch",)


def test_errors_survive_pickling() -> None:
    import pickle

    error = BadInput("q", given="shape [1]", needed="[t, h, d_qk]", fix="reshape it")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, BadInput)
    assert isinstance(again, ValueError)
    assert isinstance(again, DsattnError)
    assert str(again) == str(error) == "q: given shape [1]; needed [t, h, d_qk]; reshape it"
    assert (again.what, again.given, again.needed, again.fix) == ("q", "shape [1]", "[t, h, d_qk]", "reshape it")
