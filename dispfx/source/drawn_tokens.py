"""Draw tokens from a decoder of transformers, with its cache.

Shape legend: B batch, K tokens to begin with, S kept places, R kept sequences, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList

from dispfx.capturing.module_state import in_evaluation_mode


def can_sample(model: nn.Module) -> bool:
    """Whether transformers can generate with a decoder."""
    return isinstance(model, GenerationMixin)


class KeptLogits(LogitsProcessor):
    """Keeps the logits that some tokens of some sequences are drawn from.

    Args:
        places: of the tokens before those that are drawn, ascending.
        rows: of the sequences.
    """

    def __init__(self, places: Sequence[int], rows: Sequence[int]):
        self.places, self.rows = places, rows
        self._found: list[Tensor] = []

    @property
    def logits_SRV(self) -> Tensor:
        """What was kept, float32 on the CPU."""
        return torch.stack(self._found)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # On a GPU, drawing from such numbers would end the process's use of it.
        if not bool(scores.amax(-1).isfinite().all()):
            raise ValueError("the logits are infinite or not a number")
        if input_ids.shape[1] - 1 in self.places:
            self._found.append(scores[list(self.rows)].float().cpu())
        return scores


def sample_by_cache(
    model: Any, temperature: float, begun_BK: Tensor, new: int, seed: int, kept: KeptLogits
) -> Tensor:
    """Return sequences (B, K + new) that go on from some tokens, drawn from all that may follow.

    Args:
        model: a decoder for which `can_sample` holds; it runs in evaluation mode and is not changed.
        begun_BK: int64, on its device.
        seed: of the draws; global generators are left as they are.
        kept: keeps logits of the draws.
    """
    devices = [begun_BK.device] if begun_BK.device.type == "cuda" else []
    # The decoder's own generation settings fill what a call leaves open, and change what is likely.
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), in_evaluation_mode(model):
            torch.manual_seed(seed)
            return model.generate(
                begun_BK,
                attention_mask=torch.ones_like(begun_BK),
                do_sample=True,
                temperature=temperature,
                top_k=0,
                max_new_tokens=new,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([kept]),
            )
    finally:
        model.generation_config = own
