"""The page about `dsattn bench` names every option and work, and none that is gone."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

from dsattn.bench.works import MOST_FLOPS, WORKS
from dsattn.cli import main

PAGE = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def test_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    known = set(OPTION.findall(capsys.readouterr().out)) - {"--help"}
    assert {"--suite", "--json-lines"} <= known
    assert set(OPTION.findall(PAGE)) == known


def test_the_works() -> None:
    table = PAGE.partition("| work | what is timed |")[2].partition("\n\n")[0]
    cells = [cell for line in table.splitlines()[2:] for cell in line.split("|")[1].split(",")]
    assert [cell.strip() for cell in cells] == [*sorted(WORKS, key=[cell.strip() for cell in cells].index)]
    assert f"up to {MOST_FLOPS / 1e12:g} Tflop a call" in " ".join(PAGE.split())
