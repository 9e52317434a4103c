"""What a folder records of its quantized forms: figures in report, card and page, and digests."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dispfx.files.disk import replacing
from dispfx.quality.agreement import Comparison
from dispfx.report import Protocol, Quantized, QuantizedQuality, Report, load_report, save_report
from dispfx.report.page import write_page
from dispfx.report.quantized import with_quantized_section
from dispfx.report.run import REPORT_FILE
from dispfx.run.folders import Opened
from dispfx.source.source import longest_context

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


def record(folder: Path, found: Quantized) -> None:
    """Write the figures to the folder's report, card and page; they replace those of the same form."""
    path = folder / REPORT_FILE
    if not path.is_file():
        return
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
