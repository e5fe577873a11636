"""The page about `dsattn drift` names every option, kind of change and meaning, and none that is gone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from conftest import ROOT

from dsattn.cli import main
from dsattn.drift.findings import Effect
from dsattn.drift.watch import listed

PAGE = (ROOT / "docs" / "drift.md").read_text(encoding="utf-8")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def test_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drift", "--help"]) == 0
    known = set(OPTION.findall(capsys.readouterr().out)) - {"--help"}
    assert known == {"--package", "--watch", "--json"}
    assert set(OPTION.findall(PAGE)) == known


def test_the_meanings() -> None:
    table = PAGE.partition("What a line means for a caller")[2].partition("A line touches")[0]
    assert tuple(re.findall(r"^\| ([a-z ]+) \|", table, re.MULTILINE)) == get_args(Effect)


def test_the_file_of_calls_is_one(tmp_path: Path) -> None:
    place = tmp_path / "calls.toml"
    place.write_text(PAGE.split("```toml\n")[1].split("```")[0])
    assert [call.positional for call in listed(place)] == [3, 4, 6, 7]
