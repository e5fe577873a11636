"""What `dsattn drift` refuses: one clear line, exit code 2, and the cache as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import small_wheels
from conftest import RunPython

from dsattn.cli import main

FILES = {"kernels/__init__.py": "def scores(q, k=1):\n    return q\n"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `index` that serves kernels 1.0, and a `cache` with its wheel and snapshot."""
    folder = tmp_path_factory.mktemp("prepared")
    small_wheels.make(folder / "index", "1.0", FILES)
    with pytest.MonkeyPatch.context() as patch:
        small_wheels.serve(folder / "index", folder / "cache", patch)
        assert main(["drift", "1.0", "1.0", "--package", "kernels"]) == 0
    return folder


@pytest.fixture
def index(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that serves kernels 1.0, beside a cache that has it."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    small_wheels.serve(tmp_path / "index", tmp_path / "cache", monkeypatch)
    return tmp_path / "index"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command says before it ends with 2."""
    capsys.readouterr()
    code = main(["drift", *arguments])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("dsattn: ")
    return err


def cached(index: Path) -> dict[Path, bytes]:
    return small_wheels.read(index.parent / "cache")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1.0", "7.0", "--package", "kernels"), ("kernels 7.0", "the newest is 1.0")),
        (("1.0", "1.0", "--package", "kernelz"), ("'kernelz'", "none of that name")),
        (("1.0", "one", "--package", "kernels"), ("'one'", "1.26.0")),
        (("1.0", "1.0", "--package", "../kernels"), ("--package", "nvidia-cudnn-frontend")),
        (("1.0", "1.0", "--package=-r"), ("--package",)),
        (("1.0",), ("NEW",)),
        (("1.0", "1.0", "--package", "kernels", "--json", "nowhere/d.json"), ("nowhere",)),
        (("1.0", "1.0", "--package", "kernels", "--watch", "nowhere.toml"), ("nowhere.toml", "No such file")),
    ],
)
def test_wrong_usage(
    index: Path, arguments: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = cached(index)
    said = refused(capsys, *arguments)
    assert all(word in said for word in words), said
    assert cached(index) == before


def test_no_network(index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = cached(index)
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("PIP_FIND_LINKS")
    said = refused(capsys, "1.0", "2.0", "--package", "kernels")
    assert "no answer" in said
    assert "network" in said
    assert cached(index) == before
    assert main(["drift", "1.0", "1.0", "--package", "kernels"]) == 0


def shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def no_zip(path: Path) -> None:
    path.write_text("<html>sign in</html>")


def damaged(path: Path) -> None:
    content = path.read_bytes()
    # In the compressed source, the first file of the archive, which pip does not look at.
    place = content.index(b"kernels/__init__.py") + len("kernels/__init__.py") + 5
    path.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])


@pytest.mark.parametrize("break_", [shortened, no_zip, damaged])
def test_a_broken_wheel(index: Path, break_: Callable[[Path], None], capsys: pytest.CaptureFixture[str]) -> None:
    before = cached(index)
    path = small_wheels.make(index, "2.0", {"kernels/__init__.py": "def scores(q, k=1):\n    return q\n" * 40})
    break_(path)
    said = refused(capsys, "1.0", "2.0", "--package", "kernels")
    assert "kernels 2.0: given a broken wheel" in said
    assert cached(index) == before
    small_wheels.make(index, "2.0", FILES)
    assert main(["drift", "1.0", "2.0", "--package", "kernels"]) == 0


def test_a_broken_wheel_in_the_cache_is_downloaded_again(index: Path) -> None:
    for place in (index.parent / "cache" / "drift").iterdir():
        place.unlink()
    (kept,) = (index.parent / "cache" / "wheels").iterdir()
    shortened(kept)
    assert main(["drift", "1.0", "1.0", "--package", "kernels"]) == 0
    assert kept.read_bytes() == next(index.iterdir()).read_bytes()


def test_a_cache_that_cannot_be_written(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DSATTN_CACHE_DIR", str(tmp_path / "file"))
    said = refused(capsys, "1.0", "1.0", "--package", "kernels")
    assert "DSATTN_CACHE_DIR" in said


def test_a_package_without_python(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_wheels.make(index, "1.0", {"binary/data.bin": "x"}, name="binary")
    assert "nothing to compare" in refused(capsys, "1.0", "1.0", "--package", "binary")


def test_a_source_for_a_newer_python_is_told(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {**FILES, "kernels/newer.py": "def f(x): match x = 3\n"}
    small_wheels.make(index, "3.0", files)
    assert main(["drift", "1.0", "3.0", "--package", "kernels"]) == 0
    assert "3.0: kernels/newer.py is not Python that this interpreter can parse" in capsys.readouterr().out
    small_wheels.make(index, "4.0", {"kernels/__init__.py": "def f(x): match x = 3\n"})
    assert "kernels-4.0-py3-none-any.whl: given sources that Python" in refused(
        capsys, "1.0", "4.0", "--package", "kernels"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("nothing", "[[call]]")),
        ("x = ", ("no TOML",)),
        ("[call]\nwrapper = 'scores'\n", ("[[call]]",)),
        ("[[calls]]\nwrapper = 'scores'\n", ("calls",)),
        ("[[call]]\nkeywords = []\n", ("call 1", "wrapper")),
        ("[[call]]\nwrapper = 'scores'\nkeyword = ['q']\n", ("call 1", "keyword")),
        ("[[call]]\nwrapper = 'scores'\npositional = -1\n", ("call 1", "positional", "-1")),
        ("[[call]]\nwrapper = 'scores'\npositional = true\n", ("positional", "True")),
        ("[[call]]\nwrapper = 'scores'\npositional = 'q'\n", ("positional", "'q'")),
        ("[[call]]\nwrapper = 'scores'\nkeywords = 'q'\n", ("keywords", "'q'")),
        ("[[call]]\nwrapper = 'scores'\nkeywords = ['q', 'q']\n", ("each name once",)),
        ("[[call]]\nwrapper = 3\n", ("wrapper", "3")),
        ("[[call]]\nwrapper = 'score'\n", ("'score'", "scores")),
        ("[[call]]\nwrapper = 'scores'\nkeywords = ['kk']\n", ("'kk'", "a parameter of scores: k")),
        ("[[call]]\nwrapper = 'scores'\npositional = ['k']\n", ("positional k", "q, k")),
    ],
)
def test_wrong_files_of_calls(
    index: Path, tmp_path: Path, text: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "calls.toml"
    place.write_text(text)
    said = refused(capsys, "1.0", "1.0", "--package", "kernels", "--watch", str(place))
    assert all(word in said for word in words), said


def test_without_griffe_it_says_what_to_install(index: Path, run_python: RunPython) -> None:
    code = "import sys; sys.modules['griffe'] = None; from dsattn.cli import main; sys.exit(main(sys.argv[1:]))"
    done = run_python("-c", code, "drift", "1.0", "1.0", "--package", "kernels")
    assert done.returncode == 0, "what is in the cache needs no griffe"
    shutil.rmtree(index.parent / "cache" / "drift")
    done = run_python("-c", code, "drift", "1.0", "1.0", "--package", "kernels")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "dsattn: the command needs the package griffe: pip install griffelib\n"
