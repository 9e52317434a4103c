"""The pictures of a run: what each branch reads and writes, widths, use of features, learning.

A picture is one matplotlib figure, written as PNG and as SVG.  The SVG's colours are CSS variables of the
page, so that one drawing works in dark and light mode.  The colours are the colour-blind safe palette of
Okabe and Ito; lines also differ in their markers.

Shape legend: L layers, F features.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dispfx.learning.records import StepRecord
from dispfx.report.layers import Layers, Series
from dispfx.report.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# name of the CSS variable → colour on paper, colour on dark
COLOURS = {
    "ink": ("#24292f", "#d7dde4"),
    "grid": ("#d3d9e0", "#3a424c"),
    "c0": ("#0072b2", "#56b4e9"),
    "c1": ("#d55e00", "#f0884a"),
    "c2": ("#009e73", "#2cc295"),
    "c3": ("#b0568b", "#dd92bf"),
    "c4": ("#a87400", "#e6b13c"),
}
_INK, _GRID = COLOURS["ink"][0], COLOURS["grid"][0]
CYCLE = [COLOURS[f"c{number}"][0] for number in range(5)]
MARKERS = "os^Dv"
_STYLE = {
    "font.size": 11.0,
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.titlesize": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "svg.fonttype": "none",
}
_INCHES = 6.4
_POINTS_SHOWN = 400
# Pixels of an image cannot follow the page's theme: this blue is visible on white and on dark.
_KEPT = "#2b8cc4"


@dataclass(frozen=True)
class Picture:
    """One picture.

    Args:
        name: of the file, without its ending.
        caption: description in one sentence.
        alt: alternative text with the main figures.
        svg: for the page.
        png: for other uses.
    """

    name: str
    caption: str
    alt: str
    svg: str
    png: bytes


def pictures_of(run: Run, layers: Layers) -> list[Picture]:
    """Draw every picture that the run has data for."""
    drawn = [heat_map(layers, series) for series in layers.on_stream]
    drawn.append(width_picture(layers))
    if layers.on_stream:
        drawn.append(use_picture(layers))
    if run.steps:
        drawn += [loss_picture(run.steps), ratio_picture(run.steps, run.report.ratio.requested)]
    return drawn


def heat_map(layers: Layers, series: Series) -> Picture:
    """Draw layers × features of one selection, with the sums along both axes."""
    masks_LF = series.masks_LF(layers.width).numpy()
    present_L = ~np.isnan(masks_LF).all(axis=1)
    used_F = np.nansum(masks_LF, axis=0)
    width_L = np.where(present_L, np.nansum(masks_LF, axis=1), np.nan)

    def draw(figure: "Figure") -> None:
        grid = figure.add_gridspec(2, 2, width_ratios=(5, 1), height_ratios=(1, 3), hspace=0.06, wspace=0.04)
        shown = figure.add_subplot(grid[1, 0])
        top = figure.add_subplot(grid[0, 0], sharex=shown)
        side = figure.add_subplot(grid[1, 1], sharey=shown)
        shown.imshow(
            _tinted(masks_LF),
            aspect="auto",
            interpolation="nearest",
            extent=(0, layers.width, len(layers.names) - 0.5, -0.5),
        )
        shown.set(xlabel="feature of the residual stream", ylabel="layer")
        _label_layers(shown, layers.names)
        edges = np.arange(layers.width + 1)
        top.stairs(used_F, edges, fill=True, color=CYCLE[0])
        top.set(ylabel="layers", ylim=(0, max(1, int(present_L.sum()))), title=series.title)
        top.tick_params(labelbottom=False)
        side.barh(np.arange(len(layers.names)), np.nan_to_num(width_L), height=0.8, color=CYCLE[0])
        side.set(xlabel="features", xlim=(0, layers.width))
        side.tick_params(labelleft=False)

    least, most = np.nanmin(width_L), np.nanmax(width_L)
    return draw_picture(
        f"features-{_file_name(series.name)}",
        f"{series.title}. Coloured: kept. Top: layers that keep each feature. Right: how many "
        "features each layer keeps.",
        f"Heat map of {len(layers.names)} layers by {layers.width} features for {series.title}: layers keep "
        f"{least:.0f} to {most:.0f} features, and {int((used_F == 0).sum())} features are kept in no layer.",
        draw,
        height=3.6,
    )


def width_picture(layers: Layers) -> Picture:
    """Draw the share of features that each selection keeps, by layer."""

    def draw(figure: "Figure") -> None:
        axes = figure.add_subplot()
        rows = np.arange(len(layers.names))
        for number, series in enumerate(layers.series):
            shares = [np.nan if width is None else width[0] / width[1] for width in series.widths()]
            colour, marker = CYCLE[number % 5], MARKERS[number % 5]
            line = "-" if number < 5 else "--"
            axes.plot(
                rows, shares, color=colour, marker=marker, markersize=4, linestyle=line, label=series.title
            )
        axes.set(xlabel="layer", ylabel="share of features kept", ylim=(0, 1.03))
        _label_layers(axes, layers.names, "x")
        axes.grid(axis="y")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=9)

    means = ", ".join(f"{one.title} {_mean_share(one):.0%}" for one in layers.series)
    return draw_picture(
        "widths",
        "Share of its features that each selection keeps, by layer.",
        f"Lines over {len(layers.names)} layers. Mean share kept: {means}.",
        draw,
        height=4.2,
    )


def use_picture(layers: Layers) -> Picture:
    """Draw how many sites use each feature of the stream, most used first."""
    from matplotlib.ticker import MaxNLocator

    ordered_F = np.sort(layers.uses_F.numpy())[::-1]
    sites = layers.stream_sites

    def draw(figure: "Figure") -> None:
        axes = figure.add_subplot()
        axes.stairs(ordered_F, np.arange(len(ordered_F) + 1), fill=True, color=CYCLE[0])
        axes.set(
            xlabel="features of the residual stream, most used first",
            ylabel="reads and writes that keep it",
            ylim=(0, sites * 1.03),
            xlim=(0, len(ordered_F)),
        )
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.axhline(sites, color=_INK, linewidth=0.8, linestyle=":")
        axes.grid(axis="y")

    return draw_picture(
        "feature-use",
        f"How often each feature of the embedding is used: of {sites} reads and writes in all layers "
        "(dotted).",
        f"Sorted bars: the most used feature is kept by {ordered_F[0]}, the median one by "
        f"{int(np.median(ordered_F))} and the least used one by {ordered_F[-1]} of {sites} reads and writes.",
        draw,
        height=3.0,
    )


def loss_picture(steps: Sequence[StepRecord]) -> Picture:
    """Draw the loss of the objective and the budget loss over the steps."""
    at, loss = thinned([record.step for record in steps], [record.loss for record in steps])
    _, budget = thinned([record.step for record in steps], [record.budget_loss for record in steps])
    held_out = [(one.step, one.held_out_loss) for one in steps if one.held_out_loss is not None]

    def draw(figure: "Figure") -> None:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        upper.plot(at, loss, color=CYCLE[0], linewidth=0.8, alpha=0.35)
        upper.plot(at, smoothed(loss), color=CYCLE[0], linewidth=1.6, label="objective, sampled masks")
        if held_out:
            where, values = zip(*held_out, strict=True)
            upper.plot(
                where, values, color=CYCLE[1], marker="s", markersize=4, label="held out, hardened masks"
            )
        upper.set(ylabel="loss (nats)")
        upper.legend(fontsize=9)
        lower.plot(at, budget, color=CYCLE[2], linewidth=1.3)
        lower.set(xlabel="step", ylabel="budget loss R")
        for axes in (upper, lower):
            axes.grid(axis="y")

    return draw_picture(
        "losses",
        "Loss of the objective (pale; its running mean strong) and budget loss while the masks were learned.",
        f"Two curves over {steps[-1].step} steps: loss from {steps[0].loss:.3f} to {steps[-1].loss:.3f} "
        f"nats, budget loss from {steps[0].budget_loss:.4f} to {steps[-1].budget_loss:.4f}.",
        draw,
        height=4.2,
    )


def ratio_picture(steps: Sequence[StepRecord], requested: float) -> Picture:
    """Draw what share the sampled masks remove, over the steps."""
    at, achieved = thinned([record.step for record in steps], [record.achieved_ratio for record in steps])

    def draw(figure: "Figure") -> None:
        axes = figure.add_subplot()
        axes.plot(at, achieved, color=CYCLE[0], linewidth=1.3, label="sampled masks")
        axes.axhline(
            requested, color=CYCLE[1], linestyle="--", linewidth=1.2, label=f"requested: {requested:.0%}"
        )
        axes.set(xlabel="step", ylabel="share removed", ylim=(0, None))
        axes.grid(axis="y")
        axes.legend(fontsize=9)

    return draw_picture(
        "ratio",
        "Share of the counted parameters that the sampled masks remove, and the requested share.",
        f"A curve over {steps[-1].step} steps that ends at {steps[-1].achieved_ratio:.1%}; "
        f"{requested:.1%} was requested.",
        draw,
        height=2.8,
    )


def thinned(at: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most a few hundred points, each the mean of its neighbours."""
    groups = np.array_split(np.arange(len(at)), min(len(at), _POINTS_SHOWN))
    every, all_at = np.asarray(values, dtype=float), np.asarray(at, dtype=float)
    return [float(all_at[group].mean()) for group in groups], [float(every[group].mean()) for group in groups]


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the running mean over a twentieth of all values; over fewer at both ends."""
    half = len(values) // 40
    windows = [values[max(0, place - half) : place + half + 1] for place in range(len(values))]
    return [float(np.mean(window)) for window in windows]


def _tinted(masks_LF: np.ndarray) -> np.ndarray:
    """Return (L, F, 4) colours: kept features are coloured, removed ones transparent."""
    channels = [int(_KEPT[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    alpha_LF1 = np.nan_to_num(masks_LF)[..., None]
    return np.concatenate([np.broadcast_to(channels, (*masks_LF.shape, 3)), alpha_LF1], axis=-1)


def _label_layers(axes: "Axes", names: Sequence[str], axis: str = "y") -> None:
    every = -(-len(names) // 12)
    places = list(range(0, len(names), every))
    ticks = axes.set_yticks if axis == "y" else axes.set_xticks
    ticks(places, [names[place] for place in places])


def _mean_share(series: Series) -> float:
    widths = [width for width in series.widths() if width is not None]
    return sum(kept for kept, _ in widths) / sum(size for _, size in widths)


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()


def draw_picture(
    name: str, caption: str, alt: str, draw: "Callable[[Figure], None]", height: float
) -> Picture:
    """Draw a picture and write it in both formats; `height` is in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(_INCHES, height), layout="constrained")
        draw(figure)
        png, svg = io.BytesIO(), io.StringIO()
        figure.savefig(png, format="png", dpi=110, facecolor="white", metadata={"Software": None})
        # Both formats share the layout, which takes longer to compute than the drawing.
        figure.set_layout_engine(None)
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return Picture(name, caption, alt, _themed(svg.getvalue(), name), png.getvalue())


def _themed(svg: str, name: str) -> str:
    """Return the drawing with its colours as variables of the page, and with unique ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r' id="([^"]+)"', rf' id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    for variable, (colour, _) in COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg
