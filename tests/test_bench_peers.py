"""How peers are driven: both sides of a comparison compute the same; environments are made once and whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_peers_fakes as fakes
import pytest
import torch
from torch import Tensor

from dsattn.bench import environments
from dsattn.bench.calls import Make
from dsattn.bench.peers import megatron, transformers
from dsattn.bench.sizes import Sizes
from dsattn.errors import BadInput
from dsattn.wheels import Unreachable

SIZES = Sizes(index_heads=8, index_width=8, heads=2, key_width=24, value_width=16, top_k=5)
ROWS = 21
PEERS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Make]] = {
    "megatron": (fakes.megatron, megatron.call),
    "transformers": (fakes.transformers, transformers.call),
    "transformers-wide": (fakes.transformers, partial(transformers.call, shape=transformers.WIDE)),
}


def results(make: Make, runner: str, sizes: Sizes = SIZES) -> tuple[Mapping[str, Tensor], Any]:
    torch.manual_seed(1)
    call = make(sizes, ROWS, torch.float32, runner)
    return call.run(), call


@pytest.mark.parametrize("name", PEERS)
def test_both_sides_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, make = PEERS[name]
    fake(monkeypatch)
    theirs, their_call = results(make, name.partition("-")[0])
    mine, my_call = results(make, "torch")
    assert theirs.keys() == mine.keys()
    assert len(mine) >= 7
    for key, x in mine.items():
        assert (x - theirs[key]).norm() <= 1e-5 * theirs[key].norm(), key
        assert x.abs().max() > 0
    for left, right in zip(my_call.inputs, their_call.inputs, strict=False):
        assert torch.equal(left, right)
    other, _ = results(make, "torch", replace(SIZES, top_k=2))
    assert not torch.allclose(mine["out"], other["out"], rtol=1e-2)


def test_dsattn_trains_the_indexer_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.transformers(monkeypatch)
    gradients = {}
    for runner in ("transformers", "torch"):
        _, call = results(transformers.call, runner)
        gradients[runner] = sum(x.grad is not None for x in call.inputs)
    # wq_b, wk, k_norm's two and weights_proj.
    assert gradients["torch"] == gradients["transformers"] + 5


def test_how_a_peer_is_driven_is_told() -> None:
    for peer in (megatron.PEER, transformers.PEER):
        assert peer.release in ("0.19.2", "5.24.0")
        assert len(peer.how) > 500
        assert peer.how.startswith(f"{peer.package} as released")


def test_megatron_is_where_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "unpacked", lambda version: Path("cache", version))
    assert megatron.PEER.place().path == (Path("cache/0.19.2"),)
    assert megatron.PEER.place().python == Path(sys.executable)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """pip installs nothing, and is asked by the interpreter of the environment."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        environments, "pip", lambda *words, python: asked.append((*words, Path(python).parts[-2], Path(python).name))
    )
    return asked


def test_an_environment_is_made_once_and_sees_this_one(
    tmp_path: Path, pip: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = environments._run
    # pip takes most of the time.
    monkeypatch.setattr(environments, "_run", lambda x: run([*x, "--without-pip"] if "venv" in x else x))
    python = environments.environment("fastpack", "1.2.3", tmp_path)
    assert pip == [("install", "--quiet", "fastpack==1.2.3", "bin", "python")]
    done = subprocess.run([python, "-c", "import torch, sys; print(sys.prefix)"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == python.parents[1].resolve()
    assert environments.environment("fastpack", "1.2.3", tmp_path) == python
    assert len(pip) == 1
    assert os.listdir(tmp_path / "bench") == [python.parents[1].name]


def test_a_failed_installation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise Unreachable("package index")

    monkeypatch.setattr(environments, "pip", refuse)
    monkeypatch.setattr(environments, "_run", lambda command: str(tmp_path))
    with pytest.raises(Unreachable):
        environments.environment("fastpack", "1.2.3", tmp_path)
    assert os.listdir(tmp_path / "bench") == []


def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=1, stdout="", stderr="Error: ensurepip is not available\n")
    monkeypatch.setattr(environments.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(BadInput, match="ensurepip is not available"):
        environments.environment("fastpack", "1.2.3", tmp_path)
