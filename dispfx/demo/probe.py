"""Probe the skills of a decoder, because perplexity hides lost skills.

Entry point: `skill_probe`.

Each skill is asked about with fresh lines of the demo's own grammar.  Prompt and answer go through the
decoder in one pass, and a line counts as right when the decoder's first choice is the answer's token at
every place of the answer.  That is the same as generating greedily from the prompt and getting the whole
answer: up to the first wrong token both see the same ids.

Shapes: B lines, T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.demo.grammar import SKILLS, Line, draw_lines
from dispfx.errors import DataError

LINES_A_PASS = 64
NO_ANSWER = -1


@torch.no_grad()
def skill_probe(
    decoder: Callable[[Tensor], Any],
    tokenizer: Any,
    seed: int,
    samples: int,
    *,
    device: torch.device | None = None,
) -> dict[str, float]:
    """Returns, for each of `SKILLS`, the share of `samples` lines answered without any mistake.

    Args:
        decoder: ids (B, T) int64 → logits (B, T, V), or an output that has them as `.logits`; causal, so
            that padding on the right changes nothing before it.  A module gets ids on its own device and
            should be in eval mode.
        tokenizer: has `encode(text, add_special_tokens=False) -> list[int]`.
        seed: seeds of training texts are 2**32 and above, so that smaller ones ask something new.
        samples: lines for each skill.
        device: of the decoder, where it is no module.

    Raises:
        DataError: `samples` is not positive, the seed is negative, or a line has no tokens.
    """
    if samples < 1:
        raise DataError(f"a probe needs at least 1 line for each skill, but {samples} were asked for")
    device = device or _device(decoder)
    return {
        skill: _accuracy(decoder, tokenizer, draw_lines(skill, seed, samples), device) for skill in SKILLS
    }


def _accuracy(
    decoder: Callable[[Tensor], Any], tokenizer: Any, lines: list[Line], device: torch.device
) -> float:
    right = 0
    for start in range(0, len(lines), LINES_A_PASS):
        ids_BT, answers_BT = encode_lines(tokenizer, lines[start : start + LINES_A_PASS])
        output = decoder(ids_BT.to(device))
        chosen_BT = getattr(output, "logits", output).argmax(dim=-1).cpu()
        # The logits at a place choose the token at the next one.
        agrees_BT = (chosen_BT[:, :-1] == answers_BT[:, 1:]) | (answers_BT[:, 1:] == NO_ANSWER)
        right += int(agrees_BT.all(dim=1).sum())
    return right / len(lines)


def encode_lines(tokenizer: Any, lines: Sequence[Line]) -> tuple[Tensor, Tensor]:
    """Returns ids (B, T) of prompts with answers, padded on the right, and the answers alone in their places.

    In the second tensor every place outside an answer holds `NO_ANSWER`.
    """
    prompts = [tokenizer.encode(line.prompt, add_special_tokens=False) for line in lines]
    answers = [tokenizer.encode(line.answer, add_special_tokens=False) for line in lines]
    if not all(prompts) or not all(answers):
        raise DataError("the tokenizer turns a prompt or an answer of the probe into no tokens at all")
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids_BT = torch.zeros(len(lines), length, dtype=torch.int64)
    answers_BT = torch.full_like(ids_BT, NO_ANSWER)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids_BT[row, :end] = torch.tensor(prompt + answer)
        answers_BT[row, len(prompt) : end] = torch.tensor(answer)
    return ids_BT, answers_BT


def _device(decoder: Callable[[Tensor], Any]) -> torch.device:
    if not isinstance(decoder, nn.Module):
        return torch.device("cpu")
    return next((parameter.device for parameter in decoder.parameters()), torch.device("cpu"))
