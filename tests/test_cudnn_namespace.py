"""Finding the cuDNN frontend and asking its wrappers: with fake packages on the path, never the real one."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import RunPython
from packaging.version import Version

from dsattn.backends.cudnn import namespace
from dsattn.backends.cudnn.contracts import Contract
from dsattn.backends.cudnn.namespace import Absence, Installed, Namespace, accepts, architecture, find, open_installed
from dsattn.errors import BackendMissing, BadInput

# What the real package does: DSA looks its symbols up in modules that it imports on the way.
LAZY = """
from importlib import import_module

_SYMBOLS = {"compactify_wrapper": "top_k", "indexer_forward_wrapper": "forward"}

class DSANamespace:
    def __getattr__(self, name):
        if name in _SYMBOLS:
            return getattr(import_module("." + _SYMBOLS[name], __name__), name)
        raise AttributeError(f"DSA has no attribute {name!r}")

DSA = DSANamespace()
"""
TOP_K = "def compactify_wrapper(indices, stream=None): ..."
FORWARD = "def indexer_forward_wrapper(q, k, w, ratio=4, sm_scale=1.0): ..."

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a fake frontend on the path: install(version, forward=..., metadata=..., init=..., dsa=...)."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "cudnn"]:
        monkeypatch.delitem(sys.modules, name)

    def put(
        version: str | None,
        *,
        forward: str = FORWARD,
        metadata: bool = True,
        init: str = "from .deepseek_sparse_attention import DSA",
        dsa: bool = True,
    ) -> Path:
        package = tmp_path / "cudnn"
        package.mkdir()
        (package / "__init__.py").write_text(init)
        if dsa:
            (package / "deepseek_sparse_attention").mkdir()
            for name, text in {"__init__": LAZY, "top_k": TOP_K, "forward": forward}.items():
                (package / "deepseek_sparse_attention" / f"{name}.py").write_text(text)
        if metadata:
            info = tmp_path / "nvidia_cudnn_frontend-0.dist-info"
            info.mkdir()
            line = "" if version is None else f"Version: {version}\n"
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-cudnn-frontend\n{line}")
        importlib.invalidate_caches()
        return package

    monkeypatch.syspath_prepend(str(tmp_path))
    yield put
    for name in [name for name in sys.modules if name.partition(".")[0] == "cudnn"]:
        del sys.modules[name]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes torch say that there is a GPU of that compute capability."""

    def there(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))

    return there


def absence(found: object) -> Absence:
    assert isinstance(found, Absence), found
    return found


def test_found_without_an_import(install: Install) -> None:
    package = install("1.26.0")
    assert find() == Installed(Version("1.26.0"), package / "deepseek_sparse_attention")
    assert "cudnn" not in sys.modules


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace.importlib.util, "find_spec", lambda name: None)
    found = absence(find())
    assert found.kind == "not installed"
    assert "pip install 'nvidia-cudnn-frontend[cutedsl]'" in found.reason
    assert open_installed() == found


@pytest.mark.parametrize("version", ["1.33.0rc1", "1.31.0.dev7", "1.31.0+cu13", "1.29.1.post2", "v1.30", "1!1.30.0"])
def test_versions_of_every_kind(version: str, install: Install) -> None:
    install(version)
    found = find()
    assert isinstance(found, Installed)
    assert found.version == Version(version)


@pytest.mark.parametrize("version", ["1.32.0-cu13-nightly", "unknown", "main", "1.31.x"])
def test_unreadable_versions(version: str, install: Install) -> None:
    install(version)
    found = absence(find())
    assert found.kind == "unreadable version"
    assert repr(version) in found.reason


def test_version_from_the_source(install: Install) -> None:
    package = install("1.0", metadata=False, init='__version__ = "1.27.0"\nraise ImportError')
    assert find() == Installed(Version("1.27.0"), package / "deepseek_sparse_attention")


