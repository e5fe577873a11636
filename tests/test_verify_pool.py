"""Checks in several processes: the same records as in one, and a clean end whatever happens to a process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from simulated_fakes import PIDS, Ends, Fake, Off, release

from dsattn.verify import pool, suites
from dsattn.verify.pool import Request, WorkerDied, processes_for, run_in_processes
from dsattn.verify.records import Record
from dsattn.verify.run import run, tasks

CPU = torch.device("cpu")
posix = pytest.mark.skipif(sys.platform == "win32", reason="not run: signals of POSIX")


def request(make: Any = Fake, cases: tuple[str, ...] = ("one-row", "k-1", "k-odd")) -> Request:
    releases = [release(version, arch, make) for arch in ("sm90", "sm100") for version in ("1.30.0", "1.31.0")]
    return Request(("quick",), {"cases": cases, "device": CPU, "releases": releases})


def test_several_processes_find_what_one_does() -> None:
    asked = request(Off)
    alone = list(run(asked.tasks()))
    told: list[tuple[int, int]] = []
    together = run_in_processes(asked, 2, lambda _, done, steps: told.append((done, steps)))
    assert {record.verdict for record in alone} == {"pass", "fail", "unsupported"}
    # Two curves are equal only where they are one object.
    assert [replace(record, curves=()) for record in together] == [replace(record, curves=()) for record in alone]
    assert rows_of(together) == rows_of(alone)
    assert any(record.curves for record in together)
    assert told[-1] == (len(alone), len(alone))
    assert told == sorted(told)


def rows_of(records: list[Record]) -> list[tuple[str, list[float]]]:
    return [(curve.told, curve.values.tolist()) for record in records for curve in record.curves]


def test_a_process_that_dies_is_told() -> None:
    with pytest.raises(WorkerDied, match="OMP_NUM_THREADS=1"):
        run_in_processes(request(Ends), 2)


def test_an_error_of_the_runner_comes_through() -> None:
    asked = request(missing_release)
    with pytest.raises(LookupError, match="no such release"):
        run_in_processes(asked, 2)


def missing_release(version: str, arch: str) -> Any:
    raise LookupError("no such release")


WAITS = """
import signal, sys, torch
sys.path.insert(0, "tests")
from simulated_fakes import Slow, release
from dsattn.verify import pool
from dsattn.cli import main
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(2)
    pool.LEAST = 1
    from dsattn.verify import simulated
    simulated.chosen = lambda *_: [release(make=Slow)]
    sys.exit(main(["verify", "--cudnn-version", "1.29.1", "--case", "k-1", "--case", "k-odd"]))
"""


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.1)
    return False


def lives(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    if status.parent.parent.exists() and Path("/proc/self").exists():
        return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@posix
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_is_left_when_it_is_stopped(number: signal.Signals, code: int, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), PIDS: str(tmp_path), "PYTHONWARNINGS": "ignore"}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        pids: list[int] = []

        def started() -> bool:
            pids[:] = [int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()]
            return len(pids) == 2

        assert within(100, started)
        assert done.pid not in pids
        assert all(map(lives, pids))
        if number is signal.SIGINT:
            # A terminal sends it to all of them.
            os.killpg(done.pid, number)
        else:
            done.send_signal(number)
        out, err = done.communicate(timeout=30)
        assert (done.returncode, out, err) == (code, "", "")
        assert within(10, lambda: not any(map(lives, pids)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(done.pid, signal.SIGKILL)


def test_processes_are_for_many_checks_of_simulated_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    many = request(cases=("*",)).tasks()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    assert len(many) >= pool.LEAST
    assert processes_for(many) == 6
    assert processes_for(many[: pool.LEAST - 1]) == 1
    real, _ = suites.plan(["quick"], backends=["torch"], device=CPU)
    assert len(real) >= pool.LEAST
    assert processes_for(real) == 1, "a real backend runs as a user's calls do"
    subject = many[0].subject
    assert processes_for(tasks([subject], [release()] * 100, CPU, ["bf16"])) == 1, "one subject is not cut"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert processes_for(many) == 1
