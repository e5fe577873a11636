"""The report: what the terminal and the page say of green, red and absent checks."""

from __future__ import annotations

import io
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from dsattn.verify import report as terminal
from dsattn.verify import summary
from dsattn.verify.page import page
from dsattn.verify.records import Record, Report


def result(error: float | None, share: float | None, row: int | None = 7, batch: int | None = 2) -> dict[str, Any]:
    return {"relative_error": error, "share_of_budget": share, "worst_row": row, "worst_batch": batch}


def record(case: str, operator: str, verdict: Any = "pass", dtype: str = "fp32", **changes: Any) -> Record:
    fields: dict[str, Any] = {"suite": "quick", "backend": "torch", "device": "cpu", "dtype": dtype}
    fields |= {"case": case, "operator": operator, "verdict": verdict, **changes}
    return Record(**fields)


def attention(error: float | None, share: float | None) -> dict[str, Any]:
    return {"results": {"out": result(error, share), "d_kv": result(1e-9, 0.01)}}


SELECTION = {"recall_mean": 1.0, "recall_min": 1.0, "regret": 3e-16, "rows_with_boundary_ties": 5, "worst_row": 3}
MISSED = {**SELECTION, "recall_mean": 0.9, "recall_min": 0.25, "regret": 0.02}
TEXT = {"documents": 3, "document_rows": 421, "t": 512, "top_k": 64, "share_over_k": 0.544}

GREEN = [
    record("small", "sparse_attention", metrics=attention(1e-7, 0.2)),
    record("large", "sparse_attention", metrics=attention(3e-7, 0.5)),
    record("small", "sparse_attention", dtype="bf16", metrics=attention(2e-3, 0.4)),
    record("small", "indexer_topk", metrics=SELECTION),
    record("words", "indexer_topk", suite="real-text", metrics={**TEXT, **SELECTION}),
]
RED = [
    record("small", "dense_attention", metrics=attention(1e-7, 0.2)),
    record("bad", "dense_attention", "fail", reason="out: row 7: <wrong> & off", metrics=attention(None, None)),
    record("worse", "dense_attention", "fail", reason="d_kv: no gradient", metrics=attention(1e-7, 0.1)),
    record("bad", "indexer_topk", "fail", reason="row 3: ids differ", metrics=MISSED),
]
ABSENT = [
    record("small", "indexer_loss:visible", "unsupported", reason="fp64 [only]"),
    record("large", "indexer_loss:visible", "unsupported", reason="fp64 [only]"),
    record("", "", "not run", backend="gpu", reason="no such device"),
]
ENVIRONMENT = {"torch": "2.13.0", "cores": 2, "devices": ["cpu: x", "cuda:0: y"]}


def report(*records: Record) -> Report:
    return Report(environment=ENVIRONMENT, records=records)


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
    command = "dsattn verify --suite quick --case bad/dense_attention --backend torch --device cpu --dtype fp32"
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


class Page(HTMLParser):
    """Every tag with its attributes, that every tag is closed, and the text."""

    VOID = ("meta", "br")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("records", [GREEN, [*GREEN, *RED, *ABSENT], []], ids=["green", "red", "empty"])
def test_page_is_whole_and_needs_nothing_else(records: list[Record]) -> None:
    made = report(*records)
    source = page(made)
    parsed = Page(source)
    names = {name for _, attributes in parsed.tags for name in attributes}
    assert names <= {"lang", "charset", "name", "content", "class"}, "no src, no href, no script"
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parsed.tags}
    assert not any(word in source for word in ("http:", "https:", "url(", "@import", "//"))
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in parsed.tags
    assert made.summary in parsed.text
    assert parsed.text.index(made.summary) < parsed.text.index("Environment")
    for value in ("2.13.0", "2", "cpu: x; cuda:0: y"):
        assert value in parsed.text


def test_page_shows_what_failed() -> None:
    parsed = Page(page(report(*GREEN, *RED, *ABSENT)))
    assert "out: row 7: <wrong> & off" in parsed.text
    assert "--case bad/dense_attention --backend torch" in parsed.text
    assert "unsupported: torch: fp64 [only] (2 checks)" in parsed.text
    assert "54.4 %" in parsed.text
    assert "1 / 3" in parsed.text
