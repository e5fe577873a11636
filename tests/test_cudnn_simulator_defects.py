"""Every defect of the contract table is shown by the simulator in the releases that have it, and by no later one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cudnn_inputs import (
    HEADS,
    KEYS,
    SLOTS,
    WIDTH,
    attention_inputs,
    dense_gradients,
    dense_inputs,
    flat,
    ids_of,
    sparse_gradients,
    sparse_inputs,
)
from cudnn_literal import ARCHS, RELEASES, error, grid
from packaging.version import Version

from dsattn.backends.cudnn.contracts import contract
from dsattn.backends.cudnn.simulator import NOT_SHOWN, SimulatedFrontend
from dsattn.backends.cudnn.simulator.masks import Span, visible, visible_with_leak

ONE = torch.ones(1, device="cpu")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def raises(kind: type[Exception], match: str, call: Callable[[], Any]) -> bool:
    try:
        call()
    except kind as raised:
        return match in str(raised)
    return False


def takes(wrapper: Callable[..., Any], name: str) -> bool:
    return name in wrapper.__signature__.parameters  # type: ignore[attr-defined]


def leaks(f: SimulatedFrontend) -> bool:
    """The example of one offset: row 60 sees 62 keys, and key 62 must be masked."""
    rows, forward = 64, f.indexer_forward_wrapper
    call = {"q": grid(1, rows, 32, 128), "k": grid(1, rows + 1, 1, 128, seed=1), "w": grid(1, rows, 32, seed=2)}
    told = {"q_causal_offsets": int32(1)} if takes(forward, "q_causal_offsets") else {}
    scores = forward(**call, ratio=1, **told)["scores"][0]
    assert scores[60, :62].isfinite().all()
    return bool(scores[60, 62].isfinite())


def sparse_backward_is_off(f: SimulatedFrontend, *names: str) -> bool:
    x = flat(sparse_inputs())
    told = {"topk_indices_global": True} if takes(f.indexer_backward_wrapper, "topk_indices_global") else {}
    wanted = dict(zip(("d_index_q", "d_weights", "d_index_k"), sparse_gradients(x, 1 / 6), strict=True))
    got = f.indexer_backward_wrapper(**x, grad_loss=ONE, **told)
    return any(error(got[name].flatten(0, 1), wanted[name]) > 1e-2 for name in names)


def dense_backward_is_off(f: SimulatedFrontend) -> bool:
    x, target, predict = dense_inputs(4 if f.contract.wrapper("dense_indexer_backward").alignment != "top-left" else 0)
    wanted = dense_gradients(x, target, predict, 1 / 3)[0]
    return error(f.dense_indexer_backward_wrapper(**x, grad_loss=ONE)["d_index_q"][0], wanted) > 1e-2


def attention_is_off(f: SimulatedFrontend, heads: int, name: str, width: int = 512, sink: float | None = None) -> bool:
    call, wanted = attention_inputs(ids_of([3, 0, 6], [1], [2, 5, 4, 0]), heads=heads, width=width, sink=sink)
    got = f.sparse_attention_backward_wrapper(**call)[name]
    return error(got, wanted[0 if name == "dq" else 1]) > 1e-2


def gives_ids_outside_the_row(f: SimulatedFrontend) -> bool:
    values = torch.full((2, 64), -math.inf)
    values[:, 9] = 1.0
    ids = [f.indexer_top_k_wrapper(values, int32(40, 41), 8)["indices"] for _ in range(4)]
    return any(bool((row >= 40).any()) or len(set(row.tolist())) < 8 for table in ids for row in table)


def refuses_an_odd_number(f: SimulatedFrontend) -> bool:
    values, lengths = torch.zeros(2, 400), int32(400, 400)
    assert f.indexer_top_k_wrapper(values, lengths, 302)["indices"].shape == (2, 302)
    return raises(AssertionError, "vecsize", lambda: f.indexer_top_k_wrapper(values, lengths, 301))


def overflows(f: SimulatedFrontend, rows: int, columns: int) -> bool:
    # Nothing is computed on a tensor that has no memory: without the defect the call ends in another error.
    values = torch.empty(rows, columns, device="meta")
    lengths = torch.ones(rows, dtype=torch.int32, device="cpu")
    return raises(RuntimeError, "illegal memory access", lambda: f.indexer_top_k_wrapper(values, lengths, 2))


def misaligned_by_the_wrapper(f: SimulatedFrontend) -> bool:
    if not takes(f.dense_attn_score_recompute_wrapper, "q_causal_offsets"):
        return False
    q, k, lse = grid(4, 2, 128), grid(4, 1, 128), torch.zeros(4, 2)
    cu, offsets = int32(0, 2, 4), int32(0, 0)
    call = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "q_causal_offsets": offsets}
    return raises(ValueError, "Misaligned", lambda: f.dense_attn_score_recompute_wrapper(q, k, lse, 1.0, **call))


def sparse_scores(f: SimulatedFrontend, rows: int, slots: int = SLOTS, heads: int = 2, **rest: Any) -> torch.Tensor:
    ids = torch.full((1, rows, slots), -1, dtype=torch.int32, device="cpu")
    ids[..., :3] = int32(2, 0, 1)
    q, k, w = grid(1, rows, heads, 64), grid(1, 4, 64, seed=1), grid(1, rows, heads, seed=2)
    return f.sparse_indexer_score_recompute_wrapper(q, k, w, ids, **rest)["predict"]


def breaks_for_one_row(call: Callable[[int], Any]) -> bool:
    """Whether the first call with one row fails, and works once a longer one has compiled the kernel."""
    broken = raises(RuntimeError, "strides[leading_dim]", lambda: call(1))
    call(2)
    call(1)
    return broken


def dense_scores(f: SimulatedFrontend, rows: int, keys: int = 4, **rest: Any) -> Any:
    q, k, w = grid(1, rows, 32, 128), grid(1, keys, 1, 128, seed=1), grid(1, rows, 32, seed=2)
    return f.dense_indexer_score_recompute_wrapper(q, k, w, **rest)


def reads_ids_of_no_key(f: SimulatedFrontend) -> bool:
    call, _ = attention_inputs(ids_of([3, 0], [1]))
    call["topk_idxs"] = ids_of([3, 0, 99], [1])
    return bool(f.sparse_attention_backward_wrapper(**call)["dq"][0].isnan().any())


def trips_over_an_empty_row(f: SimulatedFrontend) -> bool:
    call, _ = attention_inputs(ids_of([3, 0], []))
    call["topk_length"] = int32(2, 0)
    if raises(RuntimeError, "hangs", lambda: f.sparse_attention_backward_wrapper(**call)):
        return True
    return bool(f.sparse_attention_backward_wrapper(**call)["dq"][1].isnan().any())


def overflows_in_the_tail(f: SimulatedFrontend) -> bool:
    call, _ = attention_inputs(ids_of([3, 0], [1]), sink=None)
    # Every logit is -4.5 * 512 / sqrt(512), about -102.
    call |= {"q": torch.full_like(call["q"], -4.5), "kv": torch.ones_like(call["kv"])}
    call["lse"] = torch.full_like(call["lse"], -4.5 * 512**0.5)
    return bool(f.sparse_attention_backward_wrapper(**call, topk_length=int32(2, 1))["dq"].isnan().any())


def numbers_slots_wrongly(f: SimulatedFrontend) -> bool:
    assert sparse_scores(f, 2, slots=512).isfinite().all()
    return bool(sparse_scores(f, 2, slots=384)[..., :3].isnan().any())


def mixes_up_queries(f: SimulatedFrontend) -> bool:
    few, many = sparse_scores(f, 2), sparse_scores(f, 150)
    # The random inputs of the longer call differ, except for the first row.
    return not torch.allclose(few[0, 0], many[0, 0])


def runs_out_of_shared_memory(f: SimulatedFrontend) -> bool:
    q, k, lse = grid(1, 2, 128, 512), grid(1, 4, 512), torch.zeros(1, 2, 128)
    ids = torch.zeros(1, 2, SLOTS, dtype=torch.int32)
    wrapper = f.sparse_attn_score_recompute_wrapper
    return raises(RuntimeError, "shared memory", lambda: wrapper(q, k, lse, ids, 0.1))


def cannot_compile_with_a_length(f: SimulatedFrontend) -> bool:
    # Of other sizes the wrapper keeps the length to itself.
    q, k, lse = grid(1, 2, 64, 512), grid(1, 4, 512), torch.zeros(1, 2, 64)
    ids, length = torch.zeros(1, 2, SLOTS, dtype=torch.int32), torch.ones(1, 2, dtype=torch.int32)
    wrapper = f.sparse_attn_score_recompute_wrapper
    wrapper(q, k, lse, ids, 0.1)
    return raises(RuntimeError, "compile", lambda: wrapper(q, k, lse, ids, 0.1, topk_length=length))


def mixes_up_key_blocks(f: SimulatedFrontend) -> bool:
    assert dense_scores(f, 2, keys=256)["denom"].isfinite().all()
    return not bool(dense_scores(f, 2, keys=384)["denom"].isfinite().all())


def leaves_a_strided_buffer(f: SimulatedFrontend) -> bool:
    out = torch.full((1, 2, 8), 7.0)[..., :4]
    result = dense_scores(f, 2, out=out)["out"]
    left = bool((out == 7).all())
    assert left == (result is not out)
    return left


def refuses_windows_with_offsets(f: SimulatedFrontend) -> bool:
    q, k, w = grid(1, 4, 32, 128), grid(1, 4, 1, 128), grid(1, 4, 32)
    call = {"ratio": 1, "microbatch_rows": 2, "q_causal_offsets": int32(0)}
    return raises(NotImplementedError, "microbatch", lambda: f.indexer_forward_top_k_wrapper(q, k, w, 2, **call))


SHOWS: dict[str, Callable[[SimulatedFrontend], bool]] = {
    "sm90-h32-leak": leaks,
    "sm90-dk-race": lambda f: sparse_backward_is_off(f, "d_index_k"),
    "sm90-attn-bwd-h64": lambda f: attention_is_off(f, 32, "dq"),
    "top-k-lanes-past-row": gives_ids_outside_the_row,
    "top-k-odd": refuses_an_odd_number,
    "top-k-scratch-overflow": lambda f: overflows(f, 30_000, 40_000),
    "top-k-chunk-off-by-one": lambda f: overflows(f, 16, 1 << 27) and not overflows(f, 30_000, 40_000),
    "sm90-thd-offsets-misaligned": misaligned_by_the_wrapper,
    "sm90-sq1-strides": lambda f: breaks_for_one_row(lambda rows: sparse_scores(f, rows)),
    "sm90-sq1-strides-dense": lambda f: breaks_for_one_row(lambda rows: dense_scores(f, rows)),
    "attn-bwd-ids-unchecked": reads_ids_of_no_key,
    "attn-bwd-empty-row": trips_over_an_empty_row,
    "sm90-attn-bwd-tail": overflows_in_the_tail,
    "sm100-attn-bwd-576-sink": lambda f: attention_is_off(f, 64, "dq", 576, sink=3.0),
    "sm100-attn-bwd-dkv-race": lambda f: attention_is_off(f, 64, "dkv", 576),
    "sm100-attn-score-topk-length": cannot_compile_with_a_length,
    "sm100-dense-score-slots": mixes_up_key_blocks,
    "sm100-score-slots": numbers_slots_wrongly,
    "sm100-score-race": mixes_up_queries,
    "sm100-score-shared-memory": runs_out_of_shared_memory,
    "sm100-weights-race": lambda f: sparse_backward_is_off(f, "d_index_q"),
    "sm100-dense-dq-race": dense_backward_is_off,
    "score-out-not-written": leaves_a_strided_buffer,
    "top-k-microbatch-offsets": refuses_windows_with_offsets,
}
RUNS = [(version, arch) for version in RELEASES for arch in ARCHS]


def has(defect: str, version: str, arch: str) -> bool:
    return contract(Version(version), arch).defect(defect) is not None


def works_on(defect: str, version: str, arch: str) -> bool:
    """Whether the release has the defect's wrappers and runs them on the architecture."""
    found = contract(Version(version), arch)
    wrappers = {name for d in any_release(defect) for name in d.wrappers}
    return all(found.has(name) and found.wrapper(name).runs for name in wrappers)


