"""Which package and which kernels the flash_mla backend finds usable, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import RunPython
from flash_mla_calls import call, faults, problem, run
from flash_mla_fake import FakeFlashMLA

from dsattn.backends import flash_mla
from dsattn.backends.flash_mla import FlashMLABackend
from dsattn.errors import BackendMissing, ContractDrift, UnsupportedProblem
from dsattn.ops.inputs import AttentionInputs

CPU = torch.device("cpu")

DRIFTS = {
    "base 10": "0.3010",
    "half": "1.0000 to 1.0000",
    "-1 is first": "nan",
    "-1 is last": "nan",
    "scale twice": "0.5000 to 0.5000",
    "last column": "0.5000 to 0.5000",
    "last values": "0.0000 to 2.0000",
    "last slot": "needed 2.0000 and 1.0000",
    "sink ignored": "with a sink of 1",
    "sink base 2": "with a sink of 1",
    "lse of bf16": "torch.float32",
    "no max_logits": "IndexError",
    "unknown argument": "'mode'",
}


@pytest.mark.parametrize("defect", DRIFTS)
@pytest.mark.parametrize("base2", [False, True])
def test_what_no_release_does_is_drift(defect: str, base2: bool) -> None:
    if defect == "base 10" and base2:
        pytest.skip("not run: a base is one of the two")
    backend = FlashMLABackend(FakeFlashMLA(defect=defect, base2=base2))
    for _ in range(2):
        with pytest.raises(ContractDrift) as caught:
            # Narrow enough for a kernel that was not shown wrong: drift of one is drift of all.
            backend.sparse_attention(*call())
        told = DRIFTS[defect] if not base2 else DRIFTS[defect].replace("0.5000", "0.7213")
        assert told in str(caught.value)
    # A drift is told by the call: "auto" does not pass over it in silence.
    assert backend.supports(problem()) is None


def test_a_kernel_that_refuses_the_sink_gets_none() -> None:
    fake = FakeFlashMLA(defect="no sink")
    assert run(fake, *call(sink=torch.randn(3))) == []
    assert fake.calls[-1][2] == {"topk_length"}


def test_a_device_out_of_memory_decides_nothing() -> None:
    fake = FakeFlashMLA()
    full = [True]

    def function(**arguments: Any) -> Any:
        if full.pop() if full else False:
            raise torch.OutOfMemoryError("out of memory")
        return fake.flash_mla_sparse_fwd(**arguments)

    backend = FlashMLABackend(SimpleNamespace(flash_mla_sparse_fwd=function))
    a, topk = call()
    with pytest.raises(torch.OutOfMemoryError):
        backend.sparse_attention(a, topk)
    assert faults(a, topk, *backend.sparse_attention(a, topk)) == []


def test_the_probe_is_made_once() -> None:
    fake = FakeFlashMLA()
    backend = FlashMLABackend(fake)
    backend.sparse_attention(*call())
    before = len(fake.calls)
    for _ in range(3):
        backend.sparse_attention(*call())
    assert len(fake.calls) == before + 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"key_width": 24, "value_width": 3}, None),
        ({"requires_grad": True}, None),
        ({"operator": "dense_attention"}, "selected keys"),
        ({"operator": "indexer_topk", "attention": None}, "selected keys"),
        ({"requires_grad": True, "backward": True}, "no backward"),
        ({"dtype": torch.float16}, "float16"),
        ({"dtype": torch.float64}, "float64"),
        ({"key_width": 577}, "577"),
        ({"value_width": 513}, "513"),
    ],
    ids=str,
)
def test_supports(changes: dict[str, Any], reason: str | None) -> None:
    fake = FakeFlashMLA()
    got = FlashMLABackend(fake).supports(problem(**changes))
    assert got is None if reason is None else got is not None and reason in got
    assert fake.calls == []


def test_the_installed_package_is_for_cuda_tensors() -> None:
    assert "cpu" in str(FlashMLABackend().supports(problem()))


def test_what_the_probe_was_refused_counts_later() -> None:
    """The third release has no kernel for 576 columns, and none for Hopper."""
    backend = FlashMLABackend(FakeFlashMLA("third", "sm100"))
    assert backend.supports(problem()) is None
    a, topk = call(d_qk=512)
    assert faults(a, topk, *backend.sparse_attention(a, topk)) == []
    reason = backend.supports(problem())
    assert reason == "FlashMLA refuses 128 heads of 576 columns on this device: RuntimeError: Invalid d_qk: 576"
    assert backend.supports(problem(key_width=512)) is None
    with pytest.raises(UnsupportedProblem, match="Invalid d_qk: 576") as caught:
        backend.sparse_attention(*call(d_qk=513))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_non_finite_has_a_reason() -> None:
    assert "NaN" in str(FlashMLABackend(FakeFlashMLA()).non_finite(problem()))


Installer = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    """Puts a package flash_mla with the given source on the path, on a machine with a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(flash_mla, "_PACKAGE", "flash_mla_stand_in")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_mla_stand_in", raising=False)

    def write(source: str) -> None:
        folder = tmp_path / "flash_mla_stand_in"
        folder.mkdir()
        (folder / "__init__.py").write_text(source, encoding="utf-8")

    return write


