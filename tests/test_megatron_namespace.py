"""The wrapped frontend: which calls get what, which pass through as they are, and when it refuses."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_fake import New, Old
from torch import Tensor

from dsattn import ContractDrift
from dsattn.backends.cudnn import namespace as frontends
from dsattn.backends.cudnn.simulator import SimulatedFrontend
from dsattn.integrations.megatron_namespace import RULES, RepairedNamespace, inner_of

B = 2


def bshd(rows: int, keys: int, batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(batch, rows, 2, 4), torch.ones(batch, keys, 1, 4), torch.ones(batch, rows, 2)


def thd(starts_q: list[int], starts_k: list[int]) -> dict[str, Any]:
    q, k = starts_q[-1], starts_k[-1]
    return {
        "q": torch.ones(q, 2, 4),
        "k": torch.ones(k, 1, 4),
        "w": torch.ones(q, 2),
        "cu_seqlens_q": torch.tensor(starts_q, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor(starts_k, dtype=torch.int32),
        "max_seqlen_k": k,
    }


def sparse(batch: int) -> list[Tensor]:
    return [
        torch.ones(batch, 1, 2, 4),
        torch.ones(batch, 1, 2),
        torch.ones(batch, 4, 4),
        *[torch.ones(batch, 1, 2)] * 3,
    ]


def assert_offsets(found: Any, *values: int) -> None:
    assert found is not None
    assert found.dtype == torch.int32
    assert found.is_contiguous()
    assert found.tolist() == list(values)


@pytest.mark.parametrize(("ratio", "offset"), [(1, 4), (3, 20), (None, 28)])
def test_bshd_calls_get_one_offset_per_sequence(ratio: int | None, offset: int) -> None:
    frontend = New()
    given = {} if ratio is None else {"ratio": ratio}
    RepairedNamespace(frontend).indexer_forward_wrapper(*bshd(4, 8), **given)
    assert_offsets(frontend.last["q_causal_offsets"], offset, offset)
    assert frontend.last["ratio"] == (ratio or 4)


def test_thd_calls_get_one_offset_per_segment() -> None:
    frontend = New()
    RepairedNamespace(frontend).indexer_forward_wrapper(**thd([0, 2, 4, 7], [0, 2, 10, 13]), ratio=2)
    assert_offsets(frontend.last["q_causal_offsets"], 2, 14, 3)


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("dense_attn_score_recompute_wrapper", [torch.ones(B, 4, 2, 4), torch.ones(B, 8, 1, 4), torch.ones(B), 1.0]),
        ("dense_indexer_backward_wrapper", [torch.ones(B, 4, 2, 4), None, torch.ones(B, 8, 4), *[None] * 4]),
    ],
)
def test_dense_calls_get_offsets(name: str, tensors: list[Any]) -> None:
    frontend = New()
    getattr(RepairedNamespace(frontend), name)(*tensors)
    assert_offsets(frontend.last["q_causal_offsets"], 4, 4)


def test_sparse_backward_of_a_batch_gets_the_id_space() -> None:
    frontend = New()
    RepairedNamespace(frontend).indexer_backward_wrapper(*sparse(2), sm_scale=1.0)
    assert frontend.last["topk_indices_global"] is True


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("indexer_forward_wrapper", bshd(8, 8), {"ratio": 1}),
        ("indexer_forward_wrapper", bshd(8, 2), {}),
        ("indexer_forward_wrapper", (), thd([0, 2, 5], [0, 2, 5]) | {"ratio": 1}),
        ("indexer_backward_wrapper", sparse(1), {}),
        ("dense_indexer_backward_wrapper", (torch.ones(B, 8, 2, 4), None, torch.ones(B, 8, 4), *[None] * 4), {}),
    ],
)
def test_calls_that_mean_the_same_to_all_releases_pass_as_they_are(name: str, args: Any, kwargs: Any) -> None:
    told, plain = New(), New()
    getattr(RepairedNamespace(told), name)(*args, **kwargs)
    getattr(plain, name)(*args, **kwargs)
    assert told.last.get("q_causal_offsets") is None
    assert told.last.get("topk_indices_global") in (None, False)
    assert told.last.keys() == plain.last.keys()


def test_equal_starts_on_an_accelerator_are_not_read() -> None:
    starts = torch.zeros(3, dtype=torch.int32, device="meta")
    x = torch.ones(4, 2, 4, device="meta"), torch.ones(4, 1, 4, device="meta"), torch.ones(4, 2, device="meta")
    frontend, other = New(), torch.zeros(3, dtype=torch.int32, device="meta")
    call = partial(RepairedNamespace(frontend).indexer_forward_wrapper, *x, ratio=1, max_seqlen_k=4)
    call(cu_seqlens_q=starts, cu_seqlens_k=starts)
    assert frontend.last["q_causal_offsets"] is None
    # Whether these are equal cannot be known without waiting, so they are said.
    call(cu_seqlens_q=starts, cu_seqlens_k=other)
    offsets: Any = frontend.last["q_causal_offsets"]
    assert offsets.device.type == "meta"


@pytest.mark.parametrize("by_name", [True, False])
def test_what_the_caller_says_stays(by_name: bool) -> None:
    frontend, mine = New(), torch.zeros(B, dtype=torch.int32)
    positional = [4, 1.0, None, None, None, None]
    namespace = RepairedNamespace(frontend)
    for offsets in (mine, None):
        if by_name:
            namespace.indexer_forward_wrapper(*bshd(4, 8), q_causal_offsets=offsets)
        else:
            namespace.indexer_forward_wrapper(*bshd(4, 8), *positional, offsets)
        assert frontend.last["q_causal_offsets"] is offsets
    namespace.indexer_backward_wrapper(*sparse(2), topk_indices_global=False)
    assert frontend.last["topk_indices_global"] is False


def test_a_strict_old_frontend_still_works() -> None:
    frontend = Old()
    namespace = RepairedNamespace(frontend)
    assert "scores" in namespace.indexer_forward_wrapper(*bshd(4, 8))
    assert "scores" in namespace.indexer_forward_wrapper(**thd([0, 2, 4], [0, 2, 8]))
    namespace.indexer_backward_wrapper(*sparse(3))
    namespace.dense_attn_score_recompute_wrapper(torch.ones(B, 4, 2, 4), torch.ones(B, 8, 1, 4), torch.ones(B), 1.0)
    assert len(frontend.calls) == 4


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class Free:
    """Takes anything, and says so."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def indexer_forward_wrapper(self, q: Tensor, k: Tensor, w: Tensor, **options: Any) -> None:
        self.last = options