def any_release(defect: str) -> list[Any]:
    found = [contract(Version(version), arch).defect(defect) for version, arch in RUNS]
    return [d for d in found if d is not None]


def test_every_defect_of_the_table_is_shown_or_said_to_be_beyond_the_simulator() -> None:
    known = {defect.id for version, arch in RUNS for defect in contract(Version(version), arch).defects}
    assert set(SHOWS) | set(NOT_SHOWN) == known
    assert not set(SHOWS) & set(NOT_SHOWN)
    assert all(NOT_SHOWN.values())


@pytest.mark.parametrize("defect", SHOWS)
def test_a_defect_shows_in_exactly_the_releases_that_have_it(defect: str) -> None:
    tried = [(version, arch) for version, arch in RUNS if works_on(defect, version, arch)]
    assert any(has(defect, version, arch) for version, arch in tried)
    wrong = [
        (version, arch)
        for version, arch in tried
        if SHOWS[defect](SimulatedFrontend(version, arch, races=has(defect, version, arch)))
        != has(defect, version, arch)
    ]
    assert wrong == []


def test_races_can_be_kept_from_striking() -> None:
    races = [defect for defect in SHOWS if defect.endswith("-race")]
    assert len(races) > 3
    for defect in races:
        for version, arch in RUNS:
            if has(defect, version, arch):
                assert not SHOWS[defect](SimulatedFrontend(version, arch, races=False)), (defect, version, arch)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_the_leak_is_where_the_table_says(heads: int, ratio: int) -> None:
    """One or two future keys with 32 heads: ratio 1 and offset % 4 in {1, 2}, or ratio 2 and offset % 4 == 2."""
    for offset in range(8):
        span = Span(0, 256, 0, 300, offset)
        extra = visible_with_leak(span, ratio, heads).long() - visible(span, ratio).long()
        expected = heads == 32 and ((ratio == 1 and offset % 4 in {1, 2}) or (ratio == 2 and offset % 4 == 2))
        assert bool(extra.any()) == expected, (offset, ratio, heads)
        assert int(extra.sum(1).max()) <= 2
        assert int(extra.min()) == 0


def test_a_naive_hopper_race_leaves_everything_but_the_key_gradient_right() -> None:
    x = sparse_inputs(batch=1)
    wanted = sparse_gradients(x, 1 / 3)
    got = SimulatedFrontend("1.29.1", "sm90").indexer_backward_wrapper(**x, grad_loss=ONE)
    assert error(got["d_index_q"][0], wanted[0]) < 5e-3
    assert error(got["d_weights"][0], wanted[1]) < 5e-3
    assert got["d_index_k"].shape == (1, KEYS, WIDTH)
    assert x["weights"].shape[-1] == HEADS
