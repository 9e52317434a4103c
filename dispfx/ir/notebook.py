"""What a Program and a Plan show of themselves in a notebook: plain tables, no style of their own."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispfx.ir.plan import Plan
    from dispfx.ir.program import Program


def html_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a title and a table of plain texts."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<p>{escape(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def program_html(program: "Program") -> str:
    """Return the branches with the features of their sites, and what is refused."""
    sizes = {site.name: site for site in program.sites}
    rows = [
        (
            branch.name,
            branch.kind,
            ", ".join(
                f"{sizes[name].symbol or sizes[name].kind} {sizes[name].size:,}" for name in branch.sites
            ),
        )
        for branch in program.branches
    ]
    rows += [(refusal.name, "left dense", refusal.reason) for refusal in program.left_dense]
    width = program.stream.width if program.stream else 0
    title = (
        f"{program.model_class}, {program.stage}: residual stream {width:,} wide, {len(program.sites)} sites"
    )
    return html_table(title, ("branch", "kind", "features of its sites"), rows)


def plan_html(plan: "Plan") -> str:
    """Return what every site keeps."""
    rows = [
        (one.site, one.symbol, f"{len(one.kept):,} of {one.size:,}", f"{len(one.kept) / one.size:.1%}")
        for one in plan.selections
    ]
    title = f"Plan: {plan.achieved:.2%} of {plan.budget.of} removed ({plan.budget.ratio:.2%} asked)"
    return html_table(title, ("site", "", "kept", "share"), rows)