def test_keywords_of_any_name_count_as_taken() -> None:
    frontend = Free()
    RepairedNamespace(frontend).indexer_forward_wrapper(*bshd(4, 8), ratio=1)
    assert_offsets(frontend.last["q_causal_offsets"], 4, 4)


@pytest.mark.parametrize(("kind", "taken"), [(Old, False), (New, True)])
def test_what_a_decorator_hands_on_decides(kind: type[Old | New], taken: bool) -> None:
    frontend = kind()
    frontend.__dict__["indexer_forward_wrapper"] = decorated(frontend.indexer_forward_wrapper)
    RepairedNamespace(frontend).indexer_forward_wrapper(*bshd(4, 8), ratio=1)
    assert ("q_causal_offsets" in frontend.last) is taken


def test_signatures_stay_visible() -> None:
    frontend = SimulatedFrontend("1.29.1", "sm100")
    namespace = RepairedNamespace(frontend)
    for name in RULES:
        mine, theirs = getattr(namespace, name), getattr(frontend, name)
        assert mine is not theirs
        assert inspect.signature(mine) == inspect.signature(theirs) == mine.__signature__
        assert (mine.__name__, mine.__doc__, mine.__wrapped__) == (theirs.__name__, theirs.__doc__, theirs)
        assert getattr(namespace, name) is mine


