"""Records of simulated releases as people read them: for each architecture releases by operators. Data, no layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsattn.verify.records import OWN_TABLES, Record, Verdict


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The checks of one operator on one release.

    Attributes:
        told: what there is to say of them, and the verdict that it is about.
    """

    told: list[tuple[str, Verdict]]


@dataclass(frozen=True, kw_only=True)
class MatrixRow:
    """A release in a dtype: a cell for each operator of the matrix."""

    release: str
    dtype: str
    cells: list[Cell]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The simulated releases of a backend on one architecture.

    Attributes:
        backend: the backend.
        arch: the architecture.
        operators: what the columns are.
        rows: the releases in the order in which they ran.
    """

    backend: str
    arch: str
    operators: list[str]
    rows: list[MatrixRow]

    @property
    def dtypes(self) -> set[str]:
        """The dtypes of the rows."""
        return {row.dtype for row in self.rows}


def matrices(records: Iterable[Record]) -> list[Matrix]:
    """One matrix for each backend and architecture of the records that are simulated, but for those of `OWN_TABLES`."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.simulated and record.suite not in OWN_TABLES:
            groups.setdefault((record.backend, record.arch or ""), []).append(record)
    return [_matrix(backend, arch, group) for (backend, arch), group in groups.items()]


def _matrix(backend: str, arch: str, group: Sequence[Record]) -> Matrix:
    operators = list(dict.fromkeys(record.operator for record in group))
    cells: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for record in group:
        cells.setdefault((record.release or "", record.dtype), {}).setdefault(record.operator, []).append(record)
    rows = [
        MatrixRow(release=release, dtype=dtype, cells=[_cell(found.get(name, [])) for name in operators])
        for (release, dtype), found in cells.items()
    ]
    return Matrix(backend=backend, arch=arch, operators=operators, rows=rows)


def _cell(records: Sequence[Record]) -> Cell:
    count = Counter(record.verdict for record in records)
    told: list[tuple[str, Verdict]] = []
    if count["fail"]:
        told.append((f"fail {count['fail']}", "fail"))
    elif count["pass"]:
        told.append((f"{count['pass']} / {count['pass']}", "pass"))
    rest: tuple[Verdict, ...] = ("unsupported", "not run")
    told += [(f"{count[verdict]} {verdict}", verdict) for verdict in rest if count[verdict]]
    return Cell(told=told)


Releases = dict[str, list[str]]
"""Architecture -> simulated releases on it."""


def releases_of(records: Iterable[Record]) -> Releases:
    """The simulated releases of some records by architecture, in the order in which they ran."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        if record.simulated:
            found.setdefault(record.arch or "", {})[record.release or ""] = None
    return {arch: list(releases) for arch, releases in found.items()}


def where(some: Releases, every: Releases) -> str:
    """Some of the releases that ran, in words: "sm90 1.24.1 to 1.28.0, sm100 all"; "" for none."""
    if not some:
        return ""
    if all(set(some.get(arch, ())) == set(releases) for arch, releases in every.items()):
        return "all releases"
    return ", ".join(f"{arch} {_runs(some[arch], releases)}" for arch, releases in every.items() if arch in some)


def _runs(some: Sequence[str], every: Sequence[str]) -> str:
    """Releases in words, neighbours among those that ran as one range."""
    if set(some) == set(every):
        return "all"
    runs: list[list[str]] = []
    for place, release in enumerate(every):
        if release not in some:
            continue
        if runs and runs[-1][-1] == every[place - 1]:
            runs[-1].append(release)
        else:
            runs.append([release])
    return " and ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
