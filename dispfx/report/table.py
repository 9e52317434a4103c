"""A report as one short table: before, after, and whether both agree.

The rows are built once: a rich table for a terminal, aligned plain lines for a pipe.
"""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dispfx.ir.shown_tables import html_table
from dispfx.report.numbers import shown_perplexity
from dispfx.report.quantized import quantized_rows
from dispfx.verification.equivalence import Verification
from dispfx.words.constraint_text import in_unit

Row = tuple[str, str, str, str]
_HEADER: Row = ("", "before", "after", "change")
_VERIFIED_HEADER: Row = ("verified", "batch × tokens", "error", "tolerance")
_ALIGN_SLACK = 0.001


def print_report(report: Any, console: Console) -> None:
    """Print the table of a report; a narrow terminal gets one line per cell, with its column's name."""
    sections = report_rows(report)
    if not _is_too_narrow(console, sections, _HEADER):
        print_rows(sections, console, _HEADER)
        return
    print_rows(sections[:-1], console, _HEADER)
    print_verifications(report.comparisons, console)


def print_verifications(verifications: Sequence[Verification], console: Console) -> None:
    """Print one line for each comparison."""
    print_rows([verification_rows(verifications)], console, _VERIFIED_HEADER)


def report_rows(report: Any) -> list[list[Row]]:
    """Return the table's sections: size, quality, verification."""
    quality = [*_quality_rows(report), *quantized_rows(report.quantized)]
    return [_size_rows(report), quality, verification_rows(report.comparisons)]


def verification_rows(verifications: Sequence[Verification]) -> list[Row]:
    """Return one row for each comparison, with its largest error relative to the largest logit."""
    return [
        (
            f"{verification.name} {'✓' if verification.holds else '✗ FAILED'}",
            " × ".join(map(str, verification.shape)),
            f"error {verification.max_rel_error:.1e}" if verification.max_rel_error else "error 0",
            f"at most {verification.tolerance:.0e}" if verification.tolerance else "equal bits",
        )
        for verification in verifications
    ]


