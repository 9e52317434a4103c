"""Draw tokens from a decoder of transformers, with its cache.

Shape legend: B batch, K tokens to begin with.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin


def can_sample(model: nn.Module) -> bool:
    """Whether transformers can generate with a decoder."""
    return isinstance(model, GenerationMixin)


def sample_by_cache(model: Any, temperature: float, begun_BK: Tensor, new: int, seed: int) -> Tensor:
    """Return sequences (B, K + new) that go on from some tokens, drawn from all that may follow.

    Args:
        model: a decoder for which `can_sample` holds; it is not changed.
        begun_BK: int64, on its device.
        seed: of the draws; global generators are left as they are.
    """
    devices = [begun_BK.device] if begun_BK.device.type == "cuda" else []
    # The decoder's own generation settings fill what a call leaves open, and change what is likely.
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(seed)
            return model.generate(
                begun_BK,
                attention_mask=torch.ones_like(begun_BK),
                do_sample=True,
                temperature=temperature,
                top_k=0,
                max_new_tokens=new,
                pad_token_id=0,
            )
    finally:
        model.generation_config = own
