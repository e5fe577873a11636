"""contracts.toml: its rows are checked and resolved, and the wheels of all releases are held against them.

The wheels come from the package index through pip, are cached, and are read as text. Without the index the tests that
need them are skipped: `not run`. A release that is newer than the table is read the same way. It fails the test when a
wrapper or a parameter is gone that our calls rely on (`relies` in the table), or when one of these wrappers requires a
new argument. Anything else that is new is the reason of a skip, since it was held against another release's row.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from wheel_facts import seen_wrong
from wheels import Sources, Unreachable, cache_folder, served, wheel

from dsattn.backends.cudnn import contracts_table
from dsattn.backends.cudnn.contracts import ARCHS, Contract, Limits, Parameter, contract, releases

NOT_RUN = "not run: the package index cannot be reached"
RELEASES = releases()
NEWEST = RELEASES[-1]


def of(release: str, arch: str = "sm100") -> Contract:
    return contract(Version(release), arch)


@pytest.fixture(scope="module")
def wheels() -> dict[Version, Sources]:
    """Every release that the index serves and its sources."""
    try:
        return {version: Sources(wheel(version)) for version in served()}
    except Unreachable:
        pytest.skip(NOT_RUN)


@pytest.fixture(scope="module")
def known_wheels(wheels: dict[Version, Sources]) -> dict[Version, Sources]:
    """Those that the table was made from."""
    return {version: sources for version, sources in wheels.items() if version in RELEASES}


def differences(row: Contract, found: dict[str, tuple[Parameter, ...]]) -> Iterator[str]:
    """What a release's signatures have beside, or instead of, those of a contract."""
    ours = {wrapper.symbol: wrapper.parameters for wrapper in row.wrappers}
    yield from (f"{symbol} is new" for symbol in sorted(set(found) - set(ours)))
    yield from (f"{symbol} is gone" for symbol in sorted(set(ours) - set(found)))
    for symbol in sorted(set(ours) & set(found)):
        before, after = ({each.name: each for each in side[symbol]} for side in (ours, found))
        yield from (f"{symbol}: {name} is new" for name in after if name not in before)
        yield from (f"{symbol}: {name} is gone" for name in before if name not in after)
        for name in (name for name in before if name in after and before[name] != after[name]):
            yield f"{symbol}: {name} was {told(before[name])}, is {told(after[name])}"
        if [name for name in before if name in after] != [name for name in after if name in before]:
            yield f"{symbol}: the order is {', '.join(after)}"


def told(parameter: Parameter) -> str:
    kind = "keyword-only " if parameter.keyword_only else ""
    return kind + ("required" if parameter.default is None else f"{parameter.default} by default")


def breaks(row: Contract, found: dict[str, tuple[Parameter, ...]]) -> Iterator[str]:
    """The differences that our calls do not survive."""
    for wrapper in (wrapper for wrapper in row.wrappers if wrapper.relies):
        if wrapper.symbol not in found:
            yield f"{wrapper.symbol} is gone"
            continue
        parameters = {parameter.name: parameter for parameter in found[wrapper.symbol]}
        if not any(name.startswith("**") for name in parameters):
            yield from (f"{wrapper.symbol}: {name} is gone" for name in wrapper.relies if name not in parameters)
        required = (name for name, each in parameters.items() if each.required and not name.startswith("*"))
        yield from (f"{wrapper.symbol}: {name} is required" for name in required if name not in wrapper.relies)


def test_the_index_serves_every_release_of_the_table(wheels: dict[Version, Sources]) -> None:
    assert [str(release) for release in RELEASES if release not in wheels] == []


def test_signatures_of_all_releases(known_wheels: dict[Version, Sources]) -> None:
    held = 0
    for version, sources in known_wheels.items():
        for arch in ARCHS:
            row = contract(version, arch)
            assert row.known
            assert list(differences(row, sources.signatures)) == [], version
            held += len(row.wrappers)
    assert held >= 2 * 11 * len(RELEASES)


def test_newer_releases(wheels: dict[Version, Sources]) -> None:
    newer = {version: sources for version, sources in wheels.items() if version not in RELEASES}
    reports = []
    for version, sources in newer.items():
        row = contract(version, "sm100")
        assert not row.known
        assert list(breaks(row, sources.signatures)) == [], version
        found = list(differences(row, sources.signatures)) or ["none"]
        reports.append(
            f"release {version} is not in the table; its differences to the row that it gets: {'; '.join(found)}"
        )
    if reports:
        pytest.skip(" | ".join(reports))


def test_the_extra_to_install_exists(known_wheels: dict[Version, Sources]) -> None:
    for version, sources in known_wheels.items():
        extras = re.findall(r"^Provides-Extra: (.*)$", sources.metadata, re.MULTILINE)
        assert contracts_table.table()["distribution"]["extra"] in extras, version


def test_facts_that_the_source_shows(known_wheels: dict[Version, Sources]) -> None:
    wrong = [
        f"{version} {entry}"
        for version, sources in known_wheels.items()
        for entry in seen_wrong(sources, contract(version, "sm90"), contract(version, "sm100"))
    ]
    assert wrong == []


