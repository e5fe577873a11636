"""TopK: what its validation refuses, what it costs, and the round trips between id spaces."""

import copy
import dataclasses
import pickle
import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsattn.errors import BadInput
from dsattn.layouts import CausalLayout, Segment, TopK

INF = float("inf")


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def fields(topk):
    return [topk.indices.tolist(), topk.lengths.tolist(), topk.num_q, topk.num_k]


def good() -> dict[str, Any]:
    """Arguments of a right selection, to be spoilt one at a time."""
    return {
        "indices": i32([[0, -1, -1], [0, 1, -1], [-1, -1, -1], [1, 4, 6]]),
        "lengths": i32([1, 2, 0, 3]),
        "scores": torch.tensor([[0.5, -INF, -INF], [0.0, INF, -INF], [-INF] * 3, [1.0, float("nan"), -2.0]]),
        "num_q": 4,
        "num_k": 7,
    }


def spoilt(name, row, value):
    arguments = good()
    arguments[name][row] = torch.as_tensor(value, dtype=arguments[name].dtype)
    return arguments


def test_a_right_selection_is_kept_as_it_is():
    arguments = good()
    topk = TopK(**arguments)
    assert topk.indices is arguments["indices"]
    assert topk.lengths is arguments["lengths"]
    assert topk.scores is arguments["scores"]
    batched = TopK(
        arguments["indices"].reshape(2, 2, 3),
        arguments["lengths"].reshape(2, 2),
        arguments["scores"].double().reshape(2, 2, 3),
        num_q=4,
        num_k=7,
    )
    assert batched.indices.shape == (2, 2, 3)
    for t, k in ((0, 3), (3, 0), (0, 0)):
        indices, lengths = torch.zeros(t, k, dtype=torch.int32), torch.zeros(t, dtype=torch.int32)
        assert TopK(indices, lengths, num_q=t, num_k=0).scores is None


