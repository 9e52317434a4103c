"""The processes of one run of learning: rank 0 leads, and all other ranks follow.

    torchrun --nproc-per-node N -m dispfx compile …      or      dispfx compile … --launch N

A batch is cut into one part a rank.  The leading rank alone has the hypernetwork, the optimizer and the
state; it sends the masks of every step, and the mean of all gradients for them is what it learns from.
So N ranks do the steps that one rank does with the whole batch, and can be resumed on any number of ranks.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dispfx.distributed.launcher import end_with_launcher
from dispfx.errors import DispfxError, first_line
from dispfx.words.chosen_device import chosen_device
from dispfx.words.option_names import option

# Ranks wait for each other while one of them compiles, measures or writes.
_LONGEST_WAIT = timedelta(minutes=60)


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run.

    Args:
        rank: its number; 0 leads.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this rank has what is learned."""
        return self.rank == 0

    def check(self, batch_size: int, samples: int) -> None:
        """Pass if a batch and its masks can be cut into one part a rank.

        Raises:
            DispfxError: saying what would fit.
        """
        if batch_size % self.size:
            raise DispfxError(
                f"a batch must be a multiple of the {self.size} ranks that share it, and it has {batch_size} "
                "sequence(s)",
                hint=f"use {option('batch_size', (batch_size // self.size + 1) * self.size)}",
            )
        if samples % self.size and self.size % samples:
            raise DispfxError(
                f"{samples} samples of the masks cannot be shared by {self.size} ranks",
                hint=f"use {option('samples', self.size)}, or 1",
            )

    def rows(self, batch: Tensor) -> Tensor:
        """Return this rank's part of a batch (B, …)."""
        own = batch.shape[0] // self.size
        return batch[self.rank * own : (self.rank + 1) * own]

    def masks(self, masks: Tensor) -> Tensor:
        """Return the masks (N,) or (S / size, N) of this rank's sequences."""
        if masks.dim() == 1 or self.size == 1:
            return masks
        samples = masks.shape[0]
        if samples < self.size:
            return masks[self.rank * samples // self.size]
        found = self.rows(masks)
        return found[0] if found.shape[0] == 1 else found

    @contextmanager
    def reaching(self) -> Iterator[None]:
        """Compute what may need the other ranks, as where the weights lie in parts on them.

        Raises:
            RankLost: if one of them ended.
        """
        if self.size == 1:
            yield
            return
        try:
            yield
        except RuntimeError as error:
            if _is_of_a_lost_rank(error):
                raise _lost(error) from error
            raise

    def send(self, tensor: Tensor) -> Tensor:
        """Broadcast the leader's tensor; on other ranks it is overwritten."""
        if self.size > 1:
            with _lost_ranks():
                dist.broadcast(tensor, 0)
        return tensor

    def average(self, tensor: Tensor) -> Tensor:
        """Return the mean over all ranks; the tensor is overwritten."""
        if self.size > 1:
            with _lost_ranks():
                dist.all_reduce(tensor)
            tensor /= self.size
        return tensor

    def all(self, holds: bool, device: torch.device) -> bool:
        """Whether something holds on every rank."""
        found = torch.tensor(float(holds), device=device)
        return bool(self.average(found) == 1.0)


ALONE = Ranks()


class RankLost(DispfxError):
    """Another process of the run ended."""


def rank_of_environment() -> Ranks:
    """Return what torchrun says that this process is; rank 0 of 1 where nothing says so."""
    return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


@contextmanager
def joined(device: str | None) -> Iterator[Ranks]:
    """Join the run that torchrun started, if it did, and leave it at the end.

    Args:
        device: that this process computes on.

    Raises:
        DispfxError: if the processes cannot reach each other.
    """
    ranks = rank_of_environment()
    if ranks.size == 1:
        yield ranks
        return
    end_with_launcher()
    on_cuda = (device or "").startswith("cuda")
    if on_cuda:
        torch.cuda.set_device(chosen_device(device))
    try:
        dist.init_process_group("nccl" if on_cuda else "gloo", timeout=_LONGEST_WAIT)
    except (RuntimeError, ValueError) as error:
        raise DispfxError(
            f"the {ranks.size} processes of the run cannot reach each other: {error}",
            hint=f"start them with {option('launch')} on one host, or with torchrun",
        ) from error
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


@contextmanager
def _lost_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error


def _is_of_a_lost_rank(error: RuntimeError) -> bool:
    """Whether a backend says that it cannot reach another rank; gloo has no type of its own for that."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _lost(error: RuntimeError) -> RankLost:
    return RankLost(
        f"another process of the run ended: {first_line(error)}",
        hint=f"start the same run with {option('resume', True)} to go on",
    )
