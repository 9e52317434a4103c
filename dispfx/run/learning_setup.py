"""From a program to the loss that learning calls, in the fastest form that passes its checks."""

from collections.abc import Callable
from dataclasses import replace

import torch

from dispfx.compiler.pipelines import for_learning, run_pipeline
from dispfx.distributed.ranks import ALONE, Ranks
from dispfx.errors import DispfxError
from dispfx.estimate.free_memory import free_bytes
from dispfx.estimate.run_estimate import estimate
from dispfx.fast_decoder.preparation import PreparedLoss, TrialBatch, prepare
from dispfx.fast_decoder.shards import Sharding, rows_of
from dispfx.ir.program import Program
from dispfx.ir.retype import placed
from dispfx.learning.objective import OBJECTIVES
from dispfx.learning.text import Batches
from dispfx.settings import ComputeSettings, LearnSettings
from dispfx.words.option_names import option

# Share of free memory; the rest is for workspaces of kernels.
_USABLE = 0.9


def prepared_loss(
    program: Program,
    text: Batches,
    settings: LearnSettings,
    compute: ComputeSettings,
    *,
    ranks: Ranks = ALONE,
    note: Callable[[str], None] = lambda text: None,
) -> PreparedLoss:
    """Return the loss of a decoder under masks, checked against the plain gated graph.

    Args:
        program: analysed, on the device to learn on unless its weights will be sharded; not changed.
        text: the ways to compute the loss are compared on one of its batches.
        settings: of the run.
        compute: the requested way to compute.
        ranks: the processes that share every batch.
        note: called with every choice.

    Raises:
        DispfxError: if a requested option is not possible.
    """
    ranks.check(settings.batch_size, settings.samples)
    sharding = _sharding(program, compute, ranks)
    device = device_of_learning(program, compute)
    plain = run_pipeline("gate", program.clone())
    if sharding is not None:
        plain = placed(plain, device)
    fast = for_learning(plain, settings.seq_len)
    short = compute.checkpointing == "auto" and short_of_memory(
        program, settings, compute.compiles(device), ranks, sharding
    )
    return prepare(
        plain,
        fast,
        TrialBatch(
            ranks.rows(text.batch(0)),
            max(1, settings.samples // ranks.size),
            OBJECTIVES[settings.objective],
        ),
        compute,
        short_of_memory=short,
        note=note,
        agree=lambda holds: ranks.all(holds, device),
        sharding=sharding,
    )


def device_of_learning(program: Program, compute: ComputeSettings) -> torch.device:
    """Return the device that learns."""
    return program.device if compute.shard_on is None else torch.device(compute.shard_on)


def _sharding(program: Program, compute: ComputeSettings, ranks: Ranks) -> Sharding | None:
    """Return how the weights are sharded, or None if `--shard` was not given.

    Raises:
        DispfxError: if there is only one rank.
    """
    if compute.shard_on is None:
        return None
    if ranks.size == 1:
        raise DispfxError(
            f"{option('shard')} splits the weights among processes, but there is only one",
            hint=f"use {option('launch')} or torchrun with {option('shard')}, or leave out {option('shard')}",
        )
    return Sharding(rows_of(dict(program.tensors())), ranks.size, torch.device(compute.shard_on))


def own_part(settings: LearnSettings, ranks: Ranks) -> LearnSettings:
    """Return the settings of a single-process run that does the work of one of these processes."""
    rows = max(1, settings.batch_size // ranks.size)
    samples = max(1, settings.samples // ranks.size)
    return replace(settings, batch_size=rows, samples=samples if rows % samples == 0 else 1)


def short_of_memory(
    program: Program,
    settings: LearnSettings,
    compiled: bool,
    ranks: Ranks = ALONE,
    sharding: Sharding | None = None,
) -> bool:
    """Whether a step without checkpoints exceeds the free memory."""
    device = program.device if sharding is None else sharding.device
    free = free_bytes(device)
    if free is None:
        return False
    found = estimate(program, own_part(settings, ranks), device=device)
    # Sharded weights are not loaded yet.
    weights = 0 if sharding is None else found.weight_bytes / sharding.size
    return found.beside_weights(compiled=compiled) + weights > _USABLE * free
