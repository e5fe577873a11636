"""The contract table itself: what a row may say, and which one holds for a release on an architecture."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from conftest import RunPython
from packaging.version import Version

from dsattn.backends.cudnn import contracts_table
from dsattn.backends.cudnn.contracts import ARCHS, Contract, Gate, Limits, Parameter, contract, distribution, releases
from dsattn.errors import BackendMissing, BadInput

RELEASES = releases()


def of(release: str, arch: str = "sm100") -> Contract:
    return contract(Version(release), arch)


def test_the_releases_of_the_table() -> None:
    assert (len(RELEASES), str(RELEASES[0]), str(RELEASES[-1])) == (11, "1.24.0", "1.32.0")
    assert distribution()["name"] == "nvidia-cudnn-frontend"


@pytest.mark.parametrize("arch", ARCHS)
def test_equal_releases_are_told_equal(arch: str) -> None:
    groups: dict[Contract, list[str]] = {}
    for release in RELEASES:
        groups.setdefault(contract(release, arch), []).append(str(release))
    assert [group for group in groups.values() if len(group) > 1] == [["1.24.0", "1.24.1"], ["1.29.0", "1.29.1"]]
    assert len(groups) == 9
    assert of("1.29.0") == of("1.29.1")
    assert of("1.29.0").version != of("1.29.1").version
    assert of("1.30.0") != of("1.31.0")
    assert of("1.30.0", "sm90") != of("1.30.0", "sm100")


@pytest.mark.parametrize(
    ("text", "like", "known"),
    [
        ("1.25.0", "1.25.0", True),
        ("1.25", "1.25.0", True),
        ("1.31.0+cu13", "1.31.0", True),
        ("1.26.0rc1", "1.26.0", False),
        ("1.26.0.dev3+g12ab", "1.26.0", False),
        ("1.26.0.post1", "1.26.0", False),
        ("1.29.2", "1.29.1", False),
        ("1.32.1", "1.32.0", False),
        ("2.0a1", "1.32.0", False),
    ],
)
def test_any_version_gets_a_row(text: str, like: str, known: bool) -> None:
    assert of(text) == of(like)
    assert of(text).known is known
    assert of(text).version == Version(text)


def test_older_releases_have_no_dsa() -> None:
    for text in ("1.23.0", "1.23.9", "0.1"):
        with pytest.raises(BackendMissing, match=r"1\.24\.0"):
            of(text)
    assert of("1.24.0rc1") == of("1.24.0")
    with pytest.raises(BadInput, match="sm90, sm100"):
        of("1.25.0", "sm80")


def test_facts_by_release_and_architecture() -> None:
    backward = [of(release).wrapper("indexer_backward") for release in ("1.25.0", "1.26.0", "1.28.0", "1.29.0")]
    assert [each.ids for each in backward] == ["global", "local", "local", "local"]
    assert [each.id_check for each in backward] == ["whole buffer"] * 3 + ["own batch"]
    assert [each.destroys for each in backward] == [("attn_score", "index_score")] * 3 + [("attn_score",)]
    assert [each.accepts("topk_indices_global") for each in backward] == [False, True, True, True]
    assert of("1.26.0", "sm90").wrapper("indexer_backward").destroys == ("attn_score",)
    scores = [
        of(release, "sm90").wrapper("dense_attn_score_recompute").masked for release in ("1.25.0", "1.29.1", "1.30.0")
    ]
    assert scores == ["0", "mixed", "-inf"]
    forward = of("1.31.0").wrapper("indexer_forward")
    assert forward.symbol == "indexer_forward_wrapper"
    assert forward.dtypes_of("w") == ("bfloat16", "float32")
    assert forward.dtypes_of("ratio") == ()
    assert forward.alignment_of("q_causal_offsets") == 16
    assert forward.alignment_of("q") == 1
    assert (forward.evidence_of("alignment"), forward.evidence_of("widths")) == ("seam", "read")
    assert not of("1.24.1", "sm90").wrapper("indexer_forward").runs
    assert of("1.32.0").wrapper("sparse_attention").symbol == "sparse_attention"


def test_defects_by_release_and_architecture() -> None:
    def having(defect: str) -> list[tuple[str, str]]:
        pairs = [(release, arch) for release in RELEASES for arch in ARCHS]
        return [(str(release), arch) for release, arch in pairs if contract(release, arch).defect(defect)]

    assert having("sm90-thd-offsets-misaligned") == [("1.26.0", "sm90")]
    assert [release for release, _ in having("sm90-dk-race")][-1] == "1.29.1"
    assert {arch for _, arch in having("sm90-dk-race")} == {"sm90"}
    assert having("sm90-h32-leak")[0] == ("1.25.0", "sm90")
    assert having("sm90-h32-leak")[-1] == ("1.32.0", "sm90")
    assert len(having("top-k-lanes-past-row")) == 8
    names = [defect.id for defect in of("1.29.1", "sm90").defects_of("indexer_backward")]
    assert names == ["sm90-dk-race"]


def test_what_is_not_there() -> None:
    with pytest.raises(BadInput, match="sparse_attention_forward"):
        of("1.28.0").wrapper("sparse_attention_forward")
    assert not of("1.28.0").has("sparse_attention_forward")
    assert of("1.29.0", "sm90").has("sparse_attention_forward")
    with pytest.raises(BadInput, match="sm90-dk-race"):
        of("1.28.0").defect("no-such-defect")
    with pytest.raises(BadInput, match="signature"):
        of("1.28.0").wrapper("compactify").evidence_of("gate")


def test_defaults_are_python_objects() -> None:
    backward = of("1.32.0").wrapper("indexer_backward")
    values = {each.name: each.value for each in backward.parameters if not each.required}
    assert values["sm_scale"] == 1.0
    assert values["backend"] == "default"
    assert values["topk_indices_global"] is False
    assert values["deterministic_dk_planes"] == 96
    assert next(each.name for each in backward.parameters if each.keyword_only) == "backend"
    with pytest.raises(BadInput, match="required"):
        _ = Parameter("q", False, None).value
    with pytest.raises(BadInput, match="literal"):
        _ = of("1.32.0").wrapper("aligned_hca_backward").parameters[7].value


@pytest.mark.parametrize(
    ("limits", "taken", "refused"),
    [
        (Limits(), [1, 7], []),
        (Limits(one_of=(32, 64)), [32, 64], [16, 96]),
        (Limits(min=64, also=(32,)), [32, 64, 65], [16, 63]),
        (Limits(min=1, max=2048), [1, 2048], [0, 2049]),
        (Limits(min=128, multiple=128), [128, 256], [0, 64, 192]),
        (Limits(min=2, block=64), [2, 33, 64, 128], [1, 65, 96]),
        (Limits(min=2, block=64, also=(96,)), [96], [97]),
    ],
)
def test_limits(limits: Limits, taken: list[int], refused: list[int]) -> None:
    assert [count for count in (*taken, *refused) if limits.allows(count)] == taken


def test_limits_say_what_they_are() -> None:
    assert str(Limits()) == "any"
    assert str(Limits(min=2, block=64, also=(96,))) == "at least 2, above 64 a multiple of it; or 96"
    assert str(Limits(one_of=(32, 64))) == "one of 32, 64"
    assert str(Limits(max=2048, multiple=128)) == "at most 2048, a multiple of 128"


def test_gates() -> None:
    assert [Gate(("bshd",)).allows(rows, 2, 4) for rows in (8, 9)] == [True, False]
    assert [Gate(("bshd",), tail=True).allows(rows, 2, 4) for rows in (11, 12)] == [True, False]


Edit = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t["wrapper"]["compactify"]["runs"][0].update(by="guessed"), "compactify.runs"),
        (lambda t: t["wrapper"]["compactify"]["runs"][0].update({"is": "yes"}), "true or false"),
        (lambda t: t["wrapper"]["compactify"]["runs"][0].update(arch="sm80"), "sm90, sm100"),
        (lambda t: t["wrapper"]["compactify"]["runs"][0].update(since="1.26.0"), "is, by, from, until, arch"),
        (lambda t: t["wrapper"]["compactify"]["runs"][0].update({"from": "1.30.0", "until": "1.26.0"}), "from before"),
        (lambda t: t["wrapper"]["compactify"]["runs"][0].update({"from": "1.25.0"}), "a row for 1.24.0 on sm90"),
        (lambda t: t["wrapper"]["compactify"]["runs"].append({"is": True, "by": "read"}), "not 2"),
        (lambda t: t["wrapper"]["compactify"].update(colour=[]), "compactify.colour"),
        (lambda t: t["wrapper"]["compactify"].update(relies=["grid"]), "not grid"),
        (lambda t: t["wrapper"]["compactify"].update(destroys=[{"is": ["grid"], "by": "read"}]), "not grid"),
        (lambda t: t["wrapper"]["compactify"].update(dtypes=[{"is": {"grid": ["int32"]}, "by": "read"}]), "not grid"),
        (lambda t: t["wrapper"]["compactify"].update(dtypes=[{"is": {"indices": ["int"]}, "by": "read"}]), "bfloat16"),
        (lambda t: t["wrapper"]["compactify"].update(layouts=[{"is": ["sbhd"], "by": "read"}]), "bshd"),
        (lambda t: t["wrapper"]["compactify"].update(heads=[{"is": {"most": 1}, "by": "read"}]), "limits"),
        (lambda t: t["wrapper"]["compactify"].update(gate=[{"is": {"tail": True}, "by": "read"}]), "layouts"),
        (lambda t: t["wrapper"]["compactify"].update(masked=[{"is": "-1", "by": "read"}]), "-inf, 0, mixed"),
        (lambda t: t["wrapper"]["compactify"].update(max_rows=[{"is": 0, "by": "read"}]), "positive"),
        (
            lambda t: t["wrapper"]["compactify"]["stream"][0].update(
                {"by": "seam", "from": "1.30.0", "until": "1.31.0"}
            ),
            "seam",
        ),
        (lambda t: t["defect"][1].update(by="compiled", until="1.25.0"), "compiled on sm90"),
        (lambda t: t["distribution"]["releases"].reverse(), "ascending"),
        (lambda t: t["defect"][0].update(by="guessed"), "sm90-h32-leak"),
        (lambda t: t["defect"][0].update(wrappers=["none"]), "wrappers of the table"),
        (lambda t: t["defect"][0].pop("what"), "what"),
        (lambda t: t["defect"][0].update(colour="red"), "no other key"),
        (lambda t: t["defect"].append(dict(t["defect"][0])), "id of its own"),
    ],
)
def test_a_wrong_table_is_refused(edit: Edit, said: str) -> None:
    table = copy.deepcopy(contracts_table.table())
    edit(table)
    with pytest.raises(BadInput, match=r"contracts\.toml") as caught:
        contracts_table.check(table)
    assert said in str(caught.value)


def test_the_table_is_not_evidence_of_a_gpu() -> None:
    table = contracts_table.table()
    rows = [
        row for wrapper in table["wrapper"].values() for fact in contracts_table.FACTS for row in wrapper.get(fact, ())
    ]
    assert len(rows) > 200
    assert {row["by"] for row in (*rows, *table["defect"])} == {"read", "compiled", "seam"}


ASKED = """
import sys
from dsattn.backends.cudnn import contracts
before = "packaging" in sys.modules
contracts.releases()
print(before, "packaging" in sys.modules)
"""


def test_packaging_is_imported_only_when_asked(run_python: RunPython) -> None:
    assert run_python("-c", ASKED).stdout == "False True\n"
