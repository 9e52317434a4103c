"""LoRA on a pruned decoder: PEFT's adapters, trained by transformers' Trainer.

Adapters lie on the smaller modules inside those that read and write, so pruned features stay zeros of the
computation, whatever is learned.

Shape legend: T tokens of a sequence, N tokens of the text.
"""

import contextlib
import importlib
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from dispfx.errors import DataError, DispfxError


@dataclass(frozen=True)
class TuneSettings:
    """How adapters are trained.

    Args:
        rank: of each adapter's product.
        alpha: an adapter is scaled by alpha / rank.
        lr: learning rate of AdamW at the first step; it falls to zero in a line.
        steps: of the optimizer.
        batch_size: sequences a step.
        seq_len: T.
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


@dataclass(frozen=True)
class TuneStep:
    """One step: its number, counted from 1, its loss in nats a token, and its learning rate."""

    step: int
    loss: float
    lr: float


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


def train(
    tuned: Any,
    tokens_N: Tensor,
    settings: TuneSettings,
    device: torch.device,
    on_step: Callable[[TuneStep], None],
) -> None:
    """Train the adapters in place on sequences of T tokens side by side, in an order drawn from the seed.

    Raises:
        DataError: if the text is shorter than one sequence.
        DispfxError: if a loss is not finite.
    """
    sequences = _Sequences(tokens_N, settings.seq_len)
    with tempfile.TemporaryDirectory() as nowhere, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = _OneDevice(
            output_dir=nowhere,
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.lr,
            seed=settings.seed,
            use_cpu=device.type == "cpu",
            dataloader_pin_memory=device.type != "cpu",
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        arguments.chosen = device
        trainer = Trainer(tuned, arguments, train_dataset=sequences, callbacks=[_Steps(on_step)])
        trainer.remove_callback(PrinterCallback)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            trainer.train()
    tuned.eval()


def save_adapters(tuned: Any, folder: Path) -> None:
    """Write the adapters and their config into `folder`."""
    tuned.save_pretrained(folder, save_embedding_layers=False)


def load_adapters(model: nn.Module, folder: Path) -> Any:
    """Return a decoder with the adapters of `folder`, in evaluation mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft_library().PeftModel.from_pretrained(model, folder).eval()


class _OneDevice(TrainingArguments):
    """The Trainer takes the first card, and spreads over all of them; here it is told which one."""

    chosen = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        _ = super().device  # sets up what the Trainer asks for elsewhere
        return self.chosen

    @property
    def n_gpu(self) -> int:
        return int(self.chosen.type != "cpu")


class _Sequences(Dataset):
    def __init__(self, tokens_N: Tensor, length: int):
        count = len(tokens_N) // length
        if not count:
            raise DataError(
                f"a sequence has {length} tokens, and the text to learn from has {len(tokens_N)}",
                hint="give a longer text, or a smaller --seq-len",
            )
        self.tokens_ST = tokens_N[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.tokens_ST)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids_T = self.tokens_ST[index].long()
        return {"input_ids": ids_T, "labels": ids_T}


class _Steps(TrainerCallback):
    def __init__(self, on_step: Callable[[TuneStep], None]):
        self.on_step = on_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Pass on the loss of a step; the Trainer's last entry is a summary and has none."""
        if not logs or "loss" not in logs:
            return
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise DispfxError(
                f"the loss of step {state.global_step} is {loss}, and nothing was written",
                hint="try a smaller --lr, or --dtype float32",
            )
        self.on_step(TuneStep(state.global_step, loss, float(logs["learning_rate"])))
