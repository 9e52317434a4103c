"""Choose how recovery computes the pass of a step, and check every choice against the plainer one before it.

    graphs as they are → compiled → one CUDA graph

Every layer of a pruned decoder has other widths, so its graph is compiled as a whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dispfx.errors import DispfxError, first_line
from dispfx.fast_decoder.comparison import Outcome, difference
from dispfx.fast_decoder.decoder import compiled_function
from dispfx.kernels.recording import Replayed
from dispfx.learning.distillation import (
    Gradients,
    Predicting,
    RecoveryPass,
    RecoveryTask,
    bytes_in_float32,
)
from dispfx.learning.divergence import Predictions

Pass = Callable[[Tensor], tuple[Tensor, Gradients]]

# Compiling takes as long as this many steps save (docs/log/2026-11-learning.md).
_WORTH_COMPILING = 2000


@runtime_checkable
class Compilable(Protocol):
    """Predictions that can be compiled."""

    def __call__(self, ids_BT: Tensor) -> Predictions:
        """Return the predictions of a batch (B, T)."""
        ...

    def compiled(self) -> Predicting:
        """Return the same, which compiles itself when it is first called."""
        ...


def fastest_pass(
    task: RecoveryTask, dtype: torch.dtype, note: Callable[[str], None] = lambda text: None
) -> Pass:
    """Return the pass of a step as fast as it can be trusted; the plain one on a CPU, or with adapters.

    Args:
        dtype: that the decoders compute in.
        note: told every choice.

    Raises:
        DataError: as `RecoveryPass`.
    """
    plain = task.plain_pass
    if task.device.type != "cuda" or not is_compilable(plain):
        return plain
    ids_BT = task.ranks.rows(task.text.batch(0)).to(task.device)
    trial = Trial(ids_BT, plain(ids_BT), dtype, note)
    best = trial.better("compiled losses", lambda: with_compiled_losses(plain), plain)
    if task.settings.steps >= _WORTH_COMPILING:
        of_losses = best
        best = trial.better("compiled graphs", lambda: with_compiled_graphs(of_losses), best)
    to_record = best
    return trial.better("one CUDA graph", lambda: _replayed(task, to_record, ids_BT), best)


def _replayed(task: RecoveryTask, plain: RecoveryPass, ids_BT: Tensor) -> Pass:
    """Return a pass as a CUDA graph, which holds the memory of a step from now on.

    Raises:
        DispfxError: if that leaves too little for the optimizer.
    """
    made = Replayed(task.device, plain, ids_BT)
    torch.cuda.empty_cache()
    # The gradients that this is compared with are gone by then.
    needed = sum(one.numel() * (bytes_in_float32(one.dtype) - one.itemsize) for one in plain.trained)
    if torch.cuda.mem_get_info(task.device)[0] < needed:
        raise DispfxError("it leaves too little memory for the optimizer")
    return made


def is_compilable(plain: RecoveryPass) -> bool:
    """Whether the graphs of a pass can be compiled, which those of a transformers model cannot."""
    return isinstance(plain.teacher, Compilable) and isinstance(plain.student, Compilable)


def with_compiled_losses(plain: RecoveryPass) -> RecoveryPass:
    """Return a pass that compiles its losses when it first runs."""
    losses = compiled_function(plain.divergence), compiled_function(plain.distance)
    return replace(plain, divergence=losses[0], distance=losses[1])


def with_compiled_graphs(plain: RecoveryPass) -> RecoveryPass:
    """Return a pass that compiles the graphs of both decoders when it first runs."""
    assert isinstance(plain.teacher, Compilable) and isinstance(plain.student, Compilable)
    return replace(plain, teacher=plain.teacher.compiled(), student=plain.student.compiled())


@dataclass(frozen=True, eq=False)
class Trial:
    """What every way to compute a pass is compared on.

    Args:
        ids_BT: a batch of the shape of all batches.
        expected: of the plain pass.
        dtype: that the decoders compute in.
        note: told every choice.
    """

    ids_BT: Tensor
    expected: tuple[Tensor, Gradients]
    dtype: torch.dtype
    note: Callable[[str], None]

    def better(self, what: str, make: Callable[[], Pass], otherwise: Any) -> Any:
        """Return what is made if it can be made, runs and agrees, else `otherwise`."""
        try:
            made = make()
            found = difference(_outcome(made(self.ids_BT)), _outcome(self.expected), self.dtype)
        except Exception as error:  # of a compiler, or what cannot be recorded; the plainer way is there
            self.note(f"recovery does without {what}: {first_line(error)}")
            return otherwise
        if not found.holds:
            self.note(f"recovery does without {what}, which differs from the plain pass ({found})")
            return otherwise
        self.note(f"recovery by {what}; difference to the plain pass: {found}")
        return made


def _outcome(found: tuple[Tensor, Gradients]) -> Outcome:
    kl, gradients = found
    return kl, [torch.zeros((), device=kl.device) if one is None else one for one in gradients]
