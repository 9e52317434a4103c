"""Perplexity of a decoder on a text, with the protocol that the figure depends on.

    perplexity = exp( - 1/N · Σ log p(token t | tokens before t in its window) )

1. The text is cut into windows of `context` tokens without overlap.
2. A window of n tokens gives n - 1 predictions; its first token is never predicted.
3. The remainder at the end is a window too if it holds two tokens or more.
4. If texts begin with a beginning-of-sequence token (or several tokens), every window does.  It is one of the
   `context` tokens and is not predicted, so that every token of the text is.

Shape legend: B batch, T tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dispfx.errors import CaptureError, DataError, first_line
from dispfx.quality.logits_by_rows import LogitsByRows, by_rows
from dispfx.settings.field import field_of
from dispfx.settings.sections import TextSettings
from dispfx.words.option_names import option


@dataclass(frozen=True)
class TextFacts:
    """Facts about the tokens to measure on.

    Args:
        name: of the text.
        held_out_share: share of the learned text that was held out at its end; None for a separate text.
        bos: tokens that every window begins with.
        unknown_share: share of the text that the tokenizer does not know; None if undetermined.
    """

    name: str = ""
    held_out_share: float | None = None
    bos: tuple[int, ...] = ()
    unknown_share: float | None = None


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and its protocol.

    Args:
        value: exp of the mean negative log-likelihood over predicted tokens; infinite or NaN if the
            decoder's logits are.
        protocol: `text` (its name), `context` (tokens of the longest window that was measured), `windows`
            (their number), `tokens` (number of predicted tokens), and `held_out_share`, `bos` and
            `unknown_share` of `TextFacts`.
    """

    value: float
    protocol: Mapping[str, Any]

    @classmethod
    def of(cls, loss: float, protocol: Mapping[str, Any]) -> "Perplexity":
        """Return the perplexity of a mean negative log-likelihood, in nats."""
        return cls(_exp(loss), protocol)


def perplexity(
    decoder: Callable[[Tensor], Any],
    tokens: Tensor,
    *,
    context: int,
    windows: int | None = None,
    batch_size: int = 1,
    device: torch.device | str = "cpu",
    text: TextFacts | None = None,
) -> Perplexity:
    """Measure the perplexity of `decoder` on `tokens`.

    Args:
        decoder: token ids (B, T) int64 to logits (B, T, V) or an output with `.logits`.
        tokens: (N,) token ids of the whole text.
        context: tokens per window, at least 2, and one more than `bos` has.
        windows: number of windows to measure on, from the start; None for all.
        batch_size: windows per forward pass.
        device: of the decoder.
        text: facts about the tokens.

    Raises:
        DataError: if there is no token to predict.
    """
    text = text or TextFacts()
    check_measurable(tokens, context, windows, text)
    first = first_predicted(text.bos)
    likelihood, predicted, used, longest = 0.0, 0, 0, 0
    way: LogitsByRows | None = None
    with torch.no_grad():
        for ids_BT in windows_of(tokens, context, windows, batch_size, text.bos):
            ids_BT = ids_BT.to(device=device, dtype=torch.int64)
            place = 1
            way = way or by_rows(decoder, ids_BT)
            for logits_BRV in way.chunks(ids_BT):
                likelihood += negative_log_likelihood(logits_BRV, ids_BT, place, first)
                place += logits_BRV.shape[1]
                del logits_BRV  # before the next chunk is made
            predicted += ids_BT[:, first:].numel()
            used += len(ids_BT)
            longest = max(longest, ids_BT.shape[1])
    return Perplexity.of(likelihood / predicted, protocol_of(text, longest, used, predicted))


def check_measurable(tokens: Tensor, context: int, windows: int | None, text: TextFacts) -> None:
    """Pass if there is something to predict.

    Raises:
        DataError: if there is no token to predict.
    """
    fewest = max(2, len(text.bos) + 1)
    if context < fewest:
        raise DataError(f"a window must hold {fewest} tokens or more, but the context is {context}")
    field_of(TextSettings, "eval_windows").require(windows)
    needed = max(1, 2 - len(text.bos))
    if len(tokens) < needed:
        raise DataError(
            f"the text to measure on has {len(tokens)} tokens, and {needed} or more are needed",
            where=text.name,
            hint=f"name a longer one with {option('eval_data')}",
        )


def protocol_of(text: TextFacts, context: int, windows: int, tokens: int) -> dict[str, Any]:
    """Return the protocol of a measurement, as `Perplexity` has it.

    Args:
        context: tokens of the longest window, which a short text does not fill.
    """
    return {
        "text": text.name,
        "context": context,
        "windows": windows,
        "tokens": tokens,
        "held_out_share": text.held_out_share,
        "bos": text.bos,
        "unknown_share": text.unknown_share,
    }


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
    with running_on(context, text):
        return perplexity(decoder, tokens, context=context, windows=windows, device=device, text=text)


@contextmanager
def running_on(context: int, text: TextFacts) -> Iterator[None]:
    """Turn what a decoder raises on windows of `context` tokens into a DataError."""
    try:
        yield
    except (CaptureError, RuntimeError, IndexError, ValueError) as error:
        raise DataError(
            f"perplexity needs a decoder that runs on windows of {context} tokens; this one does not: "
            f"{first_line(error)}",
            where=text.name,
            hint=f"measure shorter windows ({option('context')}), or leave out the text to measure on",
        ) from error


def windows_of(
    tokens: Tensor, context: int, windows: int | None, batch_size: int, bos: tuple[int, ...] = ()
) -> Iterator[Tensor]:
    """Yield windows (B, T): full ones in batches, then a shorter last one separately."""
    stride = context - len(bos)
    full = len(tokens) // stride
    limit = full if windows is None else min(full, windows)
    for start in range(0, limit, batch_size):
        stop = min(start + batch_size, limit)
        yield _begun(tokens[start * stride : stop * stride].view(stop - start, stride), bos)
    rest = tokens[full * stride :]
    if len(rest) and len(rest) + len(bos) >= 2 and (windows is None or full < windows):
        yield _begun(rest.view(1, -1), bos)


def first_predicted(bos: tuple[int, ...]) -> int:
    """Return the position of the first predicted token of a window."""
    return max(1, len(bos))


def _begun(ids_BT: Tensor, bos: tuple[int, ...]) -> Tensor:
    if not bos:
        return ids_BT
    return torch.cat([torch.tensor(bos).expand(len(ids_BT), -1), ids_BT.to("cpu", torch.int64)], dim=1)


def negative_log_likelihood(logits_BRV: Tensor, ids_BT: Tensor, place: int, first: int) -> float:
    """Return -Σ log p over the tokens that some rows of logits predict, in nats.

    Args:
        place: position of the token that the first row predicts.
        first: position of the first token of a window that counts.
    """
    total, skipped = 0.0, max(0, first - place)
    targets_BR = ids_BT[:, place + skipped : place + logits_BRV.shape[1]].to(logits_BRV.device)
    for logits_RV, targets_R in zip(logits_BRV[:, skipped:], targets_BR, strict=True):
        losses_R = functional.cross_entropy(logits_RV[: len(targets_R)].float(), targets_R, reduction="none")
        total += float(losses_R.double().sum())
    return total


def _exp(mean: float) -> float:
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf
