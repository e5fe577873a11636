"""What each release of the cuDNN frontend does, as data: `contracts.toml` read, checked and resolved."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from dsattn.backends.cudnn.contracts_table import ARCHS, LIMITS, applies, facts_of, parameters, parsed, read, table
from dsattn.errors import BackendMissing, BadInput

if TYPE_CHECKING:
    from packaging.version import Version


@dataclass(frozen=True)
class Parameter:
    """One parameter of a wrapper: `default` is its source text, None where the argument is required."""

    name: str
    keyword_only: bool
    default: str | None

    @property
    def required(self) -> bool:
        """Whether a call without it raises TypeError."""
        return self.default is None

    @property
    def value(self) -> Any:
        """The default as a Python object.

        Raises:
            BadInput: the argument is required, or its default is no literal.
        """
        if self.default is None:
            raise BadInput(f"default of {self.name!r}", given="a required parameter")
        try:
            return ast.literal_eval(self.default)
        except ValueError:
            raise BadInput(f"default of {self.name!r}", given=self.default, needed="a literal") from None


@dataclass(frozen=True)
class Limits:
    """The counts that a wrapper takes; what is None does not limit.

    `block`: above it only multiples of it. `also`: single counts beside the others.
    """

    one_of: tuple[int, ...] | None = None
    min: int | None = None
    max: int | None = None
    multiple: int | None = None
    block: int | None = None
    also: tuple[int, ...] = ()

    def allows(self, count: int) -> bool:
        """Whether `count` is taken."""
        if count in self.also:
            return True
        if self.one_of is not None and count not in self.one_of:
            return False
        too_small = self.min is not None and count < self.min
        too_large = self.max is not None and count > self.max
        uneven = self.multiple is not None and count % self.multiple != 0
        in_blocks = self.block is None or count <= self.block or count % self.block == 0
        return not (too_small or too_large or uneven) and in_blocks

    def __str__(self) -> str:
        parts = [] if self.one_of is None else ["one of " + ", ".join(map(str, self.one_of))]
        parts += [] if self.min is None else [f"at least {self.min}"]
        parts += [] if self.max is None else [f"at most {self.max}"]
        parts += [] if self.multiple is None else [f"a multiple of {self.multiple}"]
        parts += [] if self.block is None else [f"above {self.block} a multiple of it"]
        text = ", ".join(parts) or "any"
        return f"{text}; or {', '.join(map(str, self.also))}" if self.also else text


@dataclass(frozen=True)
class Gate:
    """A wrapper refuses more query rows than its keys stand for, whatever the causal offsets say.

    `tail`: the ratio - 1 rows that complete no key are let through. In THD the maximal lengths count.
    """

    layouts: tuple[str, ...]
    tail: bool = False

    def allows(self, q_len: int, k_len: int, ratio: int) -> bool:
        """Whether a call of a gated layout passes."""
        return q_len <= k_len * ratio + (ratio - 1 if self.tail else 0)


@dataclass(frozen=True)
class Defect:
    """Where a release does not do what its contract says; `what` is one sentence."""

    id: str
    wrappers: tuple[str, ...]
    what: str
    by: str = field(compare=False)


@dataclass(frozen=True)
class Wrapper:
    """What one wrapper does in one release on one architecture; contracts.toml explains the words.

    None, and an empty tuple, mean that the fact does not apply or sets no limit.
    """

    name: str
    symbol: str
    parameters: tuple[Parameter, ...]
    runs: bool
    relies: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    ids: str | None = None
    id_check: str | None = None
    id_beyond: str | None = None
    hole: str | None = None
    tail: str | None = None
    alignment: str | None = None
    gate: Gate | None = None
    masked: str | None = None
    past_segment: str | None = None
    empty_row: str | None = None
    clears_out: bool | None = None
    normaliser: str | None = None
    divisor: str | None = None
    grad_loss: str | None = None
    clip: str | None = None
    epsilon: str | None = None
    destroys: tuple[str, ...] = ()
    accumulates: tuple[str, ...] = ()
    dtypes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    heads: Limits | None = None
    widths: Limits | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    top_k: Limits | None = None
    aligned: tuple[tuple[str, int], ...] = ()
    contiguous: tuple[str, ...] = ()
    max_rows: int | None = None
    max_batch: int | None = None
    view: bool | None = None
    deterministic: bool | None = None
    host_reads: tuple[str, ...] = ()
    recompiles: tuple[str, ...] = ()
    stream: str | None = None
    evidence: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def parameter(self, name: str) -> Parameter | None:
        """The parameter of that name, or None."""
        return next((parameter for parameter in self.parameters if parameter.name == name), None)

    def accepts(self, name: str) -> bool:
        """Whether the release's own signature has the parameter."""
        return self.parameter(name) is not None

    def dtypes_of(self, name: str) -> tuple[str, ...]:
        """The dtypes that an argument may have, as in `torch.bfloat16` without `torch.`; empty: not checked."""
        return dict(self.dtypes).get(name, ())

    def alignment_of(self, name: str) -> int:
        """The bytes to which an argument's data must be aligned; 1: not checked."""
        return dict(self.aligned).get(name, 1)

    def evidence_of(self, fact: str) -> str:
        """How a fact is known: read, compiled, seam or gpu.

        Raises:
            BadInput: the wrapper has no such fact here.
        """
        for name, by in self.evidence:
            if name == fact:
                return by
        raise BadInput("fact", given=repr(fact), needed=f"one of {', '.join(name for name, _ in self.evidence)}")


