"""Suite real-text: which files become documents, what the tables make of them, and which rows are judged."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from dsattn.backends import TorchBackend
from dsattn.errors import BadInput
from dsattn.verify import real_text
from dsattn.verify.run import run, tasks


def library(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    """Makes `folder` the standard library, with these files."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})


FILES = {
    "b/__init__.py": b"",
    "b/long.py": b"x" * 65,
    "b/one.py": b"y" * 60,
    "B.py": b"z" * 50,
    "a.txt": b"no" * 10,
    "site-packages/p.py": b"not ours",
    "b/site-packages/p.py": b"nor this",
    "c.py": b"w" * 30,
    "d.py": b"fits, but c does not",
}


def test_documents_are_whole_files_in_path_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path, monkeypatch, FILES)
    text = real_text.read_text(128, 8)
    # Capitals sort first; the empty file is no document, the long one is over t / 2, c ends it.
    assert text.data == b"z" * 50 + b"y" * 60
    assert text.cu_seqlens == (0, 50, 110)
    assert (text.rows, text.asked) == (128, 128)
    assert text.share == (42 + 52) / 110
    assert text.edges() == [0, 49, 50, 109]


def test_rows_are_doubled_until_half_of_them_see_more_than_k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path, monkeypatch, {"a.py": b"a" * 10, "b.py": b"b" * 15, "c.py": b"c" * 100})
    text = real_text.read_text(32, 12)
    assert (text.rows, text.asked, len(text.data)) == (256, 32, 125)
    assert text.facts() == {
        "t": 256,
        "documents": 3,
        "document_rows": 125,
        "top_k": 12,
        "share_over_k": (3 + 88) / 125,
        "t_asked": 32,
    }


def test_too_little_text_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path, monkeypatch, {"a.py": b"a" * 10})
    with pytest.raises(BadInput, match="1 Python files"):
        real_text.read_text(32, 12)


def test_this_python_has_enough_text() -> None:
    text = real_text.read_text(512, 64)
    assert text.share >= 0.5
    assert len(text.cu_seqlens) > 2
    lengths = [end - begin for begin, end in zip(text.cu_seqlens, text.cu_seqlens[1:], strict=False)]
    assert min(lengths) > 0
    assert max(lengths) <= text.rows / 2
    assert len(text.data) <= text.rows


def test_equal_bytes_give_equal_keys_on_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path, monkeypatch, {"a.py": b"abcab" * 4, "b.py": b"ba" * 2})
    for subject in real_text.subjects(rows=48, top_k=5):
        sizes = (subject.case.heads, subject.case.index_heads, subject.case.index_width)
        assert sizes == {"d": (128, 64, 128), "g": (64, 32, 128)}[subject.case.name[0]]
        assert (subject.case.key_width, subject.case.value_width) == (576, 512)
        x, exact = subject.make_inputs(torch.bfloat16), subject.make_inputs(torch.float64)
        for name in ("index_q", "index_k", "weights", "q", "kv", "d_out"):
            value = getattr(exact, name)
            assert torch.equal(value * 8, (value * 8).round()), name
            assert torch.equal(getattr(x, name).double(), value), name
        for name in ("index_k", "kv", "q"):
            rows = getattr(exact, name)
            assert torch.equal(rows[0], rows[3]), "two a"
            assert torch.equal(rows[1], rows[20]), "b in both documents"
            assert not torch.equal(rows[0], rows[1]), "a and b"
        # Two runs make the same numbers.
        assert torch.equal(subject.make_inputs(torch.float64).q, exact.q)


def test_sampled_rows_hold_all_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path, monkeypatch, {"a.py": b"abcab" * 10, "b.py": b"ba" * 20})
    subject = real_text.subjects(rows=128, top_k=5, sampled=10)[1]
    assert subject.rows is not None
    rows = subject.rows.tolist()
    assert len(rows) == len(set(rows)) == 10
    assert rows == sorted(rows)
    assert {0, 49, 50, 89} <= set(rows)
    assert max(rows) < 90
    assert subject.facts["judged_rows"] == 10
    x = subject.make_inputs(torch.float32)
    assert x.row_mask is not None
    assert x.row_mask.nonzero().flatten().tolist() == rows
    assert (x.d_out != 0).flatten(1).any(-1).nonzero().flatten().tolist() == rows


@pytest.mark.parametrize("count", [None, 12])
def test_glm_text_is_green(count: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path, monkeypatch, {"a.py": b"def f(x):\n    return x\n", "b.py": b"import os\n"})
    subject = real_text.subjects(rows=64, top_k=7, sampled=count)[1]
    records = list(run(tasks([subject], [TorchBackend()], torch.device("cpu"), ["fp32"])))
    assert {record.verdict for record in records} == {"pass"}, [record.reason for record in records]
    assert len(records) == 8
    topk = next(record for record in records if record.operator == "indexer_topk")
    assert topk.metrics["rows_with_boundary_ties"] > 0
    assert topk.metrics["documents"] == 2
