"""Recordings of what wrappers did, and the stand-in held to them: with a stand-in of another seed in a GPU's place."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import made_up
import pytest
import torch
from packaging.version import Version

from dsattn.backends.cudnn.namespace import Absence, Namespace
from dsattn.backends.cudnn.simulator import SimulatedFrontend
from dsattn.cli import main
from dsattn.cli import verify as command
from dsattn.verify import recordings, suites
from dsattn.verify.recordings import Check, Recorder, Recording, Replay
from dsattn.verify.recordings.compare import outcomes
from dsattn.verify.recordings.digest import digest, selection

CPU = torch.device("cpu")
RELEASE, ARCH = "1.32.0", "sm100"
Change = made_up.Change


class Gpu:
    """A stand-in of another seed, with some wrappers changed."""

    def __init__(self, changes: dict[str, Change] | None = None, *, rounds: bool = True, arch: str = ARCH) -> None:
        self.frontend = SimulatedFrontend(RELEASE, arch, 7, races=False, rounds=rounds)
        self.changes = changes or {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        inner = getattr(self.frontend, name)
        change = self.changes.get(name.removesuffix("_wrapper"))
        if change is None:
            return inner

        @functools.wraps(inner)
        def call(**kwargs: Any) -> Any:
            return change(inner, kwargs)

        return call


def recorded(cases: Sequence[str], gpu: Any, arch: str = ARCH) -> Recording:
    tasks, _ = suites.plan(("quick",), cases=cases, backends=["cudnn"], device=CPU, dtype="bf16")
    return list(recordings.record(tasks, Namespace(gpu, Version(RELEASE), arch), CPU))[-1][0]


def replayed(made: Recording, folder: Path) -> Replay:
    """The replay of a recording that went through a file."""
    recordings.write(folder / "r.json", made)
    return list(recordings.replay(recordings.read(folder / "r.json"), folder / "r.json"))[-1]


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("rounds", [True, False])
def test_a_stand_in_of_another_seed_agrees(arch: str, rounds: bool, tmp_path: Path) -> None:
    # Without rounding all numbers differ by what a GPU may round elsewhere.
    result = replayed(
        recorded(["bshd-b3", "cp2-zigzag-many-rank1", "all-equal"], Gpu(rounds=rounds, arch=arch), arch), tmp_path
    )
    assert [(one.wrapper, one.case, one.what, one.text) for one in result.outcomes if one.verdict == "differs"] == []
    assert result.holds
    assert {"indexer_forward", "indexer_top_k", "sparse_attention_backward"} <= {row.wrapper for row in result.rows}
    assert sum(row.agreeing for row in result.rows) > 40


def destroys(name: str) -> Change:
    def change(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        result = inner(**kwargs)
        kwargs[name].fill_(0)
        return result

    return change


def keeps(name: str) -> Change:
    def change(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        return inner(**(kwargs | {name: kwargs[name].clone()}))

    return change


def flat_ids(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Ids count through the whole table."""
    result = inner(**kwargs)
    rows, columns = kwargs["input_values"].shape
    first = torch.arange(rows, dtype=torch.int32)[:, None] * columns
    result["indices"] = torch.where(result["indices"] >= 0, result["indices"] + first, -1)
    return result


