"""Every refusal of a layout: the message names the argument, what was given and what is needed."""

from typing import Any

import pytest
import torch

from dsattn.errors import BadInput
from dsattn.layouts import CausalLayout, Segment, context_parallel_positions, gather_order

pytestmark = pytest.mark.usefixtures("no_shape_checks")

# Untyped on purpose: wrong types are passed.
batched: Any = CausalLayout.batched
packed: Any = CausalLayout.packed
from_segments: Any = CausalLayout.from_segments


def parallel(cu_seqlens=(0, 8), cp_size=2, cp_rank=0, **rest):
    return CausalLayout.context_parallel(cu_seqlens, cp_size=cp_size, cp_rank=cp_rank, **rest)


def segments(*rows, num_q=10, num_k=10, ratio=1):
    return from_segments([Segment(*row) for row in rows], num_q=num_q, num_k=num_k, ratio=ratio)


TOP = 2**31

# (call, argument, given, needed): texts that the message must hold
REFUSED = {
    "b negative": (lambda: batched(-1, 4), "b", "-1", "from 0 to"),
    "b a bool": (lambda: batched(True, 4), "b", "True", "integer"),
    "q_len a float": (lambda: batched(1, 4.0), "q_len", "4.0", "integer"),
    "k_len a text": (lambda: batched(1, 4, "4"), "k_len", "'4'", "integer"),
    "k_len a bool tensor": (lambda: batched(1, 4, torch.tensor(True)), "k_len", "True", "integer"),
    "ratio 0": (lambda: batched(1, 4, ratio=0), "ratio", "0", "from 1 to"),
    "too many rows": (lambda: batched(2**16, 2**15), "b * q_len", str(TOP), str(TOP - 1)),
    "too many keys": (lambda: batched(2, 1, 2**30, q_offset=0), "b * k_len", str(TOP), str(TOP - 1)),
    "alignment unclear, batched": (lambda: batched(2, 3, 7), "q_offset", "3 query rows and 7 keys", "0 (top-left)"),
    "alignment names bottom-right": (
        lambda: batched(2, 3, 7, ratio=2),
        "q_offset",
        "ratio 2",
        "pass 11 (bottom-right)",
    ),
    "alignment unclear, packed": (
        lambda: packed([0, 2, 4, 7], [0, 2, 4, 5]),
        "q_offset",
        "3 query rows and 1 keys at ratio 1 in document 2",
        "pass -2 (bottom-right) or 0 (top-left)",
    ),
    "offsets of another number": (lambda: batched(2, 1, 4, q_offset=[3]), "q_offset", "1 entries", "2 entries"),
    "offset a float": (lambda: batched(2, 1, 4, q_offset=1.5), "q_offset", "1.5", "integer"),
    "offset too large": (lambda: batched(1, 4, q_offset=TOP - 4), "q_offset", f"{TOP - 4} with 4", f"< {TOP}"),
    "offset too small": (lambda: batched(1, 4, q_offset=[4 - TOP]), "q_offset", f"{4 - TOP} with 4", f"< {TOP}"),
    "lengths with k_len": (lambda: batched(1, 4, 4, lengths=[2]), "lengths", "k_len 4", "neither k_len nor a ratio"),
    "lengths with ratio": (lambda: batched(1, 4, ratio=2, lengths=[2]), "lengths", "ratio 2", "neither k_len nor"),
    "lengths too long": (lambda: batched(2, 4, lengths=[4, 5]), "lengths[1]", "5", "from 0 to 4"),
    "lengths of another number": (lambda: batched(2, 4, lengths=[4]), "lengths", "1 entries", "2 entries"),
    "side unknown": (lambda: batched(2, 4, lengths=[4, 4], side="top"), "side", "'top'", "'left' or 'right'"),
    "cu_seqlens_q empty": (lambda: packed([]), "cu_seqlens_q", "no entries", "a leading 0"),
    "cu_seqlens_q starts at 1": (lambda: packed([1, 2]), "cu_seqlens_q[0]", "1", "0"),
    "cu_seqlens_q decreases": (lambda: packed([0, 3, 2]), "cu_seqlens_q[2]", "2 after 3", "not decrease"),
    "cu_seqlens_q negative": (lambda: packed([0, -3, 2]), "cu_seqlens_q[1]", "-3", "from 0"),
    "cu_seqlens_q too large": (lambda: packed([0, TOP]), "cu_seqlens_q[1]", str(TOP), str(TOP - 1)),
    "cu_seqlens_q enormous": (lambda: packed([0, 2**70]), "cu_seqlens_q", "64 bits", str(TOP)),
    "cu_seqlens_q floats": (lambda: packed([0, 3.0]), "cu_seqlens_q", "[0, 3.0]", "integers"),
    "cu_seqlens_q bools": (lambda: packed([0, True]), "cu_seqlens_q", "[0, True]", "integers"),
    "cu_seqlens_q a number": (lambda: packed(3), "cu_seqlens_q", "3", "a sequence of integers"),
    "cu_seqlens_q a float tensor": (lambda: packed(torch.zeros(3)), "cu_seqlens_q", "float32", "integer tensor"),
    "cu_seqlens_q a bool tensor": (
        lambda: packed(torch.zeros(3, dtype=torch.bool)),
        "cu_seqlens_q",
        "torch.bool",
        "integer tensor",
    ),
    "cu_seqlens_q two axes": (
        lambda: packed(torch.zeros(1, 3, dtype=torch.int64)),
        "cu_seqlens_q",
        "[1, 3]",
        "one-dimensional",
    ),
    "cu_seqlens_q without values": (
        lambda: packed(torch.zeros(3, dtype=torch.int64, device="meta")),
        "cu_seqlens_q",
        "meta",
        "with values",
    ),
    "cu_seqlens_k of other documents": (lambda: packed([0, 2, 4], [0, 4]), "cu_seqlens_k", "2 entries", "3 entries"),
    "cu_seqlens_k decreases": (lambda: packed([0, 2, 4], [0, 3, 2]), "cu_seqlens_k[2]", "2 after 3", "not decrease"),
    "num_q too small": (lambda: packed([0, 2, 4], num_q=3), "num_q", "3", "at least 4, the end of cu_seqlens_q"),
    "num_k too small": (lambda: packed([0, 2, 4], num_k=3), "num_k", "3", "at least 4, the keys of all documents"),
    "num_q a float": (lambda: packed([0, 2, 4], num_q=4.0), "num_q", "4.0", "integer"),
    "padded of other documents": (
        lambda: packed([0, 2, 4], cu_seqlens_padded=[0, 4]),
        "cu_seqlens_padded",
        "2 entries",
        "3 entries",
    ),
    "padded starts at 1": (lambda: packed([0, 2], cu_seqlens_padded=[1, 4]), "cu_seqlens_padded[0]", "1", "0"),
    "padded too tight for queries": (
        lambda: packed([0, 2, 5], cu_seqlens_padded=[0, 4, 6]),
        "cu_seqlens_padded",
        "room for 2 query rows in document 1",
        "room for its 3",
    ),
    "padded too tight for keys": (
        lambda: packed([0, 1, 2], [0, 5, 6], cu_seqlens_padded=[0, 4, 8], q_offset=0),
        "cu_seqlens_padded",
        "room for 4 keys in document 0",
        "room for its 5",
    ),
    "padded start does not divide": (
        lambda: packed([0, 2, 4], cu_seqlens_padded=[0, 3, 8], ratio=2),
        "cu_seqlens_padded[1]",
        "3",
        "divide by ratio = 2",
    ),
    "num_q below padded": (
        lambda: packed([0, 2], cu_seqlens_padded=[0, 4], num_q=3),
        "num_q",
        "3",
        "at least 4, the end of cu_seqlens_padded",
    ),
    "num_k below padded": (lambda: packed([0, 2], cu_seqlens_padded=[0, 4], num_k=3), "num_k", "3", "at least 4"),
    "cp_size 0": (lambda: parallel(cp_size=0), "cp_size", "0", "from 1"),
    "cp_rank too large": (lambda: parallel(cp_rank=2), "cp_rank", "2", "from 0 to 1"),
    "cp_rank negative": (lambda: parallel(cp_rank=-1), "cp_rank", "-1", "from 0 to 1"),
    "scheme unknown": (lambda: parallel(scheme="ring"), "scheme", "'ring'", "'zigzag' or 'contiguous'"),
    "zigzag does not divide": (lambda: parallel([0, 4, 10]), "cu_seqlens", "document 1 of 6 rows", "2 * cp_size = 4"),
    "contiguous does not divide": (
        lambda: parallel([0, 4, 9], scheme="contiguous"),
        "cu_seqlens[-1]",
        "9",
        "cp_size = 2",
    ),
    "too few local rows": (lambda: parallel(num_q=3), "num_q", "3", "at least 4, the rows of this rank"),
    "too few keys": (lambda: parallel(num_k=7), "num_k", "7", "at least 8, the keys of all documents"),
    "context parallel ratio": (lambda: parallel(ratio=-4), "ratio", "-4", "from 1"),
    "positions do not divide": (
        lambda: context_parallel_positions([0, 6], cp_size=2, cp_rank=0),
        "cu_seqlens",
        "6 rows",
        "4",
    ),
    "positions rank": (lambda: context_parallel_positions([0, 8], cp_size=2, cp_rank=5), "cp_rank", "5", "0 to 1"),
    "gather order does not divide": (lambda: gather_order([0, 6], cp_size=2), "cu_seqlens", "6 rows", "4"),
    "gather order size": (lambda: gather_order([0, 8], cp_size=0), "cp_size", "0", "from 1"),
    "not a segment": (
        lambda: from_segments([(0, 1, 0, 1, 0)], num_q=1, num_k=1),
        "segments[0]",
        "(0, 1, 0, 1, 0)",
        "a Segment",
    ),
    "segment a float": (lambda: segments((0, 1.5, 0, 1, 0)), "q_len", "1.5", "integers"),
    "segment negative": (lambda: segments((0, 1, 0, 1, 0), (1, 1, -1, 1, 0)), "segments[1].k_start", "-1", "from 0"),
    "segment beyond the queries": (
        lambda: segments((8, 3, 0, 1, 0)),
        "segments[0]",
        "q_start + q_len = 11",
        "num_q = 10",
    ),
    "segment beyond the keys": (lambda: segments((0, 3, 9, 2, 0)), "segments[0]", "k_start + k_len = 11", "num_k = 10"),
    "segment offset": (lambda: segments((0, 3, 0, 2, 3 - TOP)), "q_offset", f"{3 - TOP} with 3 query rows", f"< {TOP}"),
    "segments overlap": (
        lambda: segments((6, 2, 0, 1, 0), (2, 0, 0, 1, 0), (0, 3, 0, 1, 0), (2, 1, 0, 1, 0)),
        "segments",
        "segments 2 and 3 with query rows [0, 3) and [2, 3)",
        "do not overlap",
    ),
    "segments num_q": (lambda: segments(num_q=-1), "num_q", "-1", "from 0"),
    "segments ratio": (lambda: segments(ratio=0), "ratio", "0", "from 1"),
    "slice beyond the rows": (lambda: batched(1, 4).slice_queries(0, 5), "end", "5", "from 0 to 4"),
    "slice backwards": (lambda: batched(1, 4).slice_queries(3, 2), "begin", "3", "from 0 to 2"),
    "slice negative": (lambda: batched(1, 4).slice_queries(-1, 2), "begin", "-1", "from 0 to 2"),
}


@pytest.mark.parametrize(("call", "argument", "given", "needed"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(call, argument, given, needed):
    with pytest.raises(BadInput) as caught:
        call()
    message = str(caught.value)
    assert caught.value.what == argument
    assert message.startswith(f"{argument}: given ")
    assert given in message.split("; needed ")[0].removeprefix(argument)
    assert needed in message.split("; needed ", 1)[1]


def test_overlapping_keys_and_neighbours_are_fine():
    layout = segments((0, 2, 0, 5, 0), (2, 3, 0, 5, 2), (5, 0, 0, 0, 0), (5, 5, 4, 6, 0))
    assert len(layout.segments) == 3


def test_alignment_is_clear_where_nothing_is_asked():
    assert batched(0, 3, 7).segments == ()
    assert batched(2, 0, 7).segments == ()
    assert packed([0, 0, 2], [0, 9, 11]).segments == (Segment(0, 2, 9, 2, 0),)
