"""Random calls of every operator against the float64 oracle, in the judge and the budgets of `dsattn verify`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from calls import offset_off_by_one
from hypothesis import given
from strategies import ALL_LAYOUTS, FEW, Drawn, strategy, two_sequences
from torch import Tensor

from dsattn import TopK
from dsattn.backends import Backend, TorchBackend
from dsattn.spec.cases import Case
from dsattn.spec.inputs import inputs
from dsattn.verify.call import Call
from dsattn.verify.checks import CHECKS
from dsattn.verify.reference import Reference
from dsattn.verify.subject import Subject

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16, torch.float64)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class RandomCase:
    """A case whose numbers `dsattn.spec.inputs` makes of its seed, and the layout object that the calls are given."""

    case: Case
    drawn: Drawn
    dtype: torch.dtype


def random_case(rng: Random) -> RandomCase:
    drawn = rng.choice(ALL_LAYOUTS)(rng)
    key_width, grid = rng.randint(1, 8), rng.random() < 0.3
    case = Case(
        name="random",
        shows=drawn.made_by,
        layout=lambda: drawn.segmented,
        batch=drawn.batch if drawn.batch and drawn.places and drawn.num_k and rng.random() < 0.8 else None,
        index_heads=rng.randint(1, 3),
        index_width=rng.randint(1, 8),
        heads=rng.randint(1, 3),
        key_width=key_width,
        value_width=rng.randint(1, key_width),
        top_k=rng.choice([1, 1, 2, 3, 4, 5, 7, 8, 12, 30]),
        index_scale=rng.choice([None, None, 1.0, 0.25, 4.0, -0.5]),
        relu=rng.random() < 0.7,
        weights=rng.choice(["normal", "normal", "negative"]),
        weights_fp32=rng.random() < 0.5,
        scores=rng.choice(["spread", "spread", "spread", "equal", "plateau", "repeated", "positive"]),
        strided=rng.random() < 0.3,
        sink=rng.choice([None, None, "normal", "zero", "large", "-inf"]),
        row_mask=rng.choice([None, None, "some", "some", "none"]),
        reduction=rng.choice(["mean", "sum"]),
        num_rows=rng.choice([None, None, 1, 7, 1000]),
        coeff=rng.choice([1.0, 0.3, -2.0, 0.0]),
        grid=grid,
        seed=rng.randint(0, 2**31),
    )
    case = case if case.num_rows is None else replace(case, reduction="mean")
    dtype = rng.choice(DTYPES)
    if dtype == torch.float64 and case.sink == "large":
        # exp(logit - 100) is off by 100 eps in any arithmetic; only an oracle of more digits can tell by how much.
        case = replace(case, sink="normal")
    return RandomCase(case, drawn, dtype)


def check_case(example: RandomCase, backend: str | Backend = "torch") -> int:
    """Compares every operator, forward and gradients, with the oracle; returns how many operators that were."""
    case = example.case
    subject = Subject(suite="random", case=case, make_inputs=lambda dtype: inputs(case, dtype))
    reference = Reference(subject, example.dtype)
    for operator, check in CHECKS.items():
        call = Call(reference, backend, CPU)
        call.layout = example.drawn.layout
        wrong = [found.reason for found in check(call).values() if not found.verdict]
        assert not wrong, f"{operator}: {'; '.join(wrong)}"
    return len(CHECKS)


@FEW
@given(strategy(random_case))
def test_every_operator_agrees_with_the_oracle(example: RandomCase) -> None:
    check_case(example)


def by_hand() -> RandomCase:
    drawn = two_sequences()
    case = Case(
        name="by-hand",
        shows="two sequences",
        layout=lambda: drawn.layout,
        batch=2,
        index_heads=2,
        index_width=3,
        heads=2,
        key_width=4,
        value_width=3,
        top_k=2,
        sink="normal",
    )
    return RandomCase(case, drawn, torch.float32)


def wrong_backend(method: str, change: Callable[[Any], Any]) -> Backend:
    """The torch backend with the results of one method changed."""

    def changed(self: TorchBackend, *arguments: Any, **options: Any) -> Any:
        return change(getattr(TorchBackend, method)(self, *arguments, **options))

    return type("Wrong", (TorchBackend,), {"name": f"wrong {method}", method: changed})()


def first(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Changes the first of several results."""
    return lambda results: (change(results[0]), *results[1:])


def unused_slot_at_the_front(topk: TopK) -> TopK:
    return TopK._trusted(topk.indices.sort(-1).values, topk.lengths, topk.scores, topk.num_q, topk.num_k)


def gradient_of_loss(results: Any) -> Any:
    loss, gradients = results
    return loss, None if gradients is None else (gradients[0], gradients[1] * 2, gradients[2])


def test_the_example_by_hand_holds() -> None:
    assert check_case(by_hand()) == len(CHECKS) == 8


@pytest.mark.parametrize(
    ("found_by", "method", "change"),
    [
        ("indexer_scores", "indexer_scores", lambda scores: scores * 1.001),
        ("indexer_scores", "indexer_scores_backward", first(torch.zeros_like)),
        ("indexer_topk", "indexer_topk", unused_slot_at_the_front),
        ("sparse_attention", "sparse_attention", lambda results: (results[0], results[1] / math.log(2))),
        ("sparse_attention", "sparse_attention_backward", first(lambda d_q: d_q * 1.001)),
        ("dense_attention", "dense_attention", first(lambda out: out.roll(1, 0))),
        ("dense_attention", "dense_attention_backward", first(torch.zeros_like)),
        ("indexer_loss:selected", "indexer_loss", first(lambda loss: loss * 1.001)),
        ("indexer_loss:selected", "indexer_loss", gradient_of_loss),
    ],
)
def test_a_wrong_operator_is_found(found_by: str, method: str, change: Callable[[Any], Any]) -> None:
    with pytest.raises(AssertionError, match=f"^{found_by}: "):
        check_case(by_hand(), wrong_backend(method, change))


def test_a_wrong_layout_is_found() -> None:
    example = by_hand()
    shifted = replace(example.drawn, layout=offset_off_by_one(example.drawn.layout))
    with pytest.raises(AssertionError):
        check_case(replace(example, drawn=shifted))