@pytest.mark.parametrize("init", ["", "__version__ = read()", "not Python ("])
def test_no_version_at_all(init: str, install: Install) -> None:
    install("1.0", metadata=False, init=init)
    assert absence(find()).kind == "unreadable version"
    assert "has no version" in absence(find()).reason


def test_another_module_of_that_name(install: Install) -> None:
    package = install("1.0", metadata=False, init="", dsa=False)
    assert absence(find()).kind == "not installed"
    assert "another module" in absence(find()).reason
    (package / "__init__.py").unlink()
    importlib.invalidate_caches()
    assert absence(find()).kind == "not installed"


def test_damaged_metadata(install: Install) -> None:
    package = install(None, init='__version__ = "1.27.0"')
    assert find() == Installed(Version("1.27.0"), package / "deepseek_sparse_attention")


def test_older_than_dsa(install: Install) -> None:
    install("1.23.0", dsa=False)
    found = absence(find())
    assert found.kind == "too old"
    assert "1.24.0 or newer" in found.reason


def test_no_gpu(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("1.26.0", init="raise SystemExit('imported')")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = absence(open_installed())
    assert found.kind == "no usable GPU"
    assert "cudnn" not in sys.modules


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm90"), ((10, 0), "sm100"), ((10, 3), "sm100"), ((10, 7), "sm100")]
)
def test_usable_gpus(capability: tuple[int, int], arch: str, gpu: Callable[[int, int], None]) -> None:
    gpu(*capability)
    assert architecture() == arch


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 1), (11, 0), (12, 0)])
def test_unusable_gpus(capability: tuple[int, int], gpu: Callable[[int, int], None]) -> None:
    gpu(*capability)
    found = absence(architecture())
    assert found.kind == "no usable GPU"
    assert "{}.{}".format(*capability) in found.reason


def test_installed_and_whole(install: Install, gpu: Callable[[int, int], None]) -> None:
    install("1.26.0")
    gpu(10, 0)
    found = open_installed()
    assert isinstance(found, Namespace)
    assert (str(found.version), found.arch) == ("1.26.0", "sm100")
    assert found.contract == Namespace(None, Version("1.26.0"), "sm100").contract
    forward = found.get("indexer_forward")
    assert forward is not None
    assert forward.__name__ == "indexer_forward_wrapper"
    assert found.get("indexer_backward") is None
    assert found.accepts("indexer_forward", "ratio")
    assert not found.accepts("indexer_forward", "q_causal_offsets")
    assert not found.accepts("indexer_backward", "ratio")


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (
            "import cuda_bindings_that_are_absent",
            "ModuleNotFoundError: No module named 'cuda_bindings_that_are_absent'",
        ),
        ("import types\nThrMma = types.ThrMma", "AttributeError: module 'types' has no attribute 'ThrMma'"),
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
    ],
)
def test_installed_but_broken(forward: str, said: str, install: Install, gpu: Callable[[int, int], None]) -> None:
    install("1.25.0+local", forward=forward)
    gpu(9, 0)
    found = absence(open_installed())
    assert found.kind == "cannot be imported"
    assert said in found.reason
    assert "pip install 'nvidia-cudnn-frontend[cutedsl]==1.25.0'" in found.reason
    assert type(found.error().__cause__).__name__ == said.partition(":")[0]
    with pytest.raises(BackendMissing, match="cannot be imported"):
        raise found.error()


def test_a_broken_package(install: Install, gpu: Callable[[int, int], None]) -> None:
    install("1.32.0", init="import nothing_of_that_name")
    gpu(9, 0)
    assert absence(open_installed()).kind == "cannot be imported"


def test_a_wrapper_that_breaks_later(install: Install, gpu: Callable[[int, int], None]) -> None:
    install("1.32.0", forward="raise ImportError('needs triton')")
    dsa = importlib.import_module("cudnn").DSA
    found = Namespace(dsa, Version("1.32.0"), "sm90")
    with pytest.raises(BackendMissing, match="needs triton"):
        found.get("indexer_forward")
    assert found.get("compactify") is not None
    assert found.get("no_such") is None


