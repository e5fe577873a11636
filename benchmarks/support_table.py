"""Writes the table of docs/cudnn.md: what the `cudnn` backend takes on each release and architecture, and why not.

python benchmarks/support_table.py
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from blocks import ROOT, row, write

from dsattn.backends.cudnn.backend import CudnnBackend
from dsattn.backends.cudnn.contracts import contract, releases
from dsattn.layouts import CausalLayout
from dsattn.spec.problem import AttentionSizes, IndexerSizes, Operator, Problem

ROWS = 4096

COLUMNS: dict[str, tuple[Operator, dict[str, object]]] = {
    "scores": ("indexer_scores", {}),
    "top-k": ("indexer_topk", {}),
    "attention": ("sparse_attention", {}),
    "attention backward": ("sparse_attention", {"backward": True}),
    "loss over selected keys": ("indexer_loss", {"support": "selected"}),
    "loss over visible keys": ("indexer_loss", {"support": "visible"}),
}


def problem(operator: Operator, **options: object) -> Problem:
    """A call in DeepSeek-V3.2's sizes: one document, bf16, fp32 weights, with gradients where there are some."""
    asked = Problem(
        operator=operator,
        num_q=ROWS,
        num_k=ROWS,
        device=torch.device("cpu"),
        layout=CausalLayout.packed([0, ROWS]),
        indexer=IndexerSizes(heads=64, width=128, dtype=torch.bfloat16, weights_dtype=torch.float32),
        attention=AttentionSizes(heads=128, key_width=576, value_width=512, dtype=torch.bfloat16),
        top_k=2048,
        requires_grad=operator not in ("indexer_scores", "indexer_topk"),
    )
    return replace(asked, **options)  # pyrefly: ignore[bad-argument-type]


def answers() -> dict[tuple[str, str], list[str]]:
    """(architecture, releases that do the same) -> the answer of each column."""
    found: dict[tuple[str, str], list[str]] = {}
    for arch in ("sm90", "sm100"):
        groups: dict[object, list[str]] = {}
        for version in releases():
            groups.setdefault(contract(version, arch), []).append(str(version))
        for versions in groups.values():
            backend = CudnnBackend.simulated(versions[-1], arch)
            asked = [backend.supports(problem(operator, **options)) for operator, options in COLUMNS.values()]
            found[arch, ", ".join(versions)] = ["" if reason is None else reason for reason in asked]
    return found


def table() -> str:
    """The table, and below it the reasons that its numbers stand for."""
    reasons: list[str] = []
    names = {"sm90": "Hopper", "sm100": "Blackwell"}
    head = ["architecture", "release", *COLUMNS]
    lines = [row(head), "|" + "---|" * len(head)]
    for (arch, versions), found in answers().items():
        cells = []
        for answer in found:
            # The same reason of another release is the same.
            text = re.sub(r"release [\d.]+ ", "the release ", answer).replace(f" on {arch}", "")
            if text and text not in reasons:
                reasons.append(text)
            cells.append(f"no ({reasons.index(text) + 1})" if text else "yes")
        lines.append(row([names[arch], versions, *cells]))
    return "\n".join([*lines, "", *(f"{number}. {text}" for number, text in enumerate(reasons, 1))])


if __name__ == "__main__":
    write(ROOT / "docs" / "cudnn.md", {"support": table()})
