"""The released megatron-core on releases of the cuDNN frontend, before and after `install()`.

Its wheels come from the package index through pip and are cached; without the index these tests are skipped: `not run`.
Megatron's own functions run unmodified, on simulated frontends, in a process that is there for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import megatron_wheel
import pytest
import torch

from dsattn.cli import main
from dsattn.spec.captured import read
from dsattn.verify.megatron_suite.host import Host
from dsattn.verify.megatron_suite.problems import selection
from dsattn.verify.records import Record

OLDEST, NEWEST = megatron_wheel.VERSIONS
OLD_FRONTEND = "1.25.0"
# Of release 1.29.1 all cases run; what 1.32.0 and the older Megatron do differently, a few would show.
SOME = ["loss-b3", "one-document-cp2-rank1", "documents-cp4-rank3", "padding-cp2-rank0", "slice-cp2-rank1"]
KERNELS = "megatron/core/transformer/experimental_attention_variant/dsa_cudnn_kernels.py"


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A process with the newest Megatron of those that need the repair."""
    with Host(megatron_wheel.folder_of(NEWEST)) as host:
        yield host


def assert_all_pass(records: list[Record]) -> None:
    assert records
    assert [f"{r.case}, {r.caller}: {r.verdict}, {r.reason}" for r in records if r.verdict != "pass"] == []


def check(records: list[Record], *, old: bool) -> None:
    """That the numbers are those that were seen when the faults were found, and none of them after `install()`."""
    assert_all_pass(records)
    for record in records:
        metrics, after = record.metrics, record.caller == "dsattn"
        if record.case.startswith("loss"):
            worst = [max(errors) for errors in zip(*metrics["errors"].values(), strict=True)]
            assert worst[0] <= 1e-6
            assert all(error <= 1e-6 for error in worst[1:]) is (after or old)
            assert all(all(zero[1:]) for zero in metrics["zero"].values()) is not (after or old)
        elif after or (old and not record.case.startswith(("padding", "slice"))):
            assert (metrics["recall_mean"], metrics["recall_min"]) == (1, 1)
        elif record.case.startswith("padding") and old:
            assert metrics["recall_mean"] == pytest.approx(0.87, abs=0.02)
        else:
            assert 0.15 < metrics["recall_mean"] < 0.62
            assert metrics["recall_min"] < 0.1


def test_as_released_it_is_right_on_the_frontend_it_was_written_for(host: Host) -> None:
    check(host.call(megatron_wheel.records, OLD_FRONTEND, NEWEST), old=True)


def test_on_a_newer_frontend_only_install_makes_it_right(host: Host) -> None:
    check(host.call(megatron_wheel.records, "1.29.1", NEWEST), old=False)


def test_on_the_newest_frontend_too(host: Host) -> None:
    check(host.call(megatron_wheel.records, "1.32.0", NEWEST, SOME), old=False)


def test_the_older_megatron_is_the_same() -> None:
    """Both wheels have the same kernels; one of them is run as a whole."""
    folders = [megatron_wheel.folder_of(version) for version in (OLDEST, NEWEST)]
    old, new = ((folder / KERNELS).read_bytes() for folder in folders)
    with Host(folders[0]) as host:
        names = SOME[:3] if old == new else None
        check(host.call(megatron_wheel.records, "1.29.1", OLDEST, names), old=False)


@pytest.mark.parametrize(("batch", "release"), [(2, "1.29.1"), (3, "1.32.0")])
def test_a_training_step_has_the_old_frontends_gradients(host: Host, batch: int, release: str) -> None:
    """Through Megatron's autograd function: selection, attention, loss, and every gradient."""
    before, after = host.call(megatron_wheel.training_errors, batch, release)
    assert set(after) == {"query", "kv_full", "q_indexer", "k_indexer", "weights"}
    for name, errors in after.items():
        assert max(errors) <= 1e-6, name
    for name in ("q_indexer", "k_indexer", "weights"):
        assert before[name] == [0.0, *[1.0] * (batch - 1)], "the gradients of all but the first sequence are zero"


def test_dense_scores_of_the_last_rows_are_the_old_frontends(host: Host) -> None:
    right = host.call(megatron_wheel.dense_scores, OLD_FRONTEND, False)
    before = host.call(megatron_wheel.dense_scores, "1.29.1", False)
    after = host.call(megatron_wheel.dense_scores, "1.29.1", True)
    assert (before.nan_to_num() - right).norm() > 0.1 * right.norm()
    assert (after - right).norm() <= 1e-6 * right.norm()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_megatron_refuses_the_scorer_takes(host: Host, rank: int) -> None:
    """Many documents and padding behind them, for which Megatron's layout has no room."""
    problem = selection("documents and padding", (64, 136), 2, rank, 0, keys=256)
    with pytest.raises(RuntimeError):
        host.call(megatron_wheel.select_as_released, problem)
    assert host.call(megatron_wheel.select_with_scorer, problem) == ""


@pytest.mark.parametrize("documents", [(128,), (64, 128)])
def test_the_scorer_hands_the_loss_the_scores_of_its_keys(host: Host, documents: tuple[int, ...]) -> None:
    problem = selection("scores", documents, 2, 1, 0)
    right = host.call(megatron_wheel.selected_scores, problem, OLD_FRONTEND, False)
    found = host.call(megatron_wheel.selected_scores, problem, "1.29.1", True)
    assert (right != 0).sum() > 1000
    assert (found - right).norm() <= 1e-6 * right.norm()


def test_verify_reads_what_a_capture_of_megatron_wrote(host: Host, tmp_path: Path) -> None:
    file = tmp_path / "step.safetensors"
    layers = host.call(megatron_wheel.attend_twice, file)
    for found, inputs in zip(read(file), layers, strict=True):
        packed = {name: x.transpose(0, 1).flatten(0, 1) for name, x in inputs.items()}
        for mine, theirs in {"index_q": "q_indexer", "index_k": "k_indexer", "q": "query", "kv": "kv_full"}.items():
            assert torch.equal(getattr(found, mine), packed[theirs])
        assert torch.equal(found.weights, packed["weights"])
        assert (found.top_k, found.value_dim, found.softmax_scale, found.scale, found.relu) == (5, 512, 0.125, 1, True)
        assert [(s.q_start, s.q_len, s.k_start, s.k_len, s.q_offset) for s in found.layout.segments] == [
            (0, 12, 0, 12, 0),
            (12, 12, 12, 12, 0),
        ]
    assert main(["verify", "--inputs", str(file), "--backend", "torch"]) == 0
