"""What a run leaves: its fields, files that are no records, tables in Markdown, and what the scripts make of them."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import Launch, bench, measurement, peer_work, small
from conftest import ROOT

from dsattn.bench import records, tables
from dsattn.bench.peak import PRODUCTS
from dsattn.bench.records import Row, Spread
from dsattn.bench.run import items
from dsattn.errors import BadInput

FIELDS = {
    "format", "suite", "work", "what", "runner", "peer", "dtype", "rows", "sizes", "flops", "verdict", "reason",
    "rounds", "wall", "cpu", "memory", "inputs", "gradients", "resident", "exact", "share", "peak", "times_wall",
    "times_cpu", "times_memory", "difference", "how", "environment",
}  # fmt: skip
WHERE = {"dsattn", "torch", "python", "os", "cpu", "cores", "threads", "devices", "date", "commit"}


@pytest.fixture(scope="module")
def cpu() -> list[Row]:
    return bench(Launch()).run(small("dense-16", "sparse-16", rows=[64, 128]))


@pytest.fixture(scope="module")
def peers() -> list[Row]:
    launch = Launch({"fast": [measurement(wall=50, cpu=99)], "torch": [measurement(cpu=3)]})
    return bench(launch).run(items([peer_work()], backends=["torch"]))


def test_a_line_has_every_field(cpu: list[Row], peers: list[Row]) -> None:
    for line in records.lines([*cpu, *peers], 2):
        found = json.loads(line)
        assert set(found) == FIELDS
        assert set(found["environment"]) == WHERE
        assert set(found["wall"]) == {"median", "least", "most"}
        assert found["environment"]["threads"] == 2


def test_rows_come_back_from_a_file(cpu: list[Row], peers: list[Row], tmp_path: Path) -> None:
    file = tmp_path / "b.jsonl"
    records.append(file, records.lines(cpu, 2))
    records.append(file, records.lines(peers, 2))
    assert [records.row_of(found) for found in records.read(file)] == [*cpu, *peers]


@pytest.mark.parametrize("text", ["no json", "[1]", '{"format": "dsattn-bench/0"}', '{"benchmark": "memory"}'])
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "b.jsonl"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"b\.jsonl"):
        records.read(file)
    with pytest.raises(BadInput, match="gone"):
        records.read(tmp_path / "gone")


def test_the_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = records.commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40
    # An installed package may stand in a checkout of something else.
    monkeypatch.setattr("dsattn.__file__", str(tmp_path / "lib" / "site-packages" / "dsattn" / "__init__.py"))
    assert records.commit() is None


def test_figures_as_they_are_told() -> None:
    assert tables.seconds(Spread(0.0123, 0.01, 0.02)) == "0.012 (0.010 .. 0.020)"
    assert tables.seconds(Spread(12.34, 9.87, 100.0)) == "12.3 (9.9 .. 100.0)"
    assert tables.mebibytes(Spread(3 << 30, 0, 0)) == "3,072"
    assert tables.share(Spread(0.906, 0, 1)) == "91%"
    assert tables.times(Spread(2.345, 0, 0)) == "2.35"
    assert tables.times(Spread(25.6, 0, 0)) == "26"
    assert tables.seconds(None) == tables.mebibytes(None) == tables.share(None) == tables.times(None) == ""


def test_a_table_in_markdown(cpu: list[Row], peers: list[Row]) -> None:
    head, rule, *lines = tables.markdown(cpu).splitlines()
    assert head.startswith("| work | tokens | dtype | what | wall s | CPU s |")
    assert rule.count("|") == head.count("|") == lines[0].count("|")
    assert len(lines) == 4
    assert tables.markdown(peers).splitlines()[-1].endswith("| 33 | 1.00 |")
    refused = replace(cpu[0], verdict="refused", reason="bshd-b3/dense_attention: out: " + "x" * 99, wall=None)
    assert "| refused: bshd-b3/dense_attention: out: ... |" in tables.markdown([refused])


def test_where_the_peak_is_from_is_told(cpu: list[Row]) -> None:
    assert "matrix peak, fp32, 2 threads: 10 GF/s before, 10 after (registers)" in tables.notes(cpu)
    poor = replace(cpu[0], peak={**cpu[0].peak, "source": PRODUCTS}, exact=False)
    notes = tables.notes([poor])
    assert any("since there is no compiler" in note for note in notes)
    assert any("cannot begin a peak anew" in note for note in notes)


def script(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return runpy.run_path(str(ROOT / "benchmarks" / name), run_name="script")


def test_the_tables_of_the_documents(
    cpu: list[Row], peers: list[Row], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = replace(cpu[0], wall=Spread(777.0, 777.0, 777.0))
    records.append(tmp_path / "bench-a.jsonl", records.lines([old, *cpu], 2))
    records.append(tmp_path / "bench-b.jsonl", records.lines(peers, 2))
    (tmp_path / "other.jsonl").write_text("{}")
    readme, page = tmp_path / "README.md", tmp_path / "bench.md"
    readme.write_text("a\n<!-- bench table -->\nold\n<!-- /bench table -->\nz\n")
    page.write_text("".join(f"<!-- bench-{x} table -->\nold\n<!-- /bench-{x} table -->\n" for x in ("cpu", "peers")))
    script("bench_tables.py", monkeypatch)["write_tables"](tmp_path, readme, page)
    text = readme.read_text()
    assert text.startswith("a\n<!-- bench table -->\n| ")
    assert text.endswith("<!-- /bench table -->\nz\n")
    assert "old" not in text
    assert "fastpack 1.2.3" in text
    assert "| share of matrix peak | tokens | sizes | torch fp32 |" in text
    share = cpu[1].share
    assert share is not None
    assert f"| dense-16 | 128 | h 16, 576/512 | {share.median:.0%} |" in text
    assert "777" not in page.read_text()
    assert page.read_text().count("| dense-16 |") == 2
    assert "fastpack 1.2.3" in page.read_text()


def test_blocks_are_replaced_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = script("blocks.py", monkeypatch)["replaced"]
    assert replaced("a <!-- x table -->1<!-- /x table --> b", "x", r"\1") == (
        "a <!-- x table -->\n\\1\n<!-- /x table --> b"
    )
    with pytest.raises(SystemExit, match="0 blocks"):
        replaced("a", "x", "2")


@pytest.mark.parametrize("name", ["readme_table.py", "frontend_tables.py", "support_table.py", "bench_tables.py"])
def test_the_scripts_can_be_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script(name, monkeypatch)["write"]
