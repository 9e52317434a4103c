"""How well a decoder predicts a text: perplexity, with the protocol that the figure depends on.

    perplexity = exp( - 1/N · Σ log p(token t | tokens before t in its window) )

1. The text is cut into windows of `context` tokens without overlap.
2. A window of n tokens gives n - 1 predictions; its first token is never predicted.
3. What is left at the end is a window too if it holds two tokens or more.

Shape legend: B batch, T tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dispfx.errors import DataError

# Logits are turned into float32 log-probabilities this many bytes at a time: whole, they would take
# 1 GB for one window of 2048 tokens and a vocabulary of 128,000.
_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and how it was measured.

    Args:
        value: exp of the mean negative log-likelihood over predicted tokens; infinite or NaN where
            the decoder's logits are.
        protocol: `text` (what was measured on), `context` (tokens a window), `windows` (how many were
            used), `tokens` (how many were predicted), `held_out_share` (which share of the text's end
            was held out for this, None where the text is another one).
    """

    value: float
    protocol: Mapping[str, Any]


def perplexity(
    decoder: Callable[[Tensor], Any],
    tokens: Tensor,
    *,
    context: int,
    windows: int | None = None,
    batch_size: int = 1,
    device: torch.device | str = "cpu",
    text: str = "",
    held_out_share: float | None = None,
) -> Perplexity:
    """Measure the perplexity of `decoder` on `tokens`.

    Args:
        decoder: token ids (B, T) int64 to logits (B, T, V) or an output with `.logits`.
        tokens: (N,) token ids of the whole text.
        context: tokens a window, at least 2.
        windows: measure on the first so many windows only; None for all.
        batch_size: windows a forward pass.
        device: where the decoder lies.
        text: what the tokens are, for the protocol.
        held_out_share: for the protocol.

    Raises:
        DataError: if there is no token to predict, or `context` or `windows` leaves none.
    """
    if context < 2:
        raise DataError(f"a window must hold 2 tokens or more, and the context is {context}")
    if windows is not None and windows < 1:
        raise DataError(f"one window or more must be measured, and {windows} were asked")
    if len(tokens) < 2:
        raise DataError(
            f"the text must have 2 tokens or more to predict one, and has {len(tokens)}", where=text
        )
    likelihood, predicted, used = 0.0, 0, 0
    with torch.no_grad():
        for ids_BT in windows_of(tokens, context, windows, batch_size):
            output = decoder(ids_BT.to(device=device, dtype=torch.int64))
            logits_BTV = output if isinstance(output, Tensor) else output.logits
            likelihood += _negative_log_likelihood(logits_BTV, ids_BT.to(logits_BTV.device))
            predicted += ids_BT[:, 1:].numel()
            used += len(ids_BT)
    protocol = {
        "text": text,
        "context": context,
        "windows": used,
        "tokens": predicted,
        "held_out_share": held_out_share,
    }
    return Perplexity(_exp(likelihood / predicted), protocol)


def windows_of(tokens: Tensor, context: int, windows: int | None, batch_size: int) -> Iterator[Tensor]:
    """Yield windows (B, T): full ones in batches, then a shorter last one by itself."""
    full = len(tokens) // context
    limit = full if windows is None else min(full, windows)
    for start in range(0, limit, batch_size):
        stop = min(start + batch_size, limit)
        yield tokens[start * context : stop * context].view(stop - start, context)
    rest = tokens[full * context :]
    if len(rest) >= 2 and (windows is None or full < windows):
        yield rest.view(1, -1)


def _negative_log_likelihood(logits_BTV: Tensor, ids_BT: Tensor) -> float:
    """Return -Σ log p of every token but the first of each window, in nats."""
    vocabulary = logits_BTV.shape[-1]
    step = max(1, _CHUNK_BYTES // (4 * vocabulary))
    total = torch.zeros((), dtype=torch.float64, device=logits_BTV.device)
    for logits_TV, ids_T in zip(logits_BTV[:, :-1], ids_BT[:, 1:].long(), strict=True):
        for start in range(0, len(ids_T), step):
            chunk_TV = logits_TV[start : start + step].float()
            losses_T = functional.cross_entropy(chunk_TV, ids_T[start : start + step], reduction="none")
            total += losses_T.double().sum()
    return float(total)


def _exp(mean: float) -> float:
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf
