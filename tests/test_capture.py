"""`capture`: which calls make a step of a file, what the file has of them, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from problems import Tensors, random_tensors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dsattn
from dsattn import BadInput, CausalLayout, UnsupportedProblem
from dsattn.spec.captured import CapturedCall, read

LAYOUT = CausalLayout.packed([0, 9, 20], num_q=22, num_k=21)
SINK, MASK = torch.linspace(-1, 1, 4), torch.arange(22) % 3 > 0
SCORING: dict[str, Any] = {"scale": 0.25, "relu": False}
ATTENDING: dict[str, Any] = {"value_dim": 10, "softmax_scale": 0.3, "sink": SINK}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "step.safetensors"


def tensors(dtype: torch.dtype = torch.float32, layout: CausalLayout = LAYOUT) -> Tensors:
    return random_tensors(layout, dtype=dtype)


def topk(x: Tensors, layout: CausalLayout = LAYOUT, top_k: int = 3) -> dsattn.TopK:
    return dsattn.indexer_topk(*x.index(), layout, top_k=top_k, **SCORING)


def loss(x: Tensors, layout: CausalLayout = LAYOUT, **options: Any) -> Tensor:
    return dsattn.indexer_loss(*x.all(), layout, softmax_scale=0.3, **SCORING, **options)


def during(file: Path, block: Callable[[], Any], **options: Any) -> None:
    """Runs a block under `capture`."""
    with dsattn.capture(file, **options):
        block()


def assert_is(found: CapturedCall, x: Tensors, layout: CausalLayout = LAYOUT, **expected: Any) -> None:
    """That a step is a call with these tensors, bit for bit, and options."""
    for name in ("index_q", "index_k", "weights", "q", "kv"):
        mine, given = getattr(found, name), getattr(x, name).detach()
        given = given.reshape(mine.shape)
        assert mine.dtype == given.dtype, name
        assert torch.equal(mine, given), name
    assert found.layout == layout
    expected = {"top_k": 3, "value_dim": 10, "softmax_scale": 0.3, **SCORING, **expected}
    for name, value in {"sink": SINK, "row_mask": None, **expected}.items():
        mine = getattr(found, name)
        assert torch.equal(mine, value) if isinstance(value, Tensor) else mine == value, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_one_dsa_attention_is_a_step(dtype: torch.dtype, file: Path) -> None:
    x, sink = tensors(dtype).requires_grad_(), SINK.double() if dtype == torch.float64 else SINK
    options: dict[str, Any] = ATTENDING | SCORING | {"sink": sink, "top_k": 3, "loss": "selected", "row_mask": MASK}
    with dsattn.capture(file) as captured:
        assert captured.steps == 0
        result = dsattn.dsa_attention(*x.dsa(), LAYOUT, **options)
        assert captured.steps == 1
        assert not file.exists()
    (found,) = read(file)
    assert_is(found, x, sink=sink, row_mask=MASK)
    assert "indexer_topk, sparse_attention, indexer_loss" in found.source
    assert "packed" in found.source
    # The call is what it is without: its results, and a backward through it.
    assert result.loss is not None
    (result.out.sum() + result.loss).backward()
    assert torch.equal(result.out, dsattn.dsa_attention(*x.dsa(), LAYOUT, **options).out)
    assert x.index_q.grad is not None


@pytest.mark.parametrize("strided", [False, True])
def test_bshd_calls_are_stored_packed(strided: bool, file: Path) -> None:
    layout = CausalLayout.batched(2, 11)
    packed = tensors(layout=layout)
    x = Tensors(*(y.unflatten(0, (2, 11)) for y in packed.all()))
    if strided:
        x = Tensors(*(y.transpose(0, 1).contiguous().transpose(0, 1) for y in x.all()))
        assert not x.q.is_contiguous()
    mask = MASK.unflatten(0, (2, 11))
    with dsattn.capture(file):
        dsattn.sparse_attention(x.q, x.kv, topk(x, layout), **ATTENDING)
        loss(x, layout, row_mask=mask)
    (found,) = read(file)
    assert_is(found, packed, layout, row_mask=MASK)
    assert "BSHD with b = 2" in found.source


def test_separate_operators_are_joined(file: Path) -> None:
    x = tensors()
    with dsattn.capture(file, steps=5) as captured:
        selection = topk(x)
        dsattn.indexer_scores(*x.index(), LAYOUT)
        dsattn.sparse_attention(x.q, x.kv, selection, **ATTENDING)
        loss(x, topk=selection, row_mask=MASK)
        assert captured.steps == 1
        y = tensors()
        topk(y)
        dsattn.dense_attention(y.q, y.kv, LAYOUT, **ATTENDING)
    first, second = read(file)
    assert_is(first, x, row_mask=MASK)
    assert_is(second, y)


def test_a_loss_alone_is_a_step_and_takes_what_others_know(file: Path) -> None:
    x = [tensors() for _ in range(5)]
    with dsattn.capture(file, steps=5):
        # Dense warm-up with and without its attention, which may also come after; a loss over a given selection.
        loss(x[0])
        dsattn.dense_attention(x[1].q, x[1].kv, LAYOUT, **ATTENDING)
        loss(x[1], row_mask=MASK)
        loss(x[2])
        dsattn.dense_attention(x[2].q, x[2].kv, LAYOUT, **ATTENDING)
        selection = topk(x[3], top_k=5)
        loss(x[3], topk=selection)
        dsattn.sparse_attention(x[3].q, x[3].kv, selection, **ATTENDING)
        topk(x[4], top_k=7)
        loss(x[4])
    found = read(file)
    # The longest window has 11 keys.
    assert_is(found[0], x[0], top_k=11, value_dim=24, sink=None)
    assert_is(found[1], x[1], top_k=11, row_mask=MASK)
    assert_is(found[2], x[2], top_k=11)
    assert_is(found[3], x[3], top_k=5)
    assert_is(found[4], x[4], top_k=7, value_dim=24, sink=None)


@pytest.mark.parametrize("attend", ["selected", "visible"])
@pytest.mark.parametrize("kind", ["none", "selected", "visible"])
def test_every_kind_of_dsa_attention(attend: str, kind: str, file: Path) -> None:
    layers = [tensors() for _ in range(2)]
    with dsattn.capture(file, steps=9) as captured:
        for x in layers:
            dsattn.dsa_attention(*x.dsa(), LAYOUT, **ATTENDING, **SCORING, top_k=3, attend=attend, loss=kind)
        if (attend, kind) == ("visible", "none"):
            assert captured.steps == 0, "nothing is asked of an indexer"
            topk(layers[0])
            loss(layers[0])
    found = read(file)
    if (attend, kind) != ("visible", "none"):
        for one, x in zip(found, layers, strict=True):
            assert_is(one, x, top_k=11 if (attend, kind) == ("visible", "visible") else 3)


def test_two_thousand_keys_are_the_most_of_a_dense_warm_up(file: Path) -> None:
    layout = CausalLayout.packed([0, 2], [0, 3000], q_offset=2998)
    with dsattn.capture(file):
        loss(tensors(layout=layout), layout)
    assert read(file)[0].top_k == 2048


def test_tensors_are_those_of_the_moment_of_the_call(file: Path) -> None:
    x = tensors()
    kept = Tensors(*(y.clone() for y in x.all()))
    with dsattn.capture(file):
        selection = topk(x)
        x.index_q.zero_()
        dsattn.sparse_attention(x.q, x.kv, selection, **ATTENDING)
        x.q.zero_()
    assert_is(read(file)[0], kept)


def test_the_next_layer_is_no_part_of_a_step(file: Path) -> None:
    """The same memory with other numbers, as an allocator gives it to the next layer."""
    x, y = tensors(), tensors()
    first, second = (Tensors(*(z.clone() for z in one.all())) for one in (x, y))
    with dsattn.capture(file, steps=2) as captured:
        dsattn.sparse_attention(x.q, x.kv, topk(x), **ATTENDING)
        for mine, other in zip(x.all(), y.all(), strict=True):
            mine.copy_(other)
        loss(x, row_mask=MASK)
        assert captured.steps == 2
    one, two = read(file)
    assert_is(one, first)
    assert_is(two, second, top_k=11, value_dim=24, sink=None, row_mask=MASK)


def test_only_the_first_steps_are_written(file: Path) -> None:
    layers = [tensors() for _ in range(4)]
    with dsattn.capture(file, steps=2) as captured:
        for x in layers:
            dsattn.dsa_attention(*x.dsa(), LAYOUT, **ATTENDING, **SCORING, top_k=3, loss="selected", row_mask=MASK)
        assert captured.steps == 2
        # Late, and of a step that was captured: the capture is over.
        loss(layers[1], row_mask=~MASK)
    found = read(file)
    assert len(found) == 2
    for one, x in zip(found, layers, strict=False):
        assert_is(one, x, row_mask=MASK)
    with dsattn.capture(file, steps=9):
        dsattn.dsa_attention(*x.dsa(), LAYOUT, **ATTENDING, **SCORING, top_k=3)
    assert len(read(file)) == 1, "fewer than asked for, in place of the old file"


def other_slots(x: Tensors) -> None:
    selection = topk(x, top_k=4)
    topk(x)
    dsattn.sparse_attention(x.q, x.kv, selection, **ATTENDING)


def other_rows(x: Tensors) -> None:
    topk(x)
    layout = CausalLayout.packed([0, 30])
    y = tensors(layout=layout)
    dsattn.dense_attention(y.q, y.kv, layout, **ATTENDING)


def other_layout(x: Tensors) -> None:
    topk(x)
    dsattn.dense_attention(x.q, x.kv, CausalLayout.packed([0, 8, 20], num_q=22, num_k=21), **ATTENDING)


def other_order(x: Tensors) -> None:
    dsattn.dense_attention(x.q, x.kv, LAYOUT, **ATTENDING)
    topk(x)


@pytest.mark.parametrize("block", [other_slots, other_rows, other_layout, other_order])
def test_what_does_not_belong_together(block: Callable[[Tensors], None], file: Path) -> None:
    with pytest.raises(BadInput, match="no complete call"):
        during(file, lambda: block(tensors()))
    assert not file.exists()


def test_a_layer_that_shares_a_selection_is_no_step(file: Path) -> None:
    x = tensors()
    with dsattn.capture(file, steps=2) as captured:
        selection = topk(x)
        dsattn.sparse_attention(x.q, x.kv, selection, **ATTENDING)
        dsattn.sparse_attention(x.q + 1, x.kv, selection, **ATTENDING)
        assert captured.steps == 1
    (found,) = read(file)
    assert_is(found, x)


def test_nothing_is_told_with_what_was_seen(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tensors()

    def sides() -> None:
        topk(x)
        topk(x)
        dsattn.indexer_scores(*x.index(), LAYOUT)

    with pytest.raises(BadInput, match=r"2 of indexer_topk, 1 of indexer_scores\)") as caught:
        during(file, sides)
    assert str(file) in str(caught.value)

    def unseen() -> None:
        # Neither questions nor calls without numbers nor those of a graph count.
        dsattn.explain("dsa_attention", *x.dsa(), LAYOUT, **ATTENDING, top_k=3)
        meta = Tensors(*(y.to("meta") for y in x.all()))
        dsattn.dense_attention(meta.q, meta.kv, LAYOUT, value_dim=10, softmax_scale=0.3)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        loss(x)

    with pytest.raises(BadInput, match=r"calls seen: none\).*compiled graphs"):
        during(file, unseen)
    assert not file.exists()


def test_a_block_that_raises_writes_what_was_complete(file: Path) -> None:
    def block() -> None:
        loss(tensors())
        topk(tensors())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        during(file, block, steps=3)
    assert len(read(file)) == 1
    assert not hasattr(caught.value, "__notes__")
    file.unlink()
    with pytest.raises(ValueError, match="invalid literal"):
        during(file, lambda: int("x"))
    assert not file.exists()


def test_an_error_while_writing_hides_no_other(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(safetensors, "serialize_file", full)
    x = tensors()
    with pytest.raises(ValueError, match="invalid literal") as caught:
        during(file, lambda: (loss(x), int("x")))
    (note,) = caught.value.__notes__
    assert note.startswith("dsattn.capture: ")
    assert "disk full" in note
    with pytest.raises(BadInput, match="disk full"):
        during(file, lambda: loss(x))


def test_captures_may_be_nested_and_end(tmp_path: Path) -> None:
    x, y = tensors(), tensors()
    with dsattn.capture(tmp_path / "outer", steps=3):
        loss(x)
        with dsattn.capture(tmp_path / "inner", steps=3):
            loss(y)
        loss(x)
    loss(y)
    assert [torch.equal(one.q, x.q) for one in read(tmp_path / "outer")] == [True, False]
    assert [torch.equal(one.q, y.q) for one in read(tmp_path / "inner")] == [True]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_layer_is_what_it_is_without(use_reentrant: bool, file: Path) -> None:
    x = tensors().requires_grad_()

    def layer(q: Tensor, kv: Tensor, *index: Tensor) -> Tensor:
        index_q, index_k, weights = index
        result = dsattn.dsa_attention(
            q, kv, index_q, index_k, weights, LAYOUT, **ATTENDING, **SCORING, top_k=3, loss="selected"
        )
        assert result.loss is not None
        return result.out.sum() + result.loss

    layer(*x.dsa()).backward()
    expected = [y.grad.clone() for y in x.all() if y.grad is not None]
    x = Tensors(*(y.detach().clone() for y in x.all())).requires_grad_()
    with dsattn.capture(file, steps=3) as captured:
        checkpoint(layer, *x.dsa(), use_reentrant=use_reentrant).backward()
        assert captured.steps == 2, "the second one is the recomputation"
    assert all(y.grad is not None and torch.equal(y.grad, d) for y, d in zip(x.all(), expected, strict=True))
    for found in read(file):
        assert_is(found, x)


def test_a_device_layout_is_refused(file: Path) -> None:
    layout = CausalLayout.on_device(torch.tensor([0, 9, 20]), num_q=22, num_k=21, max_len=20)
    x = tensors()
    with pytest.raises(UnsupportedProblem, match="device layout"):
        during(file, lambda: (loss(x), topk(x, layout)), steps=2)
    assert len(read(file)) == 1


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("x", {"steps": 0}, "steps: given 0"),
        ("x", {"steps": True}, "steps"),
        ("no/x", {}, "does not exist"),
        ("", {}, "a folder"),
    ],
)
def test_a_bad_capture_does_not_begin(path: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words), dsattn.capture(tmp_path / path, **options):
        pytest.fail("the block ran")