def test_not_installed(install: Installer, tmp_path: Path) -> None:
    assert str(FlashMLABackend().missing()).startswith("not installed: no module flash_mla_stand_in")
    # A folder is no package.
    (tmp_path / "flash_mla_stand_in").mkdir()
    assert str(FlashMLABackend().missing()).startswith("not installed")


def test_cannot_be_imported(install: Installer) -> None:
    install(
        "import sys\nsys.flash_mla_imports = getattr(sys, 'flash_mla_imports', 0) + 1\nraise OSError('no libcudart')"
    )
    backend = FlashMLABackend()
    for _ in range(2):
        assert backend.missing() == "cannot be imported: flash_mla_stand_in: OSError: no libcudart"
    assert vars(sys).pop("flash_mla_imports") == 1
    with pytest.raises(BackendMissing, match="no libcudart") as caught:
        backend._kernels(CPU)
    assert isinstance(caught.value.__cause__, OSError)
    vars(sys).pop("flash_mla_imports", None)


def test_another_package_of_that_name(install: Installer) -> None:
    install("__version__ = '1.0.0.dev0'")
    assert "has no attribute 'flash_mla_sparse_fwd'" in str(FlashMLABackend().missing())


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 1), (12, 0)])
def test_no_usable_gpu(capability: tuple[int, int] | None, install: Installer, monkeypatch: pytest.MonkeyPatch) -> None:
    install("raise RuntimeError('imported without need')")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    reason = str(FlashMLABackend().missing())
    assert reason.startswith("no usable GPU")
    assert "Hopper (9.0) or Blackwell (10.x) is needed" in reason


@pytest.mark.parametrize("release", ["second", "third", "fork"])
def test_usable_is_what_has_a_kernel_for_this_gpu(
    release: str, install: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("def flash_mla_sparse_fwd(): pass")
    fake = FakeFlashMLA(release, "sm90")
    find = flash_mla._find_kernels
    monkeypatch.setattr(flash_mla, "_find_kernels", lambda *_: find(fake.flash_mla_sparse_fwd, CPU))
    backend = FlashMLABackend()
    # In a graph capture nothing is probed, and nothing kept for later.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert backend.missing() is None
    assert fake.calls == []
    with pytest.raises(UnsupportedProblem, match="before the capture"):
        backend._kernels(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    reason = backend.missing()
    assert (reason is None) == fake.runs
    assert fake.runs or "only supported on SM100f" in str(reason)
    made = len(fake.calls)
    assert made
    assert backend.missing() == reason
    assert len(fake.calls) == made


def test_import_of_dsattn_leaves_the_package_alone(run_python: RunPython, tmp_path: Path) -> None:
    (tmp_path / "flash_mla.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import dsattn
from dsattn.backends.flash_mla import FlashMLABackend
print(FlashMLABackend()._not_installed, "flash_mla" in sys.modules)
"""
    result = run_python("-c", code)
    assert result.stdout.split() == ["None", "False"], result.stderr


@pytest.mark.parametrize("h", [16, 64, 128, 192])
@pytest.mark.parametrize("d_qk", [512, 576])
def test_on_the_gpu(h: int, d_qk: int) -> None:
    backend = FlashMLABackend()
    reason = backend.missing()
    if reason is not None:
        pytest.skip(f"not run: {reason}")
    device = torch.device("cuda", torch.cuda.current_device())
    reason = backend.supports(problem(device=device, key_width=d_qk))
    if reason is not None:
        pytest.skip(f"not run: {reason}")
    sink = torch.randn(h)
    a, topk = call(h, d_qk, 512, 30, sink=sink)
    on_gpu = AttentionInputs(a.q.to(device), a.kv.to(device), 512, a.softmax_scale, sink.to(device))
    out, lse = backend.sparse_attention(on_gpu, topk.to(device))
    assert faults(a, topk, out.cpu(), lse.cpu()) == []