# (arguments, argument named, given, needed): texts that the message must hold
REFUSED = {
    "indices int64": ({**good(), "indices": good()["indices"].long()}, "indices", "int64", "int32"),
    "indices a list": ({**good(), "indices": [[0]]}, "indices", "list", "a tensor"),
    "indices one axis": ({**good(), "indices": i32([0])}, "indices", "[1]", "[t, k] or [b, sq, k]"),
    "lengths int64": ({**good(), "lengths": good()["lengths"].long()}, "lengths", "int64", "int32"),
    "lengths of another shape": ({**good(), "lengths": i32([1, 2, 0])}, "lengths", "[3]", "[4]"),
    "lengths on another device": ({**good(), "lengths": good()["lengths"].to("meta")}, "lengths", "meta", "cpu"),
    "scores fp16": ({**good(), "scores": good()["scores"].half()}, "scores", "float16", "float32 or float64"),
    "scores ints": ({**good(), "scores": good()["indices"]}, "scores", "int32", "float32 or float64"),
    "scores of another shape": ({**good(), "scores": good()["scores"][:, :2]}, "scores", "[4, 2]", "[4, 3]"),
    "num_q not the rows": ({**good(), "num_q": 5}, "num_q", "5", "4"),
    "num_q a bool": ({**good(), "num_q": True}, "num_q", "True", "integer"),
    "num_k negative": ({**good(), "num_k": -1}, "num_k", "-1", "from 0"),
    "num_k a float": ({**good(), "num_k": 7.0}, "num_k", "7.0", "integer"),
    "key row num_k": ({**good(), "num_k": 6}, "indices[3, 2]", "6 after 4", "[0, num_k = 6)"),
    "key row negative": (spoilt("indices", 1, [-2, 1, -1]), "indices[1, 0]", "-2", "[0, num_k = 7)"),
    "unused slot in use": (spoilt("indices", 3, [1, -1, 6]), "indices[3, 1]", "-1 after 1", "[0, num_k = 7)"),
    "duplicate": (spoilt("indices", 3, [1, 4, 4]), "indices[3, 2]", "4 after 4", "strictly ascending"),
    "descending": (spoilt("indices", 1, [1, 0, -1]), "indices[1, 1]", "0 after 1", "strictly ascending"),
    "id in an unused slot": (spoilt("indices", 2, [-1, 3, -1]), "indices[2, 1]", "3", "-1 in unused slots"),
    "odd mark in an unused slot": (spoilt("indices", 0, [0, -1, -2]), "indices[0, 2]", "-2", "-1 in unused slots"),
    "length above k": (spoilt("lengths", 3, 4), "lengths[3]", "4", "0 to k = 3"),
    "length negative": (spoilt("lengths", 2, -1), "lengths[2]", "-1", "0 to k = 3"),
    "score in an unused slot": (spoilt("scores", 1, [0, 1, 0]), "scores[1, 2]", "0.0", "-inf in unused slots"),
}


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(("arguments", "argument", "given", "needed"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(arguments, argument, given, needed):
    with pytest.raises(BadInput) as caught:
        TopK(**arguments)
    message = str(caught.value)
    assert caught.value.what == argument
    assert given in message.split("; needed ")[0].removeprefix(argument)
    assert needed in message.split("; needed ", 1)[1]


def test_the_first_bad_row_is_named():
    indices = i32([[[0], [1]], [[2], [9]], [[9], [0]]])
    with pytest.raises(BadInput, match=r"^indices\[1, 1, 0\]: given 9 "):
        TopK(indices, torch.ones(3, 2, dtype=torch.int32), num_q=6, num_k=9)


class Waits(TorchDispatchMode):
    """Counts what would wait for a device: reads of values, and results whose size depends on values."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "repeat_interleave")

    def __init__(self, monkeypatch):
        super().__init__()
        self.reads = 0
        for name in ("tolist", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self.counted(getattr(torch.Tensor, name)))

    def counted(self, read):
        def reader(*args, **kwargs):
            self.reads += 1
            return read(*args, **kwargs)

        return reader

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        _, indices, *_ = (*args, None, None)
        indexes = func.overloadpacket is torch.ops.aten.index and indices
        by_mask = indexes and any(index is not None and index.dtype == torch.bool for index in indices)
        self.reads += by_mask or func.overloadpacket.__name__ in self.NAMES
        return func(*args, **(kwargs or {}))


def test_validation_waits_once(monkeypatch):
    arguments = good()
    layout = CausalLayout.packed([0, 4], [0, 7], q_offset=6)
    layout.bounds()
    with Waits(monkeypatch) as waits:
        TopK(**arguments)
    assert waits.reads == 1
    with Waits(monkeypatch) as waits:
        TopK.from_ids(arguments["indices"], layout)
    assert waits.reads == 1
    with Waits(monkeypatch) as waits:
        topk = TopK._trusted(**arguments)._batched(1)._packed().to("cpu")
        topk.to_ids(layout)
        topk._batched(1).to_ids(layout, space="seq_major")
    assert waits.reads == 0


def test_trusted_checks_nothing_and_shapes_go_back():
    topk = TopK._trusted(i32([[9, 9]] * 6), i32([5] * 6), torch.zeros(6, 2), 6, 1)
    assert fields(topk) == [[[9, 9]] * 6, [5] * 6, 6, 1]
    batched = topk._batched(3)
    assert batched.scores is not None
    assert batched.indices.shape == batched.scores.shape == (3, 2, 2)
    assert batched.lengths.shape == (3, 2)
    assert fields(batched._packed()) == fields(topk)
    assert batched.indices.data_ptr() == topk.indices.data_ptr()
    nothing = TopK._trusted(i32([]).reshape(0, 2), i32([]), None, 0, 1)
    assert nothing._batched(0, 5).indices.shape == (0, 5, 2)


def test_a_selection_is_a_value_that_stays():
    topk = TopK(**good())
    for twin in (copy.deepcopy(topk), pickle.loads(pickle.dumps(topk)), topk.to("cpu")):
        assert fields(twin) == fields(topk)
        torch.testing.assert_close(twin.scores, topk.scores, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        topk.num_q = 5  # pyrefly: ignore[read-only]
    moved = topk.to("meta")
    assert moved.scores is not None
    assert {moved.indices.device.type, moved.lengths.device.type, moved.scores.device.type} == {"meta"}
    assert repr(topk) == "TopK([4, 3] on cpu, scores torch.float32, num_q=4, num_k=7)"


def test_from_ids_sorts_and_compacts():
    layout = CausalLayout.packed([0, 2, 4], num_q=5, num_k=6)
    ids = torch.tensor([[-1, 0, 99], [1, -7, 0], [2, 6, -1], [3, -1, 2], [-1, 7, -1]])
    expected = [[[0, -1, -1], [0, 1, -1], [2, -1, -1], [2, 3, -1], [-1, -1, -1]], [1, 2, 1, 2, 0], 5, 6]
    for given in (ids, ids.int()):
        before = given.clone()
        topk = TopK.from_ids(given, layout)
        assert fields(topk) == expected
        assert topk.indices.dtype == topk.lengths.dtype == torch.int32
        assert topk.scores is None
        assert torch.equal(given, before)
        TopK(topk.indices, topk.lengths, num_q=5, num_k=6)


def test_from_local_ids():
    layout = CausalLayout.from_segments([Segment(0, 1, 4, 3, 2), Segment(2, 1, 0, 4, 9)], num_q=4, num_k=8)
    # Rows 1 and 3 are padding, where no id is in range.
    ids = i32([[2, 0, 3], [0, 1, 2], [3, 4, -1], [5, 6, 0]])
    topk = TopK.from_ids(ids, layout, space="local")
    assert fields(topk)[:2] == [[[4, 6, -1], [-1] * 3, [3, -1, -1], [-1] * 3], [2, 0, 1, 0]]
    assert topk.to_ids(layout, space="local").tolist() == [[0, 2, -1], [-1] * 3, [3, -1, -1], [-1] * 3]


def test_from_seq_major_ids():
    layout = CausalLayout.batched(2, 2, 3, q_offset=1)
    ids = torch.tensor([[[2, 0, 6], [4, -1, 0]], [[1, 3, 7], [5, 1, 3]]])
    topk = TopK.from_ids(ids, layout, space="seq_major")
    assert topk.indices.tolist() == [[[0, 1, -1], [0, 2, -1]], [[3, 4, -1], [3, 4, 5]]]
    assert topk.lengths.tolist() == [[2, 2], [2, 3]]
    assert topk.to_ids(layout, space="seq_major").tolist() == [[[0, 2, -1], [0, 4, -1]], [[1, 3, -1], [1, 3, 5]]]


def random_layout(rng):
    b = rng.randint(1, 3)
    documents = sorted(rng.randint(0, 9) for _ in range(3))
    return rng.choice(
        [
            CausalLayout.batched(b, 4, 9, q_offset=[rng.randint(-2, 8) for _ in range(b)]),
            CausalLayout.batched(b, 8, ratio=2),
            CausalLayout.batched(b, 5, lengths=[rng.randint(0, 5) for _ in range(b)], side="left"),
            CausalLayout.packed([0, *documents], num_q=12, num_k=12),
            CausalLayout.context_parallel([0, 4, 16], cp_size=2, cp_rank=rng.randrange(2)),
        ]
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("space", ["flat", "local", "seq_major"])
@pytest.mark.parametrize("seed", range(20))
def test_round_trips(seed, space, dtype):
    rng = random.Random(seed)
    layout, k = random_layout(rng), rng.randint(1, 6)
    start, end = (bound.tolist() for bound in layout.bounds())
    chosen = []
    for lo, hi in zip(start, end, strict=True):
        chosen.append(sorted(rng.sample(range(lo, hi), min(k, rng.randint(0, hi - lo)))))
    batches = [b for b in range(1, 4) if layout.num_q % b == 0 and layout.num_k % b == 0]
    b = rng.choice(batches)
    shape = (b, layout.num_q // b, k) if space == "seq_major" or rng.random() < 0.5 else (layout.num_q, k)
    key_start = {}
    for segment in layout.segments:
        key_start.update(dict.fromkeys(range(segment.q_start, segment.q_start + segment.q_len), segment.k_start))
    sk = layout.num_k // b
    ids = []
    for row, keys in enumerate(chosen):
        if space == "local":
            keys = [key - key_start[row] for key in keys]
        elif space == "seq_major":
            keys = [key % sk * b + key // sk for key in keys]
        slots = keys + [rng.choice([-1, -5, layout.num_k, 2**31 - 1]) for _ in range(k - len(keys))]
        rng.shuffle(slots)
        ids.append(slots)
    topk = TopK.from_ids(torch.tensor(ids, dtype=dtype).reshape(shape), layout, space=space)
    padded = [keys + [-1] * (k - len(keys)) for keys in chosen]
    assert topk.indices.shape == shape
    assert topk.lengths.shape == shape[:-1]
    assert topk.indices.reshape(-1, k).tolist() == padded
    assert topk.lengths.flatten().tolist() == [len(keys) for keys in chosen]
    TopK(topk.indices, topk.lengths, num_q=topk.num_q, num_k=topk.num_k)
    back = topk.to_ids(layout, space=space)
    assert back.dtype == torch.int32
    assert back.shape == shape
    used = topk.indices >= 0
    assert (back[~used] == -1).all()
    assert (back[used] >= 0).all()
    for row, given in zip(back.reshape(-1, k).tolist(), ids, strict=True):
        assert {id for id in row if id >= 0} <= set(given)
    assert fields(TopK.from_ids(back, layout, space=space)) == fields(topk)


def test_flat_ids_are_a_copy():
    topk = TopK(**good())
    layout = CausalLayout.packed([0, 4], [0, 7], q_offset=6)
    ids = topk.to_ids(layout)
    assert torch.equal(ids, topk.indices)
    ids.zero_()
    assert topk.indices.tolist() == good()["indices"].tolist()


ROW: Any = "row"
PACKED = CausalLayout.packed([0, 2, 4])
BATCHED = CausalLayout.batched(2, 2)
IDS_REFUSED = {
    "ids float": (lambda: TopK.from_ids(torch.zeros(4, 1), PACKED), "ids", "float32", "int32 or int64"),
    "ids one axis": (lambda: TopK.from_ids(i32([0]), PACKED), "ids", "[1]", "[t, k] or [b, sq, k]"),
    "ids of other rows": (lambda: TopK.from_ids(i32([[0]]), PACKED), "ids", "[1, 1]", "4 rows"),
    "space unknown": (lambda: TopK.from_ids(i32([[0]] * 4), PACKED, space=ROW), "space", "'row'", "'seq_major'"),
    "duplicate": (
        lambda: TopK.from_ids(i32([[0, -1], [0, 1], [2, 2], [2, 3]]), PACKED),
        "ids[2]",
        "key row 2 twice",
        "no duplicates",
    ),
    "duplicate in local ids": (
        lambda: TopK.from_ids(i32([[0, -1], [1, 1], [0, 4], [1, 0]]), PACKED, space="local"),
        "ids[1]",
        "key row 1 twice",
        "no duplicates",
    ),
    "local ids taken for flat": (
        lambda: TopK.from_ids(i32([[0], [1], [0], [1]]), PACKED),
        "ids[2]",
        "key row 0 in space 'flat'",
        "[2, 3), the window of query row 2; check space=",
    ),
    "a key in the future": (
        lambda: TopK.from_ids(i32([[[0], [1]], [[3], [3]]]), BATCHED),
        "ids[1, 0]",
        "key row 3",
        "[2, 3), the window of query row 2",
    ),
    "flat ids taken for seq_major": (
        lambda: TopK.from_ids(i32([[[0], [1]], [[2], [3]]]), BATCHED, space="seq_major"),
        "ids[0, 1]",
        "key row 2 in space 'seq_major'",
        "[0, 2), the window of query row 1",
    ),
    "an id in a row that sees nothing": (
        lambda: TopK.from_ids(i32([[0], [0]]), CausalLayout.packed([0, 1], num_q=2)),
        "ids[1]",
        "key row 0",
        "[0, 0)",
    ),
    "seq_major of packed ids": (
        lambda: TopK.from_ids(i32([[0]] * 4), PACKED, space="seq_major"),
        "ids",
        "[4, 1]",
        "[b, sq, k]",
    ),
    "seq_major of an odd key buffer": (
        lambda: TopK.from_ids(i32([[[0]], [[1]]]), CausalLayout.packed([0, 2], num_k=3), space="seq_major"),
        "num_k",
        "3",
        "a multiple of b = 2",
    ),
    "to another layout's sizes": (
        lambda: TopK(i32([[0]]), i32([1]), num_q=1, num_k=4).to_ids(PACKED),
        "layout",
        "num_q 4",
        "num_q 1 and num_k 4",
    ),
    "to an unknown space": (
        lambda: TopK(i32([[0]]), i32([1]), num_q=1, num_k=4).to_ids(PACKED, space=ROW),
        "space",
        "'row'",
        "'flat' or 'local'",
    ),
    "to another layout's segments": (
        lambda: TopK(i32([[0], [1], [1], [3]]), i32([1] * 4), num_q=4, num_k=4).to_ids(PACKED, space="local"),
        "layout",
        "indices[2]",
        "the selection was made for",
    ),
    "to seq_major without a batch": (
        lambda: TopK(i32([[0]] * 4), i32([1] * 4), num_q=4, num_k=4).to_ids(PACKED, space="seq_major"),
        "indices",
        "[4, 1]",
        "[b, sq, k]",
    ),
}


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(("call", "argument", "given", "needed"), IDS_REFUSED.values(), ids=IDS_REFUSED.keys())
def test_conversion_refused(call, argument, given, needed):
    with pytest.raises(BadInput) as caught:
        call()
    message = str(caught.value)
    assert caught.value.what == argument
    assert given in message.split("; needed ")[0].removeprefix(argument)
    assert needed in message.split("; needed ", 1)[1]


def test_nothing_to_convert():
    empty = CausalLayout.batched(0, 2, 3)
    ids = torch.zeros(0, 2, 4, dtype=torch.int64)
    for space in ("flat", "local", "seq_major"):
        topk = TopK.from_ids(ids, empty, space=space)
        assert topk.indices.shape == topk.to_ids(empty, space=space).shape == (0, 2, 4)
    no_slots = TopK.from_ids(torch.zeros(4, 0, dtype=torch.int64), PACKED)
    assert no_slots.lengths.tolist() == [0, 0, 0, 0]
    no_keys = CausalLayout.batched(2, 1, 0, q_offset=0)
    topk = TopK.from_ids(i32([[[0]], [[1]]]), no_keys, space="seq_major")
    assert topk.to_ids(no_keys, space="seq_major").tolist() == [[[-1]], [[-1]]]
