"""The file format of captured inputs, and `capture`: what is written is what was called, wrong files are refused."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from conftest import RunPython
from problems import random_tensors
from safetensors.torch import load_file, save_file
from test_imports import BLOCK
from torch import Tensor

from dsattn import BackendMissing, BadInput, CausalLayout, Segment
from dsattn.spec import captured
from dsattn.spec.captured import FORMAT, CapturedCall, read, write

LAYOUT = CausalLayout.from_segments([Segment(1, 5, 0, 4, -2), Segment(6, 4, 2, 9, 3)], num_q=12, num_k=13, ratio=2)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def call(dtype: torch.dtype = torch.float32, layout: CausalLayout = LAYOUT, **changes: Any) -> CapturedCall:
    x = random_tensors(layout, dtype=dtype)
    tensors = dict(zip(("index_q", "index_k", "weights", "q", "kv"), x.all(), strict=True))
    fields: dict[str, Any] = {
        **tensors,
        "layout": layout,
        "top_k": 3,
        "value_dim": 17,
        "softmax_scale": 0.1 + 0.2,
        "scale": -1.7e-9,
        "source": 'a "test"\n',
    }
    return CapturedCall(**{**fields, **changes})


def assert_same(one: CapturedCall, other: CapturedCall) -> None:
    assert one.tensors().keys() == other.tensors().keys()
    for name, x in one.tensors().items():
        y = other.tensors()[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        bits = BITS[x.element_size()]
        assert torch.equal(x.view(bits), y.view(bits)), name
    for name in ("layout", "top_k", "value_dim", "softmax_scale", "scale", "relu", "source"):
        assert getattr(one, name) == getattr(other, name), name
        assert type(getattr(one, name)) is type(getattr(other, name)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["bare", "sink-and-mask"])
def test_a_round_trip_is_bit_for_bit(dtype: torch.dtype, whole: bool, tmp_path: Path) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    more: dict[str, Any] = {}
    if whole:
        more |= {"sink": torch.randn(4).to(wide), "row_mask": torch.arange(12) % 3 > 0, "relu": False}
    one = call(dtype, weights=torch.randn(12, 3).to(torch.float32 if whole else dtype), **more)
    one.q[0, 0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-7])
    # Not contiguous, and a view of a larger buffer.
    one = replace(one, kv=torch.randn(24, 26).to(dtype).T[1:25, 11:24].T)
    write(tmp_path / "x.safetensors", [one])
    (again,) = read(tmp_path / "x.safetensors")
    assert_same(one, again)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_several_calls_and_empty_ones(tmp_path: Path) -> None:
    layouts = [LAYOUT, CausalLayout.from_segments([], num_q=0, num_k=0), CausalLayout.packed([0, 3], num_q=5)]
    calls = [call(dtype, layout) for dtype, layout in zip(DTYPES, [*layouts, LAYOUT], strict=True)] * 3
    write(tmp_path / "x.safetensors", calls)
    again = read(tmp_path / "x.safetensors")
    assert len(again) == 12
    for one, other in zip(calls, again, strict=True):
        assert_same(one, other)


def test_the_form_of_a_file(tmp_path: Path) -> None:
    one, two = call(), call(row_mask=torch.ones(12, dtype=torch.bool))
    values = {"segments": "[[1, 5, 0, 4, -2], [6, 4, 2, 9, 3]]", "num_q": "12", "num_k": "13", "ratio": "2"}
    values |= {"top_k": "3", "value_dim": "17", "softmax_scale": "0.30000000000000004", "scale": "-1.7e-09"}
    values |= {"relu": "true", "source": 'a "test"\n'}
    write(tmp_path / "one", [one])
    names = ["index_k", "index_q", "kv", "q", "weights"]
    assert contents(tmp_path / "one") == (names, {"format": "dsattn-inputs/1", **values})
    write(tmp_path / "two", [one, two])
    names = sorted([f"{i}.{name}" for i in range(2) for name in names] + ["1.row_mask"])
    found, metadata = contents(tmp_path / "two")
    assert found == names
    assert metadata.pop("format") == "dsattn-inputs/1"
    assert {key: json.loads(text) for key, text in metadata.items()} == {"0": values, "1": values}


def contents(path: Path) -> tuple[list[str], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        return sorted(file.keys()), file.metadata()


def test_one_call_in_the_form_of_several(tmp_path: Path) -> None:
    one = call()
    metadata = {"format": FORMAT, "0": json.dumps(one.metadata())}
    save_file({f"0.{name}": x for name, x in one.tensors().items()}, tmp_path / "x", metadata)
    assert_same(one, *read(tmp_path / "x"))


def test_a_source_may_be_left_out(tmp_path: Path) -> None:
    metadata = {"format": FORMAT, **call().metadata()}
    del metadata["source"]
    save_file(call().tensors(), tmp_path / "x", metadata)
    assert read(tmp_path / "x")[0].source == ""


Edit = Callable[[dict[str, Tensor], dict[str, str]], Any]


def entry(name: str, text: str) -> Edit:
    """Puts another metadata entry in its place."""
    return lambda _, metadata: metadata.update({name: text})


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    """Puts what `change` makes of a tensor in its place."""
    return lambda tensors, _: tensors.update({name: change(tensors[name]).contiguous()})


def added(name: str, x: Tensor) -> Edit:
    return lambda tensors, _: tensors.update({name: x})


BAD: dict[str, tuple[Edit, str]] = {
    "no format": (lambda _, m: m.pop("format"), "no metadata entry `format`; needed dsattn-inputs/1"),
    "a model's format": (entry("format", "pt"), "format 'pt'; needed dsattn-inputs/1"),
    "another version": (entry("format", "dsattn-inputs/2"), "'dsattn-inputs/2'; needed dsattn-inputs/1"),
    "missing tensor": (lambda x, _: x.pop("kv"), "no tensor kv"),
    "unknown tensor": (added("sinks", torch.zeros(4)), "an unknown tensor sinks"),
    "missing entry": (lambda _, m: m.pop("top_k"), "no metadata entry top_k; needed an integer"),
    "no segments": (lambda _, m: m.pop("segments"), "no metadata entry segments"),
    "words for a number": (entry("num_q", "twelve"), "num_q: given 'twelve'; needed an integer"),
    "a fraction of a row": (entry("num_q", "12.0"), "num_q: given '12.0'; needed an integer"),
    "a bool for a number": (entry("ratio", "true"), "ratio: given 'true'; needed an integer"),
    "a bool of Python": (entry("relu", "True"), "relu: given 'True'; needed true or false"),
    "1 for true": (entry("relu", "1"), "relu: given '1'; needed true or false"),
    "an infinite scale": (entry("scale", "Infinity"), "scale: given 'Infinity'; needed a finite"),
    "a scale beyond floats": (entry("scale", "1" + "0" * 400), "scale: given"),
    "text for a scale": (entry("softmax_scale", '"0.1"'), "softmax_scale: given"),
    "segments of four": (entry("segments", "[[0, 1, 0, 1]]"), "segments: given .* lists of five integers"),
    "segments of floats": (entry("segments", "[[0, 1, 0, 1, 0.0]]"), "lists of five integers"),
    "no list": (entry("segments", "{}"), "needed a JSON list of lists"),
    "no JSON": (entry("segments", "[[0, 1"), "needed a JSON list of lists"),
    "too deep": (entry("segments", "[" * 100_000), "needed a JSON list of lists"),
    "queries out of range": (entry("segments", "[[8, 5, 0, 1, 0]]"), r"segments\[0\].*q_len = 13.*num_q = 12"),
    "keys out of range": (entry("segments", "[[0, 5, 9, 5, 0]]"), r"segments\[0\].*num_k = 13"),
    "overlap": (entry("segments", "[[0, 5, 0, 5, 0], [4, 5, 0, 5, 0]]"), "do not overlap"),
    "negative start": (entry("segments", "[[-1, 5, 0, 5, 0]]"), r"segments\[0\].q_start: given -1"),
    "ratio 0": (entry("ratio", "0"), "ratio: given 0"),
    "rows beyond int32": (entry("num_k", str(2**31)), "num_k: given 2147483648"),
    "top_k 0": (entry("top_k", "0"), "top_k: given 0"),
    "wide value": (entry("value_dim", "25"), "value_dim: given 25; needed an integer from 1 to 24"),
    "rows of another layout": (entry("num_q", "14"), "index_q: given .* with t = 14, the layout's num_q"),
    "keys of another layout": (entry("num_k", "14"), "index_k: given .* with s = 14, the layout's num_k"),
    "BSHD": (tensor("q", lambda x: x.unflatten(0, (2, 6))), r"q: given shape \[2, 6, 4, 24\]; needed \[t, h, d_qk\]"),
    "other width": (tensor("kv", lambda x: x[:, 1:]), "kv: .* d_qk = 24, as in q"),
    "other heads": (added("sink", torch.zeros(5)), "sink: .* h = 4, as in q"),
    "no heads": (tensor("index_q", lambda x: x[:, :0]), "index_q: .*h_i of at least 1"),
    "integers": (tensor("index_q", lambda x: x.int()), "index_q: given torch.int32; needed torch.bfloat16 or"),
    "mixed keys": (tensor("index_k", lambda x: x.half()), "index_k: given torch.float16; needed torch.float32"),
    "mixed kv": (tensor("kv", lambda x: x.double()), "kv: given torch.float64; needed torch.float32"),
    "low weights": (tensor("weights", lambda x: x.half()), "weights: given torch.float16; needed torch.float32"),
    "low sink": (added("sink", torch.zeros(4).bfloat16()), "sink: given torch.bfloat16; needed torch.float32"),
    "a mask of numbers": (added("row_mask", torch.ones(12)), "row_mask: given torch.float32; needed torch.bool"),
    "metadata of a second call": (entry("0", "[1]"), "entry 0: given .*a JSON object of strings"),
    "tensors of no call": (entry("0", "{}"), "tensor .*: given no call in the metadata"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files(kind: str, tmp_path: Path, no_shape_checks: None) -> None:
    edit, words = BAD[kind]
    tensors, metadata = call().tensors(), {"format": FORMAT, **call().metadata()}
    edit(tensors, metadata)
    path = tmp_path / "bad.safetensors"
    save_file(tensors, path, metadata)
    with pytest.raises(BadInput, match=words) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < len(str(path)) + 250


class Payload:
    """A pickle that makes a folder when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.trace,)


