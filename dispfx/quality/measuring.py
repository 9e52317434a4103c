"""Quality as the commands measure it: on windows that the decoder can run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import CaptureError, DataError, first_line
from dispfx.quality.agreement import Comparison, compare_on_text
from dispfx.quality.perplexity import Perplexity, TextFacts, perplexity
from dispfx.words.option_names import option


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
        DataError: if the text is too short, or the decoder does not run on windows of `context` tokens,
            as one with a shorter table of positions.
    """
    with _running_on(context, text):
        return perplexity(decoder, tokens, context=context, windows=windows, device=device, text=text)


def measure_both(
    dense: Callable[[Tensor], Any], pruned: Callable[[Tensor], Any], tokens: Tensor, **rest: Any
) -> Comparison:
    """As `compare_on_text`, which says what is in `rest`.

    Raises:
        DataError: as `measure`.
    """
    with _running_on(rest["context"], rest["text"]):
        return compare_on_text(dense, pruned, tokens, **rest)


@contextmanager
def _running_on(context: int, text: TextFacts) -> Iterator[None]:
    try:
        yield
    except (CaptureError, RuntimeError, IndexError, ValueError) as error:
        raise DataError(
            f"perplexity needs a decoder that runs on windows of {context} tokens; this one does not: "
            f"{first_line(error)}",
            where=text.name,
            hint=f"measure shorter windows ({option('context')}), or leave out the text to measure on",
        ) from error
