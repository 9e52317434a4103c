"""The texts for quantizing a folder: calibration data, and a text to measure the loss on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import DataError
from dispfx.report import load_report
from dispfx.report.run import REPORT_FILE
from dispfx.run.folders import Opened
from dispfx.run.run_text import MeasuredText, TextChoice, open_text, require_known, texts_to_measure
from dispfx.settings import TextSettings
from dispfx.source import Source
from dispfx.source.source import longest_context
from dispfx.source.text import with_bos
from dispfx.words.option_names import option

# Windows of the calibration data, evenly spaced, and tokens per window.
_WINDOWS, _TOKENS = 32, 1024
# Schemes that lose too much where weights are rounded to nearest.
_NEEDS_TEXT = ("int4",)


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration data for rounding a folder's weights, and the text that the loss is measured on.

    Args:
        windows: of the calibration data, (1, T) token ids each; empty without data.
        measured: a text that is no calibration data; None if none was named and the tokenizer knows no text
            of dispfx.
        name: of the calibration data.
    """

    windows: tuple[Tensor, ...]
    measured: MeasuredText | None
    name: str = ""

    def on(self, device: Any) -> Iterator[Tensor]:
        """Yield the windows on a device."""
        for window in self.windows:
            yield window.to(device)


def calibration_of(opened: Opened, scheme: str, text: TextSettings) -> Calibration:
    """Read the texts that a user named; the demo has its own.

    Raises:
        DataError: if a text cannot be used, or the scheme needs one and has no text.
    """
    chosen = TextChoice(text)
    chosen.check()
    source = _source(opened)
    found = open_text(source, chosen)
    if found.learn:
        found.require_learnable()
        found.require_measurable()
        require_known(found.largest, opened.text_tokens, source.name)
    measured = found.measured or texts_to_measure(source, chosen)
    size = min(_TOKENS, longest_context(opened.config))
    windows = [
        torch.tensor([with_bos(window.tolist(), found.bos)[:size]], dtype=torch.int64)
        for tokens in found.learn
        for window in _spaced(tokens, size, max(1, _WINDOWS // len(found.learn)))
    ]
    if scheme in _NEEDS_TEXT and not windows:
        raise DataError(
            f"{scheme} needs a text for calibration, and none was named",
            hint=f"name one with {option('data')}, of the kind that the decoder will read",
        )
    return Calibration(tuple(windows), measured[0] if measured else None, found.learned_name)


def _spaced(tokens: Tensor, size: int, most: int) -> Iterator[Tensor]:
    """Yield up to `most` windows of `size` tokens, evenly spaced; a shorter text is one window."""
    count = max(1, min(most, len(tokens) // size))
    gap = max(0, len(tokens) - size) // max(1, count - 1)
    for index in range(count):
        yield tokens[index * gap : index * gap + size]


def _source(opened: Opened) -> Source:
    path = opened.path / REPORT_FILE
    settings = load_report(path).settings if path.is_file() else None
    of_demo = settings is not None and settings.get("model", {}).get("model") == "demo"
    origin = "demo" if of_demo else "folder"
    return Source(opened.decoder, opened.tokenizer, opened.config, str(opened.path), origin)