@dataclass(frozen=True)
class Contract:
    """What a release does on one architecture; equal where two releases do the same.

    `known` is False for a release that the table was not made from: it gets the row of the newest one before it.
    """

    arch: str
    wrappers: tuple[Wrapper, ...]
    defects: tuple[Defect, ...]
    version: Version = field(compare=False)
    known: bool = field(compare=False)

    def has(self, name: str) -> bool:
        """Whether the release has the wrapper, running on this architecture or not."""
        return any(wrapper.name == name for wrapper in self.wrappers)

    def wrapper(self, name: str) -> Wrapper:
        """The wrapper of that name (`indexer_forward`, not `indexer_forward_wrapper`).

        Raises:
            BadInput: the release has none.
        """
        for wrapper in self.wrappers:
            if wrapper.name == name:
                return wrapper
        names = ", ".join(wrapper.name for wrapper in self.wrappers)
        raise BadInput("wrapper", given=f"{name!r} of release {self.version}", needed=f"one of {names}")

    def defect(self, id: str) -> Defect | None:
        """The defect of that id, if the release has it on this architecture.

        Raises:
            BadInput: no release has a defect of that id.
        """
        if id not in _defect_ids():
            raise BadInput("defect", given=repr(id), needed=f"one of {', '.join(sorted(_defect_ids()))}")
        return next((defect for defect in self.defects if defect.id == id), None)

    def defects_of(self, name: str) -> tuple[Defect, ...]:
        """The defects of one wrapper."""
        return tuple(defect for defect in self.defects if name in defect.wrappers)


def contract(version: Version, arch: str) -> Contract:
    """What a release of the frontend does.

    Args:
        version: the release; a pre-release, development or local version counts as the release that it belongs to.
        arch: "sm90" or "sm100".

    Raises:
        BackendMissing: the release is older than 1.24.0 and has no DSA.
        BadInput: no such architecture.
    """
    if arch not in ARCHS:
        raise BadInput("arch", given=repr(arch), needed=f"one of {', '.join(ARCHS)}")
    return _resolved(version, arch)


def releases() -> tuple[Version, ...]:
    """The releases that the table was made from, oldest first."""
    return tuple(parsed(text) for text in table()["distribution"]["releases"])


def distribution() -> Mapping[str, str]:
    """What the frontend is called: `name` on the index, `module`, the `folder` of its DSA, the `extra` to install."""
    return {key: value for key, value in read()["distribution"].items() if isinstance(value, str)}


@cache
def _defect_ids() -> tuple[str, ...]:
    return tuple(defect["id"] for defect in table()["defect"])


@cache
def _resolved(version: Version, arch: str) -> Contract:
    known, name = releases(), distribution()["name"]
    # A pre-release of 1.26 sorts before 1.26.0 and does what 1.26 does.
    release = parsed(version.base_version)
    if release < known[0]:
        needed = f"{known[0]} or newer: older ones have no DSA"
        raise BackendMissing(f"cuDNN frontend {version}", needed=needed, fix=f"pip install '{name}>={known[0]}'")
    found = ((name, wrapper, facts_of(wrapper, release, arch)) for name, wrapper in table()["wrapper"].items())
    return Contract(
        arch=arch,
        wrappers=tuple(_wrapper(name, wrapper, facts) for name, wrapper, facts in found if facts),
        defects=tuple(_defect(row) for row in table()["defect"] if applies(row, release, arch)),
        version=version,
        known=not version.is_prerelease and parsed(version.public) in known,
    )


def _defect(row: dict[str, Any]) -> Defect:
    return Defect(id=row["id"], wrappers=tuple(row["wrappers"]), what=row["what"], by=row["by"])


def _wrapper(name: str, wrapper: dict[str, Any], facts: dict[str, dict[str, Any]]) -> Wrapper:
    values = {fact: _frozen(fact, row["is"]) for fact, row in facts.items() if fact != "signature"}
    return Wrapper(
        name=name,
        symbol=wrapper.get("symbol", f"{name}_wrapper"),
        parameters=tuple(Parameter(*parameter) for parameter in parameters(facts["signature"]["is"])),
        relies=tuple(wrapper.get("relies", ())),
        evidence=tuple((fact, row["by"]) for fact, row in facts.items()),
        **values,
    )


def _frozen(fact: str, value: Any) -> Any:
    if fact in LIMITS:
        one_of = tuple(value["one_of"]) if "one_of" in value else None
        counts = {key: value.get(key) for key in ("min", "max", "multiple", "block")}
        return Limits(one_of=one_of, also=tuple(value.get("also", ())), **counts)
    if fact == "gate":
        return Gate(layouts=tuple(value["layouts"]), tail=value.get("tail", False))
    if isinstance(value, dict):
        return tuple((key, tuple(item) if isinstance(item, list) else item) for key, item in value.items())
    if isinstance(value, list):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return value
