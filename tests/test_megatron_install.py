"""`install` on packages that are built like Megatron: what it changes, what it takes back, and what it finds."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import RunPython
from megatron_fake import Build, New, Old, backward, build, select, source
from packaging.version import Version

import dsattn
from dsattn import BackendMissing, BadInput, CausalLayout, ContractDrift
from dsattn.backends.cudnn.namespace import Installed
from dsattn.integrations import megatron
from dsattn.integrations.megatron_namespace import RepairedNamespace, inner_of
from dsattn.spec.captured import read

__all__ = ["build"]

# Rank 0 of two: a document of 8 keys, and two documents of 4.
ONE: dict[str, Any] = {"varlen_starts": torch.zeros(4, dtype=torch.int64), "varlen_ends": torch.tensor([1, 2, 7, 8])}
MANY: dict[str, Any] = {
    "varlen_starts": torch.tensor([0, 0, 4, 4]),
    "varlen_ends": torch.tensor([1, 4, 5, 8]),
    "single_packed_thd_sequence": False,
    "packed_cu_seqlens_q": torch.tensor([0, 4, 8], dtype=torch.int32),
    "packed_cp_size": 2,
}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    megatron.uninstall()
    megatron._PATCHES.clear()


@pytest.fixture
def kernels(build: Build) -> Any:
    return build({"kernels": source()})


def state(module: ModuleType) -> dict[str, Any]:
    """The names of a module; `__warningregistry__` and the like are not Megatron's."""
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


def held_by(kernels: Any) -> Any:
    """The frontend that Megatron holds."""
    return vars(kernels)["_cudnn_dsa"]


def test_calls_are_repaired(kernels: Any) -> None:
    kernels._cudnn_dsa = frontend = New()
    megatron.install(module=kernels)
    select(kernels)
    assert frontend.calls[0]["q_causal_offsets"] is None
    assert frontend.last["q_causal_offsets"].tolist() == [6]
    select(kernels, **MANY)
    assert frontend.last["q_causal_offsets"].tolist() == [0, 3, 0, 3]
    backward(kernels, 2)
    assert frontend.last["topk_indices_global"] is True
    backward(kernels, 1)
    assert not frontend.last["topk_indices_global"]


def test_without_it_they_are_not(kernels: Any) -> None:
    kernels._cudnn_dsa = frontend = New()
    select(kernels)
    backward(kernels, 2)
    assert frontend.calls[1]["q_causal_offsets"] is None
    assert frontend.last["topk_indices_global"] is False


