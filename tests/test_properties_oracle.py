"""Random calls of every operator against the float64 oracle, in the judge and the budgets of `dsattn verify`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import torch
from hypothesis import given
from strategies import ALL_LAYOUTS, FEW, Drawn, strategy

from dsattn.backends import Backend
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
        scores=rng.choice(["spread", "spread", "spread", "equal", "plateau", "repeated"]),
        sink=rng.choice([None, None, "normal", "zero", "large", "-inf"]),
        row_mask=rng.choice([None, None, "some", "some", "none"]),
        reduction=rng.choice(["mean", "sum"]),
        num_rows=rng.choice([None, None, 1, 7, 1000]),
        coeff=rng.choice([1.0, 0.3, -2.0, 0.0]),
        grid=grid,
        seed=rng.randint(0, 2**31),
    )
    case = case if case.num_rows is None else replace(case, reduction="mean")
    return RandomCase(case, drawn, rng.choice(DTYPES))


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
