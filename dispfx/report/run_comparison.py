"""Several runs side by side: ratio against perplexity, size and speed, as rows and as a page."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dispfx.files.disk import replacing
from dispfx.report.json_form import to_plain
from dispfx.report.numbers import shown_perplexity
from dispfx.report.page import document, figure_of, section, table
from dispfx.report.pictures import CYCLE, MARKERS, Picture, draw_picture
from dispfx.report.run import Run
from dispfx.report.tuning_record import tuning_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RUN_HEADER = (
    "run",
    "removed",
    "parameters",
    "size",
    "KL",
    "perplexity",
    "× dense",
    "prefill ×",
    "decode ×",
    "verified",
)


def ordered(runs: Sequence[Run]) -> list[Run]:
    """Return the runs ordered by removed share."""
    return sorted(runs, key=lambda run: (run.report.ratio.achieved, run.name))


def run_rows(runs: Sequence[Run]) -> list[Sequence[str]]:
    """Return one row per run, with a dash for values that were not measured."""
    return [_row(run) for run in ordered(runs)]


def run_notes(runs: Sequence[Run]) -> list[str]:
    """Return the reasons why these runs must not be compared, which measurements are not
    shown, and the effect of tuning.
    """
    measured = [run.report.perplexity for run in runs if run.report.perplexity is not None]
    notes = []
    if len({one.protocol for one in measured}) > 1:
        notes.append("perplexities were measured on different texts or windows, so they cannot be compared")
    elif len({f"{one.dense:.4g}" for one in measured}) > 1:
        notes.append("the dense decoders differ")
    counted = {run.report.ratio.of: run.report.ratio.counted for run in runs}
    if len(counted) > 1:
        notes.append(f"some ratios are of {' and some of '.join(counted[of] for of in sorted(counted))}")
    notes += [f"{run.name}: {line}" for run in ordered(runs) for line in run.left_out]
    notes += [f"{run.name}: {tuning_lines(run.report.tuned)[0]}" for run in ordered(runs) if run.report.tuned]
    return notes


def runs_plain(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the same figures, ready for JSON."""
    found = []
    for run in ordered(runs):
        report = run.report
        found.append(
            {
                "run": run.name,
                "ratio": report.ratio.achieved,
                "ratio_of": report.ratio.of,
                "parameters": report.parameters.pruned,
                "bytes": report.bytes.pruned,
                "kl": _kl(run),
                "perplexity": None if report.perplexity is None else report.perplexity.pruned,
                "dense_perplexity": None if report.perplexity is None else report.perplexity.dense,
                "prefill_speedup": speedup(run, "prefill"),
                "decode_speedup": speedup(run, "decode"),
                "verified": all(line.holds for line in report.verify),
            }
        )
    return to_plain(found)


def speedup(run: Run, kind: str) -> float | None:
    """Return the median speed-up of the measured prefills or decode steps, or None."""
    rows = [] if run.speed is None else run.speed["rows"]
    values = [row["speedup"] for row in rows if row.get("kind") == kind and row.get("speedup") is not None]
    return median(values) if values else None


def write_comparison(runs: Sequence[Run], page: Path) -> list[Path]:
    """Write the page, and its plot as PNG; return their paths."""
    picture = comparison_picture(ordered(runs))
    files = [page, page.with_suffix(".png")]
    notes = "".join(f"<p>{escape(note)}</p>" for note in run_notes(runs))
    body = section("Runs side by side", figure_of(picture) + table(RUN_HEADER, run_rows(runs)) + notes)
    with replacing(files[0]) as partial:
        partial.write_text(document("dispfx: runs side by side", body), encoding="utf-8")
    with replacing(files[1]) as partial:
        partial.write_bytes(picture.png)
    return files


def comparison_picture(runs: Sequence[Run]) -> Picture:
    """Plot perplexity, size and, if measured, speed of each run against its removed share."""
    panels = [
        (label, points)
        for label, points in (
            ("KL per token (nats)", [_kl(run) for run in runs]),
            ("perplexity", [_perplexity(run) for run in runs]),
            ("size (MB)", [run.report.bytes.pruned / 1e6 for run in runs]),
            ("prefill speed-up", [speedup(run, "prefill") for run in runs]),
            ("decode speed-up", [speedup(run, "decode") for run in runs]),
        )
        if any(point is not None for point in points)
    ]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for panel, (label, points) in zip(axes, panels, strict=True):
            for number, (run, point) in enumerate(zip(runs, points, strict=True)):
                if point is not None:
                    colour, marker = CYCLE[number % 5], MARKERS[number % 5]
                    panel.plot(run.report.ratio.achieved, point, color=colour, marker=marker, linestyle="")
                    panel.annotate(
                        run.name,
                        (run.report.ratio.achieved, point),
                        (5, 5),
                        textcoords="offset points",
                        fontsize=9,
                    )
            panel.set_ylabel(label)
            panel.grid(axis="y")
            panel.margins(0.2)
        axes[-1].set_xlabel("share of parameters removed")

    rows_text = "; ".join(", ".join(_row(run)[:6]) for run in runs)
    caption = "Every run by its removed share: " + ", ".join(label for label, _ in panels) + "."
    alt = f"{len(runs)} points (run, removed, parameters, size, KL, perplexity): {rows_text}."
    return draw_picture("comparison", caption, alt, draw, height=2.2 * len(panels))


def _kl(run: Run) -> float | None:
    """Return KL on the first text."""
    return run.report.behaviour[0].kl if run.report.behaviour else None


def _perplexity(run: Run) -> float | None:
    return None if run.report.perplexity is None else run.report.perplexity.pruned


def _row(run: Run) -> Sequence[str]:
    report = run.report
    measured = report.perplexity
    speedups = [speedup(run, kind) for kind in ("prefill", "decode")]
    return (
        run.name,
        f"{report.ratio.achieved:.2%} of {report.ratio.of}",
        f"{report.parameters.pruned:,}",
        f"{report.bytes.pruned / 1e6:,.2f} MB",
        "—" if (kl := _kl(run)) is None else f"{kl:.4f}",
        "—" if measured is None else shown_perplexity(measured.pruned),
        "—" if measured is None else f"{measured.pruned / measured.dense:.3f}",
        *("—" if value is None else f"{value:.2f}" for value in speedups),
        "yes" if report.verify and all(line.holds for line in report.verify) else "NO",
    )