@pytest.mark.parametrize("kind", ["absent", "folder", "empty", "text", "torn", "pickle", "torch", "npz"])
def test_files_of_another_kind(kind: str, tmp_path: Path) -> None:
    path, trace = tmp_path / "x.safetensors", tmp_path / "run"
    write(tmp_path / "whole", [call()])
    data = {
        "empty": b"",
        "text": b'{"format": "dsattn-inputs/1"}' * 9,
        "torn": (tmp_path / "whole").read_bytes()[:-1],
        "pickle": pickle.dumps(Payload(trace)),
        "npz": b"PK\x03\x04" + bytes(64),
    }
    if kind == "folder":
        path.mkdir()
    elif kind == "torch":
        torch.save({"q": torch.zeros(2)}, path)
    elif kind != "absent":
        path.write_bytes(data[kind])
    words = {"absent": "no such file", "folder": "a folder"}.get(kind, "cannot read")
    with pytest.raises(BadInput, match=words):
        read(path)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["0.q", "1.source", "1.kv"])
def test_the_faulty_call_of_several_is_named(name: str, tmp_path: Path, no_shape_checks: None) -> None:
    calls = [call(), call()]
    tensors = {f"{i}.{key}": x for i, one in enumerate(calls) for key, x in one.tensors().items()}
    entries = [one.metadata() for one in calls]
    if name == "1.source":
        entries[1]["relu"], name = "no", "1.relu"
    else:
        tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, tmp_path / "x", {"format": FORMAT, **{str(i): json.dumps(m) for i, m in enumerate(entries)}})
    with pytest.raises(BadInput, match=rf"x: (metadata entry )?{name}: given"):
        read(tmp_path / "x")


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, one = tmp_path / "x.safetensors", call()
    write(path, [one])

    def full(entries: Any, file: Path, *_: Any) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors, "serialize_file", full)
    with pytest.raises(BadInput, match="No space left"):
        write(path, [call()])
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
    assert_same(one, *read(path))


