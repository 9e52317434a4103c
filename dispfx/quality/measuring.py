"""Perplexity for commands: on windows that the decoder can run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import CaptureError, DataError, first_line
from dispfx.quality.perplexity import Perplexity, TextFacts, perplexity


def measure(
    decoder: Callable[[Tensor], Any],
    tokens: Tensor,
    *,
    context: int,
    text: TextFacts,
    windows: int | None = None,
    device: torch.device | str = "cpu",
) -> Perplexity:
    """As `perplexity`, one window at a time.

    Raises:
        DataError: if the text is too short, or the decoder does not run on windows of `context` tokens, for
            example because of a shorter position table.
    """
    try:
        return perplexity(decoder, tokens, context=context, windows=windows, device=device, text=text)
    except (CaptureError, RuntimeError, IndexError, ValueError) as error:
        raise DataError(
            f"perplexity needs a decoder that runs on windows of {context} tokens; this one does not: "
            f"{first_line(error)}",
            where=text.name,
            hint="measure shorter windows (--context N), or leave out the text to measure on",
        ) from error
