"""Backends that stand for those of simulated releases, made by functions that other processes can import too."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsattn.backends import TorchBackend
from dsattn.spec.problem import Problem
from dsattn.verify.simulated import Release

PIDS = "DSATTN_TEST_PIDS"


class Fake(TorchBackend):
    """Takes bf16 and fp16, no attention over all keys, and of that over selected keys the backward alone."""

    name = "cudnn"

    def __init__(self, version: str = "1.29.1", arch: str = "sm90") -> None:
        self.version, self.arch = version, arch

    def supports(self, problem: Problem) -> str | None:
        sizes = problem.indexer or problem.attention
        if sizes is not None and sizes.dtype not in (torch.bfloat16, torch.float16):
            return "bf16 or fp16 only"
        if problem.operator == "dense_attention":
            return f"release {self.version} has no attention over all keys"
        if problem.operator == "sparse_attention" and not problem.backward:
            return f"no forward on {self.arch}"
        return None


class WrongBackward(Fake):
    def sparse_attention_backward(self, *arguments: Any, **options: Any) -> Any:
        d_q, d_kv, d_sink = super().sparse_attention_backward(*arguments, **options)
        return d_q, torch.zeros_like(d_kv), d_sink


class Off(Fake):
    """Wrong in one release."""

    def indexer_scores(self, x: Any, layout: Any) -> Tensor:
        scores = super().indexer_scores(x, layout)
        return scores * 1.5 if self.version == "1.31.0" else scores


class Ends(Fake):
    """Ends its process."""

    def indexer_scores(self, x: Any, layout: Any) -> Tensor:
        os._exit(3)


class Slow(Fake):
    """Tells its process's number and takes its time."""

    def indexer_scores(self, x: Any, layout: Any) -> Tensor:
        (Path(os.environ[PIDS]) / str(os.getpid())).touch()
        time.sleep(60)
        return super().indexer_scores(x, layout)


def release(version: str = "1.29.1", arch: str = "sm90", make: Any = Fake) -> Release:
    return Release(version=version, arch=arch, make=make)
