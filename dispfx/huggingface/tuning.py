"""LoRA on a pruned decoder: PEFT's adapters.

Adapters lie on the smaller modules inside those that read and write, so pruned features stay zeros of the
computation, whatever is learned.
"""

import importlib
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dispfx.errors import DispfxError


@dataclass(frozen=True)
class TuneSettings:
    """How adapters are trained.

    Args:
        rank: of each adapter's product.
        alpha: an adapter is scaled by alpha / rank.
        lr: learning rate of AdamW at the first step; it falls to zero in a line.
        steps: of the optimizer.
        batch_size: sequences a step.
        seq_len: tokens a sequence.
        seed: of the adapters' first values and of the order of the sequences.
    """

    rank: int = 16
    alpha: float = 32.0
    lr: float = 2e-4
    steps: int = 1000
    batch_size: int = 8
    seq_len: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            DispfxError: naming the one with which no run makes sense.
        """
        for name, least in (("rank", 1), ("steps", 1), ("batch_size", 1), ("seq_len", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise DispfxError(f"{name} must be at least {least}, and {getattr(self, name)} was given")
        for name in ("alpha", "lr"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise DispfxError(f"{name} must be a number above 0, and {value} was given")


def peft_library() -> Any:
    """Return PEFT.

    Raises:
        DispfxError: if it, or accelerate, is not installed.
    """
    try:
        importlib.import_module("accelerate")
        return importlib.import_module("peft")
    except ImportError as error:
        raise DispfxError(
            f"fine-tuning needs PEFT and accelerate, which cannot be imported: {error}",
            hint="pip install 'dispfx[peft]'",
        ) from error


def with_adapters(model: nn.Module, settings: TuneSettings, base: str) -> Any:
    """Return the decoder with an adapter on every linear layer but the head; only adapters can learn.

    Args:
        base: what the adapters are for, as their config says it.

    Raises:
        DispfxError: if the decoder has no layer that PEFT can put an adapter on.
    """
    peft = peft_library()
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
