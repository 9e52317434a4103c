"""Text that a decoder writes itself, to learn from.

A decoder goes on from openings of a text, or from its beginning-of-sequence token alone.  Tokens are drawn
from its own probabilities, so the text holds what it predicts and in that proportion.  Decoders of
transformers use its `generate`, with a cache.

Shape legend: B batch, K tokens of an opening, L tokens of a sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import module_logits
from dispfx.deploy.generate import fitted_temperature, generate
from dispfx.errors import CaptureError, DataError, memory_shortage
from dispfx.learning.mixture import quotas
from dispfx.run.cached_draws import drawn_by_cache
from dispfx.run.run_text import Text, require_known
from dispfx.settings.verb_settings import SAMPLED_TOKENS, SamplingSettings
from dispfx.source import Source
from dispfx.source.drawn_tokens import can_sample
from dispfx.source.source import context_of, named_context
from dispfx.source.text import tokens_in_front
from dispfx.words.option_names import option

_FEW_TOKENS = 2
SLOW = "the decoder's cache cannot be used, so every token runs the whole sequence again, which takes longer"


@dataclass(frozen=True, eq=False)
class Openings:
    """Token ids to take openings from.

    Args:
        parts: (N,) ids each; empty if every sequence begins with the decoder's beginning-of-sequence token.
        weights: of the parts, relative to each other; all openings are of the first part if empty.
    """

    parts: Sequence[Tensor] = ()
    weights: Sequence[float] = ()

    @staticmethod
    def of(text: Text) -> "Openings":
        """Return those of a text, of whose part to learn from they are pieces."""
        return Openings(text.learn, text.weights)

    def drawn(self, size: int, count: int, generator: torch.Generator) -> Tensor:
        """Return `count` openings of so many tokens, int64.

        Raises:
            DataError: if a part is shorter than an opening.
        """
        for part in self.parts:
            if len(part) < size:
                raise DataError(
                    f"the text to take openings from has {len(part)} tokens, and {size} are needed",
                    hint=f"use a longer text, or a smaller {option('opening')}",
                )
        if not self.weights:
            starts = torch.randint(len(self.parts[0]) - size + 1, (count,), generator=generator)
            places = [(self.parts[0], start) for start in starts.tolist()]
        else:
            shares = torch.tensor(quotas(self.weights, len(self.parts)), dtype=torch.float64)
            chosen = torch.multinomial(shares, count, replacement=True, generator=generator)
            parts = [self.parts[index] for index in chosen.tolist()]
            places = [
                (part, int(torch.randint(len(part) - size + 1, (), generator=generator))) for part in parts
            ]
        return torch.stack([part[start : start + size].to("cpu", torch.int64) for part, start in places])


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
    return replace(settings, seq_len=settings.seq_len or min(SAMPLED_TOKENS, most))


def require_runs(source: Source, settings: SamplingSettings, largest: int) -> None:
    """Raise unless a decoder reads sequences of the chosen length, and has the tokens of a text.

    Args:
        settings: with a length.
        largest: token id of the text.

    Raises:
        CaptureError: if the decoder cannot run at all.
        DataError: if it runs on shorter sequences only, or lacks a token.
    """
    # The config of transformers names the length, so a short sequence shows enough.
    assert settings.seq_len is not None
    tried = _FEW_TOKENS if named_context(source.config) else settings.seq_len
    try:
        vocabulary = _width_at(source.model, tried)
    except CaptureError as error:
        if memory_shortage(error) is not None or tried <= _FEW_TOKENS:
            raise
        _width_at(source.model, _FEW_TOKENS)
        raise DataError(
            f"the decoder does not run on sequences of {tried} tokens, only on shorter ones",
            where=error.where,
            hint=f"use a smaller {option('seq_len')}",
        ) from error
    require_known(largest, vocabulary, source.name)


def _width_at(model: nn.Module, tokens: int) -> int:
    """Return how many logits a decoder gives per token, on a sequence of that length."""
    ids = torch.zeros((1, tokens), dtype=torch.int64, device=_device_of(model))
    with torch.no_grad():
        return module_logits(model, ids).shape[-1]


def _device_of(model: nn.Module) -> torch.device:
    first = next(iter((*model.parameters(), *model.buffers())), None)
    return torch.device("cpu") if first is None else first.device


def sampled_text(
    source: Source, openings: Openings, settings: SamplingSettings, tell: Callable[[str], None] | None = None
) -> Iterator[Tensor]:
    """Yield sequences (B, L) int64 on the CPU until there are as many tokens as the settings ask for.

    Args:
        source: of the decoder, which is not changed.
        openings: what sequences begin with.
        settings: of the run, with a length.
        tell: told once if the decoder's cache cannot be used.

    Raises:
        CaptureError: if the logits are infinite or not a number.
        DataError: if the text is shorter than an opening, or nothing is known to begin with.
    """
    assert settings.seq_len is not None
    generator = torch.Generator().manual_seed(settings.seed)
    model, temperature = source.model, fitted_temperature(settings.temperature)
    device = _device_of(model)
    cached = can_sample(model)
    rows = -(-settings.tokens // settings.seq_len)
    for start in range(0, rows, settings.batch_size):
        count = min(settings.batch_size, rows - start)
        begun_BK = _begin(source, openings, settings, count, generator).to(device)
        new = settings.seq_len - begun_BK.shape[1]
        seed = int(torch.randint(2**31, (), generator=generator))
        ids_BL = drawn_by_cache(model, temperature, begun_BK, new, seed) if cached else None
        if ids_BL is None:
            if cached and tell is not None:
                tell(SLOW)
            cached = False
            ids_BL = _by_whole_sequences(model, temperature, begun_BK, new, seed)
        yield ids_BL.cpu()


def _begin(
    source: Source, openings: Openings, settings: SamplingSettings, count: int, generator: torch.Generator
) -> Tensor:
    """Return the first tokens (B, K) of some sequences."""
    assert settings.seq_len is not None
    if not openings.parts:
        return torch.tensor(_first_tokens(source)).repeat(count, 1)
    return openings.drawn(min(settings.opening, settings.seq_len - 1), count, generator)


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