def test_any_object_is_a_namespace() -> None:
    def sparse_attention(q: Any) -> None: ...
    def compactify_wrapper(indices: Any, **rest: Any) -> None: ...

    stand_in = SimpleNamespace(sparse_attention=sparse_attention, compactify_wrapper=compactify_wrapper)
    found = Namespace(stand_in, Version("1.32.0"), "sm90")
    assert found.get("sparse_attention") is sparse_attention
    assert found.get("compactify") is compactify_wrapper
    assert found.get("compactify_wrapper") is compactify_wrapper
    assert found.get("indexer_forward") is None
    assert found.accepts("compactify", "anything")
    assert isinstance(found.contract, Contract)
    with pytest.raises(BadInput, match="sm90, sm100"):
        Namespace(stand_in, Version("1.32.0"), "sm80")


def old(q: Any, k: Any) -> None: ...
def new(q: Any, k: Any, q_causal_offsets: Any = None) -> None: ...
def keyword_only(q: Any, *, q_causal_offsets: Any = None) -> None: ...
def open_to_all(q: Any, **rest: Any) -> None: ...
def positional_only(q_causal_offsets: Any, /) -> None: ...
def collected(*q_causal_offsets: Any) -> None: ...
def positional_only_and_rest(q_causal_offsets: Any, /, **rest: Any) -> None: ...


class Callable_:
    def __call__(self, q_causal_offsets: Any = None) -> None: ...

    def method(self, q_causal_offsets: Any = None) -> None: ...


class Unhashable(Callable_):
    __hash__ = None  # type: ignore[assignment]


def passing_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def translating(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, q_causal_offsets: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def closing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (old, False),
        (new, True),
        (keyword_only, True),
        (open_to_all, True),
        (positional_only, False),
        (collected, False),
        (positional_only_and_rest, True),
        (Callable_(), True),
        (Callable_().method, True),
        (Unhashable(), True),
        (passing_on(old), False),
        (passing_on(new), True),
        (passing_on(passing_on(open_to_all)), True),
        (translating(old), True),
        (closing(new), False),
        (functools.partial(new, 1), True),
        (functools.partial(new, 1, 2, 3), False),
        (functools.partial(new, q_causal_offsets=3), True),
        (functools.partial(old, 1), False),
        (functools.partial(passing_on(old), 1), False),
        (functools.partial(passing_on(new), 1), True),
        (functools.partial(functools.partial(open_to_all), 1), True),
        (iter, False),
    ],
)
def test_accepts(function: Callable[..., Any], taken: bool) -> None:
    assert accepts(function, "q_causal_offsets") is taken
    assert accepts(function, "q_causal_offsets") is taken


def test_what_is_accepted_can_be_passed() -> None:
    keywords = {"q_causal_offsets": 3}
    one_argument: list[Callable[..., Any]] = [keyword_only, open_to_all, positional_only_and_rest]
    for function in one_argument:
        function(1, **keywords)
    for function in (new, passing_on(new), translating(old)):
        function(1, 2, **keywords)
    refusing: list[Callable[..., Any]] = [old, passing_on(old), closing(new), functools.partial(new, 1, 2, 3)]
    for function in refusing:
        with pytest.raises(TypeError):
            function(1, 2, **keywords)


NOT_IMPORTED = """
import sys
import torch, jaxtyping

class Told:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cudnn", "cutlass", "cuda"):
            raise SystemExit(f"{name} was looked for")

sys.meta_path.insert(0, Told())
import dsattn
from dsattn.backends.cudnn import contracts, namespace
contracts.contract(contracts.releases()[0], "sm90")
%s
print("untouched")
"""


def test_importing_dsattn_never_imports_cudnn(run_python: RunPython) -> None:
    assert run_python("-c", NOT_IMPORTED % "").stdout == "untouched\n"
    assert "cudnn was looked for" in run_python("-c", NOT_IMPORTED % "namespace.find()").stderr
