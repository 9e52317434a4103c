"""Size and quality over the ratios of a family: as a table, as a plot, and as a page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dispfx.files.disk import replacing
from dispfx.report.numbers import shown_perplexity
from dispfx.report.page import document, figure_of, section, table
from dispfx.report.pictures import CYCLE, Picture, draw_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVE_HEADER = ("ratio", "removed", "parameters", "size", "KL", "top-1", "perplexity")


@dataclass(frozen=True)
class CurvePoint:
    """The decoder of one ratio.

    Args:
        ratio: that was asked for.
        achieved: share of the counted parameters that is removed.
        parameters: of the pruned decoder.
        bytes: of its weights.
        kl: mean KL divergence from the dense decoder, in nats per token.
        top1: share of positions with the same likeliest token.
        perplexity: of the pruned decoder.
    """

    ratio: float
    achieved: float
    parameters: int
    bytes: int
    kl: float
    top1: float
    perplexity: float


@dataclass(frozen=True)
class SizeCurve:
    """The decoders of a family over its range.

    Args:
        points: in increasing order of their ratios.
        dense_parameters, dense_bytes, dense_perplexity: of the dense decoder.
        protocol: how perplexity was measured.
        of: what the ratios count.
        within: the smallest decoder that was found within `limit` nats, if that was asked for.
        limit: largest divergence from the dense decoder that was asked for.
    """

    points: tuple[CurvePoint, ...]
    dense_parameters: int
    dense_bytes: int
    dense_perplexity: float
    protocol: dict[str, Any]
    of: str
    within: CurvePoint | None = None
    limit: float | None = None


def curve_plain(found: SizeCurve) -> dict[str, Any]:
    """Return all numbers, ready for JSON."""
    return asdict(found)


def curve_rows(found: SizeCurve) -> list[Sequence[str]]:
    """Return one row for the dense decoder and one per point."""
    dense = ("0", "0.00%", f"{found.dense_parameters:,}", _size(found.dense_bytes), "0", "100.0%")
    return [
        (*dense, shown_perplexity(found.dense_perplexity)),
        *(
            (
                f"{one.ratio:g}",
                f"{one.achieved:.2%}",
                f"{one.parameters:,}",
                _size(one.bytes),
                f"{one.kl:.4f}",
                f"{one.top1:.1%}",
                shown_perplexity(one.perplexity),
            )
            for one in found.points
        ),
    ]


def curve_lines(found: SizeCurve) -> list[str]:
    """Return what was asked for, and how perplexity was measured, as text."""
    protocol, within = found.protocol, found.within
    lines = [
        f"removed of {found.of}; {protocol['tokens']:,} tokens of {protocol['text']} in windows of "
        f"{protocol['context']:,}"
    ]
    if within is not None:
        lines.append(
            f"the smallest decoder within {found.limit:g} nats has a ratio of {within.ratio:.4g}: KL "
            f"{within.kl:.4f}, perplexity {shown_perplexity(within.perplexity)}, {within.parameters:,} "
            "parameters"
        )
    return lines


def write_curve(found: SizeCurve, page: Path) -> list[Path]:
    """Write the page, and its plot as PNG; return their paths."""
    picture = curve_picture(found)
    files = [page, page.with_suffix(".png")]
    notes = "".join(f"<p>{escape(line)}</p>" for line in curve_lines(found))
    rows = table(CURVE_HEADER, curve_rows(found))
    body = section("The decoders of a family", figure_of(picture) + rows + notes)
    with replacing(files[0]) as partial:
        partial.write_text(document("dispfx: size and quality", body), encoding="utf-8")
    with replacing(files[1]) as partial:
        partial.write_bytes(picture.png)
    return files


def curve_picture(found: SizeCurve) -> Picture:
    """Plot divergence and perplexity against the size of the weights."""
    points = found.points
    sizes = [one.bytes / 1e6 for one in points]

    def draw(figure: "Figure") -> None:
        upper, lower = figure.subplots(2, 1, sharex=True)
        upper.plot(sizes, [one.kl for one in points], color=CYCLE[0], marker="o", markersize=4)
        upper.set_ylabel("KL per token (nats)")
        lower.plot(sizes, [one.perplexity for one in points], color=CYCLE[1], marker="o", markersize=4)
        dense = (found.dense_bytes / 1e6, found.dense_perplexity)
        lower.plot(*dense, color=CYCLE[2], marker="s", linestyle="")
        lower.annotate("dense", dense, (-5, 7), textcoords="offset points", ha="right")
        lower.set_ylabel("perplexity")
        lower.set_xlabel("size of the weights (MB)")
        for axes in (upper, lower):
            axes.grid(axis="y")
        if found.within is not None and found.limit is not None:
            upper.plot(
                [found.within.bytes / 1e6], [found.within.kl], color=CYCLE[2], marker="D", linestyle=""
            )
            upper.axhline(found.limit, color=CYCLE[2], linewidth=0.8, linestyle=":")

    rows = "; ".join(
        f"{one.bytes / 1e6:,.1f} MB, KL {one.kl:.4f}, perplexity {one.perplexity:.3f}" for one in points
    )
    caption = "Divergence from the dense decoder, and perplexity, by the size of the weights."
    return draw_picture("curve", caption, f"Points: {rows}.", draw, height=5.0)


def _size(number: int) -> str:
    return f"{number / 1e6:,.2f} MB"
