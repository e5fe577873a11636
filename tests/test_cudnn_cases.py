"""Telling cases of `dsattn verify`, judged by the oracle, on every release: right, or refused with a good reason."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cudnn_problems import DISTINCT

from dsattn.backends import Backend, CudnnBackend
from dsattn.spec.cases import CASES
from dsattn.spec.inputs import inputs
from dsattn.verify.reference import References
from dsattn.verify.run import run, tasks
from dsattn.verify.simulated import Release
from dsattn.verify.subject import Subject

NAMES = (
    "bshd-b3",
    "packed-empty-one-tail",
    "ratio-4-offset",
    "cp2-zigzag-many-rank1",
    "slice-middle",
    "decode",
    "negative-weights",
    "loss-num-rows-masked",
    "wide",
)
SUBJECTS = [
    Subject(suite="quick", case=case, make_inputs=partial(inputs, case)) for case in CASES if case.name in NAMES
]
SEEDS = 3
REFERENCES = References(keep=None)
REASONS = ("has no", "known defect", "no attention over all keys", "relu=False")


def seeded(version: str, arch: str, seed: int) -> Release:
    def make(version: str, arch: str) -> Backend:
        return CudnnBackend.simulated(version, arch, seed)

    return Release(version=version, arch=arch, make=make)


@pytest.mark.parametrize(("version", "arch"), DISTINCT, ids=[" ".join(release) for release in DISTINCT])
def test_cases_hold_or_are_refused(version: str, arch: str) -> None:
    """Every release meets all seeds, and every case meets all seeds on six releases."""
    passed: dict[str, set[str]] = {}
    for number, subject in enumerate(SUBJECTS):
        seed = (number + DISTINCT.index((version, arch))) % SEEDS
        checks = tasks([subject], [seeded(version, arch, seed)], torch.device("cpu"), ["bf16"])
        for record in run(checks, REFERENCES):
            where = f"{record.case} {record.operator} seed {seed}: {record.reason}"
            assert record.verdict in {"pass", "unsupported"}, where
            if record.verdict == "unsupported":
                assert any(reason in record.reason for reason in REASONS), where
            else:
                passed.setdefault(record.operator, set()).add(record.case)
    needed = {"sparse_attention"} if (version, arch) == ("1.24.1", "sm90") else {"sparse_attention", "indexer_topk"}
    needed |= {"indexer_loss:selected", "indexer_loss:visible"} if version >= "1.30" else set()
    assert {operator for operator, cases in passed.items() if len(cases) > 4} >= needed


def test_all_cases_are_there() -> None:
    assert sorted(subject.case.name for subject in SUBJECTS) == sorted(NAMES)
