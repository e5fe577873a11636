"""A self-check leaves no trace: what it must not change or depend on is set aside meanwhile."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import torch

from dsattn.ops.numerics import exact_products


@contextmanager
def undisturbed(device: torch.device) -> Generator[None]:
    """Runs a block outside of autograd, inference mode and autocast, and puts all random states back after it.

    Tensors that a backend caches meanwhile are ordinary ones, so a later backward may save them. Default dtype, default
    device, deterministic algorithms and streams are the caller's: nothing in a check depends on them.
    """
    devices = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    drawn = random.getstate()
    try:
        with (
            torch.random.fork_rng(devices=devices, device_type="cuda"),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            exact_products(device),
        ):
            yield
    finally:
        random.setstate(drawn)
