"""The simulated frontend as a namespace: attributes, signatures, results, refusals of a whole wrapper, seeds."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from cudnn_literal import ARCHS, RELEASES, grid, parameters
from packaging.version import Version

from dsattn.backends.cudnn.contracts import contract
from dsattn.backends.cudnn.simulator import KERNELS, SimulatedFrontend
from dsattn.errors import BackendMissing, BadInput

EVERY = [(version, arch) for version in RELEASES for arch in ARCHS]
FIRST = {"indexer_forward_top_k": "1.27", "sparse_attention_forward": "1.29", "aligned_hca_backward": "1.31"}


def forward_call(rows: int = 4, keys: int = 4) -> dict[str, Any]:
    return {"q": grid(1, rows, 32, 128), "k": grid(1, keys, 1, 128, seed=1), "w": grid(1, rows, 32, seed=2), "ratio": 1}


@pytest.mark.parametrize(("version", "arch"), EVERY)
def test_the_wrappers_are_those_of_the_table_with_its_signatures(version: str, arch: str) -> None:
    frontend = SimulatedFrontend(version, arch)
    wrappers = contract(Version(version), arch).wrappers
    assert dir(frontend) == sorted(wrapper.symbol for wrapper in wrappers)
    for wrapper in wrappers:
        found = inspect.signature(getattr(frontend, wrapper.symbol))
        assert list(found.parameters) == [parameter.name for parameter in wrapper.parameters]
        for parameter in wrapper.parameters:
            got = found.parameters[parameter.name]
            assert (got.default is inspect.Parameter.empty) == parameter.required
            assert (got.kind is inspect.Parameter.KEYWORD_ONLY) == parameter.keyword_only
            assert parameter.required or got.default == ast.literal_eval(repr(got.default))


@pytest.mark.parametrize(("version", "arch"), EVERY)
def test_a_wrapper_is_there_from_its_first_release_on(version: str, arch: str) -> None:
    frontend = SimulatedFrontend(version, arch)
    for name, first in FIRST.items():
        assert hasattr(frontend, f"{name}_wrapper") == (Version(version) >= Version(first)), name
    assert hasattr(frontend, "indexer_forward_wrapper")
    with pytest.raises(AttributeError, match="indexer_sideways_wrapper"):
        frontend.indexer_sideways_wrapper  # noqa: B018


def test_signatures_move_as_the_releases_moved_them() -> None:
    """Written down here once more, so that a slip in the table shows."""
    old, middle, new = (
        list(parameters(inspect.signature(SimulatedFrontend(version, "sm90").indexer_backward_wrapper)))
        for version in ("1.25.0", "1.26.0", "1.27.0")
    )
    assert old[6:10] == ["sm_scale", "loss_coeff", "grad_loss", "block_I"]
    assert "topk_indices_global" not in old
    assert middle[10] == "topk_indices_global"
    assert new[6:10] == ["grad_loss", "sm_scale", "loss_coeff", "block_I"]
    attention = {
        version: list(
            parameters(inspect.signature(SimulatedFrontend(version, "sm90").sparse_attention_backward_wrapper))
        )
        for version in ("1.28.0", "1.29.0")
    }
    assert (attention["1.28.0"][12], attention["1.29.0"][12]) == ("stream", "deterministic")
    for version in RELEASES:
        frontend = SimulatedFrontend(version, "sm100")
        assert parameters(inspect.signature(frontend.indexer_forward_wrapper))["ratio"] == 4
        dense = parameters(inspect.signature(frontend.dense_indexer_score_recompute_wrapper))
        assert dense["ratio"] == 1
        assert ("q_causal_offsets" in dense) == (Version(version) >= Version("1.26"))
        assert "sm_scale" not in parameters(inspect.signature(frontend.sparse_indexer_score_recompute_wrapper))


def test_a_call_that_does_not_fit_the_signature_is_a_type_error() -> None:
    offsets = torch.zeros(1, dtype=torch.int32, device="cpu")
    with pytest.raises(TypeError, match="q_causal_offsets"):
        SimulatedFrontend("1.25.0", "sm90").indexer_forward_wrapper(**forward_call(), q_causal_offsets=offsets)
    assert SimulatedFrontend("1.26.0", "sm90").indexer_forward_wrapper(**forward_call(), q_causal_offsets=offsets)
    with pytest.raises(TypeError, match="'w'"):
        SimulatedFrontend("1.25.0", "sm90").indexer_forward_wrapper(grid(1, 4, 32, 128), grid(1, 4, 1, 128))
    six = [torch.zeros(1, device="cpu")] * 6
    with pytest.raises(TypeError, match="grad_loss"):
        SimulatedFrontend("1.27.0", "sm90").indexer_backward_wrapper(*six)


def test_a_result_is_read_by_key_or_position_and_has_no_attributes() -> None:
    result = SimulatedFrontend("1.32.0", "sm90").compactify_wrapper(torch.tensor([[-1, 5]], dtype=torch.int32))
    ids, length = result
    assert ids.tolist() == result["indices"].tolist() == result[0].tolist() == [[5, -1]]
    assert length.tolist() == [1]
    assert list(result.keys()) == ["indices", "topk_length"]
    with pytest.raises(AttributeError):
        result.indices  # noqa: B018


def test_the_positions_of_an_older_release_mean_something_else_now() -> None:
    """`stream` of 1.28 is `deterministic` of 1.29: refused on Hopper, taken silently on Blackwell."""
    q, kv = grid(1, 64, 512), grid(4, 512, seed=1)
    ids = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    stream = object()
    call = (q, kv, q, q, torch.ones(1, 64), torch.zeros(64), ids, None, None, None, None, 64, stream)
    assert SimulatedFrontend("1.28.0", "sm90").sparse_attention_backward_wrapper(*call)["dq"].shape == q.shape
    with pytest.raises(ValueError, match="deterministic"):
        SimulatedFrontend("1.29.0", "sm90").sparse_attention_backward_wrapper(*call)
    assert SimulatedFrontend("1.29.0", "sm100").sparse_attention_backward_wrapper(*call)["dq"].shape == q.shape


@pytest.mark.parametrize(
    ("version", "arch", "name", "kind"),
    [
        ("1.24.1", "sm90", "indexer_forward", RuntimeError),
        ("1.24.1", "sm90", "indexer_top_k", RuntimeError),
        ("1.27.0", "sm90", "indexer_forward_top_k", NotImplementedError),
        ("1.32.0", "sm90", "sparse_attention_forward", RuntimeError),
    ],
)
def test_a_wrapper_without_a_kernel_here_refuses(version: str, arch: str, name: str, kind: type[Exception]) -> None:
    wrapper = getattr(SimulatedFrontend(version, arch), f"{name}_wrapper")
    required = [p for p in inspect.signature(wrapper).parameters.values() if p.default is inspect.Parameter.empty]
    with pytest.raises(kind, match="requires SM100"):
        wrapper(*[None] * len(required))


def test_what_is_not_simulated_says_so() -> None:
    frontend = SimulatedFrontend("1.32.0", "sm100")
    missing = {wrapper.name for wrapper in frontend.contract.wrappers} - set(KERNELS)
    assert {"sparse_attention", "sparse_attention_score_recompute", "aligned_hca_backward"} <= missing
    with pytest.raises(NotImplementedError, match="signature"):
        frontend.sparse_attention(None, None, None)


def test_a_release_without_dsa_and_words_that_are_none() -> None:
    with pytest.raises(BackendMissing, match=r"1\.23"):
        SimulatedFrontend("1.23.0", "sm90")
    with pytest.raises(BadInput, match="arch"):
        SimulatedFrontend("1.25.0", "sm120")
    with pytest.raises(BadInput, match="newest"):
        SimulatedFrontend("newest", "sm90")


def test_the_same_call_gives_the_same_scores_and_nothing_is_recorded_for_autograd() -> None:
    call = forward_call(8, 8)
    call["q"] = torch.randn(1, 8, 32, 128).bfloat16().requires_grad_()
    frontend = SimulatedFrontend("1.32.0", "sm100", seed=3)
    first = frontend.indexer_forward_wrapper(**call)["scores"]
    assert not first.requires_grad
    assert torch.equal(first, frontend.indexer_forward_wrapper(**call)["scores"])
    assert torch.equal(first, SimulatedFrontend("1.32.0", "sm100", seed=3).indexer_forward_wrapper(**call)["scores"])
    others = [
        SimulatedFrontend("1.32.0", "sm100", seed=seed).indexer_forward_wrapper(**call)["scores"] for seed in range(3)
    ]
    assert not all(torch.equal(first, other) for other in others), "sums run in one order whatever the seed"


def test_the_default_device_does_not_matter() -> None:
    call = forward_call()
    scores = SimulatedFrontend("1.29.1", "sm90").indexer_forward_wrapper(**call)["scores"]
    try:
        torch.set_default_device("meta")
        frontend = SimulatedFrontend("1.29.1", "sm90")
        again = frontend.indexer_forward_wrapper(**call)["scores"]
        frontend.indexer_top_k_wrapper(again[0], torch.full((4,), 4, dtype=torch.int32, device="cpu"), 2)
    finally:
        torch.set_default_device("cpu")
    assert torch.equal(scores, again)


def test_the_simulator_shares_nothing_with_operators_and_oracle() -> None:
    files = sorted((ROOT / "src/dsattn/backends/cudnn").glob("simulator/*.py"))
    assert len(files) > 5
    allowed = ("dsattn.errors", "dsattn.backends.cudnn.contracts", "dsattn.backends.cudnn.simulator")
    for file in files:
        assert [name for name in imports_of(file) if name.startswith("dsattn") and not name.startswith(allowed)] == []


def imports_of(file: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or ".")
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names