def raises(inner: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    raise ValueError("not with me")


FAKES = [
    ("indexer_forward", made_up.filled_with_zero, "scores", r"-inf at other places: \d+ of \d+, recorded 0"),
    ("indexer_top_k", flat_ids, "indices", "row 1: .* selected, recorded"),
    ("indexer_backward", made_up.local_ids, "d_index_q", "recorded"),
    (
        "sparse_attn_score_recompute",
        made_up.unwritten_tail("target", 48, math.nan),
        "target",
        "nan at other places: 0 of",
    ),
    ("sparse_attention_forward", made_up.returns_base_two, "lse", "recorded maximum"),
    ("sparse_attention_backward", made_up.reads_base_two, "dq", "recorded maximum"),
    ("sparse_attention_backward", destroys("lse"), "buffer lse", "left as it was, recorded as changed"),
    ("dense_indexer_backward", keeps("index_score"), "buffer index_score", "changed, recorded as left as it was"),
    ("dense_attn_score_recompute", made_up.scaled(lambda _: 1.01, "denom"), "denom", "recorded maximum"),
    ("indexer_forward", raises, "exception", "a result, recorded ValueError: not with me"),
]


@pytest.mark.parametrize(("wrapper", "change", "what", "text"), FAKES)
def test_another_release_is_named(wrapper: str, change: Change, what: str, text: str, tmp_path: Path) -> None:
    result = replayed(recorded(["bshd-b3"], Gpu({wrapper: change})), tmp_path)
    assert not result.holds
    first = next(one for one in result.outcomes if one.verdict == "differs")
    assert (first.wrapper, first.what) == (wrapper, what)
    assert re.search(text, first.text), first.text
    # What comes after in the same check is not blamed on another wrapper.
    assert {one.wrapper for one in result.outcomes if one.verdict == "differs"} == {wrapper}


def test_the_table_and_the_exit_code_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    fake: dict[str, Change] = {"indexer_forward": made_up.filled_with_zero}
    recordings.write(good, recorded(["packed/indexer_topk"], Gpu()))
    recordings.write(bad, recorded(["packed/indexer_topk"], Gpu(fake)))
    assert main(["verify", "--replay", str(good)]) == 0
    out = capsys.readouterr().out
    assert "PASS: the stand-in agrees with" in out
    assert "frontend 1.32.0 on sm100" in out
    assert main(["verify", "--replay", str(bad), "--verbose"]) == 1
    out = capsys.readouterr().out
    assert "indexer_forward, packed/indexer_topk, scores: -inf at other places" in out
    assert "FAIL: " in out


def test_record_writes_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Namespace(Gpu(), Version(RELEASE), ARCH)
    monkeypatch.setattr(command, "open_installed", lambda device: there)
    file = tmp_path / "r.json"
    words = ["verify", "--record", str(file), "--case", "bshd-b3/indexer_topk", "--case", "packed/*", "--device", "cpu"]
    assert main(words) == 0
    assert "checks hold" in capsys.readouterr().out
    found = recordings.read(file)
    assert (found.release, found.arch, list(found.cases)) == (RELEASE, ARCH, ["bshd-b3", "packed"])
    assert found.cases["packed"]["seed"] > 0
    assert found.environment["frontend"] == RELEASE
    assert {"torch", "device"} <= set(found.environment)
    assert sum(check.case == "packed" for check in found.checks) > 4
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_without_a_frontend_nothing_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "open_installed", lambda device: Absence("not installed", "no module cudnn"))
    assert main(["verify", "--record", str(tmp_path / "r.json")]) == 2
    assert "cuDNN frontend not installed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["--record", "r.json", "--replay", "r.json"],
        ["--record", "r.json", "--suite", "full"],
        ["--record", "r.json", "--json", "x.json"],
        ["--replay", "r.json", "--case", "packed"],
        ["--replay", "r.json", "--device", "cpu"],
        ["--self-test", "--record", "r.json"],
    ],
)
def test_other_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    assert "needed only" in capsys.readouterr().err


