"""A report that prints as tables; the record below it knows nothing of terminals."""

from __future__ import annotations

from dataclasses import fields

from weaveopt.records.report import Report
from weaveopt.reporting.text import text


class PrintedReport(Report):
    """What `weaveopt.report` returns. It can be pickled, copied, and compared."""

    def __str__(self) -> str:
        return text(self)


def printed(report: Report) -> PrintedReport:
    return PrintedReport(*(getattr(report, field.name) for field in fields(report)))
