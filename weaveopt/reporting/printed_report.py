"""A report that prints as tables: in one screen, whole, or one site, in a notebook and as JSON; the record has none
of these."""

from __future__ import annotations

from dataclasses import fields

from weaveopt.plain_json import Json
from weaveopt.records.report import Report
from weaveopt.reporting import document, screen, text, why
from weaveopt.reporting.terminal import to_html


class PrintedReport(Report):
    """Result of `weaveopt.report`. It can be pickled, copied, and compared."""

    def __str__(self) -> str:
        return screen.text(self)

    def _repr_html_(self) -> str:
        """Render HTML for notebooks: the report in one screen, and all of it in a collapsed section."""
        short, everything = screen.text(self, color=True), text.text(self, color=True)
        return f"{to_html(short)}<details><summary>everything</summary>{to_html(everything)}</details>"

    def to_dict(self) -> dict[str, Json]:
        """Every field as plain values: what `weaveopt explain --format json` writes (docs/explain.md)."""
        return document.to_dict(self)

    def to_json(self) -> str:
        """The same as indented JSON text, which `weaveopt explain --compare` reads."""
        return document.to_json(self)

    def full(self) -> str:
        """Format everything except the terms of single candidates, as `weaveopt explain --full` prints it."""
        return text.text(self)

    def why(self, site: str) -> str:
        """Format everything on the sites of an id or module. Raises `OptionError`, with the nearest name, if there
        is none."""
        return why.text(self, site)


def printed(report: Report) -> PrintedReport:
    return PrintedReport(*(getattr(report, field.name) for field in fields(report)))
