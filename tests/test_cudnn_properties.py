"""A small problem has the torch backend's results on every generation of the frontend, or is refused with a reason."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from cudnn_problems import TORCH, Problem, noise, on, outcome, recording, tried, unequal
from hypothesis import given, settings
from problems import Tensors
from strategies import HOST_LAYOUTS, strategy
from torch import Tensor

# Bottom-right defaults and global ids; top-left ones; the first whose selection is the kernel's own; the last ones.
GENERATIONS = ("1.25.0", "1.26.0", "1.27.0", "1.30.0", "1.32.0")
FEW = settings(max_examples=8)
ARCHS = pytest.mark.parametrize("arch", ["sm90", "sm100"])


def strided(x: Tensors) -> Tensors:
    """The same numbers in views that no kernel takes as they are."""

    def view(y: Tensor) -> Tensor:
        wide = torch.full((*y.shape[:-1], 2 * y.shape[-1] + 3), torch.nan, dtype=y.dtype)
        wide[..., 3::2] = y
        return wide[..., 3::2]

    return Tensors(*(view(y) for y in x.all()))


def losing(rng: Random, rows: int) -> dict[str, Any]:
    """Options of a loss."""
    options: dict[str, Any] = {"coeff": rng.choice([1.0, 0.3, -2.0])}
    if rng.random() < 0.4:
        options["row_mask"] = torch.tensor([rng.random() < 0.6 for _ in range(rows)], dtype=torch.bool)
    if rng.random() < 0.5:
        count = rng.choice([7, 1000])
        options["num_rows"] = rng.choice([count, torch.tensor(count), torch.tensor(float(count))])
    else:
        options["reduction"] = rng.choice(["mean", "sum"])
    return options


def problems(rng: Random) -> Problem:
    drawn = rng.choice(HOST_LAYOUTS)(rng)
    d_qk = rng.choice([5, 40, 64, 512, 576])
    return Problem(
        layout=drawn.layout,
        h_i=rng.choice([1, 2, 24, 33, 64]),
        d_i=rng.choice([1, 16, 128]),
        h=rng.choice([1, 2, 24, 96, 128]),
        d_qk=d_qk,
        d_v=rng.randint(1, min(d_qk, 512)),
        top_k=rng.choice([1, 2, 3, 7, 30]),
        scale=rng.choice([0.5, 0.5, 0.5, -0.25]),
        softmax_scale=d_qk**-0.5,
        weights=rng.choice([torch.float32, torch.bfloat16]),
        sink=rng.random() < 0.5,
        grid=rng.random() < 0.5,
        seed=rng.randint(0, 2**31),
        losing=losing(rng, drawn.layout.num_q),
        change=strided if rng.random() < 0.3 else lambda x: x,
    )


def check(problem: Problem, operator: str, arch: str) -> int:
    """Compares every generation with torch, without gradients where those are refused; how many had results."""
    compared = 0
    wanted = {gradients: outcome(replace(problem, gradients=gradients), operator, TORCH) for gradients in (True, False)}
    for version in GENERATIONS:
        for gradients in (True, False):
            asked = replace(problem, gradients=gradients)
            got = tried(asked, operator, on(recording(version, arch, problem.seed % 3)[1]))
            if isinstance(got, str):
                assert "known defect" in got or "has no" in got, got
                continue
            assert unequal(got, wanted[gradients], noise(asked, operator)) == [], (version, operator, gradients)
            compared += 1
            break
    return compared


@ARCHS
@FEW
@given(strategy(problems))
def test_scores_and_selection(arch: str, problem: Problem) -> None:
    assert check(problem, "scores", arch) == check(problem, "topk", arch) == len(GENERATIONS)


@ARCHS
@FEW
@given(strategy(problems))
def test_attention(arch: str, problem: Problem) -> None:
    refused = 2 if arch == "sm100" and problem.d_qk > 512 else 0
    assert check(problem, "attention", arch) == len(GENERATIONS) - refused


@ARCHS
@FEW
@given(strategy(problems))
def test_losses(arch: str, problem: Problem) -> None:
    assert check(problem, "selected", arch) == len(GENERATIONS)
    assert check(problem, "visible", arch) == len(GENERATIONS) - (arch == "sm100")
