"""What a folder records of its quantized forms: figures in report, card and page, and digests.

    DIR.partial/figures.json → DIR/int8/figures.json → report, card, page → DIR/int8 without figures.json

A form appears with its figures in it, and they are removed when the folder has them.  So a process that dies
in between loses nothing: the next run of the same command finds them and completes the folder.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dispfx.errors import DataError
from dispfx.files.disk import replacing
from dispfx.files.json_text import read_json
from dispfx.quality.agreement import Comparison
from dispfx.report import Protocol, Quantized, QuantizedQuality, Report, load_report, save_report
from dispfx.report.json_form import from_plain, to_plain
from dispfx.report.page import write_page
from dispfx.report.quantized import with_quantized_section
from dispfx.report.run import REPORT_FILE
from dispfx.run.folders import Opened
from dispfx.source.source import longest_context

_FIGURES = "figures.json"
# Both decoders give the logits of a whole window, which are large.
_CONTEXT = 512


def short_context(opened: Opened) -> int:
    """Return the tokens of a window on which quantization is measured."""
    return min(_CONTEXT, longest_context(opened.config))


def quality_of(found: Comparison) -> QuantizedQuality:
    """Return the figures of a report from a comparison of two decoders on a text."""
    return QuantizedQuality(
        kl=found.agreement.kl_nats,
        top1=found.agreement.top1,
        perplexity_before=found.dense.value,
        perplexity_after=found.pruned.value,
        protocol=Protocol(**found.pruned.protocol),
    )


def keep_figures(form: Path, found: Quantized) -> None:
    """Write the figures of a form into its folder, which does not have its final name yet."""
    (form / _FIGURES).write_text(json.dumps(to_plain(found)), encoding="utf-8")


def is_unrecorded(form: Path) -> bool:
    """Whether a form is complete, and the folder around it does not have all of its figures."""
    return (form / _FIGURES).is_file()


def record(folder: Path, form: Path) -> Quantized:
    """Write the figures of a form to the folder's report, card and page, and return them.

    They replace those of the same form.

    Raises:
        DataError: if the figures are damaged.
    """
    figures = form / _FIGURES
    try:
        found = from_plain(Quantized, read_json(figures), str(figures))
    except ValueError as error:
        raise DataError(f"the figures cannot be read: {error}", where=str(figures)) from error
    if (folder / REPORT_FILE).is_file():
        _record(folder, found)
    figures.unlink()
    return found


def _record(folder: Path, found: Quantized) -> None:
    path = folder / REPORT_FILE
    report = load_report(path)
    same = (found.name, found.form)
    others = tuple(one for one in report.quantized if (one.name, one.form) != same)
    report = replace(report, quantized=(*others, found))
    save_report(report, path)
    card = folder / "README.md"
    if card.is_file():
        text = with_quantized_section(card.read_text(encoding="utf-8"), report)
        with replacing(card) as partial:
            partial.write_text(text, encoding="utf-8")
    write_page(folder)


def recorded_files(report: Report) -> Mapping[str, str]:
    """Return the digests of a report: of the files written with the folder, and of its quantized forms."""
    return {
        **report.files,
        **{name: digest for one in report.quantized for name, digest in one.files.items()},
    }
