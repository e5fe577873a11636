"""Suites with tables of their own: what is run for which releases, and what the command shows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from test_cli import said

from dsattn.verify import megatron_suite, own_suites
from dsattn.verify.records import OWN_TABLES, Record

MEGATRON = ["verify", "--suite", "megatron"]


def row(**changes: Any) -> Record:
    """A check of the suite megatron."""
    fields: dict[str, Any] = {"suite": "megatron", "case": "documents-cp2-rank0", "operator": "indexer_topk"}
    fields |= {"backend": "cudnn", "device": "cpu", "dtype": "bf16", "verdict": "pass", "simulated": True}
    fields |= {"metrics": {"recall_mean": 0.579, "recall_min": 0.039, "megatron": "0.19.2"}, "arch": "sm100"}
    return Record(**{**fields, **changes})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[str], dict[str, Any]]]:
    """What the suite was asked for; Megatron is not run."""
    found: list[tuple[Sequence[str], dict[str, Any]]] = []

    def run(releases: Sequence[str], version: str | None, advance: Any, **options: Any) -> list[Record]:
        assert version is None
        found.append((tuple(releases), options))
        return [row(release=release) for release in releases]

    monkeypatch.setattr(megatron_suite, "run", run)
    return found


def test_every_suite_with_tables_of_its_own_is_known() -> None:
    assert set(own_suites.SUITES) == set(OWN_TABLES)


def test_megatron_runs_on_its_own_releases_or_on_those_named(asked: list[Any], capsys: Any) -> None:
    code, out, _ = said(capsys, *MEGATRON)
    assert code == 0
    assert asked == [(megatron_suite.RELEASES, {"arch": "sm100"})]
    assert "0.039" in out
    del asked[:]
    assert said(capsys, *MEGATRON, "--cudnn-version", "1.31.0", "--arch", "sm90")[0] == 0
    assert asked == [(("1.31.0",), {"arch": "sm90"})]


def test_megatron_runs_on_the_real_frontend_where_there_is_one(
    asked: list[Any], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_suites, "_real", lambda: True)
    own_suites.run(["megatron"], {"sm100": []}, lambda *_: None)
    own_suites.run(["megatron"], {"sm100": ["1.31.0"]}, lambda *_: None)
    assert asked == [(megatron_suite.RELEASES, {"device": "cuda"}), (("1.31.0",), {"arch": "sm100"})]


def test_a_red_row_is_exit_1(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    wrong = row(verdict="fail", reason="recall 0.9", release="1.31.0", caller="dsattn")
    monkeypatch.setattr(megatron_suite, "run", lambda *_, **__: [wrong])
    code, out, _ = said(capsys, *MEGATRON)
    assert code == 1
    assert "repeat: python -m dsattn verify --suite megatron --cudnn-version 1.31.0 --arch sm100\n" in out


def test_the_list_has_its_cases(capsys: Any) -> None:
    code, out, _ = said(capsys, *MEGATRON, "--list")
    assert code == 0
    assert "loss-b3" in out
    assert "bshd-b3" not in out


def test_options_of_other_suites_are_refused(capsys: Any) -> None:
    code, _, err = said(capsys, *MEGATRON, "--dtype", "fp32")
    assert code == 2
    assert "--suite megatron" in err
