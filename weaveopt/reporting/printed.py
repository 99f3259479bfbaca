"""A report that prints as tables: in one screen, whole, or one site; the record knows nothing of terminals."""

from __future__ import annotations

from dataclasses import fields

from weaveopt.records.report import Report
from weaveopt.reporting import screen, text, why


class PrintedReport(Report):
    """What `weaveopt.report` returns. It can be pickled, copied, and compared."""

    def __str__(self) -> str:
        return screen.text(self)

    def full(self) -> str:
        """Everything but the terms of single candidates, as `weaveopt explain --full` prints it."""
        return text.text(self)

    def why(self, site: str) -> str:
        """Everything on the sites of an id or module. Raises `OptionError`, with the nearest, where there is none."""
        return why.text(self, site)


def printed(report: Report) -> PrintedReport:
    return PrintedReport(*(getattr(report, field.name) for field in fields(report)))
