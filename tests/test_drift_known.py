"""Known behaviour between releases: what the contract table's rows mean to a caller, and which calls they concern."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from packaging.version import Version

from dsattn.backends.cudnn.contracts import ARCHS, Gate, Limits, contract, releases
from dsattn.backends.cudnn.contracts_table import FACTS
from dsattn.drift import known
from dsattn.drift.facts import meaning, told
from dsattn.drift.findings import Finding
from dsattn.drift.snapshot import Exported, Parameter, Snapshot
from dsattn.drift.watch import Call, own


def snapshot(release: str) -> Snapshot:
    """The signatures of a release as the table has them."""
    exports = {}
    for wrapper in contract(Version(release), "sm100").wrappers:
        parameters = tuple(
            Parameter(each.name, "keyword-only" if each.keyword_only else "positional or keyword", each.default, None)
            for each in wrapper.parameters
        )
        exports[wrapper.symbol] = Exported(wrapper.symbol, "function", wrapper.symbol, parameters)
    return Snapshot("nvidia-cudnn-frontend", release, "", True, exports, None, (), ())


def findings(old: str, new: str, calls: list[Call] | None = None) -> list[Finding]:
    watched = own() if calls is None else calls
    return known.findings(snapshot(old), snapshot(new), watched, (Version(old), Version(new)))


def row(found: list[Finding], name: str, start: str) -> Finding:
    (one,) = [each for each in found if each.name == f"{name}_wrapper" and each.what.startswith(start)]
    return one


def test_our_own_calls_are_those_of_the_table() -> None:
    calls = {call.name: call for call in own()}
    assert len(calls) == 13
    backward = calls["indexer_backward_wrapper"]
    assert {"grad_loss", "topk_indices_global", "block_I"} <= backward.keywords
    assert backward.settled == {"block_I", "backend", "deterministic"}
    assert backward.positional == 0
    assert backward.adapts
    assert "sparse_attention" not in calls


def test_changed_behaviour_fixes_and_new_defects() -> None:
    found = findings("1.25.0", "1.26.0")
    ids = row(found, "indexer_backward", "ids")
    assert (ids.what, ids.effect, ids.touches) == (
        "ids: global -> local",
        "changed behaviour",
        ("dsattn: indexer_backward",),
    )
    masked = [each.what for each in found if each.what.startswith("masked") and "dense_attn" in each.name]
    assert masked == ["masked: 0 -> mixed on sm90", "masked: 0 -> -inf on sm100"]
    fixed = row(found, "indexer_top_k", "defect fixed, top-k-scratch-overflow")
    assert (fixed.effect, fixed.touches) == ("harmless", ())
    new = row(found, "indexer_top_k", "new defect, top-k-chunk-off-by-one")
    assert (new.effect, new.touches) == ("changed behaviour", ("dsattn: indexer_top_k",))
    assert row(findings("1.28.0", "1.29.0"), "indexer_backward", "destroys").what.endswith("on sm100")


def test_equal_releases_have_no_row_and_every_other_step_has_one() -> None:
    assert findings("1.29.0", "1.29.1") == []
    assert findings("1.24.0", "1.24.1") == []
    for old, new in zip(releases(), releases()[1:], strict=False):
        same = all(contract(old, arch) == contract(new, arch) for arch in ARCHS)
        assert bool(findings(str(old), str(new), [])) is not same


def test_a_call_that_states_the_default_in_both_releases_is_not_touched() -> None:
    call = Call("indexer_backward_wrapper", "mine", positional=6, keywords=frozenset({"grad_loss"}))
    stating = replace(call, keywords=call.keywords | {"topk_indices_global"})
    for one, touches in ((call, ("mine",)), (stating, ())):
        change = known._Change("indexer_backward_wrapper", "ids", "", "changed behaviour", "")
        assert known._touched(one, change, snapshot("1.26.0"), snapshot("1.27.0")) is bool(touches)
    # 1.25 cannot be told, so the call means something else there.
    assert row(findings("1.25.0", "1.26.0", [stating]), "indexer_backward", "ids").touches == ("mine",)


def test_a_fact_of_a_parameter_touches_who_passes_it() -> None:
    passing = Call("sparse_attention_backward_wrapper", "passing", positional=7, keywords=frozenset({"dq"}))
    leaving = replace(passing, label="leaving", keywords=frozenset())
    contiguous = row(findings("1.26.0", "1.27.0", [passing, leaving]), "sparse_attention_backward", "contiguous")
    assert (contiguous.what, contiguous.touches) == ("contiguous: none -> dq, dkv on sm100", ("passing",))


def test_what_a_new_parameter_must_be_concerns_nobody() -> None:
    assert not [each for each in findings("1.25.0", "1.26.0") if "q_causal_offsets 16" in each.what]


def test_a_new_parameter_that_states_a_changed_default_is_marked() -> None:
    facts = findings("1.25.0", "1.26.0")
    static = Finding(
        "parameters",
        "indexer_backward_wrapper",
        "topk_indices_global=False added, at 10",
        "harmless",
        "can wait",
        (),
        "topk_indices_global",
    )
    other = replace(static, name="compactify_wrapper")
    marked, unmarked = known.marked([static, other], facts)
    assert (marked.effect, marked.touches) == ("changed behaviour", ("dsattn: indexer_backward",))
    assert marked.means == "for callers that leave it out: ids: global -> local"
    assert unmarked == other


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ("1.26.0", "1.27.0", None),
        ("1.23.0", "1.27.0", "1.23.0 is older than the first release with DSA, 1.24.0"),
        ("1.32.0", "1.40.0", "1.40.0 is not in dsattn's contract table: it was taken for 1.32.0"),
        ("1.27.0rc1", "1.28.0", "1.27.0rc1 is not in dsattn's contract table"),
    ],
)
def test_what_the_table_does_not_know_is_told(old: str, new: str, note: str | None) -> None:
    notes = list(known.notes(Version(old), Version(new)))
    assert len(notes) == (note is not None)
    assert note is None or notes[0].startswith(note)


CHANGED, HARMLESS, REFUSES = "changed behaviour", "harmless", "may refuse"


@pytest.mark.parametrize(
    ("fact", "was", "now", "effect"),
    [
        ("runs", False, True, HARMLESS),
        ("runs", True, False, "breaks"),
        ("heads", Limits(one_of=(32, 64)), Limits(one_of=(16, 32, 64)), HARMLESS),
        ("heads", None, Limits(min=2), REFUSES),
        ("top_k", Limits(max=2048), None, HARMLESS),
        ("max_rows", None, 65535, REFUSES),
        ("max_rows", 65535, None, HARMLESS),
        ("max_batch", 65535, 1024, REFUSES),
        ("gate", None, Gate(("bshd",)), REFUSES),
        ("gate", Gate(("bshd", "thd")), Gate(("bshd",), tail=True), HARMLESS),
        ("gate", Gate(("bshd",), tail=True), Gate(("bshd",)), REFUSES),
        ("dtypes", {"w": ("bfloat16",)}, {"w": ("bfloat16", "float32")}, HARMLESS),
        ("dtypes", {"w": ("bfloat16", "float32")}, {"w": ("bfloat16",)}, REFUSES),
        ("dtypes", {}, {"w": ("bfloat16",)}, REFUSES),
        ("dtypes", {"w": ("bfloat16",)}, {}, HARMLESS),
        ("aligned", {"lse": 4}, {"lse": 8}, REFUSES),
        ("aligned", {"lse": 8}, {}, HARMLESS),
        ("contiguous", {}, {"dq": True}, REFUSES),
        ("contiguous", {"dq": True}, {}, HARMLESS),
        ("layouts", ("bshd",), ("bshd", "thd"), HARMLESS),
        ("layouts", ("bshd", "thd"), ("bshd",), REFUSES),
        ("pairs", ((64, 512),), ((64, 512), (64, 576)), HARMLESS),
        ("destroys", {"attn_score": True}, {"index_score": True}, CHANGED),
        ("destroys", {"attn_score": True}, {}, HARMLESS),
        ("host_reads", {}, {"grad_loss": True}, "read"),
        ("recompiles", {"q": True}, {}, HARMLESS),
        ("deterministic", None, True, HARMLESS),
        ("deterministic", True, None, CHANGED),
        ("view", True, False, HARMLESS),
        ("view", False, True, CHANGED),
        ("returns", ("out",), ("out", "lse"), HARMLESS),
        ("returns", ("out", "lse"), ("out",), CHANGED),
        ("empty_row", "undefined", "+inf", HARMLESS),
        ("empty_row", "0", "-inf", CHANGED),
        ("tail", "zero", "unwritten", CHANGED),
        ("stream", "current", "caller", CHANGED),
    ],
)
def test_what_a_fact_means(fact: str, was: Any, now: Any, effect: str) -> None:
    assert fact in FACTS
    assert meaning(fact, was, now)[0] == effect


@pytest.mark.parametrize(
    ("fact", "value", "words"),
    [
        ("heads", None, "no limit"),
        ("destroys", {}, "none"),
        ("view", False, "no"),
        ("gate", Gate(("bshd",), tail=True), "no more queries than keys in bshd, but the tail"),
        ("dtypes", {"w": ("bfloat16", "float32")}, "w bfloat16/float32"),
        ("destroys", {"attn_score": True}, "attn_score"),
        ("max_rows", 65535, "65535"),
    ],
)
def test_facts_in_words(fact: str, value: Any, words: str) -> None:
    assert told(fact, value) == words
