"""A report as one HTML page that needs nothing else, by jinja2; with plots where matplotlib is installed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from dsattn.spec.metrics import FORWARD_FACTOR, GRADIENT_FACTOR
from dsattn.verify import matrix, own_suites, summary
from dsattn.verify.records import OWN_TABLES, Record, Report
from dsattn.verify.run import DTYPES

_TIMES = {2.0: "twice", 3.0: "three times"}


def page(report: Report) -> str:
    """The page: verdict, what was checked, tables, failures, plots, environment.

    Args:
        report: what was checked.

    Semantics:
        The same report gives the same page. It loads nothing, and says so to the browser, which holds it to that.
    """
    source = files("dsattn.verify").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    plots, without = _plots(report.records)
    simulated = [record for record in report.records if record.simulated]
    real = [record for record in report.records if not record.simulated]
    return environment.from_string(source).render(
        report=report,
        checked=checked(report.records),
        forward=_TIMES[FORWARD_FACTOR],
        gradient=_TIMES[GRADIENT_FACTOR],
        tables=summary.tables(report.records),
        matrices=matrix.matrices(report.records),
        budgets=any(record.suite not in OWN_TABLES for record in report.records) or not report.records,
        own=own_suites.tables(report.records),
        every=summary.tables(real, every=True),
        unlisted=len(simulated),
        texts=summary.texts(report.records),
        captured=summary.captured(report.records),
        failing=summary.failing(report.records),
        plots=plots,
        without_plots=without,
        plots_left_out=_pictured(report.records) - len(plots),
        by_torch=summary.by_torch(report.records),
        unsupported=summary.unsupported(report.records),
    )


def checked(records: Sequence[Record]) -> str:
    """What was checked, in one sentence."""
    verdicts = [record for record in records if record.verdict in ("pass", "fail")]
    ran = [record for record in verdicts if record.suite not in OWN_TABLES]
    if not verdicts:
        return "Nothing was checked."
    if not ran:
        return "Callers that rely on the cuDNN frontend's defaults, and dsattn, on simulated releases of it."

    def named(what: str, names: Sequence[str]) -> str:
        found = [name for name in names if name]
        return f"{what}{'' if len(found) == 1 else 's'} {_listed(found)}" if found else ""

    def different(field: str) -> list[str]:
        return list(dict.fromkeys(getattr(record, field) for record in ran))

    operators = {record.operator.partition(":")[0] for record in ran}
    cases = {(record.suite, record.case) for record in ran}
    dtypes = sorted(different("dtype"), key=list(DTYPES).index)
    places = different("device") if any(not record.simulated for record in ran) else []
    if simulated := list(dict.fromkeys(record.release or "" for record in ran if record.simulated)):
        archs = list(dict.fromkeys(record.arch or "" for record in ran if record.simulated))
        places.append(f"{named('the simulated release', simulated)} for {_listed(archs)}")
    return (
        f"{_count(len(operators), 'operator')} of {named('backend', different('backend'))} on "
        f"{_listed(places)}, forward and backward, on {_count(len(cases), 'case')} of "
        f"{named('suite', different('suite'))} in {_listed(dtypes)}: "
        "every result and gradient against a float64 oracle."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    """Names with commas and an "and"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _pictured(records: Sequence[Record]) -> int:
    """How many plots there could be."""
    return len({(record.backend, record.device, record.arch, record.operator) for record in records if record.curves})


def _plots(records: Sequence[Record]) -> tuple[list[Any], str]:
    """The plots, and why there are none where they cannot be made."""
    if not any(record.curves for record in records):
        simulated = any(record.simulated for record in records)
        rest = "; of simulated releases only checks that fail keep them" if simulated else ""
        return [], f"no check gave numbers row by row{rest}"
    log = logging.getLogger("matplotlib")
    level = log.level
    # It says on stderr that it builds its list of fonts, which is no part of what the command says.
    log.setLevel(logging.ERROR)
    try:
        import_module("matplotlib")
        import_module("matplotlib.backends.backend_svg")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "matplotlib":
            return [], "matplotlib is not installed here; with it this page has plots: pip install 'dsattn[plot]'"
        return [], f"matplotlib is installed here but cannot be imported: {error}"
    finally:
        log.setLevel(level)
    return import_module("dsattn.verify.plots").plots(records), ""
