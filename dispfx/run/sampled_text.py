"""Text that a decoder writes itself, to learn from.

A decoder goes on from openings of a text, or from its beginning-of-sequence token alone.  Tokens are drawn
from its own probabilities, so the text holds what it predicts and in that proportion.  Decoders of
transformers use its `generate`, with a cache.

Shape legend: B batch, K tokens of an opening, L tokens of a sequence.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import module_logits
from dispfx.deploy.generate import generate
from dispfx.errors import DataError
from dispfx.settings.verb_settings import SamplingSettings
from dispfx.source import Source
from dispfx.source.drawn_tokens import can_sample, sample_by_cache
from dispfx.source.source import context_of, named_context
from dispfx.source.text import tokens_in_front
from dispfx.words.option_names import option

_SEQ_LEN = 512


def fitted_sampling(settings: SamplingSettings, source: Source) -> SamplingSettings:
    """Return the settings with the length of a sequence.

    Raises:
        DataError: if the decoder does not read sequences of that length.
    """
    most = named_context(source.config) or context_of(source)
    if settings.seq_len is not None and settings.seq_len > most:
        raise DataError(
            f"sequences of {settings.seq_len} tokens were asked for, and the decoder reads {most}",
            where=source.name,
            hint=f"use a smaller {option('seq_len')}",
        )
    return replace(settings, seq_len=settings.seq_len or min(_SEQ_LEN, most))


def sampled_text(source: Source, openings: Tensor | None, settings: SamplingSettings) -> Iterator[Tensor]:
    """Yield sequences (B, L) int64 on the CPU until there are as many tokens as the settings ask for.

    Args:
        source: of the decoder, which is not changed.
        openings: (N,) token ids to take openings from; by default every sequence begins with the
            decoder's beginning-of-sequence token.
        settings: of the run, with a length.

    Raises:
        DataError: if the text is shorter than an opening, or nothing is known to begin with.
    """
    assert settings.seq_len is not None
    generator = torch.Generator().manual_seed(settings.seed)
    write = sample_by_cache if can_sample(source.model) else _by_whole_sequences
    write = partial(write, source.model, settings.temperature)
    device = next(source.model.parameters()).device
    rows = -(-settings.tokens // settings.seq_len)
    for start in range(0, rows, settings.batch_size):
        count = min(settings.batch_size, rows - start)
        begun_BK = _begin(source, openings, settings, count, generator)
        new = settings.seq_len - begun_BK.shape[1]
        seed = int(torch.randint(2**31, (), generator=generator))
        yield write(begun_BK.to(device), new, seed).cpu()


def _begin(
    source: Source, text: Tensor | None, settings: SamplingSettings, count: int, generator: torch.Generator
) -> Tensor:
    """Return the first tokens (B, K) of some sequences."""
    if text is None:
        return torch.tensor(_first_tokens(source)).repeat(count, 1)
    assert settings.seq_len is not None
    size = min(settings.opening, settings.seq_len - 1)
    if len(text) < size:
        raise DataError(
            f"the text to take openings from has {len(text)} tokens, and {size} are needed",
            hint=f"use a longer text, or a smaller {option('opening')}",
        )
    starts = torch.randint(len(text) - size + 1, (count,), generator=generator)
    return torch.stack([text[start : start + size] for start in starts.tolist()])


def _first_tokens(source: Source) -> tuple[int, ...]:
    """Return what texts begin with: what the tokenizer puts there, or what ends the text before."""
    known = source.tokenizer
    front = tokens_in_front(known) if known is not None else ()
    for token in (getattr(known, "bos_token_id", None), getattr(known, "eos_token_id", None)):
        if not front and isinstance(token, int):
            front = (token,)
    if not front:
        raise DataError(
            "no token is known that the decoder's texts begin with",
            where=source.name,
            hint=f"name a text to take openings from with {option('data')}",
        )
    return front


def _by_whole_sequences(
    model: nn.Module, temperature: float, begun_BK: Tensor, new: int, seed: int
) -> Tensor:
    decoder = partial(module_logits, model)
    return generate(decoder, begun_BK, max_new_tokens=new, temperature=temperature, seed=seed)
