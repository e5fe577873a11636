"""audit: what a self-check cannot see, since it is small, shows in the calls that are really made."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from made_up import release
from torch import Tensor
from trust_calls import CHUNKS, WHOLE, Checked, attention_call, loss_call, scores_call, topk_call

from dsattn import (
    BadInput,
    CausalLayout,
    ContractDrift,
    TopK,
    audit,
    dense_attention,
    indexer_loss,
    indexer_scores,
    indexer_topk,
    sparse_attention,
)
from dsattn.backends import Backend, TorchBackend
from dsattn.functional import audit as audit_function
from dsattn.spec.problem import OPERATORS

LARGE, FIRST_WRONG = 200, 60
LAYOUT = CausalLayout.packed([0, 100, 240], num_q=250, num_k=245)


GRADIENTS = ("d_index_q", "d_index_k", "d_weights")
RESULTS: dict[str, tuple[str, ...]] = {
    "indexer_scores_backward": GRADIENTS,
    "sparse_attention": ("out", "lse"),
    "sparse_attention_backward": ("d_q", "d_kv", "d_sink"),
    "dense_attention": ("out", "lse"),
    "dense_attention_backward": ("d_q", "d_kv", "d_sink"),
}


class WrongWhenLarge(TorchBackend):
    """Plain PyTorch that has to show itself right: it is in small calls, and wrong in late rows of large ones."""

    name, checked = "large", True

    def __init__(self, part: str = "") -> None:
        self.part = part
        for operation in ("indexer_scores", "indexer_topk", "indexer_loss", *RESULTS):
            setattr(self, operation, partial(self._run, operation))

    def _run(self, operation: str, *arguments: Any) -> Any:
        found = getattr(TorchBackend, operation)(self, *arguments)
        if operation == "indexer_scores":
            return self._late("scores", found)
        if operation == "indexer_topk":
            ids = self._late("ids", found.indices)
            return TopK._trusted(ids, found.lengths, found.scores, found.num_q, found.num_k)
        if operation == "indexer_loss":
            loss, gradients = found
            return loss, gradients and self._all_late(GRADIENTS, gradients)
        return self._all_late(RESULTS[operation], found)

    def _all_late(self, names: tuple[str, ...], found: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(x if x is None else self._late(name, x) for name, x in zip(names, found, strict=True))

    def _late(self, name: str, x: Tensor) -> Tensor:
        if name != self.part or x.shape[0] <= LARGE:
            return x
        late = x[FIRST_WRONG:]
        return torch.cat([x[:FIRST_WRONG], late.roll(1, 0) if x.dtype == torch.int32 else late * 1.5])


def inputs(layout: CausalLayout = LAYOUT) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The indexer's and the attention's tensors, packed, in fp32, with gradients."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    t, s = layout.num_q, layout.num_k
    return (normal(t, 2, 16), normal(s, 16), normal(t, 2)), (normal(t, 3, 24), normal(s, 24))


def run(operator: str, backend: Backend | str, layout: CausalLayout = LAYOUT, **options: Any) -> None:
    """A call of an operator and its backward."""
    index, (q, kv) = inputs(layout)
    attending: dict[str, Any] = {"value_dim": 16, "softmax_scale": 0.2, "backend": backend}
    if operator == "indexer_scores":
        table = indexer_scores(*index, layout, backend=backend)
        table.masked_fill(table == -torch.inf, 0).sum().backward()
        return
    topk = indexer_topk(*index, layout, top_k=9, backend=backend if operator == "indexer_topk" else "torch")
    if operator == "sparse_attention":
        sparse_attention(q, kv, topk, sink=torch.ones(3), **attending).square().sum().backward()
    elif operator == "dense_attention":
        dense_attention(q, kv, layout, **attending).square().sum().backward()
    elif operator.startswith("indexer_loss"):
        chosen = topk if operator.endswith("selected") else None
        indexer_loss(*index, q, kv, layout, topk=chosen, softmax_scale=0.2, backend=backend, **options)


def repeat(operator: str, backend: Backend, **options: Any) -> None:
    """Calls enough for a row of the late ones to be drawn."""
    for _ in range(4):
        run(operator, backend, **options)


CASES = [
    ("indexer_scores", "scores", "indexer_scores"),
    ("indexer_scores", "d_index_q", "the backward of indexer_scores"),
    ("indexer_scores", "d_weights", "the backward of indexer_scores"),
    ("indexer_topk", "ids", "indexer_topk"),
    ("sparse_attention", "out", "sparse_attention"),
    ("sparse_attention", "lse", "sparse_attention"),
    ("sparse_attention", "d_q", "the backward of sparse_attention"),
    ("dense_attention", "out", "dense_attention"),
    ("dense_attention", "d_q", "the backward of dense_attention"),
    ("indexer_loss selected", "d_index_q", "indexer_loss"),
    ("indexer_loss visible", "d_weights", "indexer_loss"),
]


@pytest.mark.parametrize(("operator", "part", "title"), CASES)
def test_a_kernel_that_goes_wrong_only_when_large_is_caught(operator: str, part: str, title: str) -> None:
    backend = WrongWhenLarge(part)
    run(operator, backend)  # the self-check saw nothing
    with audit(every=1), pytest.raises(ContractDrift, match=rf"^audit of {title} on backend 'large': given ") as caught:
        repeat(operator, backend)
    told = re.search(r" row (\d+): .* looked at rows ([\d, ]+) of 250;", str(caught.value))
    assert told is not None
    assert int(told[1]) >= FIRST_WRONG
    assert told[1] in told[2].split(", ")


@pytest.mark.parametrize("operator", ["indexer_scores", "indexer_topk", "sparse_attention", "dense_attention"])
def test_a_right_kernel_is_left_alone(operator: str) -> None:
    with audit(every=1) as found:
        for seed in range(6):
            torch.manual_seed(seed)
            run(operator, WrongWhenLarge())
    # Forward and backward of all but the selection, whose backward there is none.
    assert found.checked == (6 if operator == "indexer_topk" else 12)


@pytest.mark.parametrize("operator", ["indexer_loss selected", "indexer_loss visible"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"num_rows": 77, "coeff": 0.5},
        {"num_rows": torch.tensor(77), "scale": 0.3},
        {"row_mask": torch.arange(250) % 4 != 0},
        {"row_mask": torch.zeros(250, dtype=torch.bool)},
    ],
)
def test_losses_are_held_to_the_weights_of_the_whole_call(operator: str, options: dict[str, Any]) -> None:
    with audit(every=1) as found:
        for _ in range(3):
            run(operator, WrongWhenLarge(), **options)
    assert found.checked == 3
    if not options.get("row_mask", torch.ones(1)).any():
        return
    with audit(every=1), pytest.raises(ContractDrift):
        repeat(operator, WrongWhenLarge("d_index_q"), **options)


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("layout", [CHUNKS, WHOLE])
def test_the_cudnn_backend_in_bf16_is_left_alone(arch: str, layout: CausalLayout) -> None:
    backend = release("1.45", arch, {})
    calls: list[Callable[[Backend], Any]] = [
        lambda b: topk_call(b, layout),
        lambda b: scores_call(b, layout),
        lambda b: loss_call(b, layout=layout),
        lambda b: loss_call(b, "visible", layout=layout),
        *((attention_call,) if arch == "sm100" else ()),
    ]
    with audit(every=1) as found:
        for call in calls:
            for _ in range(3):
                call(backend)
    assert found.checked == 3 * len(calls)


def test_a_device_layout_is_looked_at_too() -> None:
    layout = CausalLayout.on_device(torch.tensor([0, 100, 240]), num_q=250, num_k=245, max_len=150)
    index, _ = inputs(layout)
    with audit(every=1) as found:
        indexer_topk(*index, layout, top_k=9, backend=WrongWhenLarge())
        with pytest.raises(ContractDrift):
            indexer_topk(*index, layout, top_k=9, backend=WrongWhenLarge("ids"))
    assert found.checked == 2


def test_every_nth_call_of_each_operator_and_direction_is_looked_at() -> None:
    with audit(every=3) as found:
        for call in range(1, 8):
            run("sparse_attention", WrongWhenLarge())
            assert found.checked == call // 3 * 2 + (call - 1) // 3
            run("indexer_topk", WrongWhenLarge())
            assert found.checked == call // 3 * 3


def test_it_ends_with_its_block_or_when_stopped() -> None:
    wrong = WrongWhenLarge("out")
    with audit(every=1):
        run("sparse_attention", WrongWhenLarge())
    run("sparse_attention", wrong)
    started = audit(every=1)
    try:
        with pytest.raises(ContractDrift):
            run("sparse_attention", wrong)
    finally:
        started.stop()
    run("sparse_attention", wrong)
    started.stop()


def test_plain_pytorch_costs_nothing_and_random_numbers_stay() -> None:
    with audit(every=1) as found:
        run("sparse_attention", "torch")
        assert found.checked == 0
        states = []
        for backend in (TorchBackend(), Checked()):
            torch.manual_seed(4)
            attention_call(backend)
            states.append(torch.get_rng_state())
    assert found.checked == 1
    assert torch.equal(*states)


class Swallows(WrongWhenLarge):
    """NaN comes out as 0, as of kernels that compare in place of a relu; explain tells of them."""

    def _run(self, operation: str, *arguments: Any) -> Any:
        return tuple(x if x is None else torch.where(x.isnan(), 0.0, x) for x in super()._run(operation, *arguments))


def test_what_is_not_finite_is_left_out() -> None:
    index, (q, kv) = inputs()
    topk = indexer_topk(*index, LAYOUT, top_k=9)
    for value, backend in ((torch.nan, Swallows()), (1.0, WrongWhenLarge("lse"))):
        with torch.no_grad():
            kv.fill_(value)
        with audit(every=1) as found:
            if value == 1:
                with pytest.raises(ContractDrift):
                    sparse_attention(q, kv, topk, value_dim=16, softmax_scale=0.2, backend=backend)
            else:
                sparse_attention(q, kv, topk, value_dim=16, softmax_scale=0.2, backend=backend)
        assert found.checked == 1


def test_a_capture_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = WrongWhenLarge("out")
    run("sparse_attention", backend)
    monkeypatch.setattr(sys.modules["dsattn.functional.audit"], "capturing", lambda device: True)
    with audit(every=1) as found:
        run("sparse_attention", backend)
    assert found.checked == 0


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("every", [0, -1, True, 1.5, None])
def test_every_is_a_number_of_calls(every: Any) -> None:
    with pytest.raises(BadInput, match=r"^every: given .*; needed an int of at least 1$"):
        audit(every=every)


def test_all_operators_are_looked_at() -> None:
    looked_at = {title.removeprefix("the backward of ") for _, _, title in CASES}
    assert looked_at == set(OPERATORS)
    assert audit_function is audit
