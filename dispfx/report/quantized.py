"""What a report says of quantized models: rows of a table, sentences, a section of the card.

Reports have no type here, because the module that defines them needs this one.
"""

import re
from collections.abc import Sequence
from typing import Any

from dispfx.report.numbers import shown_bytes, shown_perplexity

Row = tuple[str, str, str, str]
_HEADING = "## Quantized"
_WHAT = {"onnx": "ONNX model", "checkpoint": "checkpoint"}


def quantized_rows(found: Sequence[Any]) -> list[Row]:
    """Return the rows of a table, name, before, after and change, with size, KL and perplexity per model."""
    return [row for one in found for row in _rows(one)]


def _rows(one: Any) -> list[Row]:
    before, after = one.bytes_before, one.bytes_after
    rows = [
        (
            f"{_WHAT[one.form]}, {one.name}",
            shown_bytes(before),
            shown_bytes(after),
            f"{after / before - 1:+.1%}",
        ),
    ]
    quality = one.quality
    if quality is None:
        return rows
    first, second = quality.perplexity_before, quality.perplexity_after
    return [
        *rows,
        (
            f"KL per token, {_short(one)}",
            "0",
            f"{quality.kl:.4f} nats",
            f"{quality.top1:.1%} the same first choice",
        ),
        (
            f"perplexity, {_short(one)} ({quality.protocol.windows} × {quality.protocol.context} tokens)",
            shown_perplexity(first),
            shown_perplexity(second),
            f"{second / first - 1:+.2%}",
        ),
    ]


def quantized_lines(one: Any) -> list[str]:
    """Return sentences on how weights were rounded, what was measured, and what is not quantized."""
    name = _short(one)
    lines = [f"{name}: weights rounded with calibration data {one.rounded_by}"] if one.rounded_by else []
    if one.quality is None:
        lines.append(f"{name}: the loss was not measured: the folder's tokenizer knows no text of dispfx")
    else:
        protocol = one.quality.protocol
        against = {
            "onnx": "in ONNX Runtime against the ONNX model before quantization",
            "checkpoint": "against the checkpoint before quantization",
        }
        lines.append(
            f"{name}: measured on {protocol.text}, {protocol.tokens:,} predicted tokens, {against[one.form]}"
        )
    for left in one.left[:1]:
        more = f" and {len(one.left) - 1} more" if len(one.left) > 1 else ""
        lines.append(f"{name}: not quantized: {left}{more}")
    if one.unfit:
        count = f"{len(one.unfit)} layer{'' if len(one.unfit) == 1 else 's'}"
        lines.append(
            f"{name}: {count} among them, such as {one.unfit[0]}, because the number of inputs is no "
            "multiple of 32; in a plan with widths aligned to 32 all layers fit"
        )
    return lines


def _short(one: Any) -> str:
    return f"ONNX {one.name}" if one.form == "onnx" else one.name


def quantized_notes(one: Any) -> list[str]:
    """Return the rows and sentences of one model as lines for a terminal."""
    rows = [f"{name}: {before} → {after} ({change})" for name, before, after, change in _rows(one)]
    return rows + quantized_lines(one)


def with_quantized_section(card: str, report: Any) -> str:
    """Return a model card with the section on quantized models, in the place of an older one."""
    rest = re.sub(rf"\n*^{_HEADING}$.*?(?=^## |\Z)", "\n\n", card, flags=re.DOTALL | re.MULTILINE)
    return f"{rest.rstrip()}\n\n{_section(report.quantized)}\n"


def _section(found: Sequence[Any]) -> str:
    rows = [f"| {' | '.join(row)} |" for row in quantized_rows(found)]
    lines = [f"- {line}." for one in found for line in quantized_lines(one)]
    places = {"onnx": "`onnx-{}/model.onnx`", "checkpoint": "`{}/`, a checkpoint"}
    listed = "; ".join(places[one.form].format(one.name) for one in found)
    return "\n".join(
        [
            _HEADING,
            "",
            f"With weights in fewer bits: {listed}.",
            "",
            "| | before | after | change |",
            "|---|---:|---:|---:|",
            *rows,
            "",
            *lines,
        ]
    )
