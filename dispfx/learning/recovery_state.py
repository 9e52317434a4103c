"""The tensors of an interrupted recovery, checked before any of them is used.

losses            (steps,) float64              held_out          (measurements, 2) float64: step and KL
weight.NAME       as trained, in float32        best.NAME         as trained, from the first measurement on
optimizer.KEY.NAME, with KEY step, exp_avg and exp_avg_sq: once a step has reached NAME
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dispfx.learning.state import check_finite, check_forms, check_moments
from dispfx.settings.recovery_settings import RecoverySettings

_OF_ADAMW = ("step", "exp_avg", "exp_avg_sq")


def is_measured_at(step: int, settings: RecoverySettings) -> bool:
    """Whether KL on the held-out text is measured after so many steps."""
    return step == settings.steps or step % settings.measure_every == 0


def moments_of(names: Iterable[str], tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return the optimizer's state by the position of a weight; AdamW has none for what no step reached."""
    return {
        at: {key: tensors[f"optimizer.{key}.{name}"] for key in _OF_ADAMW}
        for at, name in enumerate(names)
        if _has_moments(name, tensors)
    }


@dataclass(frozen=True, eq=False)
class SavedRecovery:
    """A state that a run was asked to resume from.

    Args:
        step: steps done.
        tensors: by name.
        settings: of the run.
    """

    step: int
    tensors: Mapping[str, Tensor]
    settings: RecoverySettings

    def check(self, masters: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
        """Pass if this run can have saved it.

        Args:
            masters: the float32 weights that the run begins with, by name.
            trained: the weights of the student, by the same names.

        Raises:
            ValueError: if a tensor is missing, unknown, of another shape or dtype, or not finite, or the
                measurements or the optimizer's steps do not match the steps done.
        """
        if self.step > self.settings.steps:
            raise ValueError(f"it is at step {self.step} of {self.settings.steps}")
        due = self._measured_steps()
        check_forms(self._templates(due, masters, trained), self.tensors)
        check_finite({name: one for name, one in self.tensors.items() if name != "held_out"})
        # Weights may get so bad on the way that KL is not finite; those of the start are not.
        check_finite({"the first KL of held_out": self.tensors["held_out"][:1]})
        measured = [int(step) for step, _ in self.tensors["held_out"].tolist()]
        if measured != due:
            raise ValueError(f"held_out has steps {measured}, but this run measures at {due}")
        moments = moments_of(masters, self.tensors)
        if self.step and not moments:
            raise ValueError(f"the optimizer has no state after step {self.step}")
        for at, name in enumerate(masters):
            if at in moments:
                check_moments(moments[at], name, self.step)
            elif not torch.equal(self.tensors[f"weight.{name}"].to(masters[name].device), masters[name]):
                raise ValueError(f"the optimizer has no state of {name}, which was trained")

    def _measured_steps(self) -> list[int]:
        """Return the steps of the measurements; the last one may not have been made yet."""
        due = [step for step in range(self.step) if is_measured_at(step, self.settings)]
        found = self.tensors.get("held_out", torch.zeros(0)).numel() // 2
        return [*due, self.step] if is_measured_at(self.step, self.settings) and found > len(due) else due

    def _templates(
        self, due: list[int], masters: Mapping[str, Tensor], trained: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        expected = {
            "losses": torch.zeros(self.step, dtype=torch.float64),
            "held_out": torch.tensor([[step, 0.0] for step in due], dtype=torch.float64),
        }
        for name, master in masters.items():
            expected[f"weight.{name}"] = master
            if due:
                expected[f"best.{name}"] = trained[name]
            if self.step and _has_moments(name, self.tensors):
                expected[f"optimizer.step.{name}"] = torch.zeros((), dtype=torch.float32)
                expected |= {f"optimizer.{key}.{name}": master for key in _OF_ADAMW[1:]}
        return expected


def _has_moments(name: str, tensors: Mapping[str, Tensor]) -> bool:
    return any(f"optimizer.{key}.{name}" in tensors for key in _OF_ADAMW)
