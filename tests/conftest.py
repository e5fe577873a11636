"""What every test runs under: shape checks, one thread, seeded random numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook

ROOT = Path(__file__).parents[1]
SHAPE_CHECKED = ["dsattn.layouts", "dsattn.spec", "dsattn.ops", "dsattn.functional"]

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

settings.register_profile("dsattn", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("dsattn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-shape-checks",
        action="store_true",
        help="do not check the jaxtyping annotations of dsattn at run time",
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    if config.getoption("--no-shape-checks"):
        return
    if "dsattn" in sys.modules:
        raise pytest.UsageError("dsattn was imported before the shape checks could be installed")
    install_import_hook(SHAPE_CHECKED, "beartype.beartype")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_stated_width(monkeypatch: pytest.MonkeyPatch) -> None:
    # Test runners tell their workers a terminal width, which reports would follow.
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def no_shape_checks() -> Iterator[None]:
    """Leaves wrong shapes to the code under test, for tests of what it says about bad input."""
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", before)


@pytest.fixture(scope="module", params=["cpu", "torch"])
def each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test twice: as "auto" chooses on CPU tensors with a C compiler, and as it does without one."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            _hide_cpu_kernels(patch)
        yield


@pytest.fixture
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves CPU tensors to the backend `torch`."""
    _hide_cpu_kernels(monkeypatch)


def _hide_cpu_kernels(patch: pytest.MonkeyPatch) -> None:
    from dsattn.backends import CpuBackend

    patch.setattr(CpuBackend, "missing", lambda _: "hidden by a test")


@pytest.fixture
def rng() -> torch.Generator:
    """A CPU generator that starts the same in every test."""
    return torch.Generator(device="cpu").manual_seed(20)


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """Runs Python in a fresh interpreter and without shape checks: run_python("-c", code)."""

    def run(*arguments: str, path: Path = ROOT / "src", cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        return subprocess.run(
            [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
        )

    return run