def test_the_frontend_itself_is_left_alone(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = New()
    shared = SimpleNamespace(DSA=frontend)
    monkeypatch.setitem(sys.modules, "frontend_of_tests", shared)
    before = dict(vars(frontend))
    megatron.install(module=kernels)
    assert kernels._cudnn_dsa is None, "nothing is loaded before its time"
    select(kernels)
    assert isinstance(kernels._cudnn_dsa, RepairedNamespace)
    assert inner_of(held_by(kernels)) is frontend
    assert frontend.last["q_causal_offsets"].tolist() == [6]
    assert shared.DSA is frontend
    assert vars(frontend).keys() == before.keys()
    frontend.indexer_forward_wrapper(torch.ones(1, 2, 2, 4), torch.ones(1, 8, 1, 4), torch.ones(1, 2, 2))
    assert frontend.last["q_causal_offsets"] is None


def test_a_frontend_that_is_put_there_later_is_wrapped_too(kernels: Any) -> None:
    megatron.install(module=kernels)
    for frontend in (New(), New()):
        kernels._cudnn_dsa = frontend
        select(kernels)
        assert frontend.last["q_causal_offsets"].tolist() == [6]


def test_a_strict_old_frontend_works(kernels: Any) -> None:
    kernels._cudnn_dsa = frontend = Old()
    megatron.install(module=kernels)
    select(kernels)
    select(kernels, **MANY)
    backward(kernels, 3)
    assert len(frontend.calls) == 4


@pytest.mark.parametrize("loaded", [True, False])
def test_uninstall_takes_everything_back(kernels: Any, loaded: bool) -> None:
    kernels._cudnn_dsa = New() if loaded else None
    before = state(kernels)
    megatron.install(module=kernels, scorer=True)
    assert state(kernels) != before
    held: tuple[Any, Any] = held_by(kernels), kernels._ensure_dsa_namespace
    assert megatron.uninstall()
    assert state(kernels) == before
    assert not megatron.uninstall()
    # What someone has kept does nothing more.
    if loaded:
        kernels._cudnn_dsa = held[0]
        held[1]()
        select(kernels)
        assert inner_of(held[0]).last["q_causal_offsets"] is None


def test_installing_twice_changes_nothing_more(kernels: Any) -> None:
    kernels._cudnn_dsa = New()
    first = megatron.install(module=kernels)
    before = state(kernels)
    second = megatron.install(module=kernels)
    assert (first.changed, second.changed, second.repaired, second.scorer) == (True, False, True, False)
    assert state(kernels) == before
    assert not isinstance(inner_of(held_by(kernels)), RepairedNamespace)


def test_as_a_context_manager_it_takes_back_its_own_changes(kernels: Any) -> None:
    before = state(kernels)
    with megatron.install(module=kernels):
        assert state(kernels) != before
        with megatron.install(module=kernels):
            pass
        assert state(kernels) != before, "the inner one changed nothing, so it takes nothing back"
        with megatron.install(module=kernels, scorer=True) as inner:
            assert inner.scorer
        assert kernels._indexer_topk_bshd is before["_indexer_topk_bshd"]
    assert state(kernels) == before
    installed = megatron.install(module=kernels)
    with pytest.raises(ZeroDivisionError), installed:
        raise ZeroDivisionError
    assert state(kernels) == before


def test_functions_stay_what_they_were_to_look_at(kernels: Any) -> None:
    before = state(kernels)
    megatron.install(module=kernels, scorer=True)
    changed = {name for name, value in state(kernels).items() if value is not before[name]}
    assert changed == {
        "_ensure_dsa_namespace",
        "_indexer_topk_bshd",
        "_indexer_topk_single_packed_cp_segments",
        "_indexer_topk_multi_packed_cp_thd",
    }
    for name in changed:
        mine = getattr(kernels, name)
        assert (mine.__wrapped__, mine.__name__, mine.__doc__) == (before[name], name, before[name].__doc__)


def test_a_change_on_top_of_ours_stays(kernels: Any) -> None:
    megatron.install(module=kernels)
    ours = kernels._ensure_dsa_namespace
    kernels._ensure_dsa_namespace = lambda: ours()
    kernels._cudnn_dsa, on_top = New(), kernels._ensure_dsa_namespace
    megatron.uninstall()
    assert kernels._ensure_dsa_namespace is on_top
    select(kernels)
    assert isinstance(kernels._cudnn_dsa, New), "the wrapper below does nothing more"


@pytest.mark.parametrize("helpers", [True, False])
def test_a_repaired_megatron_is_left_as_it_is(build: Build, helpers: bool, caplog: pytest.LogCaptureFixture) -> None:
    text = source(fixed=True)
    if helpers:
        # Functions that cannot be tried: the helpers tell.
        text = text.replace("def _run_sparse_indexer_backward(", "def _another(")
        text += "\ndef _wrapper_accepts_kwarg(): ...\ndef _call_sparse_indexer_backward(): ...\n"
    module: Any = build({"kernels": text})
    module._cudnn_dsa = New()
    before = state(module)
    with caplog.at_level(logging.INFO):
        done = megatron.install(module=module)
    assert state(module) == before
    assert not done.repaired
    assert "nothing to repair" in caplog.text


@pytest.mark.parametrize("part", ["ids", "offsets", "packed_offsets"])
def test_a_megatron_that_is_repaired_in_part_is_repaired(build: Build, part: str) -> None:
    others = {"ids", "offsets", "packed_offsets"} - {part}
    module: Any = build({"kernels": source(**dict.fromkeys(others, True))})
    module._cudnn_dsa = frontend = New()
    assert megatron.install(module=module).repaired
    select(module)
    assert frontend.last["q_causal_offsets"].tolist() == [6]
    select(module, **MANY)
    assert frontend.last["q_causal_offsets"].tolist() == [0, 3, 0, 3]
    backward(module, 2)
    assert frontend.last["topk_indices_global"] is True


def test_trying_a_megatron_out_changes_nothing_in_it(build: Build) -> None:
    module = build({"kernels": source()})
    before = state(module)
    megatron._patch_of(module)
    assert state(module) == before


ALIASES = {
    "re-exports": "from PACKAGE.kernels import *\nfrom PACKAGE.kernels import _cudnn_dsa, run_fused_qk_topk\n",
    "asks when it is asked": """
import warnings
from PACKAGE import kernels

def __getattr__(name):
    warnings.warn("moved", DeprecationWarning, stacklevel=2)
    return getattr(kernels, name)
""",
    "calls": """
import warnings
from PACKAGE import kernels
_cudnn_dsa = None

def run_fused_qk_topk(*args, **kwargs):
    warnings.warn("moved", DeprecationWarning, stacklevel=2)
    return kernels.run_fused_qk_topk(*args, **kwargs)
""",
    "warns": "import warnings\nwarnings.warn('moved', DeprecationWarning)\nfrom PACKAGE.kernels import *\n",
    "is split": "from PACKAGE.entry import run_fused_qk_topk\n",
}


@pytest.mark.parametrize("kind", ALIASES)
def test_a_module_that_has_moved_is_found_behind_its_alias(build: Build, kind: str) -> None:
    entry = "from PACKAGE import kernels\n\ndef run_fused_qk_topk(*args, **kwargs):\n    return kernels._indexer()\n"
    build({"kernels": source(), "entry": entry, "alias": ALIASES[kind]})
    package = next(name for name in sys.modules if name.startswith("like_megatron_0"))
    name = package.partition(".")[0]
    kernels: Any = sys.modules[f"{name}.kernels"]
    kernels._cudnn_dsa = frontend = New()
    megatron.install(module=f"{name}.alias", scorer=True)
    assert isinstance(kernels._cudnn_dsa, RepairedNamespace)
    assert hasattr(kernels._indexer_topk_bshd, "__wrapped__")
    backward(kernels, 2)
    assert frontend.last["topk_indices_global"] is True


def test_a_module_that_is_not_known_is_refused(build: Build) -> None:
    module = build({"kernels": "def run_fused_qk_topk(): ...\n"})
    with pytest.raises(ContractDrift, match=r"_cudnn_dsa and _ensure_dsa_namespace"):
        megatron.install(module=module)


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ("def _indexer_topk_multi_packed_cp_thd(", "def _renamed(", "no _indexer_topk_multi_packed_cp_thd"),
        ("starts, ends, packed_cu", "begins, ends, packed_cu", "_indexer_topk_multi_packed_cp_thd without starts"),
    ],
)
def test_scorers_that_are_not_known_are_refused(build: Build, before: str, after: str, match: str) -> None:
    text = source()
    assert before in text
    module = build({"kernels": text.replace(before, after)})
    untouched = state(module)
    with pytest.raises(ContractDrift, match=match):
        megatron.install(module=module, scorer=True)
    assert state(module) == untouched
    assert megatron.install(module=module).repaired


