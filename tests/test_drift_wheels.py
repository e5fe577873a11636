"""`dsattn drift` on the real wheels: what it must find. Without the package index these are skipped: `not run`."""

from __future__ import annotations

import ast
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from packaging.version import Version
from wheels import Unreachable, cache_folder, wheel

from dsattn.cli import main
from dsattn.drift.snapshot import named, part_of
from dsattn.drift.watch import listed
from dsattn.wheels import wheel as wheel_of

MEGATRON = ("0.19.0", "0.19.2")
FRONTEND = ("1.25.0", "1.26.0", "1.27.0", "1.28.0", "1.29.1", "1.31.0", "1.32.0")
SHIFTS = "positional callers break, silently where the value fits; keyword callers unaffected"
Findings = list[dict[str, Any]]
Drifted = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture(scope="module")
def cache() -> Path:
    """The cache that all tests of real wheels share; what was read of them stays there, too."""
    try:
        for version in FRONTEND:
            wheel(Version(version))
        for version in MEGATRON:
            wheel_of("megatron-core", Version(version), cache_folder())
    except Unreachable:
        pytest.skip("not run: the package index cannot be reached")
    return cache_folder().parent


@pytest.fixture
def drifted(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Drifted:
    """Runs `dsattn drift`: exit code, JSON and what it printed."""
    monkeypatch.setenv("DSATTN_CACHE_DIR", str(cache))

    def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
        place = tmp_path / "drift.json"
        code = main(["drift", *arguments, "--json", str(place)])
        return code, json.loads(place.read_text()), capsys.readouterr().out

    return run


def about(data: dict[str, Any], name: str, group: str = "parameters") -> Findings:
    return [each for each in data["findings"] if each["name"] == name and each["group"] == group]


def starting(findings: Findings, start: str) -> dict[str, Any]:
    (found,) = [each for each in findings if each["what"].startswith(start)]
    return found


def test_the_defaults_of_1_26(drifted: Drifted) -> None:
    code, data, out = drifted("1.25.0", "1.26.0")
    assert code == 1
    offsets = [
        "indexer_forward_wrapper",
        "dense_indexer_score_recompute_wrapper",
        "dense_attn_score_recompute_wrapper",
        "dense_indexer_backward_wrapper",
    ]
    stated = [(name, "q_causal_offsets=None added", "alignment: bottom-right -> top-left") for name in offsets]
    stated += [("indexer_backward_wrapper", "topk_indices_global=False added", "ids: global -> local")]
    for name, what, cause in stated:
        found = starting(about(data, name), what)
        assert found["effect"] == "changed behaviour"
        assert found["means"].startswith(f"for callers that leave it out: {cause}")
        assert found["touches"] == [f"dsattn: {name.removesuffix('_wrapper')}"]
        assert starting(about(data, name, "known"), cause)["effect"] == "changed behaviour"
    added = [each["name"] for each in data["findings"] if each["what"].startswith("q_causal_offsets=None added")]
    assert sorted(name for name in added if name.endswith("_wrapper")) == sorted(offsets)
    assert "local_to_global_wrapper" in data["unchanged"]
    assert "no static change seen: " in out
    assert "compatible" not in out


def test_the_calls_of_the_documentation(drifted: Drifted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "drift.md").read_text(encoding="utf-8")
    place = tmp_path / "calls.toml"
    place.write_text(page.split("```toml\n")[1].split("```")[0])
    with zipfile.ZipFile(wheel_of("megatron-core", Version("0.19.2"), cache_folder())) as archive:
        (source,) = [name for name in archive.namelist() if name.endswith("/dsa_cudnn_kernels.py")]
        functions = {
            each.name: each for each in ast.walk(ast.parse(archive.read(source))) if isinstance(each, ast.FunctionDef)
        }
    for call in listed(place):
        made = [each for each in ast.walk(functions[call.label]) if isinstance(each, ast.Call)]
        real = next(each for each in made if ast.unparse(each.func) == f"_cudnn_dsa.{call.name}")
        assert (len(real.args), {each.arg for each in real.keywords}) == (call.positional, call.keywords)
    monkeypatch.setenv("COLUMNS", "104")
    code, data, out = drifted("1.25.0", "1.26.0", "--watch", str(place))
    assert (code, len(data["touched"])) == (1, 4)
    printed = [line.rstrip() for line in out.splitlines()]
    told = page.split("```text\n")[1].split("```")[0].splitlines()
    assert [line for line in told if line not in printed] == []


def test_the_loss_gradient_of_1_27(drifted: Drifted) -> None:
    code, data, _ = drifted("1.26.0", "1.27.0")
    assert code == 1
    for name, moved in (
        ("indexer_backward_wrapper", "moved: sm_scale 6 -> 7, loss_coeff 7 -> 8, grad_loss 8 -> 6"),
        ("dense_indexer_backward_wrapper", "moved: sm_scale 7 -> 8, loss_coeff 8 -> 9, grad_loss 9 -> 7"),
    ):
        required = starting(about(data, name), "grad_loss is required, was 1.0 by default")
        assert (required["effect"], required["touches"]) == ("breaks", [])
        found = starting(about(data, name), "moved")
        assert (found["what"], found["effect"], found["means"], found["touches"]) == (moved, "silent", SHIFTS, [])
        assert starting(about(data, name, "known"), "grad_loss: tensor or number -> one-element")["touches"]
    out = starting(about(data, "indexer_forward_wrapper"), "out=None added, at 10, before stream")
    assert (out["effect"], out["means"], out["touches"]) == ("silent", SHIFTS, [])
    assert starting(about(data, "indexer_forward_top_k_wrapper", "exports"), "function added")["effect"] == "harmless"


def test_the_flag_of_1_29(drifted: Drifted, tmp_path: Path) -> None:
    name = "sparse_attention_backward_wrapper"
    _, data, _ = drifted("1.28.0", "1.29.1")
    found = starting(about(data, name), "deterministic=False added, at 12, before stream")
    assert (found["effect"], found["means"], found["touches"]) == ("silent", SHIFTS, [])
    assert starting(about(data, name), "moved")["what"] == "moved: stream 12 -> 13"
    calls = tmp_path / "calls.toml"
    calls.write_text(f'[[call]]\nwrapper = "{name}"\npositional = 13\nwhere = "mine.py:7"\n')
    code, data, _ = drifted("1.28.0", "1.29.1", "--watch", str(calls))
    assert code == 1
    assert starting(about(data, name), "deterministic")["touches"] == ["mine.py:7"]
    assert starting(about(data, name), "moved")["touches"] == ["mine.py:7"]


def test_the_additions_of_1_32(drifted: Drifted) -> None:
    _, data, _ = drifted("1.31.0", "1.32.0")
    additions = [each for each in data["findings"] if each["group"] == "parameters" and " added" in each["what"]]
    wrappers = {each["name"]: each for each in additions if each["name"].endswith("_wrapper")}
    assert {"indexer_top_k_wrapper", "dense_indexer_backward_wrapper", "sparse_attention_backward_wrapper"} <= set(
        wrappers
    )
    assert {each["effect"] for each in wrappers.values()} == {"harmless"}
    assert not any(each["touches"] for each in additions)
    planes = starting(about(data, "indexer_backward_wrapper"), "deterministic_dk_planes")
    assert planes["what"] == "deterministic_dk_planes=96 added, keyword only"
    cutlass = starting(about(data, "nvidia-cutlass-dsl", "requirements"), "[cu13]>=4.8.0")
    assert ">=4.6.2" in cutlass["what"]
    # Its new checks may refuse calls, and only these may: no default and no fact touches ours.
    touching = {each["group"] for each in data["findings"] if each["touches"]}
    assert touching <= {"raises", "docstrings"}


def test_equal_releases(drifted: Drifted, cache: Path) -> None:
    code, data, out = drifted("1.32.0", "1.32")
    assert (code, data["findings"]) == (0, [])
    assert out.splitlines()[-1] == "no static change seen; 13 watched calls"
    assert (cache / "drift" / "nvidia-cudnn-frontend-1.32.json").exists()


def test_megatron(drifted: Drifted, tmp_path: Path) -> None:
    code, data, _ = drifted(*MEGATRON, "--package", "megatron-core")
    assert (code, data["watched"]) == (0, [])
    assert data["part"] == "megatron.core.transformer.experimental_attention_variant"
    assert {"dsa.DSAttention", "dsa_kernels.run_fused_qk_topk"} <= set(data["unchanged"])
    calls = tmp_path / "calls.toml"
    calls.write_text('[[call]]\nwrapper = "dsa.DSAttention.forward"\npositional = ["query", "key", "value"]\n')
    code, data, out = drifted(*MEGATRON, "--package", "Megatron_Core", "--watch", str(calls))
    assert (code, data["watched"]) == (0, ["dsa.DSAttention.forward"])
    assert "none touches one of 1 watched call" in out


def test_parts() -> None:
    assert part_of("nvidia-cudnn-frontend") == "cudnn/deepseek_sparse_attention"
    assert part_of(named("Megatron_Core")) == "megatron/core/transformer/experimental_attention_variant"
    assert part_of("kernels") == ""
