"""The notebook view of a Report."""

from typing import Any

from dispfx.ir.shown_tables import html_table
from dispfx.report.table import report_rows


def report_html(report: Any) -> str:
    """Return the table of the terminal as HTML."""
    rows = [row for rows in report_rows(report) for row in rows]
    title = f"{report.ratio.achieved:.2%} of {report.ratio.of} removed, on {report.device}"
    return html_table(title, ("", "before", "after", "change"), rows)