@pytest.mark.parametrize(
    ("module", "match"),
    [
        ("no_such_package.kernels", r"no module no_such_package; .*pip install megatron-core"),
        ("PACKAGE.broken", r"broken cannot be imported \(RuntimeError: no driver\)"),
        ("PACKAGE.needs", r"needs cannot be imported \(ModuleNotFoundError: .*no_such_thing"),
    ],
)
def test_absent_and_broken_are_told_apart(build: Build, module: str, match: str) -> None:
    files = {"kernels": "", "broken": "raise RuntimeError('no driver')\n", "needs": "import no_such_thing\n"}
    name = build(files).__name__.partition(".")[0]
    with pytest.raises(BackendMissing, match=match):
        megatron.install(module=module.replace("PACKAGE", name))


def test_a_megatron_without_the_module_is_installed_all_the_same(build: Build) -> None:
    name = build({"kernels": ""}).__name__.partition(".")[0]
    with pytest.raises(ContractDrift, match=rf"no module {name}\.gone; needed .* install\(module=\.\.\.\)"):
        megatron.install(module=f"{name}.gone")


@pytest.mark.parametrize(("backend", "error"), [("nonsense", BadInput), (3, BadInput)])
def test_a_backend_that_nothing_has_is_refused_at_once(kernels: Any, backend: Any, error: type[Exception]) -> None:
    before = state(kernels)
    with pytest.raises(error, match="backend"):
        megatron.install(module=kernels, scorer=True, backend=backend)
    assert state(kernels) == before


