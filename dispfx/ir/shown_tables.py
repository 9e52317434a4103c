"""What a Program and a Plan show of themselves: a text that fits on a screen, and a table in a notebook."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_MOST_ROWS = 20


def html_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a title and a table of plain texts."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<p>{escape(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def program_html(program: Any) -> str:
    """Return the branches with the features of their sites, and what is refused."""
    rows = _branches(program)
    rows += [(refusal.name, "left dense", refusal.reason) for refusal in program.left_dense]
    width = program.stream.width if program.stream else 0
    title = (
        f"{program.model_class}, {program.level}: residual stream {width:,} wide, {len(program.sites)} sites"
    )
    return html_table(title, ("branch", "kind", "features of its sites"), rows)


def program_text(program: Any) -> str:
    """Return what a program is and its first branches, in at most 25 lines."""
    width = f", residual stream {program.stream.width:,} wide" if program.stream else ""
    dtype = str(program.dtype).removeprefix("torch.") if program.parameters else "no parameters"
    lines = [
        f"Program of {program.model_class}, {program.level}: {dtype}, {program.size:,} parameters{width}, "
        f"{len(program.sites)} sites"
    ]
    lines += _columns(_branches(program), "branches")
    if program.refused:
        lines.append(f"  left dense: {len(program.refused)} (program.refused)")
    return "\n".join(lines)


def plan_text(plan: Any) -> str:
    """Return what a plan removes and its first sites, in at most 25 lines."""
    title = (
        f"Plan for a decoder {plan.fingerprint[:12]}: {plan.achieved:.2%} of {plan.budget.of} removed "
        f"({plan.budget.ratio:.2%} requested), {len(plan.selections)} sites"
    )
    rows = [(one.site, one.symbol, f"{len(one.kept):,} of {one.size:,}") for one in plan.selections]
    return "\n".join([title, *_columns(rows, "sites")])


def _branches(program: Any) -> list[tuple[str, str, str]]:
    """Return the name, the kind and the features of the sites of every branch."""
    sites = {site.name: site for site in program.sites}
    return [
        (
            branch.name,
            branch.kind,
            ", ".join(
                f"{sites[name].symbol or sites[name].kind} {sites[name].size:,}"
                for name in branch.sites
                if name in sites
            ),
        )
        for branch in program.branches
    ]


def _columns(rows: Sequence[Sequence[str]], what: str) -> list[str]:
    """Return rows as lines with aligned columns; of many, the first ones and how many more there are."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows[:_MOST_ROWS]
    ]
    return lines + ([f"  and {len(rows) - _MOST_ROWS} more {what}"] if len(rows) > _MOST_ROWS else [])


def plan_html(plan: Any) -> str:
    """Return what every site keeps."""
    rows = [
        (one.site, one.symbol, f"{len(one.kept):,} of {one.size:,}", f"{len(one.kept) / one.size:.1%}")
        for one in plan.selections
    ]
    title = f"Plan: {plan.achieved:.2%} of {plan.budget.of} removed ({plan.budget.ratio:.2%} requested)"
    return html_table(title, ("site", "", "kept", "share"), rows)
