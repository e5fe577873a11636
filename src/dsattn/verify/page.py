"""A report as one HTML page that needs nothing else, by jinja2."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from dsattn.verify import summary
from dsattn.verify.records import Report


def page(report: Report) -> str:
    """The page: verdict, tables, failures, every check, environment.

    Args:
        report: what was checked.
    """
    source = files("dsattn.verify").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(
        report=report,
        tables=summary.tables(report.records),
        every=summary.tables(report.records, every=True),
        texts=summary.texts(report.records),
        captured=summary.captured(report.records),
        failures=[record for record in report.records if record.verdict == "fail"],
        unsupported=summary.unsupported(report.records),
    )