def test_everything_else_is_the_frontends_own() -> None:
    frontend = New()
    namespace = RepairedNamespace(frontend)
    assert namespace.other_wrapper == frontend.other_wrapper
    assert dir(namespace) == dir(frontend)
    assert inner_of(namespace) is frontend
    with pytest.raises(AttributeError, match="no_wrapper"):
        _ = namespace.no_wrapper
    before = namespace.indexer_forward_wrapper
    namespace.indexer_forward_wrapper = frontend.other_wrapper
    assert frontend.__dict__["indexer_forward_wrapper"] == frontend.other_wrapper
    assert namespace.indexer_forward_wrapper is not before
    del namespace.indexer_forward_wrapper
    assert "indexer_forward_wrapper" not in frontend.__dict__


def test_it_can_be_switched_off() -> None:
    frontend, on = New(), [True]
    namespace = RepairedNamespace(frontend, lambda: on[0])
    namespace.indexer_forward_wrapper(*bshd(4, 8), ratio=1)
    on[0] = False
    namespace.indexer_forward_wrapper(*bshd(4, 8), ratio=1)
    assert [call["q_causal_offsets"] is None for call in frontend.calls] == [False, True]


def test_every_wrapper_that_a_release_changed_has_a_rule() -> None:
    """The parameters are those that 1.26 brought to wrappers that were there before."""
    old, new = (SimulatedFrontend(release, "sm100").contract for release in ("1.25.0", "1.26.0"))
    brought = {
        wrapper.symbol: parameter.name
        for wrapper in new.wrappers
        if old.has(wrapper.name)
        for parameter in wrapper.parameters
        if not old.wrapper(wrapper.name).accepts(parameter.name)
    }
    assert brought == {symbol: rule.adds for symbol, rule in RULES.items()}


LATER = """
from types import SimpleNamespace
__version__ = "{version}"

def forward(q, k, w, ratio=1):
    return "scores"

def backward(index_q, weights, index_k, *rest):
    return "gradients"

DSA = SimpleNamespace(indexer_forward_wrapper=forward, indexer_backward_wrapper=backward)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Installs a frontend of a release, with wrappers that have lost their parameters; its DSA."""

    def put(version: str) -> Any:
        (tmp_path / "cudnn" / "deepseek_sparse_attention").mkdir(parents=True)
        (tmp_path / "cudnn" / "__init__.py").write_text(LATER.format(version=version), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "cudnn", raising=False)
        monkeypatch.setattr(frontends, "version_of", lambda name: version)
        import cudnn  # type: ignore[import-not-found]

        return cudnn.DSA

    yield put
    sys.modules.pop("cudnn", None)


@pytest.mark.parametrize("version", ["1.26.0", "1.27.0rc1", "1.40.0"])
def test_what_a_later_release_cannot_be_told_is_refused(version: str, installed: Callable[[str], Any]) -> None:
    namespace = RepairedNamespace(installed(version))
    with pytest.raises(ContractDrift, match=rf"{version}: indexer_forward_wrapper: .*q_causal_offsets.*install"):
        namespace.indexer_forward_wrapper(*bshd(4, 8))
    with pytest.raises(ContractDrift, match=r"indexer_backward_wrapper: .*topk_indices_global"):
        namespace.indexer_backward_wrapper(*sparse(2))
    assert namespace.indexer_forward_wrapper(*bshd(8, 8)) == "scores"
    assert namespace.indexer_backward_wrapper(*sparse(1)) == "gradients"


def test_an_earlier_release_needs_no_parameter(installed: Callable[[str], Any]) -> None:
    namespace = RepairedNamespace(installed("1.25.0"))
    assert namespace.indexer_forward_wrapper(*bshd(4, 8)) == "scores"
    assert namespace.indexer_backward_wrapper(*sparse(2)) == "gradients"


def test_a_stand_in_beside_an_installed_release_is_taken_at_its_word(installed: Callable[[str], Any]) -> None:
    installed("1.40.0")
    frontend = Old()
    RepairedNamespace(frontend).indexer_forward_wrapper(*bshd(4, 8))
    assert len(frontend.calls) == 1


def test_wrong_calls_fail_as_they_do_without() -> None:
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        RepairedNamespace(New()).indexer_forward_wrapper(torch.ones(2))
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        RepairedNamespace(New()).indexer_forward_wrapper(*bshd(4, 8), nonsense=1)
