"""What `dsattn doctor` says of the installed Megatron: told from files, for every frontend that may be beside it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_fake import source
from packaging.version import Version

from dsattn.backends.cudnn.namespace import Absence, Installed
from dsattn.cli.doctor import examine
from dsattn.integrations import megatron_status

NOT_IMPORTED = "raise RuntimeError('imported')\n"
NONE = Absence("not installed", "no module cudnn")


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an installed `megatron.core`, which must not be imported."""
    folder = tmp_path / "megatron" / "core"
    (folder / "transformer").mkdir(parents=True)
    (folder / "__init__.py").write_text(NOT_IMPORTED, encoding="utf-8")
    (folder / "broken.py").write_bytes(b"\xff")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(megatron_status, "_version", lambda: "0.19.2")
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def frontend(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    found = NONE if version is None else Installed(Version(version), Path())
    monkeypatch.setattr(megatron_status, "find_frontend", lambda: found)


@pytest.mark.parametrize(
    ("kernels", "version", "said"),
    [
        (source(), "1.29.1", "megatron-core 0.19.2 with cuDNN frontend 1.29.1 needs dsattn.integrations.megatron."),
        (source(), "1.26.0rc1", "megatron-core 0.19.2 with cuDNN frontend 1.26.0rc1 needs dsattn"),
        (source(), "1.25.0", "megatron-core 0.19.2 needs no repair with cuDNN frontend 1.25.0, but from 1.26 on"),
        (
            source(),
            None,
            "megatron-core 0.19.2 needs dsattn.integrations.megatron.install() with a cuDNN frontend from",
        ),
        (source(fixed=True), "1.29.1", "megatron-core 0.19.2 names its offsets itself and needs no repair"),
        ("", "1.29.1", "megatron-core 0.19.2 does not call the cuDNN frontend's DSA"),
    ],
)
def test_what_is_said(
    core: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, version: str | None, said: str
) -> None:
    (core / "transformer" / "kernels.py").write_text(NOT_IMPORTED + kernels, encoding="utf-8")
    frontend(monkeypatch, version)
    assert megatron_status.status().startswith(said)
    assert "megatron.core" not in sys.modules


def test_a_folder_of_the_name_is_no_megatron(core: Path) -> None:
    (core / "__init__.py").unlink()
    assert megatron_status.status() == "not installed"


def test_doctor_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_status, "status", lambda: "as it is")
    assert examine()["megatron"] == "as it is"
