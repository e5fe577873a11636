"""explain, observers and attach_loss."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from problems import random_tensors

from dsattn import BadInput, CausalLayout, attach_loss, dsa_attention, explain, indexer_loss, indexer_topk
from dsattn.backends import Backend, TorchBackend
from dsattn.functional.call import Call, observed
from dsattn.spec.problem import Problem

LAYOUT = CausalLayout.batched(2, 12)
OPTIONS: dict[str, Any] = {"top_k": 5, "value_dim": 16, "softmax_scale": 0.2}


class _Absent(Backend):
    name = "absent"

    def missing(self) -> str | None:
        return "package absent is not installed"

    def supports(self, problem: Problem) -> str | None:
        raise AssertionError("an absent backend is not asked")


class _NoLoss(Backend):
    name = "no loss"

    def missing(self) -> str | None:
        return None

    def supports(self, problem: Problem) -> str | None:
        self.seen = problem
        return "it has no loss" if problem.operator == "indexer_loss" else None


def test_explain_asks_every_backend_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("an operator ran")

    for name in ("indexer_topk", "sparse_attention", "dense_attention", "indexer_loss"):
        monkeypatch.setattr(TorchBackend, name, refuse)
    picky = _NoLoss()
    # In the package the function hides the module of its name.
    module = sys.modules["dsattn.functional.explain"]
    monkeypatch.setattr(module, "ordered", lambda: (_Absent(), picky, TorchBackend()))
    x = random_tensors(LAYOUT).requires_grad_()
    found = explain("dsa_attention", *x.dsa(), LAYOUT, loss="visible", backend="torch", **OPTIONS)
    forwards = [a for a in found.answers if not a.backward]
    assert [(a.operator, a.backend, a.takes, a.reason, a.chosen) for a in forwards] == [
        ("indexer_topk", "absent", False, "package absent is not installed", False),
        ("indexer_topk", "no loss", True, None, True),
        ("indexer_topk", "torch", True, None, False),
        ("sparse_attention", "absent", False, "package absent is not installed", False),
        ("sparse_attention", "no loss", True, None, True),
        ("sparse_attention", "torch", True, None, False),
        ("indexer_loss", "absent", False, "package absent is not installed", False),
        ("indexer_loss", "no loss", False, "it has no loss", False),
        ("indexer_loss", "torch", True, None, True),
    ]
    assert [(a.operator, a.backend) for a in found.answers if a.backward] == [
        ("sparse_attention", name) for name in ("absent", "no loss", "torch")
    ]
    assert (picky.seen.num_q, picky.seen.top_k, picky.seen.support, picky.seen.requires_grad) == (
        24,
        None,
        "visible",
        True,
    )
    assert "indexer_loss               no loss  no" in str(found)


def test_explain_refuses_what_the_call_would_refuse() -> None:
    x = random_tensors(LAYOUT)
    with pytest.raises(BadInput, match="at least 1"):
        explain("indexer_topk", *x.index(), LAYOUT, top_k=0)
    with pytest.raises(BadInput, match="'indexer_topk'"):
        explain("topk", *x.index(), LAYOUT, top_k=3)


def test_observers_see_every_call_before_it_runs() -> None:
    x = random_tensors(LAYOUT)
    calls: list[Call] = []
    with observed(calls.append):
        dsa_attention(*x.dsa(), LAYOUT, loss="selected", **OPTIONS)
    dsa_attention(*x.dsa(), LAYOUT, loss="selected", **OPTIONS)
    assert [call.operator for call in calls] == ["indexer_topk", "sparse_attention", "indexer_loss"]
    assert calls[2].topk is not None
    assert calls[2].layout is LAYOUT


@pytest.mark.parametrize("scale", [1.0, 3.0, torch.tensor(0.5)])
def test_attach_loss_sends_the_scale_into_the_loss(scale: float | torch.Tensor) -> None:
    x = random_tensors(LAYOUT).requires_grad_()
    loss = indexer_loss(*x.all(), LAYOUT, softmax_scale=0.2)
    expected = torch.autograd.grad(loss, x.index(), retain_graph=True)
    out = x.q * 2
    attached = attach_loss(out, loss, scale)
    assert torch.equal(attached, out)
    gradients = torch.autograd.grad(attached, (x.q, *x.index()), torch.full_like(out, 7.0))
    assert torch.equal(gradients[0], torch.full_like(out, 14.0))
    for got, wanted in zip(gradients[1:], expected, strict=True):
        torch.testing.assert_close(got, wanted * float(scale))


def test_a_scale_may_be_set_before_the_backward_runs() -> None:
    scale, loss_input = torch.tensor(1.0), torch.ones(1, requires_grad=True)
    out = attach_loss(torch.ones(2, requires_grad=True) * 1, (loss_input * 2).sum(), scale)
    scale.fill_(8.0)
    out.sum().backward()
    assert loss_input.grad is not None
    assert loss_input.grad.item() == 16


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("argument", "value"),
    [("out", 1.0), ("loss", None), ("loss", torch.zeros(2)), ("scale", torch.zeros(2)), ("scale", "1")],
)
def test_attach_loss_names_what_is_wrong(argument: str, value: Any) -> None:
    right: dict[str, Any] = {"out": torch.zeros(2), "loss": torch.zeros(()), "scale": 1.0}
    with pytest.raises(BadInput) as caught:
        attach_loss(**(right | {argument: value}))
    assert caught.value.what == argument


def test_a_selection_survives_as_an_earlier_layers() -> None:
    x = random_tensors(LAYOUT)
    topk = indexer_topk(*x.index(), LAYOUT, top_k=5)
    found = explain("dsa_attention", x.q, x.kv, None, None, None, LAYOUT, topk=topk, value_dim=16, softmax_scale=0.2)
    assert {answer.operator for answer in found.answers} == {"sparse_attention"}


def test_observers_see_their_own_thread_only() -> None:
    x = random_tensors(LAYOUT)
    calls: list[Call] = []
    with observed(calls.append):
        other = threading.Thread(target=indexer_topk, args=(*x.index(), LAYOUT), kwargs={"top_k": 3})
        other.start()
        other.join()
    assert calls == []