def print_rows(sections: Sequence[Sequence[Sequence[str]]], console: Console, header: Sequence[str]) -> None:
    """Print sections of rows: a rich table on a terminal, plain aligned lines elsewhere.

    On a narrow terminal, every row is printed as a few lines, because a table would cut figures off.
    """
    shown = [section for section in sections if section]
    if not console.is_terminal:
        rows = [header, *(row for section in shown for row in section)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        for row in rows:
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            # Not wrapped at 80 columns, since another program may want to read it.
            console.print(line.rstrip(), soft_wrap=True, markup=False, highlight=False)
        return
    if _is_too_narrow(console, shown, header):
        for row in (row for section in shown for row in section):
            console.print("\n".join(_stacked(row, header)), markup=False, highlight=False)
        return
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for column, title in enumerate(header):
        table.add_column(title, justify="left" if column == 0 else "right", no_wrap=column == 0)
    for section in shown:
        for row in section:
            table.add_row(*row, style="red" if "FAILED" in row[0] else None)
        table.add_section()
    console.print(table)


def _is_too_narrow(
    console: Console, sections: Sequence[Sequence[Sequence[str]]], header: Sequence[str]
) -> bool:
    rows = [header, *(row for section in sections for row in section)]
    return console.is_terminal and _least_width(rows) > console.width


def _least_width(rows: Sequence[Sequence[str]]) -> int:
    """Return the minimum width of a table that breaks lines only between words, never in the first column."""
    first = max(len(row[0]) for row in rows)
    words = (
        max(len(word) for row in rows for word in row[column].split(" ")) for column in range(1, len(rows[0]))
    )
    return first + sum(3 + longest for longest in words)


def _stacked(row: Sequence[str], header: Sequence[str]) -> list[str]:
    """Return a row as lines: its name, then its cells with the names of their columns."""
    named = zip(header[1:], row[1:], strict=True)
    # Avoids "error: error 0".
    return [
        row[0],
        *(f"  {cell}" if cell.startswith(name) else f"  {name}: {cell}" for name, cell in named if cell),
    ]


def _size_rows(report: Any) -> list[Row]:
    ratio, parameters, size = report.ratio, report.parameters, report.bytes
    missed = ratio.achieved - ratio.requested
    note = f"{missed:+.2%} by alignment" if abs(missed) > _ALIGN_SLACK else f"of {ratio.of}"
    return [
        (
            "parameters",
            f"{parameters.dense:,}",
            f"{parameters.pruned:,}",
            _change(parameters.dense, parameters.pruned),
        ),
        (
            "size",
            f"{size.dense / 1e6:,.2f} MB",
            f"{size.pruned / 1e6:,.2f} MB",
            _change(size.dense, size.pruned),
        ),
        ("ratio removed", f"{ratio.requested:.2%} requested", f"{ratio.achieved:.2%} achieved", note),
        *_target_rows(report),
    ]


def _target_rows(report: Any) -> list[Row]:
    """Return rows for key/value heads, values, the KV cache and constraints, where there are any."""
    rows: list[Row] = [
        (name, f"{dense:,}", f"{kept:,}", _change(dense, kept))
        for name, dense, kept in report.attention_widths
    ]
    if report.cache is not None:
        dense = report.cache.dense
        rows += [
            (f"KV cache per token{of}", f"{dense:,} bytes", f"{kept:,} bytes", _change(dense, kept))
            for of, kept in report.cache.by_form
        ]
    if report.kv_ratio is not None:
        asked, removed = report.kv_ratio.requested, report.kv_ratio.achieved
        rows.append(
            ("KV cache removed", f"{asked:.2%} requested", f"{removed:.2%} achieved", "in whole heads")
        )
    rows += [
        (one.text, in_unit(one.text, one.dense), in_unit(one.text, one.left), _change(one.dense, one.left))
        for one in report.constraints
    ]
    return rows


def _quality_rows(report: Any) -> list[Row]:
    rows = [*map(_kl_row, report.behaviour[:1])]
    measured = report.perplexity
    if measured is not None:
        name = f"perplexity ({measured.protocol.windows} × {measured.protocol.context} tokens)"
        rows.append(_perplexity_row(name, measured.dense, measured.pruned))
    for one in report.behaviour[1:]:
        name = f"perplexity, {one.text}"
        rows += [
            _kl_row(one, f", {one.text}"),
            _perplexity_row(name, one.perplexity_dense, one.perplexity_pruned),
        ]
    tuned = report.tuned
    if tuned is not None:
        protocol = tuned.protocol
        name = f"perplexity, pruned and recovered ({protocol.windows} × {protocol.context} tokens)"
        change = _change(tuned.kl_before, tuned.kl_after)
        rows.append(("KL, pruned and recovered", f"{tuned.kl_before:.4f}", f"{tuned.kl_after:.4f}", change))
        rows.append(_perplexity_row(name, tuned.before, tuned.after))
    rows.extend(
        (f"skill: {name}", f"{skill.dense:.0%}", f"{skill.pruned:.0%}", f"{skill.pruned - skill.dense:+.0%}")
        for name, skill in report.skills.items()
    )
    return rows


def _kl_row(one: Any, of: str = "") -> Row:
    return (f"KL per token{of}", "0", f"{one.kl:.4f} nats", f"{one.top1:.1%} the same first choice")


def _perplexity_row(name: str, before: float, after: float) -> Row:
    return (name, shown_perplexity(before), shown_perplexity(after), _change(before, after))


def flattered_notes(report: Any) -> list[str]:
    """Return a line for every text that the pruned decoder predicts better, and not as the dense one does."""
    return [
        f"perplexity on {one.text or 'the text'} fell below the dense decoder's, and KL is {one.kl:.3f}: the "
        "masks follow the style of this text, and say less of others"
        for one in report.behaviour
        if one.flattered
    ]


def _change(before: float, after: float) -> str:
    if not before or not math.isfinite(before) or not math.isfinite(after):
        return "—"
    return f"{after / before - 1.0:+.1%}"


def report_html(report: Any) -> str:
    """Return the table of the terminal as HTML."""
    rows = [row for rows in report_rows(report) for row in rows]
    title = f"{report.ratio.achieved:.2%} of {report.ratio.of} removed, on {report.device}"
    return html_table(title, ("", "before", "after", "change"), rows)
