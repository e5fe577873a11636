"""The real megatron-core: where its wheel is unpacked, and calls of its own functions in a process that has it loaded.

Functions whose first argument is `kernels` run in that process (`Host.call`). Tensors are CPU tensors, so what
Megatron asks of a CUDA device is answered here, and FlashMLA has a stand-in; Megatron's code is not touched.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import dsattn
from dsattn.backends.cudnn.simulator import SimulatedFrontend
from dsattn.integrations import megatron
from dsattn.integrations.megatron_module import Kernels
from dsattn.verify.megatron_suite import suite
from dsattn.verify.megatron_suite.calls import select
from dsattn.verify.megatron_suite.host import put
from dsattn.verify.megatron_suite.judge import selection_metrics
from dsattn.verify.megatron_suite.problems import Selection
from dsattn.verify.megatron_suite.suite import Frontend, cases, record_of
from dsattn.verify.megatron_suite.wheel import unpacked
from dsattn.verify.records import Record
from dsattn.wheels import Unreachable

VERSIONS = ("0.19.0", "0.19.2")
HEADS, WIDTH, ROWS, VALUE = 64, 128, 128, 512
SCALE = 2.0
Errors = dict[str, list[float]]


def folder_of(version: str) -> Path:
    """The unpacked wheel; without the package index the test is not run."""
    from wheels import cache_folder

    try:
        return unpacked(version, cache_folder().parent)
    except Unreachable as error:
        pytest.skip(f"not run: {error}")


def frontend_of(release: str, arch: str) -> SimulatedFrontend:
    return SimulatedFrontend(release, arch, races=False)


def flash_mla(q: Tensor, kv: Tensor, ids: Tensor, softmax_scale: float, **options: Any) -> tuple[Tensor, None, Tensor]:
    """What FlashMLA's sparse forward computes, row by row: out, no maxima, natural log-sum-exp."""
    keys, lengths = kv[:, 0].float(), options["topk_length"].tolist()
    out, lse = q.new_zeros(*q.shape[:2], options["d_v"]), torch.full(q.shape[:2], torch.inf)
    for row, length in enumerate(lengths):
        if length:
            chosen = keys[ids[row, 0, :length].long()]
            logits = q[row].float() @ chosen.T * softmax_scale
            lse[row] = logits.logsumexp(1)
            out[row] = (logits.softmax(1) @ chosen[:, : options["d_v"]]).to(q.dtype)
    return out, None, lse


def exact_inputs(batch: int, seed: int = 0) -> dict[str, Tensor]:
    """Inputs of a micro-batch whose right indexer gradients no order of summation changes, SBHD.

    Every number is a small multiple of 1/8 or 1/64. The indexer likes one visible key of each row best, and each head
    of the attention another one, by so much that softmax gives 1 and 0.
    """
    rng = torch.Generator("cpu").manual_seed(seed)
    keys, index_keys = (torch.randint(-8, 9, (batch, ROWS, WIDTH), generator=rng) / 8 for _ in range(2))
    best = (torch.rand(batch, ROWS, 1 + HEADS, generator=rng) * torch.arange(1, ROWS + 1)[:, None]).long()
    entry = torch.arange(batch)[:, None, None]
    half = torch.rand(batch, ROWS, HEADS, WIDTH, generator=rng) < 0.5
    order = torch.rand(batch, ROWS, HEADS, generator=rng).argsort(-1)
    found = {
        "query": pad(keys[entry, best[..., 1:]], (0, 576 - WIDTH)),
        "kv_full": pad(keys, (0, 576 - WIDTH)),
        "q_indexer": index_keys[entry, best[..., :1]] * half,
        "k_indexer": index_keys,
        "weights": torch.tensor([-1.0] * 16 + [3.0] * 48)[order] / 64,
    }
    return {name: x.transpose(0, 1).contiguous().bfloat16() for name, x in found.items()}


def train(kernels: Kernels, batch: int, **options: Any) -> dict[str, Tensor]:
    """One forward and backward of Megatron's fused attention with the sparse indexer loss; all gradients.

    The loss is the sum over sequences of their mean, which is a sum of few bits for any number of them.
    """
    kernels.names["_flash_mla_sparse_fwd"] = flash_mla
    inputs = {name: x.requires_grad_() for name, x in exact_inputs(batch).items()}
    out, loss = kernels.names["fused_indexer_sparse_attn"](
        *inputs.values(), ROWS, SCALE, float(batch), sparse_loss=True, d_v=VALUE, **options
    )
    (out.float().square().sum() / 64 + loss).backward()
    return {name: x.grad for name, x in inputs.items() if x.grad is not None}


