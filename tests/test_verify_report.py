"""The report: what the terminal says of green, red and absent checks."""

from __future__ import annotations

import io
from typing import Any

import pytest
from reports import ABSENT, GREEN, RED, SELECTION, TEXT, attention, record, report
from rich.console import Console

from dsattn.verify import report as terminal
from dsattn.verify import summary
from dsattn.verify.records import Record, Report


def shown(made: Report, width: int = 120, **options: Any) -> str:
    out = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    terminal.show(made, out, **options)
    return out.file.getvalue()  # pyrefly: ignore[missing-attribute]


def row_of(records: list[Record], operator: str, dtype: str = "fp32") -> summary.Row:
    (table,) = summary.tables(records)
    (row,) = [row for row in table.rows if (row.operator, row.dtype) == (operator, dtype)]
    return row


def test_one_row_per_operator_and_dtype_with_the_worst_case() -> None:
    (table,) = summary.tables(GREEN)
    assert [(row.operator, row.dtype) for row in table.rows] == [
        ("sparse_attention", "fp32"),
        ("sparse_attention", "bf16"),
        ("indexer_topk", "fp32"),
    ]
    row = table.rows[0]
    assert (row.checks, row.verdict, row.recall) == ("2 / 2", "pass", "")
    assert row.errors == [("out", "3.0e-07"), ("d_kv", "1.0e-09")]
    assert row.worst == "50%: large, out, row 7, batch 2"
    assert (table.rows[2].recall, table.rows[2].regret) == ("1.000 / 1.000", "0")


def test_a_failure_is_named_before_what_came_near() -> None:
    row = row_of(RED, "dense_attention")
    assert (row.checks, row.verdict) == ("1 / 3", "fail")
    assert row.errors[0] == ("out", "not finite")
    assert row.worst == "wrong: bad, out, row 7, batch 2"
    for share, told in ((9.9, "990%"), (10480.9, "10,481 times"), (3.2e7, "3e+07 times")):
        far = record("bad", "dense_attention", "fail", metrics=attention(1e-7, share))
        assert row_of([far], "dense_attention").worst == f"{told}: bad, out, row 7, batch 2"
    topk = row_of(RED, "indexer_topk")
    assert (topk.recall, topk.regret, topk.worst) == ("0.900 / 0.250", "2.0e-02", "bad, row 3")


def test_refused_checks_are_no_passes() -> None:
    row = row_of(ABSENT, "indexer_loss:visible")
    assert (row.checks, row.verdict) == ("", "unsupported")
    assert summary.unsupported(ABSENT) == [
        ("unsupported: torch: fp64 [only]", 2),
        ("not run: gpu: no such device", 1),
    ]


def test_every_check_has_a_row_when_asked() -> None:
    (table,) = summary.tables(GREEN, every=True)
    assert [row.case for row in table.rows] == [one.case for one in GREEN]
    assert table.rows[0].worst == "20%: out, row 7, batch 2"


def test_backends_and_devices_have_tables_of_their_own() -> None:
    other = record("small", "indexer_topk", backend="other", metrics=SELECTION)
    assert [(table.backend, len(table.rows)) for table in summary.tables([*GREEN, other])] == [
        ("torch", 3),
        ("other", 1),
    ]


def test_terminal_shows_green() -> None:
    text = shown(report(*GREEN))
    assert "PASS: 5 checks hold" in text
    assert "FAIL" not in text
    assert "50%: large, out" in text
    (line,) = [line for line in text.splitlines() if line.split()[:1] == ["words"]]
    assert line.split() == ["words", "3", "421", "512", "64", "54.4%", "5", "of", "421"]


def test_terminal_shows_red_with_the_command_that_repeats_it() -> None:
    text = shown(report(*GREEN, *RED, *ABSENT))
    assert "FAIL: 3 of 9 checks failed (2 unsupported, 1 not run)" in text
    assert "out: row 7: <wrong> & off  (and 1 other cases)" in text
    command = (
        "python -m dsattn verify --suite quick --case bad/dense_attention --backend torch --device cpu --dtype fp32"
    )
    assert f"  repeat: {command}\n" in text
    assert "d_kv: no gradient" not in text
    assert "d_kv: no gradient" in shown(report(*RED), verbose=True)
    assert "unsupported: torch: fp64 [only] (2 checks)" in text
    assert "not run: gpu: no such device" in text


def test_a_long_command_is_never_folded() -> None:
    text = shown(report(*RED), width=60)
    assert "--case bad/dense_attention --backend torch --device cpu --dtype fp32\n" in text


def test_tracebacks_are_for_verbose() -> None:
    one = record("small", "indexer_topk", "fail", reason="KeyError: 1", traceback="Traceback: here")
    assert "Traceback" not in shown(report(one))
    assert "Traceback: here" in shown(report(one), verbose=True)


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    for verbose in (False, True):
        text = shown(report(*GREEN, *ABSENT), width=width, verbose=verbose)
        assert max(map(len, text.splitlines())) <= width


def test_doubled_rows_are_told() -> None:
    metrics = {**TEXT, **SELECTION, "t": 1024, "t_asked": 512, "judged_rows": 256}
    text = shown(report(record("words", "indexer_topk", metrics=metrics)))
    assert "1024 (from 512)" in text
    assert "5 of 256" in text
