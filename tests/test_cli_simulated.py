"""The command line with simulated releases: what it takes and refuses, exit codes, and that red is repeated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import RunPython
from simulated_fakes import Ends, Fake, Off, release
from test_cli import said

from dsattn.cli import verify
from dsattn.verify import frontend_defaults, pool, simulated
from dsattn.verify.frontend_defaults.suite import checks
from dsattn.verify.records import Record
from dsattn.verify.simulated import Release

CASES = ["--case", "one-row", "--case", "k-1"]
DEFAULTS = ["verify", "--suite", "frontend-defaults"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a backend of the tests in the place of the simulated ones: fake(Off)."""
    right = simulated.chosen

    def put(make: Any) -> None:
        def chosen(versions: Sequence[str], archs: Sequence[str]) -> list[Release]:
            return [replace(one, make=make) for one in right(versions, archs)]

        monkeypatch.setattr(simulated, "chosen", chosen)

    return put


def test_green_is_0_and_the_records_say_what_was_simulated(
    fake: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake(Fake)
    data = tmp_path / "r.json"
    versions = ["--cudnn-version", "1.29.0", "--cudnn-version", "1.29.1"]
    code, out, err = said(capsys, "verify", *CASES, *versions, "--json", str(data))
    assert (code, err) == (0, "")
    assert "releases simulated on sm90" in out
    assert "releases simulated on sm100" in out
    assert "1.29.1 stands for 1.29.0 too" in out
    found = json.loads(data.read_text())
    kinds = {(r["backend"], r["device"], r["dtype"], r["simulated"], r["release"]) for r in found["records"]}
    assert kinds == {("cudnn", "cpu", "bf16", True, "1.29.1")}
    assert {r["arch"] for r in found["records"]} == {"sm90", "sm100"}
    assert found["environment"]["releases"] == ["1.29.1 stands for 1.29.0 too: the same contract"]


def test_red_is_1_and_its_command_repeats_it(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake(Off)
    versions = ["--cudnn-version", "1.30.0", "--cudnn-version", "1.31.0", "--arch", "sm100"]
    code, out, _ = said(capsys, "verify", *CASES, *versions)
    assert code == 1
    assert "FAIL one-row, indexer_scores, bf16, cudnn on a simulated 1.31.0 for sm100" in out
    (repeat,) = [line.split() for line in out.splitlines() if "repeat: " in line]
    again, out, _ = said(capsys, *repeat[4:])
    assert again == 1
    assert "FAIL: 1 of 1 checks failed" in out
    fake(Fake)
    assert said(capsys, *repeat[4:])[0] == 0


def test_many_checks_go_to_processes(
    fake: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(Ends)
    monkeypatch.setattr(pool.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(pool, "LEAST", 1)
    code, out, err = said(capsys, "verify", *CASES, "--cudnn-version", "1.29.1")
    assert (code, out) == (1, "")
    assert err.startswith("dsattn: a process that ran checks died")
    assert err.count("\n") == 1


def test_captured_and_dumped_inputs_run_on_simulated_releases(
    fake: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("safetensors", reason="not run: no safetensors here")
    fake(Off)
    version = ["--cudnn-version", "1.31.0", "--arch", "sm90"]
    code, out, _ = said(capsys, "verify", "--case", "k-1/indexer_scores", *version, "--dump", str(tmp_path))
    assert code == 1
    (line,) = [line for line in out.splitlines() if line.startswith("  inputs: ")]
    file = tmp_path / "quick-k-1-bf16.safetensors"
    assert line.endswith(f"--inputs {file} --case 'quick-k-1-bf16[0]/indexer_scores' {' '.join(version)} --dtype bf16")
    code, out, _ = said(
        capsys, "verify", "--inputs", str(file), "--case", "quick-k-1-bf16[[]0]/indexer_scores", *version
    )
    assert code == 1
    assert f"repeat: python -m dsattn verify --inputs {file}" in out
    fake(Fake)
    code, out, _ = said(capsys, "verify", "--inputs", str(file), *version)
    assert code == 0
    assert "captured inputs" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cudnn-version", "new"], "'new'"),
        (["--cudnn-version", "1.2"], "1.24.0 or newer"),
        (["--cudnn-version", "1.29.1", "--arch", "sm80"], "sm100"),
        (["--cudnn-version", "1.29.1", "--backend", "torch"], "'torch' with --cudnn-version"),
        (["--cudnn-version", "1.29.1", "--device", "cuda:99"], "cuda:99"),
        (["--arch", "sm90"], "without --cudnn-version"),
        (["--self-test", "--cudnn-version", "1.29.1"], "--cudnn-version"),
        (["--self-test", "--arch", "sm90"], "--arch"),
        (["--suite", "frontend-defaults", "--case", "dense-b2"], "--case"),
        (["--suite", "frontend-defaults", "--dtype", "fp16"], "--dtype"),
        (["--suite", "quick", "--suite", "frontend-defaults", "--device", "cpu"], "--device"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2_with_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "verify", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dsattn: ")
    assert words in err


def test_a_list_has_the_cases_of_simulated_releases(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "verify", "--list", "--suite", "full", "--cudnn-version", "all")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[-2:]] == [
        ["full", "deepseek-v3.2-t512"],
        ["full", "glm-5-t512"],
    ]
    code, out, _ = said(capsys, *DEFAULTS, "--list")
    assert code == 0
    assert [line.split()[1] for line in out.splitlines()] == [check.case for check in checks()]


def row(**changes: Any) -> Record:
    """A check of frontend-defaults."""
    fields: dict[str, Any] = {
        "suite": "frontend-defaults",
        "case": "recall-documents-cp2-rank0",
        "operator": "indexer_topk",
    }
    fields |= {"backend": "cudnn", "device": "cpu", "dtype": "bf16", "verdict": "pass", "simulated": True}
    fields |= {"release": "1.31.0", "arch": "sm90", "caller": "naive"}
    fields |= {"metrics": {"recall_mean": 0.579, "recall_min": 0.039}}
    return Record(**{**fields, **changes})


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[str], str]]:
    """What the suite was asked for; its checks are not run."""
    asked: list[tuple[Sequence[str], str]] = []

    def run(releases: Sequence[str], arch: str, *, advance: Any) -> list[Record]:
        asked.append((tuple(releases), arch))
        return [row(arch=arch, release=release) for release in releases]

    monkeypatch.setattr(frontend_defaults, "run", run)
    return asked


def test_frontend_defaults_has_releases_of_its_own(
    defaults: list[tuple[Sequence[str], str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, *DEFAULTS)[0] == 0
    assert defaults == [(frontend_defaults.RELEASES, "sm100")]
    del defaults[:]
    assert said(capsys, *DEFAULTS, "--arch", "sm90", "--arch", "sm100")[0] == 0
    assert defaults == [(frontend_defaults.RELEASES, "sm90"), (frontend_defaults.RELEASES, "sm100")]
    del defaults[:]
    assert said(capsys, *DEFAULTS, "--cudnn-version", "1.31.0", "--cudnn-version", "1.25.0")[0] == 0
    assert defaults == [(("1.25.0", "1.31.0"), arch) for arch in ("sm90", "sm100")]


def test_frontend_defaults_is_shown_in_its_tables(
    defaults: list[tuple[Sequence[str], str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data, page = tmp_path / "r.json", tmp_path / "r.html"
    code, out, _ = said(capsys, *DEFAULTS, "--json", str(data), "--html", str(page))
    assert code == 0
    (title,) = [table.title for table in frontend_defaults.tables([row()])]
    for text in (out, page.read_text()):
        assert title.lower() in text.lower()
        assert "0.579 / 0.039" in text
        assert "releases simulated on" not in text
        assert "PASS" in text
    assert {r["caller"] for r in json.loads(data.read_text())["records"]} == {"naive"}
    assert "Callers that rely on the cuDNN frontend&#39;s defaults" in page.read_text()
    assert "A result may be off" not in page.read_text(), "it is judged by other rules"


def test_a_row_of_frontend_defaults_that_does_not_hold_is_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = row(verdict="fail", reason="recall 0.9 where 0.579 was seen", arch="sm100")
    monkeypatch.setattr(frontend_defaults, "run", lambda *_, **__: [row(arch="sm100", release="1.25.0"), wrong])
    page = tmp_path / "r.html"
    code, out, _ = said(capsys, *DEFAULTS, "--html", str(page))
    assert code == 1
    assert (
        "FAIL recall-documents-cp2-rank0, indexer_topk, bf16, cudnn on a simulated 1.31.0 for sm100, called as naive\n"
        in out
    )
    command = "python -m dsattn verify --suite frontend-defaults --cudnn-version 1.31.0 --arch sm100"
    assert f"repeat: {command}\n" in out
    assert "--dump" not in out
    assert command in page.read_text()
    assert "recall 0.9 where 0.579 was seen" in page.read_text()


def test_frontend_defaults_runs_beside_other_suites(
    fake: Any,
    defaults: list[tuple[Sequence[str], str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake(Fake)
    right: Any = verify.suites.plan
    few = {"cases": CASES[1::2], "releases": [release()]}
    monkeypatch.setattr(verify.suites, "plan", lambda *given, **options: right(*given, **{**options, **few}))
    code, out, _ = said(capsys, *DEFAULTS, "--suite", "quick", "--cudnn-version", "1.29.1")
    assert code == 0
    assert "releases simulated on sm90" in out
    assert "0.579 / 0.039" in out


def test_help_says_what_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = said(capsys, "verify", "--help")
    words = " ".join(out.split())
    assert "small text only" in words
    assert "--arch {sm90,sm100}" in words


def test_the_real_simulator_runs_without_a_gpu(run_python: RunPython) -> None:
    arguments = ["verify", "--case", "one-row", "--cudnn-version", "1.32.0", "--arch", "sm100"]
    done = run_python("-W", "ignore", "-m", "dsattn", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "releases simulated on sm100" in done.stdout