def training_errors(kernels: Kernels, batch: int, release: str, arch: str = "sm90") -> tuple[Errors, Errors]:
    """Relative errors of every sequence's gradients on a release, as released and after `install()`.

    What they are compared with is Megatron as released on the frontend that it was written for.
    """
    put(kernels, frontend_of("1.25.0", arch), arch)
    right = train(kernels, batch)
    put(kernels, frontend_of(release, arch), arch)
    before = train(kernels, batch)
    with megatron.install():
        after = train(kernels, batch)
    return errors_of(before, right), errors_of(after, right)


def errors_of(found: dict[str, Tensor], right: dict[str, Tensor]) -> Errors:
    """||found - right|| / ||right|| of every sequence of each SBHD gradient; 0 where both are zero."""
    return {name: [_error(found[name][:, b], x[:, b]) for b in range(x.shape[1])] for name, x in right.items()}


def _error(found: Tensor, right: Tensor) -> float:
    difference = float((found.double() - right.double()).norm())
    return difference and difference / float(right.double().norm())


def records(kernels: Kernels, release: str, version: str, names: list[str] | None = None) -> list[Record]:
    """The suite's records on a release, of all cases or those named."""
    frontend = Frontend(release, "sm100", 0, "cpu")
    return [
        record_of(kernels, frontend, case, caller, version) for case in names or cases(0) for caller in suite.CALLERS
    ]


def dense_scores(kernels: Kernels, release: str, installed: bool) -> Tensor:
    """Attention mass of the last 32 rows over 64 keys, two sequences; what a row does not see is 0."""
    put(kernels, frontend_of(release, "sm100"), "sm100")
    rng = torch.Generator("cpu").manual_seed(1)
    q, k = (torch.randn(2, *size, WIDTH, generator=rng).bfloat16() for size in ((32, 64), (64, 1)))
    lse = torch.full((2, 32, 64), 5.0)
    with megatron.install() if installed else nullcontext():
        out, denom = kernels.names["_compute_dense_attn_score"](q, k, lse, 64, 0.1)
    seen = torch.arange(64) <= torch.arange(32)[:, None] + 32
    return torch.cat((out.masked_fill(~seen, 0.0).flatten(), denom.flatten()))


def select_with_scorer(kernels: Kernels, problem: Selection) -> str:
    """What is wrong with a selection on release 1.29.1 with dsattn's scorer, "" if nothing is."""
    put(kernels, frontend_of("1.29.1", "sm100"), "sm100")
    with megatron.install(scorer=True):
        return selection_metrics(*select(kernels, problem)[:2], problem)["reason"]


def select_as_released(kernels: Kernels, problem: Selection) -> None:
    put(kernels, frontend_of("1.25.0", "sm100"), "sm100")
    select(kernels, problem)


def selected_scores(kernels: Kernels, problem: Selection, release: str, scorer: bool) -> Tensor:
    """Scores that Megatron's loss gets of the selected keys: a row of the table per row, 0 at other keys."""
    put(kernels, frontend_of(release, "sm100"), "sm100")
    with megatron.install(scorer=True) if scorer else nullcontext():
        ids, lengths, scores = select(kernels, problem, return_topk_scores=True)
    used = torch.arange(ids.shape[1]) < lengths[:, None]
    table = torch.zeros(len(ids), problem.index_k.shape[0] + 1)
    return table.scatter_(1, torch.where(used, ids, -1).long() + 1, scores.where(used, 0.0))[:, 1:].clone()


def attend_twice(kernels: Kernels, file: Path) -> list[dict[str, Tensor]]:
    """Two layers of Megatron's fused attention under a capture: their inputs, SBHD."""
    put(kernels, frontend_of("1.29.1", "sm100"), "sm100")
    kernels.names["_flash_mla_sparse_fwd"] = flash_mla
    rng = torch.Generator("cpu").manual_seed(1)
    sizes = {"query": (12, 2, 2, 576), "kv_full": (12, 2, 576), "q_indexer": (12, 2, 32, 128)}
    sizes |= {"k_indexer": (12, 2, 128), "weights": (12, 2, 32)}
    found = [{name: torch.randn(size, generator=rng).bfloat16() for name, size in sizes.items()} for _ in range(2)]
    with dsattn.capture(file, steps=2):
        for inputs in found:
            kernels.names["fused_indexer_sparse_attn"](*inputs.values(), 5, 0.125, d_v=VALUE)
    return found
