"""The named cases are what their names say, and their inputs are the same everywhere."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from dsattn.spec import metrics, oracle, plain
from dsattn.spec.cases import ALL, CASES, Case
from dsattn.spec.cases_edges import CHUNKS
from dsattn.spec.inputs import Inputs, inputs

NAMED = {case.name: case for case in CASES}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
named = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def tensors(x: Inputs) -> dict[str, Tensor]:
    return {f.name: value for f in fields(x) if isinstance(value := getattr(x, f.name), Tensor)}


def number_bits(x: Tensor) -> Tensor:
    """Equal where numbers are, NaN included."""
    return torch.stack([x.nan_to_num(nan=0.0), x.isnan()]) if x.is_floating_point() else x


def scores(case: Case, dtype: torch.dtype = torch.float32) -> Tensor:
    x = inputs(case, dtype)
    return oracle.indexer_scores(x.index_q, x.index_k, x.weights, case.layout(), scale=case.scale).value


def windows(case: Case) -> list[int]:
    return [len(keys) for keys in oracle.visible_keys(case.layout())]


def test_names_are_unique() -> None:
    assert len(NAMED) == len(CASES) >= 120


@named
def test_case_is_small_and_complete(case: Case) -> None:
    layout = case.layout()
    assert layout.num_q <= 200
    assert case.value_width <= case.key_width
    assert case.shows
    assert set(case.operators) <= set(ALL)
    assert len(case.operators) == len(set(case.operators)) > 0
    if case.batch is not None:
        assert layout.num_q % case.batch == layout.num_k % case.batch == 0


@named
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_have_the_sizes_of_the_case(case: Case, dtype: torch.dtype) -> None:
    x, layout = inputs(case, dtype), case.layout()
    t, s, wide = layout.num_q, layout.num_k, torch.float64 if dtype == torch.float64 else torch.float32
    assert x.index_q.shape == (t, case.index_heads, case.index_width)
    assert x.index_k.shape == (s, case.index_width)
    assert x.weights.shape == (t, case.index_heads)
    assert x.q.shape == (t, case.heads, case.key_width)
    assert x.kv.shape == (s, case.key_width)
    assert x.d_out.shape == (t, case.heads, case.value_width)
    assert {x.index_q.dtype, x.index_k.dtype, x.q.dtype, x.kv.dtype, x.d_out.dtype} == {dtype}
    assert x.weights.dtype == (wide if case.weights_fp32 else dtype)
    assert (x.sink is None) == (case.sink is None)
    assert x.sink is None or (x.sink.dtype, x.sink.shape) == (wide, (case.heads,))
    assert (x.row_mask is None) == (case.row_mask is None)


@named
def test_inputs_are_the_same_numbers_in_every_dtype(case: Case) -> None:
    exact = tensors(inputs(case, torch.float64))
    for dtype in DTYPES:
        for name, value in tensors(inputs(case, dtype)).items():
            assert torch.equal(number_bits(value), number_bits(exact[name].to(value.dtype))), name


def test_inputs_do_not_depend_on_random_state_or_default_device() -> None:
    case = NAMED["bshd-b1"]
    first = tensors(inputs(case, torch.float32))
    torch.manual_seed(7)
    torch.set_default_device("meta")
    try:
        second = tensors(inputs(case, torch.float32))
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_cases_and_seeds_differ() -> None:
    case = NAMED["bshd-b1"]
    other = replace(case, seed=1)
    assert not torch.equal(inputs(case, torch.float32).q, inputs(other, torch.float32).q)
    assert not torch.equal(inputs(case, torch.float32).q, inputs(replace(case, name="x"), torch.float32).q)


def test_bshd_inputs_are_the_packed_rows() -> None:
    case = NAMED["padded-left"]
    x = inputs(case, torch.float32)
    shaped = x.to_bshd(3)
    assert shaped.q.shape == (3, 40, case.heads, case.key_width)
    assert shaped.kv.shape == (3, 40, case.key_width)
    assert shaped.sink is x.sink
    assert shaped.row_mask is not None
    assert x.row_mask is not None
    assert torch.equal(shaped.row_mask.flatten(), x.row_mask)
    assert torch.equal(shaped.index_k.flatten(0, 1), x.index_k)


@pytest.mark.parametrize("case", [case for case in CASES if case.grid], ids=lambda case: case.name)
def test_grid_scores_are_exact_in_fp32_and_bf16(case: Case) -> None:
    exact = inputs(case, torch.float64)
    for x in (exact.index_q, exact.index_k, exact.weights):
        assert torch.equal((x * 8).round(), x * 8)
        assert x.abs().max() <= 1
    options = {"scale": case.scale, "relu": case.relu}
    value = oracle.indexer_scores(exact.index_q, exact.index_k, exact.weights, case.layout(), **options).value
    for dtype in (torch.float32, torch.bfloat16):
        x = inputs(case, dtype)
        assert torch.equal(
            plain.indexer_scores(x.index_q, x.index_k, x.weights, case.layout(), **options), value.float()
        )


def test_plateaus_are_larger_than_k() -> None:
    for name in ("plateau", "negative-weights"):
        case = NAMED[name]
        rows = scores(case)
        full = torch.tensor(windows(case)) > 2 * case.top_k
        assert ((rows[full] == 0).sum(-1) > case.top_k).all()
        assert (rows[full].isfinite() & (rows[full] != 0)).any()
    assert (inputs(NAMED["negative-weights"], torch.float32).weights < 0).all()
    # There the zeros are the best scores, and minus zero among them.
    assert scores(NAMED["negative-weights"]).amax() == 0
    assert scores(NAMED["plateau"]).amax() > 0


def test_equal_and_repeated_keys() -> None:
    rows = scores(NAMED["all-equal"])
    for row, count in zip(rows, windows(NAMED["all-equal"]), strict=True):
        assert len(row[row.isfinite()].unique()) == min(count, 1)
    keys = inputs(NAMED["repeated-keys"], torch.float32).index_k
    assert len(keys.unique(dim=0)) == 8


def test_the_cases_that_the_issue_asks_for() -> None:
    by = {name: {getattr(case, name) for case in CASES} for name in ("index_heads", "heads", "batch", "sink", "coeff")}
    assert {1, 8, 24, 32, 64} <= by["index_heads"]
    assert {1, 8, 24, 64, 128} <= by["heads"]
    assert {1, 3} <= by["batch"]
    assert {"-inf", "zero", "large", None} <= by["sink"]
    assert 0.0 in by["coeff"]
    ranks = {
        f"cp{n}-{s}-{d}-rank{r}"
        for n in (2, 4)
        for s in ("zigzag", "contiguous")
        for d in ("one", "many")
        for r in range(n)
    }
    assert ranks <= set(NAMED)
    losses = {(case.reduction, case.num_rows is None, case.row_mask is None) for case in CASES if "loss" in case.tags}
    assert losses >= {(r, True, m) for r in ("mean", "sum") for m in (True, False)}
    assert losses >= {("mean", False, m) for m in (True, False)}
    assert {1, 7} <= {case.top_k for case in CASES}
    assert any(case.top_k >= max(windows(case), default=0) for case in CASES)
    assert any(case.top_k > case.layout().num_k > 0 for case in CASES)
    assert min(segment.q_offset for case in CASES for segment in case.layout().segments) < 0
    assert 4 in {case.layout().ratio for case in CASES}


def test_rows_without_keys() -> None:
    assert max(windows(NAMED["all-padding"])) == 0
    for name in ("no-key-row", "negative-offset", "padded-left", "padded-right", "packed-empty-one-tail"):
        assert 0 in windows(NAMED[name]), name
        assert max(windows(NAMED[name])) > 0, name


def test_a_large_sink_is_beyond_fp32() -> None:
    sink = inputs(NAMED["sink-large"], torch.float32).sink
    assert sink is not None
    assert sink.exp().isinf().any()
    assert sink.exp().isfinite().any()


def test_chunks_are_one_sequence() -> None:
    chunks = [NAMED[f"prefill-chunk-{i}"].layout() for i in range(len(CHUNKS) - 1)]
    whole = [window for layout in chunks for window in oracle.visible_keys(layout)]
    assert [len(keys) for keys in whole] == list(range(1, CHUNKS[-1] + 1))
    assert [layout.num_k for layout in chunks] == list(CHUNKS[1:])


def test_pasts_of_decoded_sequences_differ() -> None:
    for name, q_len in (("decode", 1), ("decode-2", 2), ("decode-3", 3), ("decode-ratio-4", 3)):
        segments = NAMED[name].layout().segments
        assert {segment.q_len for segment in segments} == {q_len}
        assert len({segment.q_offset for segment in segments}) == len(segments) >= 3


def test_compressed_documents_do_not_divide() -> None:
    for name in ("ratio-4-short", "ratio-4-prefill", "ratio-4-gaps"):
        layout = NAMED[name].layout()
        assert layout.ratio == 4
        assert sum(segment.q_len % 4 != 0 for segment in layout.segments) >= 2, name
    assert 0 in {segment.k_len for segment in NAMED["ratio-4-short"].layout().segments}
    assert any(segment.q_offset % 4 for segment in NAMED["ratio-4-prefill"].layout().segments)


@pytest.mark.parametrize("name", ["shared-prefix", "overlap"])
def test_overlapping_segments_share_seen_keys(name: str) -> None:
    layout = NAMED[name].layout()
    visible = oracle.visible_keys(layout)
    seen = [set(torch.cat(visible[s.q_start : s.q_start + s.q_len]).tolist()) for s in layout.segments]
    assert sum(len(a & b) > 0 for i, a in enumerate(seen) for b in seen[:i]) >= 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["near-ties", "near-ties-grid"])
def test_near_ties_are_near(name: str, dtype: torch.dtype) -> None:
    case = NAMED[name]
    row = scores(case, dtype)[-1]
    assert len(row) == 4096
    assert row.amax() - row.amin() <= 2**-10
    assert row.abs().amin() > 0.5, "near, next to their size"
    kth = row.sort(descending=True).values[case.top_k - 1]
    if case.grid:
        assert (row == kth).sum() > 1, "ids hang on the order of ties"
        assert len(row.unique()) > 50
        return
    assert len(row.unique()) > 3500
    if dtype != torch.float64:
        x = inputs(case, dtype)
        tau = metrics.tau(x.index_q, x.index_k, x.weights, case.layout(), scale=case.scale)[-1]
        assert ((row - kth).abs() <= tau).sum() > 20, "many may stand in for each other"
        assert (row > kth + tau).sum() > 50, "but not all"


@pytest.mark.parametrize("name", ["far-below", "far-below-grid"])
def test_scores_far_below_are_below_every_mask_of_fp16(name: str) -> None:
    rows = scores(NAMED[name])
    least_of_fp16 = torch.finfo(torch.float16).min
    assert rows.amax() < 1.1 * least_of_fp16
    assert (rows == -torch.inf).any(), "keys that are not visible"
    if NAMED[name].grid:
        spread = rows.amax(-1) - rows.nan_to_num(neginf=0.0).amin(-1)
        assert 2 < spread[39] < 20, "a student that is not one-hot"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("selected", [False, True])
def test_the_wide_teacher_stands_where_the_student_has_nothing(dtype: torch.dtype, selected: bool) -> None:
    case = NAMED["wide"]
    x, table = inputs(case, dtype), scores(case, dtype)
    support = oracle.visible_keys(case.layout())
    if selected:
        support = oracle.indexer_topk(table, support, top_k=case.top_k)
    teacher = oracle.head_probabilities(x.q, x.kv, support, softmax_scale=case.softmax_scale)
    for i, keys in enumerate(support):
        score, logit = table[i, keys], case.softmax_scale * x.q[i].double() @ x.kv[keys].double().T
        assert score.amax() - score.amin() > 300
        assert (logit.amax(-1) - logit.amin(-1) > 300).all()
        assert teacher[i].argmax() == score.argmin()
        assert teacher[i].amax() / teacher[i].sum() > 0.5
        assert torch.softmax(score.float(), -1)[score.argmin()] == 0


def test_a_bad_number_stands_alone_where_rows_read_it() -> None:
    bad = [case for case in CASES if case.bad is not None]
    names = {(case.bad.name, str(case.bad.value).removeprefix("-")) for case in bad if case.bad is not None}
    every = {"index_q", "index_k", "weights", "q", "kv", "sink"}
    assert {name for name, value in names if value == "nan"} == every
    assert {name for name, value in names if value == "inf"} == every
    for case in bad:
        assert case.bad is not None
        name, row = case.bad.name, case.bad.row
        for dtype in DTYPES:
            found = {name: (~x.isfinite()).nonzero().tolist() for name, x in tensors(inputs(case, dtype)).items()}
            assert {name for name, places in found.items() if places} == {name}
            (place,) = found[name]
            assert place[0] == row
        visible = oracle.visible_keys(case.layout())
        if name in ("index_k", "kv"):
            assert 0 < sum(row in keys.tolist() for keys in visible) < 30
        elif name != "sink":
            assert len(visible[row]) > case.top_k


def test_there_may_be_nothing() -> None:
    sizes = {name: (NAMED[name].layout().num_q, NAMED[name].layout().num_k) for name in ("no-queries", "no-keys")}
    assert sizes == {"no-queries": (0, 9), "no-keys": (6, 0)}
