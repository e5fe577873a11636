"""Suites that run as a whole and have tables of their own: callers of the cuDNN frontend, as they are and repaired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dsattn.backends.cudnn.namespace import Absence, open_installed
from dsattn.verify import frontend_defaults, megatron_suite
from dsattn.verify.frontend_defaults.suite import checks
from dsattn.verify.megatron_suite.suite import cases
from dsattn.verify.records import Record

Advance = Callable[[str, int, int], None]
Table = frontend_defaults.Table
Line = tuple[str, str, str, str]


@dataclass(frozen=True)
class OwnSuite:
    """One of them.

    Attributes:
        name: what `--suite` takes.
        releases: what is simulated where no release is named.
        run: the records for releases on an architecture.
        tables: the tables of its records among others.
        lines: suite, case, what it shows, and operators, of each case.
    """

    name: str
    releases: tuple[str, ...]
    run: Callable[[Sequence[str], str, Advance], list[Record]]
    tables: Callable[[Sequence[Record]], list[Table]]
    lines: Callable[[], list[Line]]


def _defaults(releases: Sequence[str], arch: str, advance: Advance) -> list[Record]:
    return frontend_defaults.run(releases, arch, advance=advance)


def _megatron(releases: Sequence[str], arch: str, advance: Advance) -> list[Record]:
    return megatron_suite.run(releases, None, advance, arch=arch)


def _defaults_lines() -> list[Line]:
    name = frontend_defaults.SUITE
    shows = "called as for 1.25 and as dsattn does"
    return [(name, one.case, f"{', '.join(one.wrappers)}, {shows}", one.operator) for one in checks()]


def _megatron_lines() -> list[Line]:
    shows = "Megatron-LM's own functions, as released and after install()"
    return [(megatron_suite.SUITE, case, shows, "released functions") for case in cases(0)]


SUITES: dict[str, OwnSuite] = {
    suite.name: suite
    for suite in (
        OwnSuite(
            frontend_defaults.SUITE, frontend_defaults.RELEASES, _defaults, frontend_defaults.tables, _defaults_lines
        ),
        OwnSuite(megatron_suite.SUITE, megatron_suite.RELEASES, _megatron, megatron_suite.tables, _megatron_lines),
    )
}


def run(names: Sequence[str], versions: dict[str, list[str]], advance: Advance) -> list[Record]:
    """The records of the suites of those names.

    Args:
        names: chosen suites, those of other kinds among them.
        versions: releases to simulate for each architecture; none: the suite's own.
        advance: is told the progress.

    Semantics:
        Where no release is named and a GPU has the frontend, Megatron runs on that in place of simulated ones.
    """
    records: list[Record] = []
    for suite in (SUITES[name] for name in names if name in SUITES):
        if suite.name == megatron_suite.SUITE and not any(versions.values()) and _real():
            records += megatron_suite.run(suite.releases, None, advance, device="cuda")
            continue
        for arch, wanted in versions.items():
            records += suite.run(wanted or suite.releases, arch, advance)
    return records


def tables(records: Sequence[Record]) -> list[Table]:
    """The tables of all their records."""
    return [table for suite in SUITES.values() for table in suite.tables(records)]


def _real() -> bool:
    return torch.cuda.is_available() and not isinstance(open_installed(), Absence)
