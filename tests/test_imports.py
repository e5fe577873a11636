"""What `import dsattn` loads, what it runs without, and that it leaves devices alone; each in a fresh interpreter."""

from __future__ import annotations

import pytest
from conftest import RunPython

# Blocked packages are as absent as any other: `find_spec` gives None, `import` raises ModuleNotFoundError.
BLOCK = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == %r else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""

THIRD_PARTY = """
import sys, torch, jaxtyping
before = set(sys.modules)
import dsattn
%s
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - {"dsattn", "torch", "jaxtyping"} - set(sys.stdlib_module_names)))
"""

SMALL_CALL = """
import torch, dsattn
layout = dsattn.CausalLayout.batched(1, 3)
topk = dsattn.indexer_topk(torch.ones(3, 2, 4), torch.ones(3, 4), torch.ones(3, 2), layout, top_k=2)
out = dsattn.sparse_attention(torch.ones(3, 2, 8), torch.ones(3, 8), topk, value_dim=4, softmax_scale=1.0)
print(topk.indices.tolist(), out.shape[-1], out.min().item())
"""

COMMAND = """
import runpy
sys.argv = ["dsattn", "doctor"]
runpy.run_module("dsattn", run_name="__main__", alter_sys=True)
"""

# torch.cuda answers these three by asking the driver, which a fork or a login node must not be made to do.
NO_DEVICE = """
import torch

def touched(*args, **kwargs):
    raise SystemExit("a device was touched")

torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = touched
import dsattn
%s
dsattn.CausalLayout.packed([0, 3, 7]).table
print("untouched", torch.cuda.is_initialized())
"""


def test_import_loads_nothing_else(run_python: RunPython) -> None:
    done = run_python("-c", THIRD_PARTY % "")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_another_package_would_be_seen(run_python: RunPython) -> None:
    assert "'rich'" in run_python("-c", THIRD_PARTY % "import rich").stdout


@pytest.mark.parametrize("package", ["rich", "jinja2", "safetensors", "matplotlib", "numpy", "packaging", "beartype"])
def test_works_without(package: str, run_python: RunPython) -> None:
    done = run_python("-c", BLOCK % package + SMALL_CALL)
    assert done.stdout == "[[0, -1], [0, 1], [0, 1]] 4 1.0\n", done.stderr


def test_the_blocker_blocks(run_python: RunPython) -> None:
    done = run_python("-c", BLOCK % "jaxtyping" + SMALL_CALL)
    assert done.returncode == 1
    assert "No module named 'jaxtyping'" in done.stderr


@pytest.mark.parametrize("package", ["rich"])
def test_the_command_says_what_to_install(package: str, run_python: RunPython) -> None:
    done = run_python("-c", BLOCK % package + COMMAND)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert package in line
    assert "pip install" in line


def test_import_touches_no_device(run_python: RunPython) -> None:
    done = run_python("-c", NO_DEVICE % "")
    assert done.stdout == "untouched False\n", done.stderr


def test_a_touched_device_would_be_seen(run_python: RunPython) -> None:
    done = run_python("-c", NO_DEVICE % "torch.cuda.is_available()")
    assert "a device was touched" in done.stderr
