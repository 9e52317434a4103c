"""LoRA on a pruned decoder: PEFT's adapters.

Adapters lie on the smaller modules inside those that read and write, so pruned features stay zeros of the
computation, whatever is learned.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.errors import DispfxError
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.words.extras import library
from dispfx.words.option_names import option


def peft_library() -> Any:
    """Return PEFT.

    Raises:
        DataError: if it, or accelerate, is not installed.
    """
    needed = "adapters need PEFT and accelerate, which"
    library("accelerate", "peft", needed)
    return library("peft", "peft", needed)


def with_adapters(model: nn.Module, settings: RecoverySettings, base: str) -> Any:
    """Return the decoder with an adapter on every linear layer but the head; only adapters can learn.

    Args:
        base: what the adapters are for, as their config says it.

    Raises:
        DispfxError: if the decoder has no layer that PEFT can put an adapter on, or only ones narrower than
            the rank.
    """
    peft = peft_library()
    weights = (getattr(module, "weight", None) for module in model.modules())
    most = max((min(one.shape) for one in weights if isinstance(one, Tensor) and one.dim() == 2), default=0)
    if settings.rank > most:
        raise DispfxError(
            f"no layer has room for adapters of rank {settings.rank:,}; the widest one has {most:,} features",
            where=base,
            hint=f"use a smaller {option('rank')}; 8 to 64 are usual",
        )
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    torch.manual_seed(settings.seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tuned = peft.get_peft_model(model, config)
    except ValueError as error:
        raise DispfxError(f"PEFT cannot put adapters on this decoder: {error}", where=base) from error
    tuned.peft_config["default"].base_model_name_or_path = base
    return tuned


def save_adapters(tuned: Any, folder: Path) -> None:
    """Write the adapters and their config into `folder`."""
    tuned.save_pretrained(folder, save_embedding_layers=False)


def load_adapters(model: nn.Module, folder: Path) -> Any:
    """Return a decoder with the adapters of `folder`, in evaluation mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft_library().PeftModel.from_pretrained(model, folder).eval()
