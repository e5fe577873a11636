"""The command line: exit codes, messages on stderr, and that pipes get plain text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RunPython

import dsattn
from dsattn.backends import Backend, TorchBackend
from dsattn.cli import main
from dsattn.cli.doctor import ask, examine, problem
from dsattn.spec.problem import OPERATORS, WITH_BACKWARD

# What is counted and broken here is the backend torch alone.
pytestmark = pytest.mark.usefixtures("on_torch")

QUICK = ["verify", "--case", "one-row", "--device", "cpu"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_green_is_0(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data, page = tmp_path / "r.json", tmp_path / "r.html"
    code, out, err = said(capsys, *QUICK, "--json", str(data), "--html", str(page))
    assert (code, err) == (0, "")
    assert "PASS: 16 checks hold" in out
    found = json.loads(data.read_text())
    ran = [record for record in found["records"] if record["verdict"] != "not run"]
    assert [record["verdict"] for record in ran] == ["pass"] * 16
    assert {record["dtype"] for record in ran} == {"fp32", "bf16"}
    assert found["environment"]["torch"] == torch.__version__
    assert {"dsattn", "torch", "python", "os", "cpu", "devices", "threads", "date"} <= set(found["environment"])
    assert "PASS: 16 checks hold" in page.read_text()


def test_red_is_1_and_says_how_to_repeat_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TorchBackend.dense_attention
    monkeypatch.setattr(TorchBackend, "dense_attention", lambda *a: (right(*a)[0] * 2, right(*a)[1]))
    code, out, _ = said(capsys, *QUICK, "--dtype", "fp32")
    assert code == 1
    assert "FAIL: 2 of 8 checks failed" in out
    (repeat,) = [line for line in out.splitlines() if "one-row/dense_attention" in line]
    again, out, _ = said(capsys, *repeat.split()[4:])
    assert again == 1
    assert "FAIL: 1 of 1 checks failed" in out
    monkeypatch.undo()
    assert said(capsys, *repeat.split()[4:])[0] == 0


def test_nothing_checked_is_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchBackend, "supports", lambda *_: "not today")
    code, out, _ = said(capsys, *QUICK)
    assert code == 1
    assert "FAIL: no check ran (16 unsupported" in out
    assert "not today" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "--case", "bshd-b7"], "bshd-b1"),
        (["verify", "--backend", "cuda"], "torch"),
        (["verify", "--suite", "quik"], "quick"),
        (["verify", "--dtype", "fp8"], "fp32, bf16, fp16, fp64"),
        (["verify", "--device", "moon"], "moon"),
        (["verify", "--device", "meta"], "meta"),
        (["verify", "--device", "cuda:99"], "cuda:99"),
        (["verify", "--json", "nowhere/r.json"], "nowhere"),
        (["verify", "--html", "nowhere/r.html"], "nowhere"),
        (["verify", "--colour"], "--colour"),
        (["verify", "--no-verbose"], "--no-verbose"),
        (["verify", "bshd-b1"], "bshd-b1"),
        (["verfy"], "verfy"),
        (["verify", "--case"], "--case"),
        (["doctor", "--json", "nowhere/r.json"], "nowhere"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2_with_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, *arguments)
    assert (code, out if arguments[0] != "doctor" else "") == (2, "")
    assert err.startswith("dsattn: ")
    assert err.count("\n") == 1
    assert words in err
    assert len(err) < 500


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version") == (0, f"{dsattn.__version__}\n", "")
    code, out, err = said(capsys, "--help")
    assert (code, err) == (0, "")
    assert "verify" in out
    assert "doctor" in out
    code, out, _ = said(capsys, "verify", "--help")
    assert code == 0
    for option in ("--suite", "--case", "--list", "--backend", "--device", "--dtype", "--verbose", "--json", "--html"):
        assert option in out
    assert "--no-" not in out


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys)
    assert code == 0
    assert "verify" in out


def test_list_runs_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsattn.cli.verify.run", lambda _: pytest.fail("a check ran"))
    code, out, err = said(capsys, "verify", "--list", "--suite", "quick", "--suite", "real-text")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    (line,) = [line for line in lines if line.split()[1] == "bshd-b1"]
    assert line.split()[0] == "quick"
    assert "one square causal sequence" in line
    assert "indexer_topk" in line
    assert sum(line.startswith("real-text") for line in lines) == 2
    _, out, _ = said(capsys, "verify", "--list", "--case", "k-*")
    assert [line.split()[1] for line in out.splitlines()] == ["k-1", "k-odd", "k-all", "k-more", "k-2048"]


def test_verbose_shows_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    _, short, _ = said(capsys, *QUICK, "--dtype", "fp32", "--case", "k-1")
    _, long, _ = said(capsys, *QUICK, "--dtype", "fp32", "--case", "k-1", "--verbose")
    assert sum(line.startswith("one-row") for line in short.splitlines()) == 0
    assert sum(line.startswith("one-row") for line in long.splitlines()) == 8


def test_a_pipe_gets_no_progress_bar_and_no_escape(run_python: RunPython) -> None:
    done = run_python("-W", "ignore", "-m", "dsattn", *QUICK, "--backend", "torch", "--dtype", "fp32")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "PASS: 8 checks hold" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_a_terminal_gets_a_progress_bar(run_python: RunPython) -> None:
    code = "import pty, sys; sys.exit(pty.spawn([sys.executable, '-W', 'ignore', '-m', 'dsattn', *sys.argv[1:]]))"
    done = run_python("-c", code, *QUICK, "--backend", "torch", "--dtype", "fp32")
    assert done.returncode == 0
    assert "8/8" in done.stdout


def test_a_missing_page_package_is_told_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr("dsattn.cli.verify.run", lambda _: pytest.fail("a check ran"))
    code, out, err = said(capsys, *QUICK, "--html", str(tmp_path / "r.html"))
    assert (code, out) == (2, "")
    assert err == "dsattn: the command needs the package jinja2: pip install jinja2\n"


def test_another_missing_module_is_no_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> Any:
        raise ModuleNotFoundError("No module named 'dsattn.lost'", name="dsattn.lost")

    monkeypatch.setattr("dsattn.cli.verify.run", broken)
    with pytest.raises(ModuleNotFoundError, match=r"dsattn\.lost"):
        main(QUICK)


def test_doctor_answers_for_every_operator(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    code, out, err = said(capsys, "doctor", "--json", str(file))
    assert (code, err) == (0, "")
    for word in (*OPERATORS, "torch", torch.__version__, "yes"):
        assert word in out
    found = json.loads(file.read_text())
    assert {(a["operator"], a["backend"]) for a in found["operators"]} >= {(name, "torch") for name in OPERATORS}
    assert all(
        answer["runs"] and answer["reason"] == "" for answer in found["operators"] if answer["backend"] == "torch"
    )
    assert (
        found["packages"]["torch"] == torch.__version__.split("+")[0] or found["packages"]["torch"] == torch.__version__
    )


def test_doctor_takes_each_answer_from_the_backend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky(TorchBackend):
        name = "picky"
        absent: str | None = None

        def missing(self) -> str | None:
            return self.absent

        def supports(self, problem: Any) -> str | None:
            assert problem.indexer is None or problem.indexer.heads == 64
            assert problem.attention is None or (problem.attention.heads, problem.attention.key_width) == (128, 576)
            return f"no {problem.operator} [yet]"

        def non_finite(self, problem: Any) -> str | None:
            pytest.fail("asked of a problem that it does not take")

    backends: tuple[Backend, ...] = (Picky(),)
    monkeypatch.setattr("dsattn.cli.doctor.ordered", lambda: backends)
    asked = [name for name in OPERATORS for _ in range(2 if name in WITH_BACKWARD else 1)]
    assert [answer["reason"] for answer in examine()["operators"]] == [f"no {name} [yet]" for name in asked]
    assert "no: no indexer_topk [yet]" in said(capsys, "doctor")[1]
    absent = Picky()
    absent.absent = "no compiler"
    assert ask(absent, problem("indexer_topk", torch.device("cpu"))) == "no compiler"
