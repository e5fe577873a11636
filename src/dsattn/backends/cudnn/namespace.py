"""Find the installed cuDNN frontend, which is imported only when asked for, and what its DSA wrappers take."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from dsattn.backends.cudnn.contracts import ARCHS, Contract, contract, distribution, releases
from dsattn.errors import BackendMissing, BadInput

if TYPE_CHECKING:
    from packaging.version import Version

Kind = Literal["not installed", "cannot be imported", "no usable GPU", "unreadable version", "too old"]


@dataclass(frozen=True)
class Absence:
    """Why the frontend cannot be used here: the kind of reason, and a sentence with the cause and what to do."""

    kind: Kind
    reason: str
    cause: BaseException | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"

    def error(self) -> BackendMissing:
        """The error to raise; it carries the cause."""
        error = BackendMissing(f"cuDNN frontend {self.kind}", given=self.reason)
        error.__cause__ = self.cause
        return error


@dataclass(frozen=True)
class Installed:
    """A frontend that was found but not imported: its version and the folder of its DSA."""

    version: Version
    folder: Path


@dataclass(frozen=True, eq=False)
class Namespace:
    """The DSA wrappers of one release on one architecture: those that are installed, or any object that has them.

    Args:
        dsa: has the wrappers as attributes: `cudnn.DSA`, or a stand-in.
        version: the release whose contract the wrappers follow.
        arch: "sm90" or "sm100".
    """

    dsa: Any
    version: Version
    arch: str

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise BadInput("arch", given=repr(self.arch), needed=f"one of {', '.join(ARCHS)}")

    @property
    def contract(self) -> Contract:
        """What the release does on this architecture."""
        return contract(self.version, self.arch)

    def get(self, name: str) -> Callable[..., Any] | None:
        """A wrapper, `indexer_forward` for `indexer_forward_wrapper`; None where this release has none of that name.

        Raises:
            BackendMissing: the release has it, but it cannot be imported; the message has the cause.
        """
        for symbol in (f"{name}_wrapper", name):
            try:
                wrapper = _attribute(self.dsa, symbol)
            except Exception as error:
                raise _broken(error, self.version).error() from error
            if wrapper is not None:
                return wrapper
        return None

    def accepts(self, name: str, parameter: str) -> bool:
        """Whether the wrapper exists and takes the parameter by keyword; see `accepts`."""
        wrapper = self.get(name)
        return wrapper is not None and accepts(wrapper, parameter)


def accepts(function: Callable[..., Any], parameter: str) -> bool:
    """Whether a call may pass `parameter` by keyword.

    It may where the function's own signature names it, or where it takes **kwargs. If it hands **kwargs on to a
    function that it wraps (`functools.wraps`, `functools.partial`), that one decides. A callable without a readable
    signature accepts nothing.
    """
    try:
        return _accepts(function, parameter)
    except TypeError:
        # Not hashable.
        return _accepts.__wrapped__(function, parameter)


@lru_cache(maxsize=512)
def _accepts(function: Callable[..., Any], parameter: str) -> bool:
    try:
        named = inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return False
    found = named.get(parameter)
    if found is not None and found.kind in (found.KEYWORD_ONLY, found.POSITIONAL_OR_KEYWORD):
        return True
    if not any(each.kind is each.VAR_KEYWORD for each in named.values()):
        return False
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    wrapped = getattr(inner, "__wrapped__", None)
    return wrapped is None or accepts(wrapped, parameter)


def find() -> Installed | Absence:
    """The installed frontend, found without importing it or touching a device; or why there is none to use."""
    names = distribution()
    try:
        spec = importlib.util.find_spec(names["module"])
    except (ImportError, ValueError) as error:
        return Absence("cannot be imported", f"looking for {names['module']} fails: {_told(error)}", error)
    install = f"pip install '{names['name']}[{names['extra']}]'"
    # A folder of that name on the path is a namespace package, which has no origin.
    if spec is None or spec.origin is None:
        return Absence("not installed", f"no module {names['module']}; {install}")
    place = Path(spec.origin).parent
    folder, text = place / names["folder"], _version_text(place)
    if text is None and not folder.is_dir():
        return Absence("not installed", f"{spec.origin} is another module {names['module']}; {install}")
    version = _parsed(text)
    if version is None:
        found = "has no version" if text is None else f"has version {text!r}, which is none (PEP 440)"
        return Absence("unreadable version", f"{names['name']} at {place} {found}, so its contract is not known")
    if not folder.is_dir():
        return Absence("too old", f"{names['name']} {version} has no {folder}; {releases()[0]} or newer has")
    return Installed(version, folder)


@cache
def installed_identity() -> dict[str, str] | None:
    """What the numbers of the installed kernels hang on; None where no frontend is installed."""
    from dsattn.backends.trust.keys import folder_hash, package_version

    found = find()
    if isinstance(found, Absence):
        return None
    dsl = "nvidia-cutlass-dsl"
    return {"frontend": str(found.version), dsl: package_version(dsl), "DSA": folder_hash(found.folder)}


def architecture(device: torch.device | int | None = None) -> str | Absence:
    """The architecture of the current (or given) CUDA device, "sm90" or "sm100"; or why its kernels cannot run."""
    if not torch.cuda.is_available():
        return Absence("no usable GPU", "torch sees no CUDA device; Hopper (9.0) or Blackwell (10.x) is needed")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) == (9, 0):
        return "sm90"
    if major == 10:
        return "sm100"
    needed = "Hopper (9.0) or Blackwell (10.x) is needed"
    return Absence("no usable GPU", f"the CUDA device has compute capability {major}.{minor}; {needed}")


def open_installed(device: torch.device | int | None = None) -> Namespace | Absence:
    """The DSA of the installed frontend on this machine's GPU, imported now; or why it cannot be used.

    What is cheap is asked first: the package, then the GPU, then the import.
    """
    found = find()
    if isinstance(found, Absence):
        return found
    arch = architecture(device)
    if isinstance(arch, Absence):
        return arch
    dsa = load(found)
    return dsa if isinstance(dsa, Absence) else Namespace(dsa, found.version, arch)


def load(found: Installed) -> Any | Absence:
    """The frontend's `DSA`, imported; or why it cannot be: its wrappers need packages that only an extra installs."""
    try:
        dsa = importlib.import_module(distribution()["module"]).DSA
        # DSA is lazy: a missing or wrong nvidia-cutlass-dsl shows at its wrappers.
        for wrapper in contract(found.version, ARCHS[0]).wrappers:
            if wrapper.relies:
                _attribute(dsa, wrapper.symbol)
    except Exception as error:
        return _broken(error, found.version)
    return dsa


