"""The control of a recovery: the dense decoder itself, tuned by cross entropy on the same text.

It says what the style of that text is worth.  Steps, rate and batches are those of `recover --train weights`,
and the weights with the best loss on the held-out end of the text are kept, as there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import module_logits
from dispfx.learning.distillation import learning_rate
from dispfx.learning.objective import next_token_loss
from dispfx.quality.agreement import Comparison, compare_on_text
from dispfx.run.opening import open_model
from dispfx.run.recovery_job import held_out_sequences, recovery_batches
from dispfx.run.run_text import Text, TextChoice, open_text
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.settings.sections import ModelSettings, TextSettings
from dispfx.source import Source
from dispfx.source.source import context_of


@dataclass(frozen=True)
class Control:
    """What is tuned, on what, and how it is measured.

    Args:
        model: MODEL and its dtype and device.
        text: to learn from and to measure on.
        settings: of the training.
        context: tokens per window to measure on; the decoder's by default.
        windows: to measure on at most.
    """

    model: ModelSettings
    text: TextSettings
    settings: RecoverySettings
    context: int | None
    windows: int | None

    def run(self) -> tuple[list[Comparison], int]:
        """Tune the decoder; return how it differs from itself on every text, and the tokens seen."""
        dense = open_model(self.model)
        tuned = open_model(ModelSettings(self.model.model, dtype="float32", device=self.model.device))
        text = open_text(dense, TextChoice(self.text))
        context = context_of(dense)
        settings = self.settings.fitted(context, demo=dense.origin == "demo")
        steps = self._tune(tuned, text, settings)
        tuned.model.to(next(dense.model.parameters()).dtype)
        found = [
            compare_on_text(
                partial(module_logits, dense.model),
                partial(module_logits, tuned.model),
                one.tokens,
                context=self.context or context,
                windows=self.windows,
                device=self.model.device or "cpu",
                text=one.about,
            )
            for one in text.measured
        ]
        return found, steps * settings.batch_size * settings.seq_len

    def _tune(self, source: Source, text: Text, settings: RecoverySettings) -> int:
        """Train the weights in place, and return the steps done."""
        model = source.model.requires_grad_(True)
        device = torch.device(self.model.device or "cpu")
        half = torch.autocast(device.type, torch.bfloat16, enabled=self.model.dtype == "bfloat16")
        batches = recovery_batches(text, settings)
        ends = batches.held_out_batches(held_out_sequences(settings))
        optimizer = torch.optim.AdamW(model.parameters(), settings.lr, weight_decay=0.0)

        def loss_of(ids_BT: Tensor) -> Tensor:
            with half:
                return next_token_loss(module_logits(model, ids_BT.to(device)), ids_BT.to(device))

        best = (_held_out(loss_of, ends), -1, _copy(model))
        for step in range(settings.steps):
            loss_of(batches.batch(step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % settings.measure_every == 0 or step + 1 == settings.steps:
                found = _held_out(loss_of, ends)
                if found < best[0]:
                    best = (found, step, _copy(model))
                elif step - best[1] >= settings.patience * settings.measure_every:
                    break
        model.load_state_dict(best[2])
        return step + 1


@torch.no_grad()
def _held_out(loss_of: Any, ends: Sequence[Tensor]) -> float:
    return sum(float(loss_of(one)) for one in ends) / len(ends)


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().cpu().clone() for name, one in model.state_dict().items()}
