"""The built wheel holds the package and nothing else, and works where only it is installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, RunPython


def ran(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    ran("hatchling", "build", "-t", "wheel", "-d", str(folder))
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    ran(
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder),
        str(wheel),
    )
    return folder


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {name for name in names if ".dist-info/" not in name}
    sources = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert package == {path.relative_to(ROOT / "src").as_posix() for path in sources}
    assert "dsattn/py.typed" in package
    assert any(name.startswith("dsattn/verify/") and name.endswith(".j2") for name in package)
    assert {name.partition(".dist-info/")[2] for name in names - package} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }


def test_installed_wheel_imports_itself(installed: Path, tmp_path: Path, run_python: RunPython) -> None:
    done = run_python("-c", "import dsattn; print(dsattn.__file__)", path=installed, cwd=tmp_path)
    assert Path(done.stdout.strip()) == installed / "dsattn" / "__init__.py", done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["verify", "--list"]])
def test_installed_command_runs(arguments: list[str], installed: Path, tmp_path: Path, run_python: RunPython) -> None:
    done = run_python("-m", "dsattn", *arguments, path=installed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert (installed / "bin" / "dsattn").exists()
    assert list(tmp_path.iterdir()) == []
