"""What a Report shows of itself in a notebook."""

from typing import Any

from dispfx.ir.shown_tables import html_table
from dispfx.report.table import report_rows


def report_html(report: Any) -> str:
    """Return the table that a terminal gets."""
    rows = [row for rows in report_rows(report) for row in rows]
    title = f"{report.ratio.achieved:.2%} of {report.ratio.of} removed, on {report.device}"
    return html_table(title, ("", "before", "after", "change"), rows)
