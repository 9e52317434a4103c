"""Check that a run fits into memory, before it starts.

1. Before weights are read: the weights, and if a folder is written also their pruned copy.
2. Before learning: the estimate of `dispfx.estimate.run_estimate` without the weights, which are loaded by
   then.  If layers may be checkpointed, it is the estimate with checkpoints.
3. Before recovery, and before the learning that it follows: what AdamW holds.

The estimate may be wrong by 25%: a run is rejected only if it would not fit with 25% less.
"""

import torch

from dispfx.distributed.ranks import ALONE, Ranks
from dispfx.errors import DispfxError
from dispfx.estimate.free_memory import free_bytes
from dispfx.estimate.run_estimate import estimate
from dispfx.ir.program import Program
from dispfx.learning.distillation import bytes_in_float32
from dispfx.report.numbers import shown_bytes
from dispfx.run.learning_setup import own_part
from dispfx.settings import ComputeSettings, LearnSettings, ModelSettings
from dispfx.source import dtype_of
from dispfx.source.loaded_size import loaded_bytes
from dispfx.words.option_names import option

_SURE = 0.75


def require_room_for_weights(model: ModelSettings, *, copies: float = 1.0) -> None:
    """Raise if a decoder does not fit; a decoder of unknown size passes.

    Args:
        copies: minimum memory of the run, as a multiple of the weights.

    Raises:
        DispfxError: saying how much is missing and what would help.
    """
    if not isinstance(model.model, str):
        return
    size = loaded_bytes(model.model, dtype_of(model.dtype))
    if size is None:
        return
    for device in {torch.device("cpu"), torch.device(model.device or "cpu")}:
        free = free_bytes(device)
        if free is not None and _SURE * copies * size > free:
            raise _missing(
                f"the weights take {shown_bytes(size)}, and the run {copies:g} times as much",
                copies * size,
                free,
                device,
                f"{option('dtype', 'bfloat16')} halves float32 weights; "
                "`dispfx inspect MODEL --config-only` needs none",
            )


def require_room_to_learn(
    program: Program, settings: LearnSettings, compute: ComputeSettings, ranks: Ranks = ALONE
) -> None:
    """Raise if learning does not fit next to the loaded weights; sharded weights are not checked.

    Raises:
        DispfxError: saying how much is missing and what would help.
    """
    if settings.method != "learned" or compute.shard_on is not None:
        return
    own = own_part(settings, ranks)
    found = estimate(program, own)
    checkpoints, compiled = compute.checkpointing != "off", compute.compiles(program.device)
    needed = found.beside_weights(checkpoints=checkpoints, compiled=compiled)
    free = free_bytes(program.device)
    if free is not None and _SURE * needed > free:
        raise _missing(
            f"learning takes {shown_bytes(needed)} in addition to the weights: "
            f"{shown_bytes(found.hypernetwork_bytes)} for the hypernetwork, the rest for a step of "
            f"{own.batch_size} × {own.seq_len} tokens",
            needed,
            free,
            program.device,
            f"a smaller {option('batch_size')} or {option('seq_len')}"
            + (f", {option('checkpointing', 'on')}" if compute.checkpointing == "off" else "")
            + (f", {option('hypernetwork', 'linear')}" if settings.hypernetwork == "full" else "")
            + f", or {option('launch')}",
        )


def require_room_to_recover(parameters: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise if training so many weights does not fit next to the loaded decoders.

    To what AdamW holds comes a weight's best value so far, and its own gradient in half precision.

    Args:
        parameters: that are trained.
        dtype: that they are stored in.

    Raises:
        DispfxError: saying how much is missing and what would help.
    """
    each = bytes_in_float32(dtype) + 4 + (dtype.itemsize if dtype.itemsize < 4 else 0)
    needed, free = each * parameters, free_bytes(device)
    if free is not None and _SURE * needed > free:
        raise _missing(
            f"recovery takes {shown_bytes(needed)} for {parameters:,} weights, {each} bytes each",
            needed,
            free,
            device,
            "train one number per kept feature (scales), or adapters, in place of all weights",
        )


def _missing(what: str, needed: float, free: int, device: torch.device, hint: str) -> DispfxError:
    return DispfxError(
        f"{what}; {shown_bytes(free)} are free on {device}, so {shown_bytes(needed - free)} are missing",
        hint=hint,
    )