@pytest.fixture(scope="module")
def small() -> Recording:
    return recorded(["packed/indexer_topk"], Gpu())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data.update(format="dsattn-recording/0"), "format 'dsattn-recording/0'"),
        (lambda data: data.pop("format"), "a file without a format"),
        (lambda data: data.update(release="1.2"), "release '1.2'"),
        (lambda data: data.update(release="newest"), "release 'newest'"),
        (lambda data: data.update(arch="sm80"), "architecture 'sm80'"),
        (lambda data: data.pop("checks"), "damaged"),
        (lambda data: data.update(checks=[]), "without a check"),
        (lambda data: data["checks"][0]["calls"][0].pop("results"), "damaged"),
        (lambda data: data["checks"][0]["calls"][0]["results"]["scores"].pop("max"), "damaged"),
        (lambda data: data["checks"][0]["calls"][0]["results"]["scores"].update(shape="x"), "damaged"),
        (lambda data: data["checks"][0].update(case="gone"), "case 'gone'"),
        (lambda data: data["checks"][0].update(operator="gone"), "operator 'gone'"),
        (lambda data: data["cases"]["packed"]["inputs"]["index_q"].update(sum=1.0), "other inputs (index_q: sum"),
    ],
)
def test_a_file_that_is_no_good(
    change: Callable[[Any], Any], told: str, small: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    recordings.write(file, small)
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    assert main(["verify", "--replay", str(file)]) == 2
    assert told in capsys.readouterr().err


def test_a_file_that_is_cut_or_absent(small: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    assert main(["verify", "--replay", str(file)]) == 2
    recordings.write(file, small)
    file.write_text(file.read_text()[:-40])
    assert main(["verify", "--replay", str(file)]) == 2
    file.write_bytes(b"\xff\xfe")
    assert main(["verify", "--replay", str(file)]) == 2
    err = capsys.readouterr().err.splitlines()
    assert ["No such file" in err[0], "no JSON" in err[1], "no JSON" in err[2]] == [True] * 3


def test_a_release_newer_than_the_table_is_told(
    small: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    recordings.write(file, small)
    file.write_text(file.read_text().replace('"release":"1.32.0"', '"release":"1.99.0"'))
    assert main(["verify", "--replay", str(file)]) == 0
    assert "1.99.0 is not in the table of contracts" in capsys.readouterr().out


def test_the_recorder_changes_nothing() -> None:
    made: list[Any] = []

    class Dsa:
        def indexer_top_k_wrapper(self, input_values: torch.Tensor, *, seq_lens: Any, top_k: int = 1, stream: Any = 0):
            made.append((input_values, seq_lens, {"indices": torch.tensor([[2], [0]]), "values": None}))
            return made[-1][2]

    values, lengths = torch.tensor([[1.0, 2.0, 3.0], [4.0, 1.0, math.nan]]), torch.tensor([3, 2])
    recorder = Recorder(Dsa())
    result = recorder.indexer_top_k_wrapper(values, seq_lens=lengths)
    assert made[0][0] is values
    assert made[0][1] is lengths
    assert result is made[0][2]
    with pytest.raises(AttributeError, match="no_such"):
        _ = recorder.no_such
    names = Namespace(recorder, Version(RELEASE), ARCH)
    assert names.get("no_such") is None
    assert [names.accepts("indexer_top_k", name) for name in ("stream", "tie_break")] == [True, False]


def test_bits_are_those_of_a_run_without_recorder() -> None:
    given = {"input_values": torch.randn(5, 40), "seq_lens": torch.full((5,), 40, dtype=torch.int32), "top_k": 8}
    plain = SimulatedFrontend(RELEASE, ARCH, 3).indexer_top_k_wrapper(**given)
    kept = Recorder(SimulatedFrontend(RELEASE, ARCH, 3)).indexer_top_k_wrapper(**given)
    assert list(dict.keys(plain)) == ["indices", "values"]
    assert all(torch.equal(plain[name], kept[name]) for name in dict.keys(plain))


def test_settings_come_back() -> None:
    torch.use_deterministic_algorithms(False)
    recorded(["packed/indexer_topk"], Gpu())
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_digest_has_places_and_sizes() -> None:
    found = digest(torch.tensor([[1.0, -math.inf], [math.nan, -3.0]]))
    assert (found["dtype"], found["shape"], found["max"]) == ("float32", [2, 2], 3.0)
    assert (found["nan"][0], found["-inf"][0], "+inf" in found) == (1, 1, False)
    assert found["values"] == [1.0, None, None, -3.0]
    assert sum(found["sums"]) == 4.0
    other = digest(torch.tensor([[-math.inf, 1.0], [math.nan, -3.0]]))
    assert other["-inf"] != found["-inf"]
    assert other["nan"] == found["nan"]


def test_a_selection_leaves_equal_scores_open() -> None:
    scores = torch.tensor([[5.0, 1.0, 1.0, 0.0, 9.0], [5.0, 4.0, 3.0, 2.0, 9.0]])
    found = selection(torch.tensor([[2, 0], [1, 0]]), scores, torch.tensor([4, 4]))
    assert found["rows"] == [[0, [0, 2], [1, 2]], [1, [0, 1], [1]]]


def calls(chosen: list[int], hash: str, tail: list[dict[str, Any]]) -> Check:
    ids = {"dtype": "int32", "shape": [1, 2], "negative": [0, "n"], "rows": [[0, chosen, [1, 2]]]}
    first = {"wrapper": "indexer_top_k", "arguments": {}, "changed": [], "results": {"indices": ids}}
    given = {"topk_idxs": {"dtype": "int32", "shape": [1, 2], "hash": hash}}
    second = {"wrapper": "sparse_attention_forward", "arguments": given, "changed": [], "results": {"out": None}}
    return Check(case="a", operator="b", verdict="pass", calls=[first, second, *tail])


@pytest.mark.parametrize(
    ("chosen", "hash", "verdicts"),
    [
        ([0, 1], "x", ["agrees", "agrees"]),
        # Another choice among equal scores explains other ids in the next call, and nothing else does.
        ([0, 2], "y", ["agrees", "follows"]),
        ([0, 1], "y", ["agrees", "differs"]),
        ([0, 3], "y", ["differs", "follows"]),
    ],
)
def test_what_follows_from_a_choice_is_no_difference(chosen: list[int], hash: str, verdicts: list[str]) -> None:
    found = list(outcomes(calls([0, 1], "x", []), calls(chosen, hash, [])))
    assert [one.verdict for one in found] == verdicts


def test_a_call_that_is_missing_or_too_many_differs() -> None:
    more = [{"wrapper": "indexer_forward", "arguments": {}, "changed": [], "results": {}}]
    few, many = calls([0, 1], "x", []), calls([0, 1], "x", more)
    assert list(outcomes(few, many))[-1].text == "a call of indexer_forward, recorded none"
    last = list(outcomes(many, few))[-1]
    assert (last.wrapper, last.verdict, last.text) == (
        "indexer_forward",
        "differs",
        "no such call, recorded indexer_forward",
    )