def test_a_module_of_another_kind_is_refused() -> None:
    with pytest.raises(BadInput, match="module: given int"):
        megatron.install(module=3)  # type: ignore[arg-type]


def test_one_line_says_what_was_done(kernels: Any, caplog: pytest.LogCaptureFixture) -> None:
    name = kernels.__name__
    with caplog.at_level(logging.INFO, "dsattn.integrations.megatron"):
        megatron.install(module=kernels)
        megatron.install(module=kernels)
        megatron.install(module=kernels, scorer=True, backend="torch")
        megatron.uninstall()
    first, again, scorer, gone = caplog.messages
    assert first == f"{name}: its calls of the cuDNN frontend get explicit id spaces and causal offsets"
    assert again == f"{first}; as before"
    assert scorer == f"{first}; dsattn selects the keys of packed context-parallel rows (backend torch)"
    assert gone == f"{name}: calls of the cuDNN frontend are its own again"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1.25.0", "its calls of the cuDNN frontend 1.25.0 pass as they are, and would be repaired from 1.26 on"),
        ("1.29.1", "its calls of the cuDNN frontend 1.29.1 get explicit id spaces and causal offsets"),
    ],
)
def test_the_line_names_the_installed_frontend(
    kernels: Any, version: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(megatron, "find_frontend", lambda: Installed(Version(version), Path()))
    with caplog.at_level(logging.INFO, "dsattn.integrations.megatron"):
        megatron.install(module=kernels)
    assert caplog.messages == [f"{kernels.__name__}: {said}"]


@pytest.mark.parametrize("layout", [ONE, MANY], ids=["one", "many"])
def test_the_scorers_select_what_the_windows_say(kernels: Any, layout: dict[str, Any]) -> None:
    kernels._cudnn_dsa = frontend = New()
    megatron.install(module=kernels, scorer=True)
    generator = torch.Generator("cpu").manual_seed(1)
    q, k, w = (torch.rand(1, *size, generator=generator) for size in ((4, 2, 4), (8, 4), (4, 2)))
    ids, lengths, _ = kernels._indexer_topk_bshd(q, k, w, 3, **layout)
    assert frontend.calls == []
    scores = (torch.einsum("qhd,kd->qhk", q[0], k[0]).relu() * w[0, ..., None]).sum(1)
    for row, (start, end) in enumerate(zip(layout["varlen_starts"], layout["varlen_ends"], strict=True)):
        count = min(3, int(end - start))
        best = scores[row, start:end].topk(count).indices + start
        assert sorted(best.tolist()) == ids[0, row, :count].tolist()
        assert lengths[0, row] == count


def test_padding_and_slices_have_windows_of_their_own(kernels: Any) -> None:
    """Rows of a slice, keys past the end and rows without a key: none of it has the form of a whole rank."""
    kernels._cudnn_dsa = New()
    megatron.install(module=kernels, scorer=True)
    starts, ends = torch.tensor([2, 2, 0, 7, 8, 5]), torch.tensor([5, 6, 1, 12, 12, 5])
    ids, lengths, _ = kernels._indexer_topk_bshd(
        torch.ones(1, 6, 2, 4), torch.ones(1, 8, 4), torch.ones(1, 6, 2), 4, varlen_starts=starts, varlen_ends=ends
    )
    assert ids[0].tolist() == [[2, 3, 4, -1], [2, 3, 4, 5], [0, -1, -1, -1], [7, -1, -1, -1], [-1] * 4, [-1] * 4]
    assert lengths.tolist() == [[3, 4, 1, 1, 0, 0]]


def test_a_scorer_that_is_called_without_windows_is_megatrons(kernels: Any) -> None:
    kernels._cudnn_dsa = frontend = New()
    megatron.install(module=kernels, scorer=True)
    kernels._indexer_topk_single_packed_cp_segments(
        torch.ones(1, 4, 2, 4), torch.ones(1, 8, 1, 4), torch.ones(1, 4, 2), 1, False, 0
    )
    assert len(frontend.calls) == 2


def test_layouts_are_shared_by_layers(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels._cudnn_dsa = New()
    megatron.install(module=kernels, scorer=True)
    seen: list[CausalLayout] = []
    from dsattn.integrations import megatron_scorer

    original = megatron_scorer.select
    monkeypatch.setattr(megatron_scorer, "select", lambda *args: (seen.append(args[3]), original(*args))[1])
    for _ in range(3):
        select(kernels, **{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in MANY.items()})
    select(kernels, **ONE)
    assert seen[0] is seen[1] is seen[2]
    assert seen[3] != seen[0]


def test_threads_install_and_call_at_the_same_time(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    frontend, errors, stop = New(), [], threading.Event()
    monkeypatch.setitem(sys.modules, "frontend_of_tests", SimpleNamespace(DSA=frontend))

    def work(step: Any) -> None:
        try:
            while not stop.is_set():
                step()
        except Exception as error:
            errors.append(error)

    def reload() -> None:
        kernels._cudnn_dsa = None
        kernels._ensure_dsa_namespace()

    def toggle() -> None:
        megatron.install(module=kernels, scorer=True)
        megatron.uninstall()

    before = state(kernels)
    steps = [reload, toggle, toggle, lambda: kernels._ensure_dsa_namespace()]
    threads = [threading.Thread(target=work, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    stop.wait(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    kernels._cudnn_dsa = None
    assert state(kernels) == before
    megatron.install(module=kernels)
    select(kernels)
    assert isinstance(kernels._cudnn_dsa, RepairedNamespace)
    assert inner_of(held_by(kernels)) is frontend


def test_a_capture_sees_the_calls(kernels: Any, tmp_path: Path) -> None:
    kernels._cudnn_dsa = New()
    megatron.install(module=kernels)
    before, file = state(kernels), tmp_path / "step.safetensors"
    q, kv = torch.randn(4, 1, 2, 6), torch.randn(8, 1, 6)
    with dsattn.capture(file, steps=2) as captured:
        for layout in (ONE, MANY):
            kernels._run_sparse_attention_forward(q, kv, select(kernels, **layout), 0.5, 3)
        assert captured.steps == 2
        assert megatron.uninstall()
    one, many = read(file)
    assert (one.top_k, one.value_dim, one.softmax_scale, one.relu) == (1, 3, 0.5, True)
    assert torch.equal(one.q, q[:, 0])
    assert torch.equal(one.kv, kv[:, 0])
    for found, layout in ((one, ONE), (many, MANY)):
        start, end = found.layout.bounds()
        assert torch.equal(start, layout["varlen_starts"].int())
        assert torch.equal(end, layout["varlen_ends"].int())
    assert state(kernels) != before, "uninstalled"
    assert not hasattr(kernels._indexer_topk_bshd, "__wrapped__")
    assert not hasattr(kernels._run_sparse_attention_forward, "__wrapped__")


def test_a_capture_of_a_megatron_that_is_not_known_goes_on(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = build({"kernels": source().replace("def _run_sparse_attention_forward(", "def _renamed(")})
    megatron.install(module=module)
    layout = CausalLayout.packed([0, 4])
    index = torch.ones(4, 2, 4), torch.ones(4, 4), torch.ones(4, 2)
    with dsattn.capture(tmp_path / "step.safetensors") as captured:
        topk = dsattn.indexer_topk(*index, layout, top_k=2)
        dsattn.sparse_attention(
            torch.ones(4, 2, 4), torch.ones(4, 4), topk, value_dim=2, softmax_scale=1.0, backend="torch"
        )
        assert captured.steps == 1
    assert "does not see Megatron's calls" in caplog.text


def test_importing_it_imports_no_megatron(run_python: RunPython) -> None:
    names = "[name for name in sys.modules if name.startswith(('megatron', 'cudnn'))]"
    done = run_python("-c", f"import sys, dsattn; from dsattn.integrations import megatron; print({names})")
    assert (done.stdout, done.stderr) == ("[]\n", "")
