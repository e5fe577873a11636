"""Where Megatron's cuDNN kernels really are: the namespaces of their functions, behind whatever aliases."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from dsattn.errors import BackendMissing, BadInput, ContractDrift

DISTRIBUTION = "megatron-core"
KERNELS = "megatron.core.transformer.experimental_attention_variant.dsa_cudnn_kernels"
"""The module under the name by which Megatron's dispatcher imports it."""
ENTRIES = ("run_fused_dsa_attention", "run_fused_qk_topk", "fused_indexer_sparse_attn")
"""Functions that Megatron's dispatcher calls; one of them is enough to find the others."""

HELD, LOADER = "_cudnn_dsa", "_ensure_dsa_namespace"
"""The global that holds the frontend's DSA, and the function that sets it before each use."""
SELECT = "_indexer_topk_bshd"
ONE_DOCUMENT, MANY_DOCUMENTS = "_indexer_topk_single_packed_cp_segments", "_indexer_topk_multi_packed_cp_thd"
ATTEND = "_run_sparse_attention_forward"

Names = dict[str, Any]
"""The namespace in which a function looks up its globals."""


@dataclass(frozen=True)
class Kernels:
    """Megatron's functions that call the frontend.

    Attributes:
        names: the namespace that holds the frontend's DSA and its loader.
        place: the name of the module that it belongs to.
        version: Megatron's version, "" where it is not known.
    """

    names: Names
    place: str
    version: str

    def __str__(self) -> str:
        return f"{DISTRIBUTION} {self.version}".strip() if self.place.startswith("megatron.") else self.place

    def home(self, *wanted: str) -> Names:
        """The namespace in which functions of these names are defined.

        Raises:
            ContractDrift: there is none.
        """
        for names in _reached(self.names):
            if all(_is_home(names, name) for name in wanted):
                return names
        raise ContractDrift(str(self), given=f"no {' and '.join(wanted)}", needed="the functions of release 0.19")


def find(module: ModuleType | str | None = None) -> Kernels:
    """Megatron's kernels, imported now.

    Args:
        module: the module of the kernels or its name; None for the one that Megatron's dispatcher imports.

    Raises:
        BackendMissing: Megatron is not installed, or cannot be imported; the message has the cause.
        ContractDrift: this Megatron has no such module, or nothing in it of what is looked for.
        BadInput: `module` is neither a module nor a name.
    """
    if module is not None and not isinstance(module, (ModuleType, str)):
        raise BadInput("module", given=type(module).__name__, needed="a module, its name, or None")
    with warnings.catch_warnings():
        # An alias may say that it is deprecated; what matters here is what stands behind it.
        warnings.simplefilter("ignore", DeprecationWarning)
        loaded = module if isinstance(module, ModuleType) else _imported(module or KERNELS)
        entries = [getattr(loaded, name, None) for name in ENTRIES]
    starts = [vars(loaded), *(inspect.unwrap(entry).__globals__ for entry in entries if inspect.isfunction(entry))]
    for names in _reached(*reversed(starts)):
        if HELD in names and _is_home(names, LOADER):
            return Kernels(names, str(names.get("__name__", loaded.__name__)), _version())
    raise ContractDrift(
        f"cuDNN kernels of Megatron in {loaded.__name__}",
        given=f"no module behind it that has {HELD} and {LOADER}",
        needed="both, as in release 0.19",
        fix="a later Megatron may need no repair: `dsattn doctor` says what is known",
    )


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
        if not absent or not f"{name}.".startswith(f"{absent}."):
            given = f"{name} cannot be imported ({type(error).__name__}: {error})"
            raise BackendMissing("Megatron", given=given) from error
        if absent in (name.partition(".")[0], "megatron.core"):
            raise BackendMissing("Megatron", given=f"no module {absent}", fix=f"pip install {DISTRIBUTION}") from error
        what = f"{DISTRIBUTION} {_version()}".strip()
        needed, fix = "the kernels of release 0.19", "name the module that has them: install(module=...)"
        raise ContractDrift(what, given=f"no module {absent}", needed=needed, fix=fix) from error


def _version() -> str:
    return str(getattr(sys.modules.get("megatron.core"), "__version__", ""))


def _is_home(names: Names, name: str) -> bool:
    """Whether a function is defined in a namespace, and not only imported into it."""
    function = names.get(name)
    return inspect.isfunction(function) and inspect.unwrap(function).__globals__ is names


def _reached(*starts: Names) -> Iterator[Names]:
    """Namespaces, these first, and then those of the functions and modules of the same package that they hold."""
    found: list[Names] = []
    waiting = deque(starts)
    package = {str(names.get("__name__", "")).partition(".")[0] for names in starts}
    while waiting:
        names = waiting.popleft()
        if any(names is each for each in found):
            continue
        found.append(names)
        yield names
        for value in list(names.values()):
            inner = inspect.unwrap(value).__globals__ if isinstance(value, FunctionType) else None
            if isinstance(value, ModuleType):
                inner = vars(value)
            if inner is not None and str(inner.get("__name__", "")).partition(".")[0] in package:
                waiting.append(inner)