@pytest.mark.parametrize(("name", "calls", "words"), [("no/x", 1, "can be written"), ("x", 0, "at least one")])
def test_what_cannot_be_written(name: str, calls: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        write(tmp_path / name, [call()] * calls)


def test_without_the_package_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for use in (lambda: read(tmp_path / "x"), lambda: write(tmp_path / "x", [call()])):
        with pytest.raises(BackendMissing, match="not installed; pip install safetensors"):
            use()


def test_a_broken_package_is_another_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "safetensors"
    broken.mkdir()
    (broken / "__init__.py").write_text("import no_such_part")
    monkeypatch.delitem(sys.modules, "safetensors")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendMissing, match=r"broken package safetensors .*no_such_part"):
        captured.safetensors()


WITHOUT_NUMPY = """
import torch, dsattn
from dsattn.spec.captured import read
layout = dsattn.CausalLayout.batched(1, 3)
index = torch.ones(3, 2, 4), torch.ones(3, 4), torch.ones(3, 2)
with dsattn.capture("x.safetensors"):
    dsattn.indexer_loss(*index, torch.ones(3, 2, 8), torch.ones(3, 8), layout, softmax_scale=1.0)
print(read("x.safetensors")[0].q.sum().item(), "numpy" in __import__("sys").modules)
"""


def test_numpy_is_not_needed(run_python: RunPython, tmp_path: Path) -> None:
    done = run_python("-W", "ignore", "-c", BLOCK % "numpy" + WITHOUT_NUMPY, cwd=tmp_path)
    assert done.stdout == "48.0 False\n", done.stderr


def test_bits_would_be_seen(tmp_path: Path) -> None:
    one = call()
    write(tmp_path / "x", [one])
    tensors, metadata = load_file(tmp_path / "x"), contents(tmp_path / "x")[1]
    tensors["weights"][0, 0] *= 1 + 2.0**-23
    save_file(tensors, tmp_path / "x", metadata)
    with pytest.raises(AssertionError, match="weights"):
        assert_same(one, *read(tmp_path / "x"))
