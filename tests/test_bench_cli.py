"""`dsattn bench`: exit codes, what it lists and writes, and messages for wrong usage."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_fakes import Launch, measurement, peer_work

from dsattn.backends import TorchBackend
from dsattn.bench import records
from dsattn.bench.gate import Gate
from dsattn.bench.works import WORKS
from dsattn.cli import main

FEW = ["--work", "dense-16", "--rows", "64", "--dtype", "fp32", "--backend", "torch", "--rounds", "2", "--threads", "1"]
Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def say(*arguments: str) -> tuple[int, str, str]:
        code = main(["bench", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return say


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Takes the place of all processes."""
    made = Launch()
    monkeypatch.setattr("dsattn.bench.children.Children.__call__", lambda _, *question: made(*question))
    return made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify finds everything right, without looking."""
    monkeypatch.setattr(Gate, "reason", lambda *_: None)
    monkeypatch.setattr(Gate, "unsupported", lambda *_: None)


@pytest.mark.usefixtures("opened")
def test_a_table_and_lines_of_json(said: Said, launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    code, out, err = said(*FEW, "--json-lines", str(file))
    assert (code, err) == (0, "")
    assert "dense-16" in out
    assert "1.00 (1.00 .. 1.00)" in out
    assert launch.ran == ["peak", "torch", "torch", "peak"]
    assert said(*FEW, "--json-lines", str(file))[0] == 0
    first, second = map(json.loads, file.read_text().splitlines())
    assert first["format"] == second["format"] == records.FORMAT
    assert first["environment"]["threads"] == 1


def test_a_red_operator_is_1_and_has_no_speed(
    said: Said, launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = TorchBackend.dense_attention
    monkeypatch.setattr(TorchBackend, "dense_attention", lambda *a: (right(*a)[0] * 2, right(*a)[1]))
    file, picture = tmp_path / "bench.jsonl", tmp_path / "bench.svg"
    code, out, _ = said(*FEW, "--json-lines", str(file), "--plot", str(picture))
    assert code == 1
    assert "refused: bshd-b3/dense_attention: out" in out
    assert "1.00" not in out
    assert launch.asked == []
    assert json.loads(file.read_text())["wall"] is None
    assert not picture.exists()


@pytest.mark.usefixtures("opened")
def test_a_failure_is_1(said: Said, launch: Launch) -> None:
    launch.broken = ("torch",)
    code, out, _ = said(*FEW)
    assert code == 1
    assert "failed: the process was killed, as where memory runs out" in out


def test_nothing_measured_is_1(said: Said, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchBackend, "supports", lambda *_: "not today")
    monkeypatch.setattr("dsattn.bench.run.usable", lambda: ("torch",))
    code, out, _ = said("--work", "dense-16", "--rows", "64")
    assert (code, launch.asked) == (1, [])
    assert "nothing ran" in out


@pytest.mark.usefixtures("opened")
def test_peers_have_ratios_and_tell_how_they_are_driven(
    said: Said, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORKS, "beside", peer_work())
    launch.figures = {"fast": [measurement(wall=50, cpu=100)], "torch": [measurement(wall=1, cpu=2, above=100)]}
    code, out, _ = said("--suite", "peers", "--work", "beside", "--rounds", "1", "--backend", "torch")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("beside  ") and "dsattn torch" in line]
    assert line.split()[-2:] == ["50", "10"]
    assert "fastpack 1.2.3" in out
    assert "Driven by hand." in out
    assert "results of dsattn torch and the peer differ by 0.0e+00 (out)" in out


@pytest.mark.usefixtures("opened")
def test_a_picture_is_drawn(said: Said, launch: Launch, tmp_path: Path) -> None:
    for name in ("bench.svg", "bench.png"):
        file = tmp_path / name
        assert said(*FEW, "--rows", "128", "--plot", str(file))[0] == 0
        assert file.stat().st_size > 5000
    assert "dense-16, share of the matrix peak" in (tmp_path / "bench.svg").read_text().replace("<!-- ", "")


def test_list_runs_nothing(said: Said, launch: Launch) -> None:
    code, out, err = said("--list")
    assert (code, err, launch.asked) == (0, "", [])
    lines = {line.split()[1]: line for line in out.splitlines()}
    assert set(lines) == {name for name, work in WORKS.items() if work.suite == "cpu"}
    assert "1024,4096,16384" in lines["indexer-scores"]
    assert "more tokens pass 2.3 Tflop" in lines["indexer-scores"]
    assert "only where it is named" in lines["dsa-long"]
    code, out, _ = said("--list", "--suite", "peers")
    assert [line.split()[1] for line in out.splitlines()] == ["megatron", "transformers", "transformers-wide"]
    assert len(said("--list", "--work", "sparse-*")[1].splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "gpus"], "peers"),
        (["--work", "dence-16"], "dense-16"),
        (["--suite", "peers", "--work", "dense-16"], "suite peers"),
        (["--backend", "cuda"], "torch"),
        (["--backend", "flash_mla"], "flash_mla"),
        (["--dtype", "fp8"], "bf16"),
        (["--rows", "0"], "above 0"),
        (["--rows", "many"], "--rows"),
        (["--rounds", "-1"], "--rounds"),
        (["--threads", "0"], "--threads"),
        (["--json-lines", "nowhere/b.jsonl"], "nowhere"),
        (["--plot", "nowhere/b.svg"], "nowhere"),
        (["--json", "b.json"], "--json"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2_with_one_line(arguments: list[str], words: str, said: Said, launch: Launch) -> None:
    code, out, err = said(*arguments)
    assert (code, out, launch.asked) == (2, "", [])
    assert err.startswith("dsattn: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.usefixtures("opened")
def test_a_picture_of_no_kind_is_2(said: Said, launch: Launch, tmp_path: Path) -> None:
    code, _, err = said(*FEW, "--plot", str(tmp_path / "bench.docx"))
    assert code == 2
    assert "bench.docx" in err


def test_a_missing_plot_package_is_told_before_anything_runs(
    said: Said, launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "dsattn.bench.plots", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = said(*FEW, "--plot", str(tmp_path / "b.svg"))
    assert (code, out, launch.asked) == (2, "", [])
    assert err == "dsattn: the command needs the package matplotlib: pip install matplotlib\n"
