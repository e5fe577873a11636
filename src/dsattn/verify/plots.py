"""Plots of what was found row by row, by matplotlib: one SVG per operator, in the colours and the font of the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from dsattn.verify.per_row import Axis, Curve, Measure
from dsattn.verify.records import Record

MOST = 32
"""How many figures a page has at most."""

_WIDTH, _PANEL, _AXIS = 360, 92, 34
_LEFT, _RIGHT = 46, 8
_SHARE_FLOOR = 1e-3
# Colours that stand for the page's own, which are others in the dark.
_COLOURS = {
    "#000001": "var(--ink)",
    "#000002": "var(--line)",
    "#000003": "var(--bad)",
    "#000004": "var(--fp32)",
    "#000005": "var(--bf16)",
    "#000006": "var(--fp16)",
    "#000007": "var(--fp64)",
}
_INK, _LINE, _BAD, *_ = _COLOURS


@dataclass(frozen=True)
class _Mark:
    """How the points of a dtype look: a line of no length with round or square ends, or a short one."""

    sign: str
    colour: str
    ends: str
    reach: tuple[float, float] = (0.0, 0.0)


_MARKS = {
    "fp32": _Mark("●", "#000004", "round"),
    "bf16": _Mark("■", "#000005", "projecting"),
    "fp16": _Mark("▬", "#000006", "butt", (3.5, 0.0)),
    "fp64": _Mark("▮", "#000007", "butt", (0.0, 3.5)),
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One dtype in a plot.

    Attributes:
        sign: how its points look.
        dtype: its short name.
        verdict: of the check.
        told: its worst number, or which rows are wrong.
    """

    sign: str
    dtype: str
    verdict: str
    told: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    """An operator's rows on one case.

    Attributes:
        operator: the operator.
        case: the case that failed worst, or came nearest to its budget.
        backend: the backend.
        where: the device, or the simulated release.
        fails: whether a check in it fails.
        lines: the dtypes.
        svg: the picture.
    """

    operator: str
    case: str
    backend: str
    where: str
    fails: bool
    lines: list[Line]
    svg: str


def plots(records: Iterable[Record]) -> list[Plot]:
    """One plot per operator, backend and device or simulated architecture, those that fail first; at most `MOST`.

    Args:
        records: what was checked; those without curves are passed over.
    """
    groups: dict[tuple[str | None, ...], list[Record]] = {}
    for record in records:
        if record.curves:
            groups.setdefault((record.backend, record.device, record.arch, record.operator), []).append(record)
    chosen = []
    for group in groups.values():
        worst = max(group, key=_badness)
        chosen.append([record for record in group if _same_call(record, worst)])
    chosen.sort(key=lambda same: not _fails(same))
    return [_plot(same) for same in chosen[:MOST]]


def _same_call(one: Record, other: Record) -> bool:
    """Whether two records differ at most in the dtype, operators apart."""
    return (one.suite, one.case, one.release) == (other.suite, other.case, other.release)


def _fails(records: Iterable[Record]) -> bool:
    return any(record.verdict == "fail" for record in records)


def _badness(record: Record) -> tuple[bool, bool, float, float, int]:
    """For choosing the worst: a failure with a wrong row, then what is furthest off, then what has most rows."""
    shares = [curve.worst for curve in record.curves if curve.measure == "share"]
    recalls = [curve.worst for curve in record.curves if curve.measure == "recall"]
    wrong = any(curve.wrong for curve in record.curves)
    rows = max(curve.judged for curve in record.curves)
    return record.verdict == "fail", wrong, max(shares, default=0.0), -min(recalls, default=1.0), rows


def _plot(records: Sequence[Record]) -> Plot:
    panels: dict[tuple[Axis, Measure], list[tuple[str, Curve]]] = {}
    for record in records:
        for curve in record.curves:
            panels.setdefault((curve.axis, curve.measure), []).append((record.dtype, curve))
    # Heads and the loss have a panel only where it shows a fault: rows are what people look for.
    shown = [
        panel
        for (axis, _), panel in panels.items()
        if axis in ("query row", "key row") or any(curve.wrong for _, curve in panel)
    ]
    first = records[0]
    lines = [
        Line(sign=_MARKS[record.dtype].sign, dtype=record.dtype, verdict=record.verdict, told=_told(record))
        for record in records
    ]
    words = "; ".join(f"{line.dtype}: {line.told}" for line in lines)
    return Plot(
        operator=first.operator,
        case=first.case,
        backend=first.backend,
        where=first.where,
        fails=_fails(records),
        lines=lines,
        svg=_draw(shown or list(panels.values()), f"{first.operator} on {first.case}. {words}"),
    )


def _told(record: Record) -> str:
    wrong = [curve.told for curve in record.curves if curve.wrong]
    if wrong:
        return "; ".join(wrong)
    words = ["no row wrong" for curve in record.curves if curve.measure == "recall"]
    shares = [curve.worst for curve in record.curves if curve.measure == "share"]
    if shares:
        words.append(f"at most {max(shares):.0%} of the budget")
    return ", ".join(words)


def _draw(panels: Sequence[list[tuple[str, Curve]]], label: str) -> str:
    """The panels below each other."""
    height = len(panels) * (_PANEL + _AXIS)
    style = {"svg.fonttype": "none", "svg.hashsalt": "dsattn", "font.family": "DejaVu Sans", "path.simplify": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(_WIDTH / 72, height / 72))
        figure.patch.set_visible(False)
        for place, panel in enumerate(panels):
            bottom = (len(panels) - 1 - place) * (_PANEL + _AXIS) + _AXIS - 6
            box = _LEFT / _WIDTH, bottom / height, 1 - (_LEFT + _RIGHT) / _WIDTH, (_PANEL - 14) / height
            _draw_panel(figure.add_axes(box), panel)
        source = io.StringIO()
        FigureCanvasSVG(figure).print_svg(source, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _slim(source.getvalue(), height, label)


def _draw_panel(ax: Axes, panel: list[tuple[str, Curve]]) -> None:
    first = panel[0][1]
    shares = first.measure == "share"
    length = max(curve.length for _, curve in panel)
    top = _scale_shares(ax, panel) if shares else _scale_recall(ax)
    ax.set_xlim(-0.5, length - 0.5)
    plain: dict[str, Any] = {"clip_on": False, "solid_capstyle": "butt"}
    if first.starts:
        low, high = ax.get_ylim()
        x, y = _strokes([(start - 0.5, low, start - 0.5, high) for start in first.starts])
        ax.plot(x, y, color=_LINE, linewidth=1, **plain)
    if shares:
        ax.axhspan(1.0, ax.get_ylim()[1], color=_BAD, alpha=0.1, linewidth=0, clip_on=False)
        ax.plot(ax.get_xlim(), (1, 1), color=_BAD, linewidth=1, **plain)
    for dtype, curve in panel:
        for wrong in (False, True):
            _draw_points(ax, curve, _MARKS[dtype], wrong, top)
    title = "share of the error budget" if shares else "recall"
    ax.set_title(f"{title}, by {first.axis}" if first.axis != "loss" else f"{title}, the loss", pad=6)
    ax.title.set(ha="left", x=0, fontsize=10.5, color=_INK)
    _look(ax, [] if first.axis == "loss" else _ticks(length))


def _draw_points(ax: Axes, curve: Curve, mark: _Mark, wrong: bool, top: float) -> None:
    """The rows that are wrong, larger and in one colour, or those that are right."""
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    dx = mark.reach[0] / (_WIDTH - _LEFT - _RIGHT) * (right - left)
    dy = mark.reach[1] / (_PANEL - 14)
    # Steps up an axis of shares are factors.
    factor = (high / low) ** dy if curve.measure == "share" else 1.0
    lift = 0.0 if curve.measure == "share" else dy
    strokes = []
    for row, value, faulty in zip(curve.rows.tolist(), curve.values.tolist(), curve.faulty.tolist(), strict=True):
        if faulty == wrong:
            value = min(max(value, low), top)
            strokes.append((row - dx, value / factor - lift, row + dx, value * factor + lift))
    if strokes:
        colour, size = (_BAD, 4.2) if wrong else (mark.colour, 2.6)
        ax.plot(*_strokes(strokes), color=colour, linewidth=size, solid_capstyle=mark.ends, clip_on=False)


def _strokes(ends: Iterable[tuple[float, float, float, float]]) -> tuple[list[float], list[float]]:
    """Lines from (x, y) to (x, y) as one: NaN breaks a line, and one path is smaller than many."""
    xs: list[float] = []
    ys: list[float] = []
    for x0, y0, x1, y1 in ends:
        xs += [x0, x1, math.nan]
        ys += [y0, y1, math.nan]
    return xs, ys


def _scale_shares(ax: Axes, panel: list[tuple[str, Curve]]) -> float:
    """A logarithmic axis of shares, and where what has no size is drawn."""
    shares = [share for _, curve in panel for share in curve.values.tolist()]
    largest = max([1.0, *(share for share in shares if math.isfinite(share))])
    decades = max(1, math.ceil(math.log10(largest)))
    endless = not all(map(math.isfinite, shares))
    top = 10.0**decades
    ax.set_yscale("log")
    ax.set_ylim(_SHARE_FLOOR, top * (10.0 ** ((decades + 3) / 8) if endless else 1.0))
    step = -(-(decades + 3) // 5)
    exponents = sorted({*range(0, decades + 1, step), *range(0, -4, -step)})
    ticks = {10.0**x: _share(x) for x in exponents}
    if endless:
        ticks[ax.get_ylim()[1]] = "∞"
    ax.set_yticks(list(ticks), list(ticks.values()))
    return ax.get_ylim()[1]


def _share(exponent: int) -> str:
    if exponent > 0:
        return f"{10**exponent} x" if exponent < 4 else f"1e{exponent} x"
    return f"{'≤' if exponent == -3 else ''}{100 * 10.0**exponent:g} %"


def _scale_recall(ax: Axes) -> float:
    ax.set_ylim(0.0, 1.0)
    ax.set_yticks([0.0, 0.5, 1.0], ["0", "0.5", "1"])
    return 1.0


def _look(ax: Axes, ticks: list[int]) -> None:
    """Grid and numbers in the page's colours, and nothing around them."""
    ax.patch.set_visible(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.tick_params(which="both", left=False, bottom=False, labelsize=10, labelcolor=_INK, pad=4)
    ax.minorticks_off()
    ax.grid(axis="y", color=_LINE, linewidth=0.7, clip_on=False)
    ax.set_axisbelow(True)
    ax.set_xticks(ticks)


def _ticks(length: int) -> list[int]:
    """Round row numbers, five at most."""
    for step in (size * 10**power for power in range(9) for size in (1, 2, 5)):
        if (length - 1) // step < 5:
            return list(range(0, max(length, 1), step))
    return [0]


_SVG = "{http://www.w3.org/2000/svg}"
_NUMBER = re.compile(r"-?\d+\.\d+")
_POINT = re.compile(r"M (\S+) (\S+) L \1 \2(?!\S)")
_AROUND = re.compile(r" ?([MLhz]) ?")


def _slim(source: str, height: int, label: str) -> str:
    """The paths and texts of matplotlib's SVG as a part of a page: no ids, no fonts, no namespaces, few digits."""
    slim = ElementTree.Element("svg", {"viewBox": f"0 0 {_WIDTH} {height}", "role": "img", "aria-label": label})
    for element in ElementTree.fromstring(source).iter():
        style = dict(part.split(": ", 1) for part in element.get("style", "").split("; ") if part)
        if element.tag == f"{_SVG}path":
            kept = {"d": _rounded(element.get("d", ""))}
            names = "fill", "stroke", "stroke-width", "stroke-linecap", "opacity", "stroke-opacity"
        elif element.tag == f"{_SVG}text":
            kept = {name: _rounded(element.get(name, "0")) for name in ("x", "y")}
            names = "font-size", "text-anchor", "fill"
        else:
            continue
        looks = {name: _COLOURS.get(style[name], style[name]) for name in names if name in style}
        kept["style"] = ";".join(f"{name}:{value}" for name, value in looks.items())
        ElementTree.SubElement(slim, element.tag.removeprefix(_SVG), kept).text = (element.text or "").strip() or None
    return ElementTree.tostring(slim, encoding="unicode")


def _rounded(numbers: str) -> str:
    """Numbers with one digit after the point, and lines of no length written shortly."""
    short = _NUMBER.sub(lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), " ".join(numbers.split()))
    return _AROUND.sub(r"\1", _POINT.sub(r"M\1 \2h0", short))
