"""Continue token ids with any decoder: a torch module, or a callable that wraps an ONNX session.

The whole sequence is computed again for every new token.  This is slower than a KV cache, but needs only a
decoder from token ids to logits, so that every form that the compiler writes can be used.

Shape legend: B batch, T tokens so far, N new tokens, V vocabulary.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import CaptureError, DataError
from dispfx.words.option_names import option

# Temperatures beyond these change nothing, and quotients by them are infinite or zero in float32.
_COLDEST, _HOTTEST = 1e-30, 1e30


def generate(
    decoder: Callable[[Tensor], Any],
    ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    eos: int | Collection[int] | None = None,
) -> Tensor:
    """Return `ids` and up to `max_new_tokens` more tokens, int64 (B, T + N) with N <= max_new_tokens.

    1. Temperature 0 takes the likeliest token (the first of equals); otherwise tokens are drawn from
       softmax(logits / temperature), among the `top_k` likeliest where given.
    2. A sequence that has ended keeps its end token to the length of the batch; generation stops once
       all have ended.
    3. Prompts of one batch have one length: a decoder without a mask cannot tell padding from text.

    Args:
        decoder: int64 token ids (B, T) to logits (B, T, V), or to an output with `.logits`.
        ids: int64 (B, T), on the decoder's device.
        temperature: at least 0.
        top_k: at least 1.
        seed: of the draws, which global generators do not affect.
        eos: the token or tokens that end a sequence.

    Raises:
        CaptureError: if the logits are infinite or not a number.
        DataError: if the prompt is empty or an argument is out of its range.
    """
    _check(ids, max_new_tokens, temperature, top_k)
    ends = torch.tensor(_end_tokens(eos), dtype=torch.int64, device=ids.device)
    generator = torch.Generator().manual_seed(seed)
    ended_B = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    with torch.no_grad():
        for _ in range(max_new_tokens):
            logits_BV = _last_logits(decoder(ids))
            next_B = _choose(logits_BV, temperature, top_k, generator).to(ids.device)
            if len(ends):
                next_B = torch.where(ended_B, ends[0], next_B)
                ended_B = ended_B | torch.isin(next_B, ends)
            ids = torch.cat([ids, next_B[:, None]], dim=1)
            if bool(ended_B.all()):
                break
    return ids


def fitted_temperature(temperature: float) -> float:
    """Return a temperature above 0 with which logits can be divided in float32."""
    return min(max(temperature, _COLDEST), _HOTTEST)


def _check(ids: Tensor, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if ids.dim() != 2 or ids.numel() == 0:
        raise DataError(
            f"token ids (batch, tokens) with at least one token were expected, {tuple(ids.shape)} found",
            hint="give a prompt that is not empty",
        )
    if max_new_tokens < 1 or not temperature >= 0.0 or (top_k is not None and top_k < 1):
        raise DataError(
            f"max_new_tokens {max_new_tokens}, temperature {temperature} and top_k {top_k} cannot be used",
            hint="max_new_tokens and top_k are at least 1, the temperature is at least 0",
        )


def _end_tokens(eos: int | Collection[int] | None) -> list[int]:
    named = [eos] if isinstance(eos, int | str | None) else list(eos)
    # A config is a file, and may hold anything.
    return [token for token in named if type(token) is int]


def _last_logits(output: Any) -> Tensor:
    logits_BTV = output if isinstance(output, Tensor) else output.logits
    logits_BV = logits_BTV[:, -1].float().cpu()
    if not bool(logits_BV.amax(dim=-1).isfinite().all()):
        raise CaptureError(
            "the decoder gives logits that are infinite or not a number, so no token can be drawn",
            hint=f"load it with {option('dtype', 'float32')}",
        )
    return logits_BV


def _choose(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    if temperature == 0.0:
        return logits_BV.argmax(dim=-1)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        # By rank and not by value: equal logits at the border would let more than k through.
        top_BK, rank_BK = logits_BV.topk(top_k, dim=-1)
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter(-1, rank_BK, top_BK)
    # The largest logit is taken off first, so that a tiny temperature gives no infinities.
    peaked_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / fitted_temperature(temperature)
    return torch.multinomial(peaked_BV.softmax(dim=-1), 1, generator=generator)[:, 0]
