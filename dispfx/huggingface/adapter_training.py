"""Train adapters, step by step, so that an interrupted run goes on where it was, bit for bit on a CPU.

The step is that of transformers' Trainer: AdamW without weight decay, gradients clipped to a norm of 1, a
learning rate that falls to zero in a line.  The Trainer's own saved states hold pickles, which dispfx does
not read; here a state is one safetensors file, as while masks are learned (`dispfx.learning.state`).

Shape legend: B sequences a step, T tokens of a sequence.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.errors import DataError, DispfxError
from dispfx.huggingface.adapters import TuneSettings
from dispfx.learning.interrupt import ending_as_interrupt, uninterrupted
from dispfx.learning.state import Position, load_state, save_state
from dispfx.learning.text import Batches
from dispfx.words.option_names import option

SAVE_EVERY = 500
_LARGEST_NORM = 1.0


@dataclass(frozen=True)
class TuneStep:
    """One step: its number, counted from 1, its loss in nats a token, and its learning rate."""

    step: int
    loss: float
    lr: float


@dataclass(frozen=True)
class Keeping:
    """Where a run keeps its state.

    Args:
        folder: of the state; it is made when the first one is saved.
        decoder: what identifies the decoder that adapters are trained on; a state of another one is refused.
        save_every: steps between two saved states.
        resume: go on from the state, where there is one.
    """

    folder: Path
    decoder: str
    save_every: int = SAVE_EVERY
    resume: bool = False

    def __post_init__(self) -> None:
        """Check the number of steps.

        Raises:
            DispfxError: if it is none.
        """
        if self.save_every < 1:
            raise DispfxError(f"save_every must be at least 1, and {self.save_every} was given")


@dataclass(eq=False)
class _Run:
    """What changes while adapters are trained."""

    adapters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    device: torch.device
    losses: list[float] = field(default_factory=list)
    # Of dropout, as they were when the last step was done.
    generators: dict[str, Tensor] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)


def train(
    tuned: Any,
    text: Batches,
    settings: TuneSettings,
    device: torch.device,
    on_step: Callable[[TuneStep], None],
    keeping: Keeping,
) -> list[TuneStep]:
    """Train the adapters in place, and return all steps of the run, also those before it was resumed.

    Args:
        tuned: a decoder with adapters, which alone can learn.
        text: batches (B, T) of the settings' sizes.
        on_step: called with every step that this process does.

    Raises:
        DataError, PlanMismatchError: if the state to go on from belongs to another run, or is damaged.
        DispfxError: if a loss is not finite.
        KeyboardInterrupt: after the state was saved.
    """
    torch.manual_seed(settings.seed)
    adapters = {name: one for name, one in tuned.named_parameters() if one.requires_grad}
    run = _Run(adapters, torch.optim.AdamW(adapters.values(), settings.lr, weight_decay=0.0), device)
    run.generators = _generators(device)
    identity = _identity(run, text, settings, keeping)
    if keeping.resume:
        _restore(run, load_state(keeping.folder, identity), settings, keeping.folder)

    def save() -> None:
        # A second request to end must not cut the first one's state off.
        with uninterrupted():
            keeping.folder.mkdir(parents=True, exist_ok=True)
            save_state(keeping.folder, identity, Position(run.step), _tensors(run))

    tuned.train()
    on_card = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_card, ending_as_interrupt():
        try:
            while run.step < settings.steps:
                on_step(_advance(tuned, run, text, settings))
                if run.step == settings.steps or run.step % keeping.save_every == 0:
                    save()
        except KeyboardInterrupt:
            save()
            raise
    tuned.eval()
    return [TuneStep(at + 1, loss, _lr(settings, at)) for at, loss in enumerate(run.losses)]


def _advance(tuned: Any, run: _Run, text: Batches, settings: TuneSettings) -> TuneStep:
    """Do one step; interrupted in between, it has changed nothing that a state holds."""
    ids_BT = text.batch(run.step).to(run.device)
    run.optimizer.zero_grad(set_to_none=True)
    loss = getattr(tuned(input_ids=ids_BT, labels=ids_BT), "loss", None)
    if loss is None:
        raise _no_loss(tuned)
    value = float(loss.detach())
    if not math.isfinite(value):
        raise _not_finite(f"the loss of step {run.step + 1}", value)
    loss.backward()
    norm = float(nn.utils.clip_grad_norm_(run.adapters.values(), _LARGEST_NORM))
    if not math.isfinite(norm):
        raise _not_finite(f"the norm of its gradient in step {run.step + 1}", norm)
    lr = _lr(settings, run.step)
    with uninterrupted():
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        run.optimizer.step()
        run.generators = _generators(run.device)
        run.losses.append(value)
    return TuneStep(run.step, value, lr)


def _no_loss(tuned: Any) -> DispfxError:
    # peft's model stands around the decoder.
    decoder = tuned.get_base_model() if hasattr(tuned, "get_base_model") else tuned
    return DispfxError(
        "fine-tuning needs a decoder whose forward takes `labels` and returns a `loss`, as those of "
        "transformers do, and this one returns none",
        where=type(decoder).__name__,
        hint="add the loss to the decoder's forward, or train the folder with a loop of your own",
    )


def _not_finite(what: str, value: float) -> DispfxError:
    return DispfxError(
        f"{what} is {value}, and no adapters were written",
        hint=f"try a smaller {option('lr')}, or {option('dtype', 'float32')}, "
        f"without {option('resume')} where a state was saved",
    )


def _lr(settings: TuneSettings, step: int) -> float:
    return settings.lr * (1.0 - step / settings.steps)


def _identity(run: _Run, text: Batches, settings: TuneSettings, keeping: Keeping) -> dict[str, Any]:
    return {
        "decoder": keeping.decoder,
        "sites": list(run.adapters),
        "budget": {},
        "settings": asdict(settings),
        "text": text.digest,
        "device": run.device.type,
    }


def _generators(device: torch.device) -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _tensors(run: _Run) -> dict[str, Tensor]:
    """Return all tensors of a run under flat names."""
    tensors: dict[str, Tensor] = {"losses": torch.tensor(run.losses, dtype=torch.float64)}
    for name, adapter in run.adapters.items():
        tensors[f"adapter.{name}"] = adapter
        for key, value in run.optimizer.state[adapter].items():
            tensors[f"optimizer.{key}.{name}"] = value
    return tensors | {f"generator.{name}": state for name, state in run.generators.items()}


def _restore(
    run: _Run, found: tuple[Position, dict[str, Tensor]] | None, settings: TuneSettings, folder: Path
) -> None:
    """Put a state back, where there is one.

    Raises:
        DataError: if something is missing in it, or has another shape.
    """
    if found is None:
        return
    position, tensors = found
    try:
        losses = tensors["losses"].tolist()
        if not len(losses) == position.step <= settings.steps:
            raise ValueError(f"{len(losses)} losses of {position.step} steps of {settings.steps}")
        with torch.no_grad():
            for name, adapter in run.adapters.items():
                adapter.copy_(tensors[f"adapter.{name}"])
        run.optimizer.load_state_dict(_optimizer_state(run, tensors))
        torch.set_rng_state(tensors["generator.cpu"])
        if run.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["generator.cuda"], run.device)
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise DataError(
            f"the state to resume from is damaged: {error}",
            where=str(folder),
            hint=f"start again without {option('resume')}",
        ) from error
    run.losses, run.generators = losses, _generators(run.device)


def _optimizer_state(run: _Run, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    keys = ("step", "exp_avg", "exp_avg_sq")
    state = {
        at: {key: tensors[f"optimizer.{key}.{name}"] for key in keys}
        for at, name in enumerate(run.adapters)
        # AdamW keeps nothing of an adapter that no step has reached.
        if tensors["losses"].numel() and any(f"optimizer.{key}.{name}" in tensors for key in keys)
    }
    for at, adapter in enumerate(run.adapters.values()):
        for key in keys[1:] if at in state else ():
            if state[at][key].shape != adapter.shape:
                raise ValueError(f"{key} has the shape {tuple(state[at][key].shape)}")
    return {"state": state, "param_groups": run.optimizer.state_dict()["param_groups"]}
