"""DIR/report.html: one self-contained page, and its pictures as PNG.

The page loads nothing: style and drawings are inline.  Every picture has an alternative text, and its numbers
as a table.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from dispfx.errors import OutputError
from dispfx.files.disk import replacing, writing
from dispfx.report.evaluation import Evaluation, task_table, text_lines
from dispfx.report.layers import Layers, layers_of
from dispfx.report.numbers import shown_perplexity
from dispfx.report.pictures import COLOURS, Picture, pictures_of
from dispfx.report.quantized import quantized_lines
from dispfx.report.run import Run, read_run
from dispfx.report.schema import Report
from dispfx.report.settings_table import settings_rows
from dispfx.report.table import flattered_notes, report_rows
from dispfx.report.task_rows import task_notes
from dispfx.report.tuning_record import tuning_lines

PAGE_FILE, PICTURES_FOLDER = "report.html", "pictures"
_ROWS_OF_STEPS = 20


def write_page(folder: str | Path, name: str | None = None) -> list[Path]:
    """Write report.html and pictures/*.png into a folder, and return their paths.

    Args:
        name: of the run; that of the folder by default.

    Raises:
        OutputError, DataError: as `dispfx.report.run.read_run`.
    """
    path = Path(folder).expanduser()
    run = read_run(path, name)
    layers = layers_of(run.plan, run.report.sites)
    pictures = pictures_of(run, layers)
    written = [path / PICTURES_FOLDER / f"{picture.name}.png" for picture in pictures]
    _make_pictures_folder(path / PICTURES_FOLDER)
    for file, picture in zip(written, pictures, strict=True):
        with replacing(file) as partial:
            partial.write_bytes(picture.png)
    with replacing(path / PAGE_FILE) as partial:
        partial.write_text(page(run, layers, pictures), encoding="utf-8")
    return [path / PAGE_FILE, *written]


def _make_pictures_folder(folder: Path) -> None:
    """Create the folder.  A symbolic link is rejected: an untrusted folder could redirect the output.

    Raises:
        OutputError: if the path exists and is not a folder.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OutputError(
            "a folder is needed at this path, but it is something else",
            where=str(folder),
            hint="move it away",
        )
    with writing(folder):
        folder.mkdir(exist_ok=True)


def page(run: Run, layers: Layers, pictures: Sequence[Picture]) -> str:
    """Return the whole document."""
    heat_maps = [picture for picture in pictures if picture.name.startswith("features-")]
    by_name = {picture.name: picture for picture in pictures}
    report = run.report
    sections = [
        _header(run),
        section(
            "Before and after",
            table(("", "before", "after", "change"), _figures(report)) + _protocol(report),
        ),
        section(
            "What each branch reads and writes",
            f'<div class="pair">{"".join(map(figure_of, heat_maps))}</div>'
            + _numbers("Widths by layer", *_width_table(layers)),
        ),
        _widths(layers, by_name),
    ]
    if run.steps:
        drawn = figure_of(by_name["losses"]) + figure_of(by_name["ratio"])
        learning = f'<div class="pair">{drawn}</div>' + _numbers("Steps", *_step_table(run))
        sections.append(section("Learning", learning))
    sections.append(section("Verified", _verified(report)))
    if run.evaluation is not None:
        sections.append(section("Measured by dispfx eval", _evaluation(run.evaluation)))
    if run.speed is not None:
        sections.append(section("Speed", _speed(run)))
    if run.left_out:
        items = "".join(f"<li>{escape(line)}</li>" for line in run.left_out)
        sections.append(section("Not shown", f"<ul>{items}</ul>"))
    if report.onnx_without_cache is not None:
        note = f"The ONNX model has no KV cache: {report.onnx_without_cache}"
        sections.append(section("ONNX", f"<p>{escape(note)}</p>"))
    if report.quantized:
        notes = [line for one in report.quantized for line in quantized_lines(one)]
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        sections.append(section("Quantized ONNX models", f"<ul>{items}</ul>"))
    if report.refused:
        rows = [(one.name, one.reason) for one in report.refused]
        sections.append(section("Left dense", table(("branch or site", "reason"), rows)))
    sections.append(section("How to get it again", _origin(report)))
    return document(f"{run.name}: dispfx report", "\n".join(sections))


def _widths(layers: Layers, by_name: Mapping[str, Picture]) -> str:
    if "feature-use" not in by_name:
        return section("Widths", figure_of(by_name["widths"]))
    drawn = figure_of(by_name["widths"]) + figure_of(by_name["feature-use"])
    content = f'<div class="pair">{drawn}</div>' + _numbers("Features by use", *_use_table(layers))
    return section("Widths, and use of the embedding's features", content)


def _header(run: Run) -> str:
    report = run.report
    tiles = [
        (
            f"{report.ratio.achieved:.1%}",
            f"of {report.ratio.counted} removed ({report.ratio.requested:.1%} requested)",
        ),
        (
            f"{report.parameters.pruned / 1e6:,.2f} M",
            f"parameters, of {report.parameters.dense / 1e6:,.2f} M",
        ),
    ]
    if report.behaviour:
        first = report.behaviour[0]
        tiles.append((f"{first.kl:.4f}", f"nats of KL per token; {first.top1:.1%} the same first choice"))
    if report.perplexity is not None:
        tiles.append(
            (
                shown_perplexity(report.perplexity.pruned),
                f"perplexity, {shown_perplexity(report.perplexity.dense)} before",
            )
        )
    lines = report.comparisons
    tiles.append((f"{sum(line.holds for line in lines)} of {len(lines)}", "verifications hold"))
    shown = "".join(f"<li><b>{escape(value)}</b>{escape(what)}</li>" for value, what in tiles)
    return f'<header><h1>{escape(run.name)}</h1><ul class="tiles">{shown}</ul></header>'


def _figures(report: Report) -> list[Sequence[str]]:
    size, quality, _ = report_rows(report)
    return [*size, *quality]


def _protocol(report: Report) -> str:
    tuned = report.tuned
    lines = "" if tuned is None else "".join(f"<p>{escape(line)}</p>" for line in tuning_lines(tuned))
    if report.perplexity is None:
        return lines or "<p>Perplexity was not measured: no text was given to measure on.</p>"
    protocol = report.perplexity.protocol
    share = protocol.held_out_share
    held_out = (
        "" if share is None else f" This is the last {share:.0%} of the text, which was not learned from."
    )
    return lines + (
        f"<p>Perplexity on {escape(protocol.text or 'the given text')}: {protocol.windows:,} windows of "
        f"{protocol.context:,} tokens, {protocol.tokens:,} predicted tokens.{held_out}{protocol.begins}</p>"
        + "".join(f"<p>{escape(note)}.</p>" for note in flattered_notes(report))
    )


def _width_table(layers: Layers) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    columns = [series.widths() for series in layers.series]
    rows = [
        (name, *("" if width is None else f"{width[0]:,} of {width[1]:,}" for width in widths))
        for name, *widths in zip(layers.names, *columns, strict=True)
    ]
    return ("layer", *(series.title for series in layers.series)), rows


def _use_table(layers: Layers) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Count features by tenths of the sites that keep them."""
    uses, sites = layers.uses_F.tolist(), layers.stream_sites
    bounds = sorted({round(sites * tenth / 10) for tenth in range(11)})
    rows: list[Sequence[str]] = [("none", f"{sum(use == 0 for use in uses):,}")]
    for low, high in pairwise(bounds):
        label = f"{high}" if low + 1 == high else f"{low + 1} to {high}"
        rows.append((label, f"{sum(low < use <= high for use in uses):,}"))
    return (f"kept by so many of {sites} reads and writes", "features"), rows


def _step_table(run: Run) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    steps = run.steps
    every = max(1, -(-len(steps) // _ROWS_OF_STEPS))
    shown = [*steps[:-1:every], steps[-1]]
    rows = [
        (
            f"{one.step:,}",
            f"{one.loss:.4f}",
            f"{one.budget_loss:.5f}",
            f"{one.achieved_ratio:.2%}",
            "" if one.held_out_loss is None else f"{one.held_out_loss:.4f}",
        )
        for one in shown
    ]
    return ("step", "loss (nats)", "budget loss R", "removed", "held-out loss"), rows


def _verified(report: Report) -> str:
    if not report.verify:
        return "<p>Nothing was verified.</p>"
    # On a terminal, words in front of the number replace this heading.
    rows = [
        (name, shape, error.removeprefix("error "), most.removeprefix("at most "))
        for name, shape, error, most in report_rows(report)[-1]
    ]
    return table(("comparison", "batch × tokens", "error", "tolerance"), rows)


def _evaluation(found: Evaluation) -> str:
    lines = text_lines(found) + ([] if found.tasks is None else task_notes(found.tasks))
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" + ("" if found.tasks is None else table(*task_table(found)))


def _speed(run: Run) -> str:
    speed = run.speed or {}
    header = ("step", "batch", "tokens", "past", "mode", "dense", "pruned", "×", "bound")
    facts = "".join(f"<li>{escape(str(k))}: {escape(str(v))}</li>" for k, v in speed.get("facts", {}).items())
    return f"<ul>{facts}</ul>" + table(header, [_speed_row(row) for row in speed["rows"]])


def _speed_row(row: dict[str, Any]) -> Sequence[str]:
    shape = row.get("shape") or {}
    sides = [row.get(side) for side in ("dense", "pruned")]
    times = ["" if side is None else f"{side['seconds'] * 1e3:,.2f} ms" for side in sides]
    speedup = row.get("speedup")
    factor = (
        str(row.get("note", "")) if speedup is None else f"{speedup:.2f}{' ⚠' if row.get('slower') else ''}"
    )
    place = [str(value) for value in shape.values()]
    return (
        str(row.get("kind", "")),
        *place,
        str(row.get("mode", "")),
        *times,
        factor,
        f"{row.get('bound', 0):.2f}",
    )


def _origin(report: Report) -> str:
    versions = [(name, version) for name, version in report.versions.items()]
    seconds = [(name, f"{value:,.1f} s") for name, value in report.seconds.items()]
    return (
        f"<pre><code>{escape(report.command)}</code></pre>"
        f"<p>Seed {report.seed}, on {escape(report.device)}.</p>"
        f'<div class="pair">{table(("made with", "version"), versions)}'
        f"{table(('stage', 'time'), seconds)}{_settings(report)}</div>"
    )


def _settings(report: Report) -> str:
    return "" if report.settings is None else table(("setting", "value"), settings_rows(report.settings))


def section(title: str, content: str) -> str:
    """Return a part of the page; `content` is markup."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def figure_of(picture: Picture) -> str:
    """Return a picture with its caption."""
    # With role and label a screen reader reads the drawing as one image instead of its parts.
    svg = picture.svg.replace("<svg", f'<svg role="img" aria-label="{escape(picture.alt)}"', 1)
    return f"<figure>{svg}<figcaption>{escape(picture.caption)}</figcaption></figure>"


def _numbers(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<details><summary>{escape(title)}, as a table</summary>{table(header, rows)}</details>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of plain text; the first cell of a row is its name."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    # A wide table scrolls on its own, also by keyboard.
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide" tabindex="0">{whole}</div>'


def document(title: str, body: str) -> str:
    """Return a whole page around `body`, which loads nothing."""
    light, dark = (
        " ".join(f"--{name}: {colours[side]};" for name, colours in COLOURS.items()) for side in (0, 1)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
:root {{ {light} --paper: #ffffff; --card: #f6f8fa; }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} --paper: #14181d; --card: #1d232a; }} }}
{_CSS}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


_CSS = """\
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 75rem; margin: 0 auto; padding: 1rem; }
h1 { margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 0.75rem; padding-bottom: 0.25rem; border-bottom: 1px solid var(--grid); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 0.75rem; padding: 0;
  list-style: none; }
.tiles li { background: var(--card); border-radius: 0.5rem; padding: 0.75rem; font-size: 0.9rem; }
.tiles b { display: block; font-size: 1.6rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem;
  align-items: start; }
figure { margin: 0; padding: 0.75rem; background: var(--card); border-radius: 0.5rem; min-width: 0; }
section > figure { max-width: 48rem; }
figure + .wide { margin-top: 1rem; }
figure svg { display: block; width: 100%; height: auto; }
figure image { image-rendering: pixelated; }
figcaption { margin-top: 0.5rem; }
figcaption, p, summary { font-size: 0.95rem; }
summary { cursor: pointer; margin: 0.75rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.75rem; text-align: right; white-space: nowrap; }
tr { border-bottom: 1px solid var(--grid); }
th:first-child { text-align: left; padding-left: 0; }
tbody th { font-weight: normal; white-space: normal; }
@media (max-width: 40rem) { th, td { padding: 0.25rem; font-size: 0.8rem; } }
td { text-align: right; }
pre { background: var(--card); padding: 0.75rem; border-radius: 0.5rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
:focus-visible { outline: 2px solid var(--c0); }
"""
