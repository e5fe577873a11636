"""The page: whole, self-contained, honest about what did not run, and that it shows which rows are wrong."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import browser
import pytest
import torch
from conftest import RunPython
from reports import ABSENT, GREEN, RED, WrongBatch, curve, judged, record, report
from torch import Tensor

from dsattn.verify.page import checked, page
from dsattn.verify.per_row import POINTS
from dsattn.verify.records import Record, Report

WRONG_BATCH = "40 of 120 query rows over budget: 40 to 79"


class Page(HTMLParser):
    """Every tag with its attributes, that every tag is closed, and the text."""

    VOID = ("meta", "br", "wbr")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), "an attribute is given twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


RIGHT = curve(wrong=0, runs=(), values=torch.linspace(0.0, 0.5, 20), faulty=torch.zeros(20, dtype=torch.bool))
MISSED = curve(measure="recall", values=torch.where(torch.arange(20) >= 10, 0.5, 1.0))
WITH_CURVES = [
    replace(GREEN[0], curves=(RIGHT,)),
    replace(GREEN[2], case="large", curves=(RIGHT,)),
    replace(RED[1], curves=(curve(), replace(RIGHT, axis="key row"))),
    replace(RED[3], curves=(MISSED,)),
    RED[2],
]
EVERYTHING = [*GREEN, *WITH_CURVES, *ABSENT]


@pytest.fixture(params=["matplotlib", "no matplotlib"])
def plotted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs a test with matplotlib and without it; whether it is there."""
    if request.param == "no matplotlib":
        for name in [*sys.modules, "matplotlib"]:
            if name.partition(".")[0] == "matplotlib":
                monkeypatch.setitem(sys.modules, name, None)
        return False
    pytest.importorskip("matplotlib", reason="not run: no matplotlib here")
    return True


@pytest.mark.parametrize("records", [GREEN, EVERYTHING, []], ids=["green", "red", "empty"])
def test_the_page_is_whole_and_needs_nothing_else(records: list[Record], plotted: bool) -> None:
    made = report(*records)
    source = page(made)
    parsed = Page(source)
    names = {name for _, attributes in parsed.tags for name in attributes}
    assert not {"src", "srcset", "xlink:href", "onclick", "onload", "xmlns"} & names
    assert not {"script", "link", "img", "iframe", "use", "image"} & {tag for tag, _ in parsed.tags}
    assert not any(word in source for word in ("http:", "https:", "url(", "@import", "//"))
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert {attributes["href"] for _, attributes in parsed.tags if "href" in attributes} == {f"#{id}" for id in ids}
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in parsed.tags
    policy = {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}
    assert ("meta", policy) in parsed.tags
    word, _, rest = made.summary.partition(": ")
    places = [parsed.text.rindex(word), parsed.text.rindex(rest), parsed.text.index("Environment")]
    assert places == sorted(places)
    for value in ("2.13.0", "2", "cpu: x; cuda:0: y"):
        assert value in parsed.text


@pytest.mark.parametrize("records", [GREEN, EVERYTHING, []], ids=["green", "red", "empty"])
def test_the_page_can_be_read_aloud(records: list[Record], plotted: bool) -> None:
    parsed = Page(page(report(*records)))
    assert parsed.all("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert all(attributes.get("scope") in ("col", "row") for attributes in parsed.all("th"))
    for picture in parsed.all("svg"):
        assert picture.get("aria-hidden") == "true" or (picture["role"] == "img" and picture["aria-label"])
    assert {attributes["class"] for attributes in parsed.all("header")} == {"pass" if records is GREEN else "fail"}


def test_the_page_shows_what_failed(plotted: bool) -> None:
    parsed = Page(page(report(*EVERYTHING)))
    for words in (
        "out: row 7: <wrong> & off",
        "10 of 20 query rows over budget: 10 to 19",
        "--case bad/dense_attention",
    ):
        assert words in parsed.text
    assert "10 of 20 query rows wrong: 10 to 19" in parsed.text
    assert "54.4 %" in parsed.text
    strip = [attributes for attributes in parsed.all("rect") if attributes.get("x") == "10"]
    assert [attributes["width"] for attributes in strip] == ["10", "10"]
    assert "d_kv: no gradient" in parsed.text
    assert "there was no result to compare row by row" in parsed.text


def test_a_dump_is_offered_with_its_command() -> None:
    failed = replace(RED[1], dumped="dumps/quick-bad-fp32.safetensors")
    text = Page(page(report(failed))).text
    assert failed.command() in text
    assert (failed.command_for_dump() or "-") in text


def test_what_did_not_run_is_never_a_pass() -> None:
    parsed = Page(page(report(*ABSENT)))
    assert "no check ran (2 unsupported, 1 not run)" in parsed.text
    assert "Nothing was checked." in parsed.text
    assert "unsupported: torch: fp64 [only] (2 checks)" in parsed.text
    assert "not run: gpu: no such device" in parsed.text
    assert {attributes.get("class") for attributes in parsed.all("td")} & {"pass", "fail"} == set()
    assert "✓" not in parsed.text
    assert "PASS" not in parsed.text


def test_one_sentence_says_what_was_checked() -> None:
    assert checked(GREEN) == (
        "2 operators of backend torch on cpu, forward and backward, on 3 cases of suites quick and real-text in fp32 "
        "and bf16: every result and gradient against a float64 oracle."
    )
    assert "of backends torch and other on cpu" in checked([*GREEN, replace(GREEN[0], backend="other"), *ABSENT])
    assert "on 1 case of suite quick in fp32:" in checked(GREEN[:1])


def test_nothing_in_a_record_becomes_markup(plotted: bool) -> None:
    bad = "<script>alert(1)</script>&\"'"
    failed = record(bad, "dense_attention", "fail", reason=bad, traceback=bad, backend=bad, curves=(curve(),))
    made = Report(environment={bad: bad}, records=[failed, replace(ABSENT[2], reason=bad)])
    parsed = Page(page(made))
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert parsed.text.count("<script>alert(1)</script>") >= 7


def test_the_same_records_give_the_same_page(plotted: bool) -> None:
    assert page(report(*EVERYTHING)) == page(report(*EVERYTHING))


def test_without_matplotlib_the_page_says_how_to_get_plots(plotted: bool) -> None:
    source = page(report(*EVERYTHING))
    assert ("pip install &#39;dsattn[plot]&#39;" in source) is not plotted
    assert ("<figure" in source) is plotted


def test_a_broken_matplotlib_is_told_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("numpy is too old")

    monkeypatch.setattr("dsattn.verify.page.import_module", broken)
    text = Page(page(report(*EVERYTHING))).text
    assert "matplotlib is installed here but cannot be imported: numpy is too old" in text
    assert "pip install" not in text


def test_plots_are_small_and_failures_come_first() -> None:
    plots = pytest.importorskip("dsattn.verify.plots", reason="not run: no matplotlib here").plots
    made = plots(EVERYTHING)
    assert [(plot.operator, plot.case, plot.fails) for plot in made] == [
        ("dense_attention", "bad", True),
        ("indexer_topk", "bad", True),
        ("sparse_attention", "small", False),
    ]
    assert [line.told for line in made[0].lines] == ["10 of 20 query rows over budget: 10 to 19"]
    svg = made[0].svg
    assert svg.count("<svg") == 1
    for word in ("share of the error budget, by query row", "share of the error budget, by key row", ">100 %<"):
        assert word in svg
    for word in ("http", "url(", "id=", "font-family", "metadata", "#0000", "e-0"):
        assert word not in svg
    rows = torch.arange(POINTS, device="cpu")
    long = curve(length=POINTS, judged=POINTS, rows=rows, faulty=rows % 2 > 0, values=rand(POINTS), starts=(1, 2, 3))
    curves = (replace(long, measure="recall"), long, replace(long, axis="key row"), replace(long, axis="head"))
    (large,) = plots(
        [record("x", "dsa_attention:selected", "fail", dtype, curves=curves) for dtype in ("fp32", "bf16")]
    )
    assert len(large.lines) == 2
    assert len(large.svg) < 40_000


def rand(count: int) -> Tensor:
    return 10 ** (torch.rand(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu") * 8 - 4)


def test_a_point_is_where_its_row_and_share_are() -> None:
    plots = pytest.importorskip("dsattn.verify.plots", reason="not run: no matplotlib here").plots
    values = torch.tensor([1e-9, 0.1, 1.0, 1e5, torch.inf])
    faulty = values > 1
    one = curve(length=5, judged=5, rows=torch.arange(5), values=values, faulty=faulty, starts=())
    (plot,) = plots([record("x", "dense_attention", "fail", curves=(one,))])
    points = {
        colour: [tuple(map(float, point)) for point in re.findall(r"M(\S+) (\S+)h0", path)]
        for path, colour in re.findall(
            r'<path d="([^"]*)" style="[^"]*stroke:var\(--(\w+)\);[^"]*linecap:round', plot.svg
        )
    }
    (x0, y0), (x1, y1), (x2, y2) = points["fp32"]
    (x3, y3), (x4, y4) = points["bad"]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert x4 - x3 == pytest.approx(x1 - x0, abs=0.2)
    # From the floor of 0.1 % to 10 % are two decades, from there to 100 % one.
    assert y0 - y1 == pytest.approx(2 * (y1 - y2), abs=0.2)
    assert y2 - y3 == pytest.approx(5 * (y1 - y2), abs=0.4)
    assert y4 < y3
    assert ">∞<" in plot.svg


def test_more_plots_than_fit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="not run: no matplotlib here")
    monkeypatch.setattr("dsattn.verify.plots.MOST", 1)
    source = page(report(*EVERYTHING))
    assert source.count("<figure") == 1
    assert "2 more are left out." in source


@pytest.fixture(scope="module")
def wrong_batch() -> dict[str, Record]:
    return judged(WrongBatch())


def test_a_red_run_makes_a_page_that_shows_it(wrong_batch: dict[str, Record], plotted: bool) -> None:
    source = page(report(*wrong_batch.values()))
    parsed = Page(source)
    # Two operators attend to all visible keys; the plot of each says the same as its failure.
    assert parsed.text.count(WRONG_BATCH) == (4 if plotted else 2)
    assert '<rect x="40" width="40" height="1"/>' in source
    assert "M40 0v1M80 0v1" in source
    for one in wrong_batch.values():
        assert one.verdict == "pass" or one.command() in parsed.text
    assert len(source) < 200_000


def test_nothing_of_the_page_is_loaded_without_it(run_python: RunPython) -> None:
    code = """
import sys
from dsattn.cli import main
code = main(["verify", "--case", "one-row", "--device", "cpu", "--dtype", "fp32"])
print(code, [name for name in ("matplotlib", "jinja2", "dsattn.verify.page") if name in sys.modules])
"""
    assert run_python("-W", "ignore", "-c", code).stdout.endswith("0 []\n")


def complaints(found: browser.Browser) -> list[str]:
    """What the browser logged, and what it wanted to load beside the page itself."""
    said = []
    for event in found.events:
        method, told = event.get("method"), event.get("params", {})
        if method in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            said.append(f"{method}: {json.dumps(told)[:300]}")
        if method == "Network.requestWillBeSent" and told.get("type") != "Document":
            said.append(f"request: {told['request']['url']}")
    return said


def overflow(found: browser.Browser) -> int:
    """By how many pixels the document is wider than its window."""
    return int(found.value("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.fixture(scope="module")
def chromium() -> Any:
    binary = browser.find()
    if binary is None:
        pytest.skip("not run: no Chromium here")
    with browser.Browser(binary) as found:
        yield found


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, False)])
def test_a_browser_shows_it_at_any_width(
    width: int, dark: bool, chromium: Any, tmp_path: Path, wrong_batch: dict[str, Record]
) -> None:
    made: Sequence[Record] = [*EVERYTHING, *wrong_batch.values()]
    file = tmp_path / "report.html"
    file.write_text(page(Report(environment={"flags": "x" * 300}, records=made)), encoding="utf-8")
    chromium.show(file, width=width, dark=dark)
    assert overflow(chromium) == 0
    assert chromium.value("document.querySelectorAll('details').forEach(d => d.open = true)") is None
    assert overflow(chromium) == 0
    assert chromium.value("document.compatMode") == "CSS1Compat"
    background = chromium.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert complaints(chromium) == []


def test_a_bad_page_would_be_seen(chromium: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    meta = "<meta name=viewport content='width=device-width, initial-scale=1'>"
    bad = "<p style='width:900px'>x<img src='other.png'><script>console.error(1)</script>"
    file.write_text(f"<!doctype html>{meta}{bad}", encoding="utf-8")
    chromium.show(file, width=390)
    assert overflow(chromium) > 400
    found = "\n".join(complaints(chromium))
    assert "request: file:" in found
    assert "Runtime.consoleAPICalled" in found
