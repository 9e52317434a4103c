"""Train a pruned decoder to predict what the dense one predicts (`dispfx.learning.divergence`).

    loss = KL(dense ‖ pruned) + w · distance of their residual streams      means over the tokens of a batch
    every so many steps: KL on held-out text; the best weights are kept, and a run without a better
    measurement for `patience` of them ends

What is trained is the student's business: scales of features, weights, or adapters.  AdamW works on float32
copies where the weights have fewer digits.  With several ranks each computes its rows of every batch, and
all of them do the step of the mean gradient, so N ranks do what one rank does with the whole batch.

A state is one safetensors file, as while masks are learned (`dispfx.learning.state`).

Legend: B batch, T tokens.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.distributed.ranks import ALONE, RankLost, Ranks
from dispfx.errors import DataError, DispfxError
from dispfx.learning.divergence import (
    ChunkDivergence,
    Predictions,
    ValueDistance,
    distance_and_gradient,
    divergence_and_gradient,
    kl_divergence,
    stream_distance,
)
from dispfx.learning.interrupt import ending_as_interrupt, uninterrupted
from dispfx.learning.recovery_state import SavedRecovery, is_measured_at, moments_of
from dispfx.learning.state import Position, load_state, save_state
from dispfx.learning.text import Batches, Prefetcher
from dispfx.settings.recovery_settings import WARM_UP, RecoverySettings
from dispfx.words.option_names import option

_LARGEST_NORM = 1.0

Predicting = Callable[[Tensor], Predictions]
Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Student:
    """A decoder that learns.

    Args:
        predictions: of every token of a batch (B, T).
        trained: what is trained, by name; it requires gradients, and nothing else does.
    """

    predictions: Predicting
    trained: Mapping[str, nn.Parameter]


@dataclass(frozen=True, eq=False)
class RecoveryPass:
    """The pass of a step: both decoders' predictions, their loss, and its gradients.

    Args:
        teacher: the dense decoder, which does not learn.
        student: what learns.
        trained: what is trained of it.
        stream_weight: w; the streams are not looked at where it is 0.
        divergence: `divergence_and_gradient`, or the same compiled.
        distance: `distance_and_gradient`, or the same compiled.
    """

    teacher: Predicting
    student: Predicting
    trained: tuple[nn.Parameter, ...]
    stream_weight: float
    divergence: ChunkDivergence = divergence_and_gradient
    distance: ValueDistance = distance_and_gradient

    def __call__(self, ids_BT: Tensor) -> tuple[Tensor, Gradients]:
        """Return KL in nats a token, and the loss's gradient for each of what is trained that it reaches.

        Raises:
            DataError: as `kl_divergence` and `stream_distance`.
        """
        with torch.no_grad():
            teacher = self.teacher(ids_BT)
        student = self.student(ids_BT)
        kl = loss = kl_divergence(teacher, student, chunk=self.divergence)
        if self.stream_weight:
            loss = kl + self.stream_weight * stream_distance(teacher, student, of_value=self.distance)
        return kl.detach(), torch.autograd.grad(loss, self.trained, allow_unused=True)


@dataclass(frozen=True)
class RecoveryStep:
    """One step: its number, counted from 1, its KL in nats a token, and its learning rate."""

    step: int
    loss: float
    lr: float


@dataclass(frozen=True)
class HeldOut:
    """KL on held-out text after so many steps, in nats a token."""

    step: int
    kl: float


@dataclass(frozen=True, eq=False, kw_only=True)
class RecoveryTask:
    """What is trained, towards what, on what.

    Args:
        student: what learns.
        teacher: the dense decoder, which does not.
        decoder: identifies both; a state of other ones is refused.
        text: batches (B, T) to learn from.
        held_out: batches (1, T) that are never learned from; one or more.
        settings: of the run, with nothing left open.
        device: of the decoders.
        ranks: the processes of the run; all call `recover` with the same task.
        faster: a faster way to compute what `plain_pass` does.
    """

    student: Student
    teacher: Predicting
    decoder: str
    text: Batches
    held_out: Sequence[Tensor]
    settings: RecoverySettings
    device: torch.device
    ranks: Ranks = ALONE
    faster: Callable[[Tensor], tuple[Tensor, Gradients]] | None = None

    @property
    def plain_pass(self) -> RecoveryPass:
        """The pass of a step, operation by operation."""
        trained = tuple(self.student.trained.values())
        return RecoveryPass(self.teacher, self.student.predictions, trained, self.settings.stream_weight)

    @property
    def identity(self) -> dict[str, Any]:
        """What a run that is resumed must share with this one."""
        return {
            "decoder": self.decoder,
            "sites": [],
            "budget": {},
            "settings": self.settings.identity,
            "text": self.text.digest,
            "device": self.device.type,
        }


@dataclass(frozen=True, eq=False)
class Keeping:
    """Where a run keeps its state, and who is told of its steps.

    Args:
        folder: of the state; it is made when the first one is saved.
        resume: go on from the state, where there is one.
        on_step: called with every step that this process does.
    """

    folder: Path
    resume: bool = False
    on_step: Callable[[RecoveryStep], None] = lambda step: None


@dataclass(frozen=True, eq=False)
class Recovered:
    """What a run did; the student has the best weights.

    Args:
        steps: all of the run, also those before it was resumed.
        held_out: the measurements, the first one before any step.
    """

    steps: tuple[RecoveryStep, ...]
    held_out: tuple[HeldOut, ...]

    @property
    def best(self) -> HeldOut:
        """The measurement of the weights that the student has."""
        return min(self.held_out, key=lambda one: one.kl)


def recover(task: RecoveryTask, keeping: Keeping) -> Recovered:
    """Train the student in place until held-out KL stops falling, and give it its best weights.

    Raises:
        DataError, PlanMismatchError: if the state to go on from belongs to another run, or is damaged.
        DispfxError: if a loss is not finite, or the ranks cannot share a batch.
        KeyboardInterrupt, RankLost: after the state was saved.
    """
    task.ranks.check(task.settings.batch_size, 1)
    run = _Run(task)
    if keeping.resume:
        run.resume(keeping.folder)

    def save() -> None:
        # A second request to end must not cut the first one's state off.
        with uninterrupted():
            if task.ranks.leads:
                keeping.folder.mkdir(parents=True, exist_ok=True)
                save_state(keeping.folder, task.identity, Position(run.step), run.tensors())

    with _on_device(task.device), ending_as_interrupt():
        try:
            while not run.measured():
                keeping.on_step(run.advance())
                if run.step == task.settings.steps or run.step % task.settings.save_every == 0:
                    save()
        except (KeyboardInterrupt, RankLost):
            save()
            raise
    run.take_best()
    steps = (
        RecoveryStep(at + 1, loss, learning_rate(task.settings, at)) for at, loss in enumerate(run.losses)
    )
    return Recovered(tuple(steps), tuple(run.held_out))


def learning_rate(settings: RecoverySettings, step: int) -> float:
    """Return the learning rate of a step, counted from 0: a short rise, then half a cosine to 0."""
    rise = min(1.0, (step + 1) / max(1.0, WARM_UP * settings.steps))
    return settings.lr * rise * 0.5 * (1.0 + math.cos(math.pi * step / settings.steps))


@torch.no_grad()
def held_out_divergence(task: RecoveryTask) -> float:
    """Return KL on the held-out text, in nats a token, the same number on every rank."""
    ranks, most = task.ranks, task.settings.batch_size
    total = torch.zeros(2, dtype=torch.float64, device=task.device)
    own = task.held_out[ranks.rank :: ranks.size]
    for start in range(0, len(own), most):
        ids_BT = torch.cat(list(own[start : start + most])).to(task.device)
        kl = kl_divergence(task.teacher(ids_BT), task.student.predictions(ids_BT))
        total += torch.stack([kl.double() * len(ids_BT), torch.tensor(len(ids_BT)).to(kl)])
    divergence, count = ranks.average(total).tolist()
    return divergence / count


def bytes_in_float32(dtype: torch.dtype) -> int:
    """Return the bytes per trained weight of its gradient, AdamW's two moments, and a copy in float32.

    Args:
        dtype: of the weights; those in float32 need no copy.
    """
    return 12 if dtype.itemsize >= 4 else 16


@dataclass(eq=False)
class _Run:
    """What changes while a student learns."""

    task: RecoveryTask
    losses: list[float] = field(default_factory=list)
    held_out: list[HeldOut] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        task = self.task
        # The weights themselves, or float32 copies of weights with fewer digits.
        self.masters = {
            name: one if one.dtype is torch.float32 else nn.Parameter(one.detach().float())
            for name, one in task.student.trained.items()
        }
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), task.settings.lr, weight_decay=0.0, fused=True
        )
        self.gradients = task.faster or task.plain_pass
        self.batches = Prefetcher(lambda index: task.ranks.rows(task.text.batch(index)), task.device)

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    def measured(self) -> bool:
        """Measure KL on the held-out text where that is due, and return whether the run is at its end."""
        settings = self.task.settings
        last = self.step == settings.steps
        if is_measured_at(self.step, settings) and (not self.held_out or self.held_out[-1].step != self.step):
            found = HeldOut(self.step, held_out_divergence(self.task))
            with uninterrupted():
                if not self.held_out or found.kl < min(one.kl for one in self.held_out):
                    self.best = self._copy()
                self.held_out.append(found)
        best = min(self.held_out, key=lambda one: one.kl)
        return last or self.held_out.index(best) < len(self.held_out) - settings.patience

    def advance(self) -> RecoveryStep:
        """Do one step; interrupted in between, it has changed nothing that a state holds."""
        task = self.task
        ids_BT = self.batches.get(self.step)
        kl, gradients = self.gradients(ids_BT)
        value = float(task.ranks.average(kl.clone()))
        if not math.isfinite(value):
            raise _not_finite(f"the loss of step {self.step + 1}", value)
        self._take(gradients)
        del gradients
        norm = float(nn.utils.clip_grad_norm_(self.masters.values(), _LARGEST_NORM))
        if not math.isfinite(norm):
            raise _not_finite(f"the norm of the gradient of step {self.step + 1}", norm)
        lr = learning_rate(task.settings, self.step)
        with uninterrupted():
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self._give_weights()
            self.losses.append(value)
        self.optimizer.zero_grad(set_to_none=True)
        return RecoveryStep(self.step, value, lr)

    def _take(self, gradients: Gradients) -> None:
        """Let the float32 weights have the gradients, averaged over the ranks."""
        for master, gradient in zip(self.masters.values(), gradients, strict=True):
            if gradient is not None:
                master.grad = self.task.ranks.average(gradient.float())

    @torch.no_grad()
    def _give_weights(self) -> None:
        """Let the student compute with the float32 weights, rounded where it has fewer digits."""
        for name, weight in self.task.student.trained.items():
            if self.masters[name] is not weight:
                weight.copy_(self.masters[name])

    def _copy(self) -> dict[str, Tensor]:
        return {name: one.detach().to("cpu", copy=True) for name, one in self.task.student.trained.items()}

    @torch.no_grad()
    def take_best(self) -> None:
        """Give the student the weights of the best measurement."""
        for name, weight in self.task.student.trained.items():
            weight.copy_(self.best[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the run under flat names."""
        tensors = {
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "held_out": torch.tensor([[one.step, one.kl] for one in self.held_out], dtype=torch.float64),
        }
        for name, master in self.masters.items():
            tensors[f"weight.{name}"] = master
            for key, value in self.optimizer.state[master].items():
                tensors[f"optimizer.{key}.{name}"] = value
        return tensors | {f"best.{name}": tensor for name, tensor in self.best.items()}

    def resume(self, folder: Path) -> None:
        """Put a state back, where there is one; every rank reads it.

        Raises:
            DataError: if it is damaged, or not every rank finds it.
        """
        found = load_state(folder, self.task.identity)
        step = torch.tensor(float(-1 if found is None else found[0].step), device=self.task.device)
        if float(self.task.ranks.average(step.clone())) != float(step):
            raise DataError(
                "the processes of the run find different states to resume from",
                where=str(folder),
                hint=f"put {option('out')} on a disk that all hosts share",
            )
        if found is None:
            return
        try:
            self._restore(*found)
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise DataError(
                f"the state to resume from is damaged: {error}",
                where=str(folder),
                hint=f"start again without {option('resume')}",
            ) from error

    @torch.no_grad()
    def _restore(self, position: Position, tensors: Mapping[str, Tensor]) -> None:
        saved = SavedRecovery(position.step, tensors, self.task.settings)
        saved.check(self.masters, self.task.student.trained)
        state = moments_of(self.masters, tensors)
        for name, master in self.masters.items():
            master.copy_(tensors[f"weight.{name}"])
        self._give_weights()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.losses = tensors["losses"].tolist()
        self.held_out = [HeldOut(int(step), kl) for step, kl in tensors["held_out"].tolist()]
        self.best = {name: tensors[f"best.{name}"] for name in self.masters if self.held_out}


def _not_finite(what: str, value: float) -> DispfxError:
    return DispfxError(
        f"{what} is {value}, and nothing was written",
        hint=f"try a smaller {option('lr')}, without {option('resume')} where a state was saved",
    )


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
