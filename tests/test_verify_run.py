"""The runner: green for a right backend, red with the right reason for a wrong one, honest about what did not run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import dsattn
from dsattn.backends import Backend, TorchBackend
from dsattn.errors import BadInput
from dsattn.layouts import TopK
from dsattn.spec import oracle
from dsattn.spec.cases import CASES
from dsattn.spec.inputs import Inputs, inputs
from dsattn.verify import suites
from dsattn.verify.checks import CHECKS
from dsattn.verify.records import Record, Report
from dsattn.verify.reference import References
from dsattn.verify.run import DTYPES, operators_of, run, tasks
from dsattn.verify.subject import Subject
from dsattn.verify.threads import one_thread

CPU = torch.device("cpu")
NAMED = {case.name: case for case in CASES}


def subject_of(name: str, **changes: Any) -> Subject:
    case = replace(NAMED[name], **changes)
    return Subject(suite="quick", case=case, make_inputs=partial(inputs, case))


def judged(
    subject: Subject, backend: str | Backend, dtype: str = "fp32", references: References | None = None
) -> dict[str, Record]:
    records = run(tasks([subject], [backend], CPU, [dtype]), references)
    return {record.operator: record for record in records}


def failed(records: dict[str, Record]) -> set[str]:
    return {operator for operator, record in records.items() if record.verdict == "fail"}


class Off(TorchBackend):
    """The torch backend with one fault."""

    name = "off"


class WrongOut(Off):
    def sparse_attention(self, a: Any, topk: TopK) -> tuple[Tensor, Tensor]:
        out, lse = super().sparse_attention(a, topk)
        out[5] *= 1.001
        return out, lse


class WrongLse(Off):
    def dense_attention(self, a: Any, layout: Any) -> tuple[Tensor, Tensor]:
        out, lse = super().dense_attention(a, layout)
        return out, lse / 0.6931471805599453


class NoKeyGradient(Off):
    def dense_attention_backward(self, *arguments: Any, **options: Any) -> Any:
        d_q, d_kv, d_sink = super().dense_attention_backward(*arguments, **options)
        return d_q, torch.zeros_like(d_kv), d_sink


class NextKey(Off):
    def indexer_topk(self, x: Any, layout: Any, top_k: int, return_scores: bool) -> TopK:
        topk = super().indexer_topk(x, layout, top_k, return_scores)
        topk.indices[3, 0] += 1
        return topk


class WrongScores(Off):
    def indexer_scores(self, x: Any, layout: Any) -> Tensor:
        scores = super().indexer_scores(x, layout)
        return scores.masked_fill(scores.isinf(), -1e30)


class WrongLoss(Off):
    def indexer_loss(self, *arguments: Any, **options: Any) -> Any:
        loss, gradients = super().indexer_loss(*arguments, **options)
        return loss * 1.01, gradients


class Refuses(Off):
    def supports(self, problem: Any) -> str | None:
        return "fp64 only" if problem.operator == "dense_attention" else None


class Breaks(Off):
    def sparse_attention(self, a: Any, topk: TopK) -> tuple[Tensor, Tensor]:
        raise ZeroDivisionError("told")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize(
    "name", ["bshd-b1", "padded-left", "packed-empty-one-tail", "cp2-zigzag-many-rank1", "all-padding"]
)
def test_the_right_backend_is_green(name: str, dtype: str) -> None:
    records = judged(subject_of(name), TorchBackend(), dtype)
    assert set(records) == set(CHECKS)
    assert {record.verdict for record in records.values()} == {"pass"}, [r.reason for r in records.values()]
    assert {record.backend for record in records.values()} == {"torch"}


@pytest.mark.parametrize(
    ("backend", "operators", "words"),
    [
        (WrongOut(), {"sparse_attention", "dsa_attention:selected"}, "out: row 5"),
        (WrongLse(), {"dense_attention", "dsa_attention:visible"}, "lse: row"),
        (NoKeyGradient(), {"dense_attention", "dsa_attention:visible"}, "d_kv: batch 0 is all zero"),
        (NextKey(), {"indexer_topk", "dsa_attention:selected"}, "row 3"),
        (WrongScores(), {"indexer_scores"}, "infinity in other places"),
        (WrongLoss(), {name for name in CHECKS if ":" in name}, "loss: row 0"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Backend) else "",
)
def test_a_wrong_backend_is_red(backend: Backend, operators: set[str], words: str) -> None:
    records = judged(subject_of("bshd-b1"), backend)
    assert failed(records) == operators
    for operator in operators:
        assert words in records[operator].reason
        assert records[operator].backend == "off"


def test_a_refusal_is_unsupported_with_its_reason() -> None:
    records = judged(subject_of("bshd-b1"), Refuses())
    refused = {name: record for name, record in records.items() if record.verdict == "unsupported"}
    assert set(refused) == {"dense_attention", "dsa_attention:visible"}
    assert all("fp64 only" in record.reason and record.metrics == {} for record in refused.values())
    assert failed(records) == set()


def test_a_missing_backend_that_was_named_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchBackend, "missing", lambda _: "no compiler")
    records = judged(subject_of("bshd-b1"), "torch")
    assert {record.verdict for record in records.values()} == {"unsupported"}
    assert all("no compiler" in record.reason for record in records.values())


def test_an_exception_is_a_failure_and_keeps_its_traceback() -> None:
    record = judged(subject_of("bshd-b1"), Breaks())["sparse_attention"]
    assert (record.verdict, record.reason) == ("fail", "ZeroDivisionError: told")
    assert record.traceback is not None
    assert "test_verify_run.py" in record.traceback


def test_one_operators_error_stays_its_own() -> None:
    records = judged(subject_of("bshd-b1"), NextKey())
    assert records["sparse_attention"].verdict == records["indexer_loss:selected"].verdict == "pass"


def test_near_ties_may_be_selected_otherwise() -> None:
    """With fp32 scores another order of summation may swap two keys; what follows is judged over the keys selected."""

    class Swapped(Off):
        def indexer_topk(self, x: Any, layout: Any, top_k: int, return_scores: bool) -> TopK:
            topk = super().indexer_topk(x, layout, top_k, return_scores)
            # Keys 3 and 4 are twins: 4 in place of 3, wherever 3 was selected alone.
            swap = (topk.indices == 3).any(-1) & ~(topk.indices == 4).any(-1) & (torch.arange(96) >= 4)
            topk.indices[swap] = torch.where(topk.indices[swap] == 3, 4, topk.indices[swap])
            assert swap.any()
            return topk

    def twins(dtype: torch.dtype) -> Inputs:
        x = inputs(NAMED["bshd-b1"], dtype)
        x.index_k[4] = x.index_k[3]
        return x

    subject = replace(subject_of("bshd-b1"), make_inputs=twins)
    records = judged(subject, Swapped())
    assert failed(records) == set(), [r.reason for r in records.values()]


def test_a_reference_serves_several_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    attention = oracle.attention
    monkeypatch.setattr(oracle, "attention", lambda *a, **o: calls.append(1) or attention(*a, **o))
    references = References(keep=None)
    for backend in (TorchBackend(), WrongOut(), TorchBackend()):
        for name in ("bshd-b1", "packed"):
            judged(subject_of(name), backend, references=references)
    assert len(calls) == 4, "two cases, selected and visible"
    few = References(keep=1)
    first = few.get(subject_of("bshd-b1"), torch.float32)
    assert few.get(subject_of("bshd-b1"), torch.float32) is first
    few.get(subject_of("packed"), torch.float32)
    assert few.get(subject_of("bshd-b1"), torch.float32) is not first


def sampled(rows: Sequence[int]) -> Subject:
    """`packed` with the oracle on some rows only."""
    case = replace(NAMED["packed"], num_rows=50)
    chosen = torch.tensor(rows)

    def make(dtype: torch.dtype) -> Inputs:
        x = inputs(case, dtype)
        mask = torch.zeros(len(x.q), dtype=torch.bool)
        mask[chosen] = True
        return replace(x, d_out=x.d_out * mask[:, None, None], row_mask=mask)

    return Subject(suite="quick", case=case, make_inputs=make, rows=chosen)


def test_sampled_rows_are_judged_and_others_send_nothing() -> None:
    rows = [0, 12, 13, 40, 59, 119]
    records = judged(sampled(rows), TorchBackend())
    assert failed(records) == set(), [r.reason for r in records.values()]

    class Judged(Off):
        def sparse_attention(self, a: Any, topk: TopK) -> tuple[Tensor, Tensor]:
            out, lse = super().sparse_attention(a, topk)
            out[40] *= 1.01
            return out, lse

    record = judged(sampled(rows), Judged())["sparse_attention"]
    assert record.verdict == "fail"
    assert "row 40 of the call" in record.reason
    assert record.metrics["results"]["out"]["worst_row"] == 40

    class Leaks(Off):
        def sparse_attention_backward(self, *arguments: Any, **options: Any) -> Any:
            d_q, d_kv, d_sink = super().sparse_attention_backward(*arguments, **options)
            d_q[41] = 1e-6
            return d_q, d_kv, d_sink

    record = judged(sampled(rows), Leaks())["sparse_attention"]
    assert record.verdict == "fail"
    assert "d_q: row 41 is not zero" in record.reason


def test_a_loss_that_reaches_its_teacher_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    loss_of = dsattn.indexer_loss

    def reaching(index_q: Any, index_k: Any, weights: Any, q: Tensor, *rest: Any, **options: Any) -> Tensor:
        return loss_of(index_q, index_k, weights, q, *rest, **options) + 1e-9 * q.square().sum()

    monkeypatch.setattr(dsattn, "indexer_loss", reaching)
    record = judged(subject_of("loss-sum"), "torch")["indexer_loss:selected"]
    assert record.verdict == "fail"
    assert "detached" in record.reason


def test_operators_of_a_case() -> None:
    assert operators_of(subject_of("sink-zero")) == [
        "sparse_attention",
        "dense_attention",
        "dsa_attention:selected",
        "dsa_attention:visible",
    ]


def test_threads_are_put_back() -> None:
    torch.set_num_threads(2)
    try:
        assert one_thread()(torch.get_num_threads)() == 1
        with pytest.raises(ValueError, match="invalid literal"):
            one_thread()(int)("x")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indices": lambda topk: topk.indices.long()}, "topk.indices: dtype torch.int64"),
        ({"lengths": lambda topk: topk.lengths.long()}, "topk.lengths: dtype torch.int64"),
        ({"scores": lambda topk: None}, "scores were asked for"),
        ({"scores": lambda topk: topk.scores + 1e-3}, "off by more than tau"),
    ],
)
def test_a_selection_of_another_form_is_red(
    change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topk_of = dsattn.indexer_topk

    def changed(*arguments: Any, **options: Any) -> TopK:
        topk = topk_of(*arguments, **options)
        for name, value in change.items():
            object.__setattr__(topk, name, value(topk))
        return topk

    monkeypatch.setattr(dsattn, "indexer_topk", changed)
    record = judged(subject_of("bshd-b3"), "torch")["indexer_topk"]
    assert record.verdict == "fail"
    assert words in record.reason


def test_batches_are_batch_entries_or_segments() -> None:
    padded = References().get(subject_of("padded-right"), torch.float32)
    assert padded.row_batches.tolist() == padded.key_batches.tolist() == [i // 40 for i in range(120)]
    packed = References().get(subject_of("packed-empty-one-tail"), torch.float32)
    documents = [0] * 1 + [1] * 39 + [2] * 1 + [3] * 49
    assert packed.row_batches.tolist() == documents + [-1] * 10
    assert packed.key_batches.tolist() == documents + [-1] * 14


def test_plan_takes_names_patterns_and_operators() -> None:
    def names(*patterns: str) -> set[tuple[str, str, str]]:
        found, records = suites.plan(["quick"], cases=patterns, device=CPU)
        assert {record.verdict for record in records} <= {"not run"}
        return {(task.subject.case.name, task.operator, task.dtype) for task in found}

    assert {case for case, _, _ in names()} == set(NAMED)
    assert {dtype for _, _, dtype in names()} == {"fp32", "bf16"}
    assert {case for case, _, _ in names("cp4-zigzag-one-*")} == {f"cp4-zigzag-one-rank{r}" for r in range(4)}
    assert names("k-1/indexer_topk", "k-odd/indexer_topk") == {
        (case, "indexer_topk", dtype) for case in ("k-1", "k-odd") for dtype in ("fp32", "bf16")
    }
    found, _ = suites.plan(["quick"], cases=["bshd-b1"], device=CPU, dtype="fp16")
    assert {task.dtype for task in found} == {"fp16"}


def test_the_full_suite() -> None:
    named, text = suites.parts("full")
    assert named.dtypes == ("fp32", "bf16", "fp64")
    assert {subject.case.name for subject in named.subjects} == set(NAMED)
    assert {subject.suite for subject in (*named.subjects, *text.subjects)} == {"full"}
    assert len(text.subjects) == 2
    for subject in text.subjects:
        assert subject.facts["t"] >= 4096
        assert subject.case.top_k == 512
        assert subject.rows is not None
        assert len(subject.rows) == 256
        assert subject.facts["share_over_k"] >= 0.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cases": ["bshd-b2"]}, "bshd-b1"),
        ({"cases": ["zzz"]}, "--list"),
        ({"cases": ["sink-zero/indexer_topk"]}, "sparse_attention"),
        ({"backends": ["tritn"]}, "torch"),
        ({"dtype": "int8"}, "fp32, bf16, fp16, fp64"),
    ],
)
def test_plan_refuses_unknown_names(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        suites.plan(["quick"], device=CPU, **options)


@pytest.mark.usefixtures("on_torch")
def test_absent_backends_are_not_run_and_never_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(Off):
        name = "absent"

        def missing(self) -> str | None:
            return "no such device"

    monkeypatch.setattr(suites, "ordered", lambda: (TorchBackend(), Absent()))
    found, records = suites.plan(["quick"], cases=["bshd-b1"], device=CPU)
    assert {task.backend for task in found} == {"torch"}
    assert [(r.backend, r.verdict, r.reason) for r in records] == [("absent", "not run", "no such device")]
    _, records = suites.plan(["quick"], cases=["bshd-b1"], backends=["torch"], device=CPU)
    assert records == []


def record(verdict: Any, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "suite": "quick",
        "case": "c",
        "operator": "o",
        "backend": "b",
        "device": "cpu",
        "dtype": "fp32",
    }
    fields |= {"verdict": verdict, **changes}
    return Record(**fields)


@pytest.mark.parametrize(
    ("verdicts", "holds", "summary"),
    [
        (["pass", "pass"], True, "PASS: 2 checks hold"),
        (["pass", "unsupported"], True, "PASS: 1 checks hold (1 unsupported)"),
        (["pass", "fail"], False, "FAIL: 1 of 2 checks failed"),
        (["unsupported", "not run"], False, "FAIL: no check ran (1 unsupported, 1 not run)"),
        ([], False, "FAIL: no check ran"),
    ],
)
def test_verdict_of_a_run(verdicts: list[str], holds: bool, summary: str) -> None:
    report = Report(environment={}, records=[record(verdict) for verdict in verdicts])
    assert (report.holds, report.summary) == (holds, summary)


def test_json_has_the_fields_of_the_interface() -> None:
    records = [*judged(subject_of("bshd-b1"), WrongScores()).values(), *judged(subject_of("grid"), Breaks()).values()]
    found = json.loads(Report(environment={"torch": "x"}, records=records).as_json())
    assert set(found) == {"environment", "records"}
    names = ["suite", "case", "operator", "backend", "device", "dtype", "simulated", "release", "arch", "caller"]
    names += ["metrics", "verdict", "reason"]
    for one in found["records"]:
        assert set(one) == set(names)
        assert one["verdict"] in ("pass", "fail", "unsupported", "not run")
        assert (one["simulated"], one["release"], one["arch"], one["caller"]) == (False, None, None, "dsattn")
    wrong = next(one for one in found["records"] if one["operator"] == "indexer_scores")
    assert wrong["metrics"]["results"]["scores"]["share_of_budget"] is None, "infinity is not JSON"
    topk = next(one for one in found["records"] if one["operator"] == "indexer_topk")
    assert topk["metrics"]["recall_min"] == 1.0


def test_dtypes_are_those_of_the_interface() -> None:
    assert list(DTYPES) == ["fp32", "bf16", "fp16", "fp64"]


def test_records_come_one_by_one() -> None:
    """A caller may stop at the first red record."""
    started: list[str] = []

    class Counting(Off):
        def supports(self, problem: Any) -> str | None:
            started.append(problem.operator)
            return None

    records: Iterator[Record] = run(tasks([subject_of("bshd-b1")], [Counting()], CPU, ["fp32"]))
    next(records)
    assert set(started) == {"indexer_scores"}
