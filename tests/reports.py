"""Reports that are green, red and incomplete, for the tests of what is shown of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsattn.backends import TorchBackend
from dsattn.layouts import TopK
from dsattn.spec.cases import CASES
from dsattn.spec.inputs import inputs
from dsattn.verify.per_row import Curve
from dsattn.verify.records import Record, Report
from dsattn.verify.run import run, tasks
from dsattn.verify.subject import Subject


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


def curve(**changes: Any) -> Curve:
    """Ten rows of twenty wrong, in the second of two batch entries."""
    rows = torch.arange(20, device="cpu")
    fields: dict[str, Any] = {"axis": "query row", "measure": "share", "length": 20, "judged": 20, "wrong": 10}
    fields |= {"runs": ((10, 19),), "starts": (10,), "rows": rows, "faulty": rows >= 10}
    fields |= {"values": torch.where(rows >= 10, 300.0, 0.25)}
    return Curve(**{**fields, **changes})


class WrongBatch(TorchBackend):
    name = "off"

    def dense_attention(self, a: Any, layout: Any) -> tuple[Tensor, Tensor]:
        out, lse = super().dense_attention(a, layout)
        out[40:80] *= 1.01
        return out, lse

    def sparse_attention(self, a: Any, topk: TopK) -> tuple[Tensor, Tensor]:
        out, lse = super().sparse_attention(a, topk)
        out[7] = torch.nan
        return out, lse

    def indexer_topk(self, x: Any, layout: Any, top_k: int, return_scores: bool) -> TopK:
        topk = super().indexer_topk(x, layout, top_k, return_scores)
        topk.indices[100:104, 0] = topk.indices[100:104, 1]
        return topk

    def indexer_loss(self, *arguments: Any, **options: Any) -> Any:
        loss, gradients = super().indexer_loss(*arguments, **options)
        return loss * 1.01, gradients

    def indexer_scores(self, x: Any, layout: Any) -> Tensor:
        raise ZeroDivisionError("told")


def judged(backend: TorchBackend, name: str = "bshd-b3", **changes: Any) -> dict[str, Record]:
    case = next(case for case in CASES if case.name == name)
    subject = Subject(suite="quick", case=case, make_inputs=partial(inputs, case), **changes)
    return {one.operator: one for one in run(tasks([subject], [backend], torch.device("cpu"), ["fp32"]))}
