"""`dsattn doctor`: what is installed here, and which operator runs on what."""

from __future__ import annotations

import argparse
import json as json_format
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from dsattn.backends import Backend, ordered
from dsattn.backends.trust import standing
from dsattn.integrations import megatron_status
from dsattn.layouts import CausalLayout
from dsattn.spec.problem import OPERATORS, WITH_BACKWARD, AttentionSizes, IndexerSizes, Operator, Problem
from dsattn.verify.environment import devices, environment, package_version
from dsattn.verify.records import write
from dsattn.verify.report import console
from dsattn.wheels import cache_folder

_PACKAGES = (
    "torch",
    "jaxtyping",
    "rich",
    "jinja2",
    "packaging",
    "safetensors",
    "matplotlib",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "flash_mla",
    "triton",
)
_ROWS = 4096


DESCRIPTION = """\
Show what is installed here, and which operator runs on what, and why not.

Every answer is a backend's own, asked for DeepSeek-V3.2's sizes in bf16 with gradients. Forward and backward of an
operator may run on different backends, so each is asked for."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `main`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the answers to this file")


def main(*, json: Path | None) -> int:
    """Runs `dsattn doctor`; its exit code."""
    found = examine()
    out = console()
    facts = Table(show_header=False, box=None)
    for name, value in {**found["environment"], **{f"package {k}": v for k, v in found["packages"].items()}}.items():
        facts.add_row(name, "\n".join(value) if isinstance(value, list) else str(value))
    for name, state in found["backends"].items():
        facts.add_row(f"backend {name}", Text(state, "" if name in found["usable"] else "yellow"))
    facts.add_row("cache", found["cache"])
    facts.add_row("Megatron-LM", Text(found["megatron"]))
    out.print(facts)
    answers = Table(title="operators, DeepSeek-V3.2 sizes, bf16", title_justify="left", title_style="bold")
    for name in ("operator", "backend", "device", "runs"):
        answers.add_column(name)
    for answer in found["operators"]:
        if answer["backend"] not in found["usable"]:
            continue
        check = f", self-check {answer['self_check']}" if answer["self_check"] else ""
        runs = Text(f"yes{check}", "green") if answer["runs"] else Text(f"no: {answer['reason']}", "yellow")
        asked = f"{answer['operator']} backward" if answer["backward"] else answer["operator"]
        answers.add_row(asked, answer["backend"], answer["device"], runs)
    out.print(answers)
    if json is not None:
        write(json, json_format.dumps(found, indent=1) + "\n")
    return 0


def examine() -> dict[str, Any]:
    """What is installed, and each direction of an operator x backend x device: yes, or why not."""
    answers = []
    for operator in OPERATORS:
        directions = (False, True) if operator in WITH_BACKWARD else (False,)
        for backward, backend, device in product(directions, ordered(), devices()):
            asked = replace(problem(operator, device), backward=backward)
            reason = ask(backend, asked)
            check = "" if reason is not None else standing(backend, asked)
            if check.startswith("failed"):
                reason = f"its self-check {check}"
            answers.append(
                {
                    "operator": operator,
                    "backward": backward,
                    "backend": backend.name,
                    "device": str(device),
                    "runs": reason is None,
                    "reason": reason or "",
                    "self_check": check,
                }
            )
    return {
        "environment": environment(),
        "backends": {backend.name: backend.missing() or backend.about() or "usable" for backend in ordered()},
        "usable": [backend.name for backend in ordered() if backend.missing() is None],
        "packages": {name: package_version(name) or "not installed" for name in _PACKAGES},
        "cache": str(cache_folder()),
        "megatron": megatron_status.status(),
        "operators": answers,
    }


def ask(backend: Backend, asked: Problem) -> str | None:
    """Why a backend does not run a problem here; None if it does."""
    return backend.missing() or backend.supports(asked)


def problem(operator: Operator, device: torch.device) -> Problem:
    """A call of an operator in DeepSeek-V3.2's sizes: one document, bf16, with gradients."""
    indexer = IndexerSizes(heads=64, width=128, dtype=torch.bfloat16, weights_dtype=torch.float32)
    # The loss reads no values, so its rows are all key.
    value_width = 576 if operator == "indexer_loss" else 512
    attention = AttentionSizes(heads=128, key_width=576, value_width=value_width, dtype=torch.bfloat16)
    selects = operator in ("indexer_topk", "sparse_attention", "indexer_loss")
    return Problem(
        operator=operator,
        num_q=_ROWS,
        num_k=_ROWS,
        device=device,
        layout=None if operator == "sparse_attention" else CausalLayout.packed([0, _ROWS]),
        indexer=None if operator.endswith("attention") else indexer,
        attention=None if operator in ("indexer_scores", "indexer_topk") else attention,
        top_k=2048 if selects else None,
        support="selected" if operator == "indexer_loss" else None,
        requires_grad=operator != "indexer_topk",
    )