def _attribute(dsa: Any, symbol: str) -> Any | None:
    """`dsa.symbol`, None where there is no such name; an import that fails on the way raises its own error."""
    try:
        return getattr(dsa, symbol)
    except AttributeError as error:
        # An import that finds the wrong nvidia-cutlass-dsl raises AttributeError, too, but about another name.
        if error.name not in (None, symbol):
            raise
        return None


def _broken(error: BaseException, version: Version) -> Absence:
    names = distribution()
    fix = f"pip install '{names['name']}[{names['extra']}]=={version.public}'"
    return Absence("cannot be imported", f"{names['name']} {version}: {_told(error)}; {fix}", error)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _version_text(place: Path) -> str | None:
    """The version that the metadata gives, else the one that the package's source assigns."""
    # Damaged metadata gives None, whatever the annotation says.
    with suppress(PackageNotFoundError, KeyError):
        text: str | None = version_of(distribution()["name"])
        if text is not None:
            return text
    try:
        body = ast.parse((place / "__init__.py").read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return None
    for statement in body:
        if isinstance(statement, ast.Assign) and "__version__" in map(ast.unparse, statement.targets):
            return str(statement.value.value) if isinstance(statement.value, ast.Constant) else None
    return None


def _parsed(text: str | None) -> Version | None:
    from packaging.version import InvalidVersion, Version

    try:
        return None if text is None else Version(text)
    except InvalidVersion:
        return None
