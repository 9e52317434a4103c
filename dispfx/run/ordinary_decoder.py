"""Build a smaller decoder that needs no dispfx, and check before learning that this is possible."""

from typing import Any

from torch import nn

from dispfx.analysis.label_map import Mismatch
from dispfx.compiler.programs import lower
from dispfx.errors import UnsupportedGraphError
from dispfx.huggingface.ordinary import build_ordinary
from dispfx.ir.program import Program
from dispfx.plan.budget import BudgetOf
from dispfx.plan.plan import Plan
from dispfx.source import Source
from dispfx.verification.graphs import dense_lines


def ordinary_decoder(source: Source, program: Program, plan: Plan, lowered: nn.Module) -> Any:
    """Return the decoder left by a plan with one selection for the whole stream, as its own class.

    Args:
        source: the dense decoder.
        program: of the decoder.
        lowered: its lowered graph, to compare the result with.

    Raises:
        UnsupportedGraphError: if the class does not support these widths, or computes something else with
        them.
    """
    kept = plan.for_sites(program.sites)
    by_site = {site.name: indices for site, indices in zip(program.sites, kept, strict=True)}
    found = build_ordinary(source.model, program, by_site)
    if isinstance(found, Mismatch):
        raise _no_ordinary_decoder(found.reason, source)
    model: Any = found.to(program.device)  # type: ignore[arg-type]
    lines = dense_lines(program, lowered, model)
    worst = max(line.max_rel_error for line in lines)
    if not all(line.holds for line in lines):
        raise _no_ordinary_decoder(
            f"the smaller decoder's logits differ by {worst:.1e}: its code derives a number from a width",
            source,
        )
    return model


def require_ordinary(source: Source, program: Program, ratio: float, of: BudgetOf, align: int) -> None:
    """Check that a smaller ordinary decoder is possible, by building one with a random plan of this ratio.

    Raises:
        UnsupportedGraphError: as `ordinary_decoder`.
        BudgetError: if no widths meet the ratio.
    """
    plan = Plan.random(program, ratio, seed=0, of=of, align=align)
    ordinary_decoder(source, program, plan, lower(program, plan))


def _no_ordinary_decoder(reason: str, source: Source) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"this class cannot be built with smaller widths: {reason}",
        where=type(source.model).__name__,
        hint="leave out --export dense; the folder itself loads with dispfx",
    )
