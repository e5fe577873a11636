"""Kernels that round as matrix units do are right: verify must not call them wrong, and says what it cannot judge."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dsattn.backends.cudnn.backend import CudnnBackend
from dsattn.spec.cases import CASES
from dsattn.spec.inputs import inputs
from dsattn.verify.reference import References
from dsattn.verify.run import run, tasks
from dsattn.verify.simulated import Chain
from dsattn.verify.subject import Subject

ROUNDED = ("sparse_attention", "indexer_loss:selected", "indexer_loss:visible")
REFERENCES = References(keep=None)
SUBJECTS = [Subject(suite="quick", case=case, make_inputs=partial(inputs, case)) for case in CASES]


class Rounding(CudnnBackend):
    """Says of itself what the real kernels say."""

    def rounds(self, problem: object) -> str | None:
        """Not asked of a stand-in as a rule."""
        return "the kernels round"


@pytest.mark.parametrize(("release", "arch"), [("1.32.0", "sm100"), ("1.30.0", "sm90")])
def test_kernels_that_round_are_judged_right(release: str, arch: str) -> None:
    simulated = CudnnBackend.simulated(release, arch, rounds=True)
    chain = Chain(Rounding(simulated.namespace_for(torch.device("cpu"))))
    todo = [t for t in tasks(SUBJECTS, [chain], torch.device("cpu"), ["bf16"]) if t.operator in ROUNDED]
    records = list(run(todo, REFERENCES))
    assert [(r.case, r.operator, r.reason) for r in records if r.verdict == "fail"] == []
    assert sum(record.verdict == "pass" for record in records) > 250
    unjudged = {record.case for record in records if record.reason == "the kernels round"}
    assert unjudged == {"weights-opposed"}


def test_what_they_cannot_keep_would_be_seen() -> None:
    simulated = CudnnBackend.simulated("1.32.0", "sm100", rounds=True)
    subjects = [subject for subject in SUBJECTS if subject.case.name == "weights-opposed"]
    todo = [t for t in tasks(subjects, [simulated], torch.device("cpu"), ["bf16"]) if t.operator in ROUNDED]
    assert "fail" in {record.verdict for record in run(todo, REFERENCES)}
