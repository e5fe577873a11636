"""`verify --inputs` and `--dump`: captured calls are judged like any case, and a red result can be taken elsewhere."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import random_tensors
from torch import Tensor

import dsattn
from dsattn import BadInput, CausalLayout, Segment
from dsattn.backends import TorchBackend
from dsattn.cli import main
from dsattn.spec.captured import CapturedCall, read, write
from dsattn.verify import captured
from dsattn.verify.checks import CHECKS
from dsattn.verify.run import run, tasks

# What is counted and broken here is the backend torch alone.
pytestmark = pytest.mark.usefixtures("on_torch")

LAYOUT = CausalLayout.packed([0, 3, 12], num_q=14, num_k=13)
MANY = CausalLayout.packed([0, 90, 91, 91, 570], num_q=600, num_k=570)
CPU = torch.device("cpu")


@pytest.fixture
def wrong_dense(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The torch backend with its dense attention twice as large; `undo` puts it right."""
    right = TorchBackend.dense_attention
    monkeypatch.setattr(TorchBackend, "dense_attention", lambda *a: (right(*a)[0] * 2, right(*a)[1]))
    return monkeypatch


def call(
    dtype: torch.dtype = torch.float32,
    layout: CausalLayout = LAYOUT,
    index_dtype: torch.dtype | None = None,
    **changes: Any,
) -> CapturedCall:
    x, index = random_tensors(layout, dtype=dtype), random_tensors(layout, dtype=index_dtype or dtype)
    fields: dict[str, Any] = dict(
        zip(("index_q", "index_k", "weights", "q", "kv"), (*index.index(), x.q, x.kv), strict=True)
    )
    fields |= {"layout": layout, "top_k": 3, "value_dim": 10, "softmax_scale": 0.3, "scale": 0.2}
    return CapturedCall(**(fields | changes))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two captured calls, fp32 and bf16."""
    path = tmp_path / "steps.safetensors"
    sink, mask = torch.linspace(-1, 1, 4), torch.arange(14) % 3 > 0
    with dsattn.capture(path, steps=2):
        for dtype in (torch.float32, torch.bfloat16):
            x = random_tensors(LAYOUT, dtype=dtype)
            options: dict[str, Any] = {"top_k": 3, "value_dim": 10, "softmax_scale": 0.3, "scale": 0.2, "sink": sink}
            dsattn.dsa_attention(*x.dsa(), LAYOUT, **options, loss="selected", row_mask=mask)
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["verify", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def commands(out: str, word: str) -> list[list[str]]:
    """The command lines that a report says after a word, as words after `verify`."""
    lines = [line.partition(": ")[2] for line in out.splitlines() if line.startswith(f"  {word}: ")]
    assert all(line.startswith("python -m dsattn verify ") for line in lines)
    return [shlex.split(line)[4:] for line in lines]


def test_captured_calls_are_judged_in_their_own_dtypes(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, page = tmp_path / "r.json", tmp_path / "r.html"
    code, out, err = said(capsys, "--inputs", file, "--device", "cpu", "--json", data, "--html", page)
    assert (code, err) == (0, "")
    assert "PASS: 16 checks hold" in out
    (line,) = [line for line in out.splitlines() if line.startswith("steps[1]")]
    assert line.split()[-4:] == ["14", "13", "3", "14"]
    records = [r for r in json.loads(data.read_text())["records"] if r["verdict"] != "not run"]
    assert {(r["suite"], r["case"], r["dtype"]) for r in records} == {
        ("inputs", "steps[0]", "fp32"),
        ("inputs", "steps[1]", "bf16"),
    }
    assert {record["operator"] for record in records} == set(CHECKS)
    assert not {"inputs", "dumped"} & set(records[0])
    assert "steps[1]" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "checks"),
    [
        (["--case", "steps[1]/dense_attention"], "1 checks"),
        (["--case", "steps*", "--dtype", "fp64"], "16 checks"),
        (["--backend", "torch", "--case", "*/indexer_topk"], "2 checks"),
        (["--suite", "quick", "--case", "one-row/indexer_topk", "--case", "steps[0]/indexer_topk"], "3 checks"),
        (["--inputs", "FILE"], "16 checks"),
    ],
    ids=" ".join,
)
def test_inputs_and_other_options(
    arguments: list[str], checks: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(file) if word == "FILE" else word for word in arguments]
    code, out, _ = said(capsys, "--inputs", file, *arguments)
    assert code == 0
    assert f"PASS: {checks} hold" in out


def test_list_names_the_calls(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "--inputs", file, "--list")
    assert code == 0
    assert [line.split()[:3] for line in out.splitlines()] == [
        ["inputs", f"steps[{i}]", "dsattn.capture:"] for i in range(2)
    ]


def test_wrong_usage_is_2_with_one_line(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other" / file.name
    other.parent.mkdir()
    other.write_bytes(file.read_bytes())
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"0" * 100)
    mixed = tmp_path / "mixed.safetensors"
    write(mixed, [call(torch.bfloat16, index_dtype=torch.float64)])
    for arguments, words in {
        ("--inputs", tmp_path / "absent"): "no such file",
        ("--inputs", bad): "cannot read",
        ("--inputs", file, "--inputs", other): "names that differ",
        ("--inputs", file, "--case", "steps[2]"): "steps[0]",
        ("--inputs", mixed): "pass --dtype",
        ("--inputs", file, "--dump", bad): "a folder that can be made",
        ("--self-test", "--inputs", file): "--inputs",
    }.items():
        code, out, err = said(capsys, *arguments)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert words in err
    assert said(capsys, "--inputs", mixed, "--dtype", "bf16", "--case", "*/indexer_scores")[0] == 0


def test_without_the_package_it_is_2(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for option, path in (("--inputs", file), ("--dump", tmp_path / "d")):
        code, out, err = said(capsys, option, path, "--case", "*")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "pip install safetensors" in err


def test_a_red_result_is_repeated_by_its_command(
    file: Path, wrong_dense: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = said(capsys, "--inputs", file, "--device", "cpu", "--case", "steps[1]")
    assert code == 1
    assert "FAIL: 2 of 8 checks failed" in out
    assert "inputs: --dump DIR would write them to a file" in out
    repeats = commands(out, "repeat")
    assert [words[:4] for words in repeats] == [
        ["--inputs", str(file), "--case", f"steps[1]/{name}"] for name in ("dense_attention", "dsa_attention:visible")
    ]
    for words in repeats:
        code, out, _ = said(capsys, *words)
        assert code == 1
        assert "FAIL: 1 of 1 checks failed" in out
    wrong_dense.undo()
    assert said(capsys, *repeats[0])[0] == 0


@pytest.mark.parametrize("source", ["inputs", "quick"])
def test_dumped_inputs_repeat_a_red_result(
    source: str, file: Path, tmp_path: Path, wrong_dense: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "dumps"
    asked = ["--inputs", file, "--case", "steps[1]"] if source == "inputs" else ["--case", "ratio-4-bshd"]
    code, out, _ = said(capsys, *asked, "--device", "cpu", "--dtype", "bf16", "--dump", folder)
    assert code == 1
    name = "inputs-steps[1]-bf16" if source == "inputs" else "quick-ratio-4-bshd-bf16"
    assert [path.name for path in folder.iterdir()] == [f"{name}.safetensors"], "one file for two failed checks"
    first, second = commands(out, "inputs")
    assert first == [
        *("--inputs", f"{folder / name}.safetensors", "--case", f"{name}[0]/dense_attention"),
        *("--backend", "torch", "--device", "cpu", "--dtype", "bf16"),
    ]
    assert len(commands(out, "repeat")) == 2
    for words in (first, second):
        code, out, _ = said(capsys, *words)
        assert code == 1
        assert "FAIL: 1 of 1 checks failed" in out
    wrong_dense.undo()
    assert said(capsys, *first)[0] == 0
    (dumped,) = read(folder / f"{name}.safetensors")
    if source == "inputs":
        original = read(file)[1]
        assert all(torch.equal(x, getattr(dumped, key)) for key, x in original.tensors().items())
        assert (dumped.layout, dumped.top_k, dumped.softmax_scale) == (original.layout, 3, 0.3)
    else:
        assert dumped.layout == CausalLayout.batched(2, 64, ratio=4)
        assert "ratio-4-bshd of suite quick" in dumped.source


def test_green_results_are_not_dumped(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--inputs", file, "--case", "steps[0]/indexer_topk", "--dump", tmp_path / "d")[0] == 0
    assert list((tmp_path / "d").iterdir()) == []


def test_a_failed_dump_loses_no_record(file: Path, tmp_path: Path, wrong_dense: pytest.MonkeyPatch) -> None:
    dump = captured.Dump(tmp_path / "d")
    dump.folder.rmdir()
    ((subject, _), _) = captured.subjects([file], None)
    records = list(run(tasks([subject], ["torch"], CPU, ["fp32"], dump)))
    failed = [record for record in records if record.verdict == "fail"]
    assert len(failed) == 2
    assert all("out: row 0" in r.reason and "could not be written" in r.reason and r.dumped is None for r in failed)


def test_inputs_that_a_kernel_spoiled_are_dumped_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiling(_: Any, a: Any, layout: Any) -> Any:
        a.q.zero_()
        raise ZeroDivisionError

    monkeypatch.setattr(TorchBackend, "dense_attention", spoiling)
    path, one = tmp_path / "x.safetensors", call()
    write(path, [one])
    ((subject, _),) = captured.subjects([path], None)
    todo = tasks([subject], ["torch"], CPU, ["fp32"], captured.Dump(tmp_path / "d"))
    (record,) = run(task for task in todo if task.operator == "dense_attention")
    assert record.traceback is not None
    assert record.dumped is not None
    assert torch.equal(read(record.dumped)[0].q, one.q)
    assert torch.equal(read(path)[0].q, one.q)


def test_what_a_case_takes_from_its_call(tmp_path: Path) -> None:
    x = call(torch.float16, sink=torch.ones(4), relu=False)
    write(tmp_path / "x", [x])
    ((subject, dtype),) = captured.subjects([tmp_path / "x"], None)
    case = subject.case
    assert (dtype, case.name, case.layout()) == (torch.float16, "x[0]", LAYOUT)
    assert (case.softmax_scale, case.scale, case.relu, case.top_k) == (0.3, 0.2, False, 3)
    sizes = case.index_heads, case.index_width, case.heads, case.key_width, case.value_width
    assert sizes == (3, 16, 4, 24, 10)
    made = subject.make_inputs(torch.float16)
    assert all(torch.equal(y, getattr(made, name)) for name, y in x.tensors().items())
    assert (made.d_out.dtype, tuple(made.d_out.shape)) == (torch.float16, (14, 4, 10))
    assert torch.equal(made.d_out, subject.make_inputs(torch.float16).d_out)
    other = subject.make_inputs(torch.float64)
    assert {y.dtype for y in (other.index_q, other.weights, other.q, other.kv)} == {torch.float64}
    assert other.sink is not None
    assert other.sink.dtype == torch.float64
    low = subject.make_inputs(torch.bfloat16)
    assert (low.weights.dtype, low.q.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(("index_dtype", "weights"), [(torch.float32, None), (torch.float16, torch.float32)])
def test_sides_of_two_dtypes(index_dtype: torch.dtype, weights: torch.dtype | None, tmp_path: Path) -> None:
    x = call(torch.bfloat16, index_dtype=index_dtype)
    if weights is not None:
        x = call(torch.bfloat16, index_dtype=index_dtype, weights=x.weights.to(weights))
    write(tmp_path / "x", [x])
    ((subject, dtype),) = captured.subjects([tmp_path / "x"], None)
    made = subject.make_inputs(dtype)
    assert (made.q.dtype, made.index_q.dtype) == (torch.bfloat16, index_dtype)
    records = list(run(tasks([subject], ["torch"], CPU, ["bf16"])))
    assert {record.verdict for record in records} == {"pass"}, [record.reason for record in records]


@pytest.mark.parametrize("sizes", [(0, 0), (0, 4), (3, 0)])
def test_calls_without_rows(sizes: tuple[int, int], tmp_path: Path) -> None:
    write(tmp_path / "x", [call(layout=CausalLayout.from_segments([], num_q=sizes[0], num_k=sizes[1]))])
    ((subject, _),) = captured.subjects([tmp_path / "x"], None)
    records = list(run(tasks([subject], ["torch"], CPU, ["fp32"])))
    assert {record.verdict for record in records} == {"pass"}, [record.reason for record in records]


def many(tmp_path: Path, mask: Tensor | None = None) -> Any:
    path = tmp_path / "many.safetensors"
    write(path, [call(layout=MANY, row_mask=mask)])
    ((subject, _),) = captured.subjects([path], None)
    return subject


def test_many_rows_are_judged_in_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = many(tmp_path)
    rows = subject.rows.tolist()
    assert len(set(rows)) == len(rows) == subject.facts["judged_rows"] == captured.JUDGED_ROWS
    assert rows == sorted(rows)
    assert {0, 89, 90, 91, 569} <= set(rows)
    assert max(rows) < 570, "padding comes last"
    x = subject.make_inputs(torch.float32)
    assert x.row_mask.nonzero().flatten().tolist() == rows
    assert (x.d_out != 0).flatten(1).any(-1).nonzero().flatten().tolist() == rows
    records = {record.operator: record for record in run(tasks([subject], ["torch"], CPU, ["fp32"]))}
    assert {record.verdict for record in records.values()} == {"pass"}, [r.reason for r in records.values()]
    right = TorchBackend.sparse_attention

    def wrong(self: Any, a: Any, topk: Any) -> Any:
        out, lse = right(self, a, topk)
        out[rows[100]] *= 1.001
        return out, lse

    monkeypatch.setattr(TorchBackend, "sparse_attention", wrong)
    todo = tasks([subject], ["torch"], CPU, ["fp32"], captured.Dump(tmp_path / "d"))
    (record,) = run(task for task in todo if task.operator == "sparse_attention")
    assert f"row {rows[100]} of the call" in record.reason
    # The dumped call is judged in the same rows.
    ((again, _),) = captured.subjects([Path(record.dumped or "")], None)
    assert again.rows is not None
    assert again.rows.tolist() == rows
    (record,) = run(task for task in tasks([again], ["torch"], CPU, ["fp32"]) if task.operator == "sparse_attention")
    assert f"row {rows[100]} of the call" in record.reason


def test_rows_that_count_come_first(tmp_path: Path) -> None:
    mask = torch.zeros(600, dtype=torch.bool)
    mask[100:200] = True
    rows = set(many(tmp_path, mask).rows.tolist())
    assert {0, 89, 90, 91, 569, *range(100, 200)} <= rows
    x = many(tmp_path, mask).make_inputs(torch.float32)
    assert x.row_mask.sum() == 100


def test_more_edges_than_rows(tmp_path: Path) -> None:
    layout = CausalLayout.from_segments([Segment(2 * i, 2, 0, 5, 3) for i in range(300)], num_q=600, num_k=5)
    write(tmp_path / "x", [call(layout=layout)])
    ((subject, _),) = captured.subjects([tmp_path / "x"], None)
    assert subject.facts["judged_rows"] == captured.JUDGED_ROWS
    assert subject.rows is not None
    assert len(subject.rows) == captured.JUDGED_ROWS


def test_a_table_that_is_too_large_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "TABLE_ELEMENTS", 14 * 13 - 1)
    write(tmp_path / "x", [call()])
    ((subject, _),) = captured.subjects([tmp_path / "x"], None)
    records = {record.operator: record for record in run(tasks([subject], ["torch"], CPU, ["fp32"]))}
    assert records["indexer_scores"].verdict == "not run"
    assert "14 x 13" in records["indexer_scores"].reason
    assert [r.verdict for name, r in records.items() if name != "indexer_scores"] == ["pass"] * 7


def test_two_files_of_one_name(tmp_path: Path) -> None:
    write(tmp_path / "x", [call()])
    same = tmp_path / "." / "x"
    assert len(captured.subjects([tmp_path / "x", same], None)) == 1
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / "x", [call()])
    with pytest.raises(BadInput, match="names that differ"):
        captured.subjects([tmp_path / "x", tmp_path / "d" / "x"], None)
