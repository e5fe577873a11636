"""Where a report was made: versions, devices, threads, date."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import dsattn


def package_version(name: str) -> str | None:
    """The installed version of a package, or None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def devices() -> list[torch.device]:
    """The devices that dsattn can be asked to run on here: the CPU and every CUDA device."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def describe(device: torch.device) -> str:
    """A device in words."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return f"{device}: {facts.name}, sm{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB"
    return f"{device}: {cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def cpu_name() -> str:
    """The processor's model."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment() -> dict[str, str | int | list[str]]:
    """What a report says of the machine that it was made on."""
    return {
        "dsattn": dsattn.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "devices": [describe(device) for device in devices()],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
