"""Pictures of a run, by matplotlib: time over tokens, and the share of the matrix peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dsattn.bench.records import Row, Spread
from dsattn.errors import BadInput

_ACROSS, _PANEL = 4, (4.2, 3.2)
_MARKERS = "osD^vP"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws seconds over tokens, a panel for each work, a line for each runner and dtype, and shares where there are.

    Args:
        rows: what was measured.
        path: the file; its suffix says which kind of picture.

    Raises:
        BadInput: nothing was measured, the suffix is of no picture, or the file cannot be written.
    """
    measured = [row for row in rows if row.wall is not None]
    if not measured:
        raise BadInput(str(path), given="no figures to draw", fix="see what was refused or failed")
    works = list(dict.fromkeys(row.work for row in measured))
    kinds = ("seconds", "share of the matrix peak") if any(row.share for row in measured) else ("seconds",)
    panels = list(product(works, kinds))
    across = min(_ACROSS, len(panels))
    lines = math.ceil(len(panels) / across)
    figure = Figure(figsize=(across * _PANEL[0], lines * _PANEL[1]), layout="constrained")
    for place, (work, kind) in enumerate(panels, 1):
        ax = figure.add_subplot(lines, across, place)
        _draw(ax, [row for row in measured if row.work == work], kind == "seconds")
        ax.set_title(f"{work}, {kind}", fontsize=10)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise BadInput(str(path), given=str(error).partition("\n")[0], needed="a file such as bench.svg") from error


def _draw(ax: Axes, rows: Sequence[Row], seconds: bool) -> None:
    """One panel."""
    figure: Callable[[Row], Spread | None] = (lambda row: row.wall) if seconds else (lambda row: row.share)
    names = list(dict.fromkeys((row.what, row.dtype) for row in rows))
    for name, marker in zip(names, _MARKERS * len(names), strict=False):
        points = [(row.rows, found) for row in rows if (row.what, row.dtype) == name and (found := figure(row))]
        points.sort(key=lambda point: point[0])
        tokens, medians = [t for t, _ in points], [found.median for _, found in points]
        below = [found.median - found.least for _, found in points]
        above = [found.most - found.median for _, found in points]
        ax.errorbar(tokens, medians, [below, above], marker=marker, markersize=4, capsize=2, label=", ".join(name))
    ax.set_xscale("log", base=2)
    ticks = sorted({row.rows for row in rows})
    ax.set_xticks(ticks, [f"{t // 1024}k" if t % 1024 == 0 else str(t) for t in ticks])
    ax.set_xlabel("tokens")
    if seconds:
        ax.set_yscale("log")
    else:
        # More than all of it is a peak that was disturbed, which must not be hidden.
        ax.set_ylim(0, max(1.0, ax.get_ylim()[1]))
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7)
