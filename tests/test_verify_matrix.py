"""Simulated releases in the report: the matrix, which releases a reason concerns, what torch ran, the page."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import browser
import pytest
from reports import ENVIRONMENT, GREEN, attention, curve, record, report
from rich.console import Console
from test_verify_page import Page, complaints, overflow

from dsattn.verify import matrix, summary
from dsattn.verify import report as terminal
from dsattn.verify.page import checked, page
from dsattn.verify.records import Record, Report, Verdict

ARCHS, RELEASES = ("sm90", "sm100"), ("1.25.0", "1.26.0", "1.29.1", "1.30.0", "1.31.0", "1.32.0")
OPERATORS = ("indexer_scores", "indexer_topk", "sparse_attention", "dense_attention")
OPERATORS += ("indexer_loss:selected", "indexer_loss:visible", "dsa_attention:selected", "dsa_attention:visible")


def simulated(release: str, arch: str, operator: str, verdict: Any = "pass", **changes: Any) -> Record:
    fields: dict[str, Any] = {"backend": "cudnn", "dtype": "bf16", "simulated": True, "case": "small"}
    return record(operator=operator, verdict=verdict, **{**fields, "release": release, "arch": arch, **changes})


def run() -> list[Record]:
    """Two cases: dense attention refused, the loss on one architecture until 1.29.1, one case wrong in 1.26.0."""
    made = []
    for case in ("small", "large"):
        for arch in ARCHS:
            for release in RELEASES:
                for operator in OPERATORS:
                    options: dict[str, Any] = {"case": case, "metrics": attention(1e-3, 0.4)}
                    if operator == "dense_attention":
                        options = {"case": case, "verdict": "unsupported", "reason": f"release {release} has none"}
                    elif operator == "indexer_loss:selected" and arch == "sm90" and RELEASES.index(release) <= 2:
                        options = {"case": case, "verdict": "unsupported", "reason": "a race"}
                    elif operator == "indexer_topk" and release == "1.26.0" and (case, arch) == ("large", "sm100"):
                        options = {
                            "case": case,
                            "verdict": "fail",
                            "reason": "row 3: <ids> differ",
                            "curves": (curve(),),
                        }
                    elif operator == "sparse_attention" and arch == "sm90":
                        options["metrics"] = {**options["metrics"], "by_torch": ["sparse_attention forward"]}
                    made.append(simulated(release, arch, operator, **options))
    return made


RUN = run()
RIGHT = [one for one in RUN if one.verdict != "fail"]
SAME = "1.29.1 stands for 1.29.0 too: the same contract"


def made(*records: Record) -> Report:
    return Report(environment={**ENVIRONMENT, "releases": [SAME]}, records=records)


def shown(given: Report, width: int = 120, **options: Any) -> str:
    out = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    terminal.show(given, out, **options)
    return out.file.getvalue()  # pyrefly: ignore[missing-attribute]


def told(found: matrix.Matrix, release: str, operator: str) -> list[tuple[str, Verdict]]:
    (row,) = [row for row in found.rows if row.release == release]
    return row.cells[found.operators.index(operator)].told


def test_a_matrix_for_each_architecture() -> None:
    sm90, sm100 = matrix.matrices([*GREEN, *RUN])
    assert [(found.backend, found.arch) for found in (sm90, sm100)] == [("cudnn", "sm90"), ("cudnn", "sm100")]
    assert sm90.operators == list(OPERATORS)
    assert [row.release for row in sm90.rows] == list(RELEASES)
    assert told(sm90, "1.26.0", "indexer_topk") == [("2 / 2", "pass")]
    assert told(sm100, "1.26.0", "indexer_topk") == [("fail 1", "fail")]
    assert told(sm90, "1.26.0", "indexer_loss:selected") == [("2 unsupported", "unsupported")]
    assert told(sm90, "1.30.0", "indexer_loss:selected") == [("2 / 2", "pass")]
    partly = [simulated("1.30.0", "sm90", "indexer_topk", verdict) for verdict in ("pass", "unsupported", "not run")]
    (found,) = matrix.matrices(partly)
    words = [("1 / 1", "pass"), ("1 unsupported", "unsupported"), ("1 not run", "not run")]
    assert told(found, "1.30.0", "indexer_topk") == words


def test_real_runs_have_no_matrix_and_simulated_ones_no_table() -> None:
    assert matrix.matrices(GREEN) == []
    assert summary.tables(RUN) == []
    assert [table.title for table in summary.tables([*GREEN, *RUN])] == ["torch on cpu"]
    every = [table.title for table in summary.tables(RUN, every=True)]
    assert every == [f"cudnn {release} on a simulated {arch}" for arch in ARCHS for release in RELEASES]


@pytest.mark.parametrize(
    ("some", "words"),
    [
        ({}, ""),
        ({"b": ["1", "2", "3"], "a": ["3", "2", "1"]}, "all releases"),
        ({"a": ["1", "2", "3"]}, "a all"),
        ({"a": ["2"], "b": ["1", "2", "3"]}, "a 2, b all"),
        ({"a": ["1", "2"]}, "a 1 to 2"),
        ({"a": ["1", "3"]}, "a 1 and 3"),
    ],
)
def test_releases_in_words(some: dict[str, list[str]], words: str) -> None:
    assert matrix.where(some, {"a": ["1", "2", "3"], "b": ["1", "2", "3"]}) == words


def test_a_reason_says_which_releases_it_concerns() -> None:
    absent = record("", "", "not run", backend="gpu", reason="no such device")
    assert summary.unsupported([*RUN, absent]) == [
        ("unsupported: cudnn: the release has none [all releases]", 24),
        ("unsupported: cudnn: a race [sm90 1.25.0 to 1.29.1]", 6),
        ("not run: gpu: no such device", 1),
    ]


def test_what_torch_ran_is_told() -> None:
    text = "torch ran the sparse_attention forward, which cudnn does not have here"
    assert summary.by_torch([*GREEN, *RUN]) == [(f"{text} [sm90 all]", 12)]
    assert summary.by_torch(GREEN) == []
    real = record("small", "sparse_attention", backend="cudnn", metrics={"by_torch": ["sparse_attention forward"]})
    assert summary.by_torch([real]) == [(text, 1)]
    assert f"{text} [sm90 all] (12 checks)" in " ".join(shown(made(*RIGHT)).split())
    assert f"{text} [sm90 all] (12 checks)" in Page(page(made(*RIGHT))).text


def test_the_terminal_shows_the_matrix() -> None:
    text = shown(made(*RUN))
    assert "backend cudnn, releases simulated on sm100\n" in text
    cells = "fail 1|2 / 2|2 unsup.|2 / 2|2 / 2|2 / 2|2 / 2"
    assert f"1.26.0|2 / 2|{cells}" in [re.sub(" {2,}", "|", line.strip()) for line in text.splitlines()]
    assert SAME in text
    assert "unsupported: cudnn: a race [sm90 1.25.0 to 1.29.1] (6 checks)" in text
    assert "FAIL large, indexer_topk, bf16, cudnn on a simulated 1.26.0 for sm100\n" in text
    command = "--suite quick --case large/indexer_topk --cudnn-version 1.26.0 --arch sm100 --dtype bf16"
    assert f"repeat: python -m dsattn verify {command}\n" in text
    assert "FAIL: 1 of 162 checks failed (30 unsupported)" in text
    assert "FAIL" not in shown(made(*RIGHT))


def test_failures_of_several_releases_are_one_with_a_count() -> None:
    wrong = [simulated(release, "sm90", "indexer_topk", "fail", reason="row 3") for release in RELEASES[:3]]
    text = shown(made(*wrong, *(simulated(release, "sm90", "indexer_topk") for release in RELEASES[3:])))
    assert text.count("FAIL small") == 1
    assert "row 3  (and 2 other cases; they concern sm90 1.25.0 to 1.29.1)" in text
    assert shown(made(*wrong), verbose=True).count("FAIL small") == 3


def test_verbose_shows_every_check() -> None:
    text = shown(made(*RUN), verbose=True)
    assert "backend cudnn 1.26.0 on a simulated sm100" in text
    assert sum(line.startswith(("small", "large")) for line in text.splitlines()) == len(RUN)


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
def test_no_matrix_is_wider_than_the_terminal(width: int) -> None:
    text = shown(made(*RIGHT), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert ("unsup.\n" in text or "unsup. " in text) is (120 <= width < 160)
    assert text.count("dsa_") == 4
    for line in text.splitlines():
        if line.startswith("1.25.0"):
            assert line.count("2 / 2") in ((2, 3, 4) if width < 120 else (6, 7))


def test_dtypes_have_rows_of_their_own() -> None:
    both = [simulated("1.30.0", "sm90", "indexer_topk", dtype=dtype) for dtype in ("bf16", "fp16")]
    (found,) = matrix.matrices(both)
    assert [(row.release, row.dtype) for row in found.rows] == [("1.30.0", "bf16"), ("1.30.0", "fp16")]
    assert "fp16" in shown(made(*both))
    assert "bf16" not in shown(made(*both[:1]))


def test_json_has_the_releases() -> None:
    found = json.loads(made(*RUN).as_json())
    assert found["environment"]["releases"] == [SAME]
    assert {(one["simulated"], one["arch"]) for one in found["records"]} == {(True, "sm90"), (True, "sm100")}
    assert {one["release"] for one in found["records"]} == set(RELEASES)


def test_one_sentence_says_what_was_simulated() -> None:
    assert checked(RIGHT).startswith(
        "5 operators of backend cudnn on the simulated releases 1.25.0, 1.26.0, 1.29.1, 1.30.0, 1.31.0 and 1.32.0 for "
        "sm90 and sm100, forward and backward, on 2 cases of suite quick in bf16:"
    )
    assert "on cpu and the simulated release 1.25.0 for sm90," in checked([*GREEN, RIGHT[0]])


def test_the_page_shows_the_matrix() -> None:
    parsed = Page(page(made(*GREEN, *RUN)))
    assert "Backend cudnn, releases simulated on sm90" in parsed.text
    assert "✗ fail 1" in parsed.text
    assert "large, release 1.26.0: row 3: <ids> differ" in parsed.text
    assert "--cudnn-version 1.26.0 --arch sm100" in parsed.text
    assert "unsupported: cudnn: a race [sm90 1.25.0 to 1.29.1] (6 checks)" in parsed.text
    assert SAME in parsed.text
    assert f"{len(RUN)} checks of simulated releases are counted above" in parsed.text
    assert all(attributes.get("scope") in ("col", "row") for attributes in parsed.all("th"))
    assert "fail" not in {attributes.get("class") for attributes in Page(page(made(*RIGHT))).all("span")}
    assert "simulated" not in Page(page(report(*GREEN))).text


def test_the_page_says_why_green_releases_have_no_plot() -> None:
    assert "of simulated releases only checks that fail keep them" in Page(page(made(*RIGHT))).text
    plots = pytest.importorskip("dsattn.verify.plots", reason="not run: no matplotlib here").plots
    (plot,) = plots(RUN)
    assert (plot.operator, plot.where, plot.fails) == ("indexer_topk", "a simulated 1.26.0 for sm100", True)
    other = simulated("1.25.0", "sm100", "indexer_topk", "fail", case="large", curves=(curve(),))
    (plot,) = plots([*RUN, other])
    assert len(plot.lines) == 1, "another release is another call"


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_matrix_at_any_width(width: int, tmp_path: Path) -> None:
    binary = browser.find()
    if binary is None:
        pytest.skip("not run: no Chromium here")
    file = tmp_path / "report.html"
    file.write_text(page(made(*GREEN, *RUN)), encoding="utf-8")
    with browser.Browser(binary) as chromium:
        chromium.show(file, width=width)
        assert overflow(chromium) == 0
        assert complaints(chromium) == []