def test_counts_that_the_source_lists(known_wheels: dict[Version, Sources]) -> None:
    for version, sources in known_wheels.items():
        sm90, sm100 = (contract(version, arch) for arch in ARCHS)
        counts = sources.value("indexer_forward/_interface_sm90.py", "_SUPPORTED_QHPKV")
        assert counts == (sm90.wrapper("indexer_forward").heads or Limits()).one_of, version
        counts = sources.value("indexer_forward/_support.py", "SUPPORTED_QHEAD_PER_KV_HEAD_BF16") or (32, 64)
        assert counts == limits(sm100.wrapper("indexer_forward").heads).one_of, version
        if sm100.has("sparse_attention_forward"):
            variants: Any = sources.value("sparse_attention_forward/api.py", "_SUPPORTED_VARIANTS")
            assert tuple(variants) == sm100.wrapper("sparse_attention_forward").pairs, version


def limits(value: Limits | None) -> Limits:
    assert value is not None
    return value


@pytest.fixture
def small_wheel(tmp_path: Path) -> Path:
    """A wheel whose DSA has one function, defined in another module, with a default that is a constant elsewhere."""
    path = tmp_path / "a.whl"
    files = {
        "__init__.py": '_SYMBOLS = {"f_wrapper": (".part", "f_wrapper"), "F": (".part", "F")}',
        "part/__init__.py": "from .api import F, f_wrapper as f_wrapper",
        "part/api.py": "from .sizes import BEST\nclass F: ...\ndef f_wrapper(q, k=BEST, *, scale=2 ** -1, **rest): ...",
        "part/sizes.py": "ALL = (96, 128)\nBEST = ALL[0]\n_SUPPORTED = (1, 2)",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"cudnn/deepseek_sparse_attention/{name}", text)
        archive.writestr("nvidia_cudnn_frontend-1.0.dist-info/METADATA", "Provides-Extra: cutedsl\n")
    return path


def test_a_wheel_is_read(small_wheel: Path) -> None:
    sources = Sources(small_wheel)
    assert sources.signatures == {
        "f_wrapper": (
            Parameter("q", False, None),
            Parameter("k", False, "96"),
            Parameter("scale", True, "2 ** (-1)"),
            Parameter("**rest", True, None),
        )
    }
    assert sources.value("part/sizes.py", "_SUPPORTED") == (1, 2)
    assert sources.value("part/none.py", "_SUPPORTED") is None
    assert sources.metadata == "Provides-Extra: cutedsl\n"


FOUND = {wrapper.symbol: wrapper.parameters for wrapper in of("1.32.0").wrappers}


def changed(symbol: str, *parameters: Parameter) -> dict[str, tuple[Parameter, ...]]:
    return {**FOUND, symbol: parameters}


COMPACTIFY = FOUND["compactify_wrapper"]
EXTRA = Parameter("grid", False, "None")


@pytest.mark.parametrize(
    ("found", "different", "broken"),
    [
        (FOUND, [], []),
        ({**FOUND, "new_wrapper": ()}, ["new_wrapper is new"], []),
        (changed("compactify_wrapper", *COMPACTIFY, EXTRA), ["compactify_wrapper: grid is new"], []),
        (
            changed("compactify_wrapper", *COMPACTIFY, replace(EXTRA, default=None)),
            ["compactify_wrapper: grid is new"],
            ["compactify_wrapper: grid is required"],
        ),
        (
            changed("compactify_wrapper", *COMPACTIFY[:1]),
            ["compactify_wrapper: stream is gone"],
            ["compactify_wrapper: stream is gone"],
        ),
        (
            changed("compactify_wrapper", COMPACTIFY[0], Parameter("**rest", True, None)),
            ["compactify_wrapper: **rest is new", "compactify_wrapper: stream is gone"],
            [],
        ),
        (
            changed("compactify_wrapper", *reversed(COMPACTIFY)),
            ["compactify_wrapper: the order is stream, indices"],
            [],
        ),
        (
            changed("compactify_wrapper", COMPACTIFY[0], replace(COMPACTIFY[1], keyword_only=True)),
            ["compactify_wrapper: stream was None by default, is keyword-only None by default"],
            [],
        ),
        (
            {symbol: found for symbol, found in FOUND.items() if symbol != "compactify_wrapper"},
            ["compactify_wrapper is gone"],
            ["compactify_wrapper is gone"],
        ),
        (
            {symbol: found for symbol, found in FOUND.items() if symbol != "sparse_attention"},
            ["sparse_attention is gone"],
            [],
        ),
    ],
)
def test_differences_are_found(
    found: dict[str, tuple[Parameter, ...]], different: list[str], broken: list[str]
) -> None:
    assert list(differences(of("1.32.0"), found)) == different
    assert list(breaks(of("1.32.0"), found)) == broken


def test_a_fact_that_the_source_contradicts_is_found(known_wheels: dict[Version, Sources]) -> None:
    sm90, sm100 = (contract(NEWEST, arch) for arch in ARCHS)
    older = next(sources for version, sources in known_wheels.items() if version < NEWEST)
    assert len(list(seen_wrong(older, sm90, sm100))) > 20


def test_an_index_out_of_reach_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(Unreachable):
        served()
    with pytest.raises(Unreachable):
        wheel(NEWEST)
    assert list(cache_folder().iterdir()) == []


def test_where_wheels_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSATTN_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path / "wheels"
    monkeypatch.delenv("DSATTN_CACHE_DIR")
    monkeypatch.setenv("CI", "1")
    assert cache_folder().parent.name == ".cache"
    monkeypatch.delenv("CI")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder().parent.name == "dsattn"
