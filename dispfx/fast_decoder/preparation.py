"""Choose how learning computes a decoder's loss, and check every choice against the plainer one before it.

    graph → layers and fast attention → checkpoints → compiled bodies → CUDA graph

Whatever is not there, does not fit or does not agree is left out, with a word.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dispfx.errors import DispfxError, UnsupportedGraphError, VerificationError, first_line
from dispfx.fast_decoder.comparison import (
    Comparison,
    Loss,
    beside_rounding,
    compare,
    is_exact,
    sample_masks,
)
from dispfx.fast_decoder.decoder import TrainingDecoder
from dispfx.fast_decoder.gathered import GatheredDecoder
from dispfx.fast_decoder.shards import Sharding
from dispfx.ir.program import Program
from dispfx.kernels.recording import ReplayedLoss
from dispfx.learning.objective import NEXT_TOKEN, MaskedLosses, Objective, loss_of_logits
from dispfx.settings import ComputeSettings
from dispfx.words.option_names import option

# The ordinary capture is compared on a short sequence: it holds whole masks and whole logits.
SHORT = 128


class PlainDecoder(nn.Module, MaskedLosses):
    """A gated graph with the loss of its whole logits.

    Args:
        program: gated.
        objective: what is learned.
    """

    def __init__(self, program: Program, objective: Objective = NEXT_TOKEN):
        super().__init__()
        self.objective = objective
        self.graph = program.graph_module
        self.sizes = [site.size for site in program.sites]
        self.separator = program.separator

    def forward(self, ids_BT: Tensor, masks: Sequence[Tensor]) -> Tensor:
        """Return logits (B, T, V)."""
        return self.graph(ids_BT, *masks)

    def _loss(self, ids_BT: Tensor, masks: Tensor, objective: Objective, shift: int) -> Tensor:
        def logits(as_dense: bool) -> Tensor:
            return self(ids_BT, (torch.ones_like(masks) if as_dense else masks).split(self.sizes, -1))

        return loss_of_logits(objective, logits, ids_BT, separator=self.separator, shift=shift)


class PreparedLoss:
    """What learning calls: `loss(ids_BT, masks)`.

    Args:
        loss: the fastest way that agrees.
        decoder: what it belongs to.
        notes: what was chosen, for people.
    """

    def __init__(self, loss: Loss, decoder: PlainDecoder | TrainingDecoder, notes: list[str]):
        self._loss = loss
        self.decoder = decoder
        self.notes = tuple(notes)

    def loss(self, ids_BT: Tensor, masks: Tensor) -> Tensor:
        """Return what is learned from a batch under masks (N,) or (S, N) of all sites."""
        return self._loss(ids_BT, masks)

    def next_token_loss(self, ids_BT: Tensor, masks: Tensor) -> Tensor:
        """Return the mean cross entropy with the next token under masks (N,) or (S, N) of all sites."""
        return self.decoder.next_token_loss(ids_BT, masks)

    def __call__(self, ids_BT: Tensor, masks: Sequence[Tensor]) -> Tensor:
        """Return logits (B, T, V)."""
        return self.decoder(ids_BT, masks)


@dataclass(frozen=True, eq=False)
class TrialBatch:
    """What the ways to compute a loss are compared on; every batch of the run has its shape.

    Args:
        ids_BT: token ids (B, T).
        samples: S, masks per batch.
        objective: what is learned from a batch.
    """

    ids_BT: Tensor
    samples: int = 1
    objective: Objective = NEXT_TOKEN


def prepare(
    plain: Program,
    fast: Program,
    trial: TrialBatch,
    compute: ComputeSettings,
    *,
    short_of_memory: bool = False,
    note: Callable[[str], None] = lambda text: None,
    agree: Callable[[bool], bool] = lambda holds: holds,
    sharding: Sharding | None = None,
) -> PreparedLoss:
    """Return the loss of a decoder, computed as fast as it can be trusted.

    Args:
        plain: the gated program.
        fast: the same with simple attention and its outline, where there is one.
        trial: a batch of the shape of all batches.
        compute: what is wanted.
        short_of_memory: whether checkpointing `auto` means on.
        note: told every choice.
        agree: whether something holds here and in every other process of the run.
        sharding: how the weights lie in parts on these processes; each has all by default.

    Raises:
        DispfxError: if something that was asked for with `on` fails, or the weights cannot lie in parts; what
            works and differs too much is left out, with a note.
        VerificationError: if the layers of a decoder that is too large to run whole are another function.
    """
    return _Preparation(plain, fast, trial, compute, note, agree, sharding).run(short_of_memory)


class _Preparation:
    def __init__(
        self,
        plain: Program,
        fast: Program,
        trial: TrialBatch,
        compute: ComputeSettings,
        note: Callable[[str], None],
        agree: Callable[[bool], bool],
        sharding: Sharding | None,
    ):
        self.plain, self.fast, self.compute, self.note = plain, fast, compute, note
        self.ids_BT, self.objective = trial.ids_BT.to(plain.device), trial.objective
        self.sizes = [site.size for site in plain.sites]
        features = sum(self.sizes)
        shape = (features,) if trial.samples == 1 else (trial.samples, features)
        self.masks = sample_masks(shape, self.ids_BT.device)
        self.agree, self.sharding = agree, sharding
        self.notes: list[str] = []

    def run(self, short_of_memory: bool) -> PreparedLoss:
        ordinary = PlainDecoder(self.plain, self.objective)
        decoder = self._layers(ordinary)
        if decoder is None:
            if self.compute.compile == "on" or self.compute.checkpointing == "on":
                raise DispfxError(
                    "compiling and checkpointing need the decoder's layers, which cannot be told apart here",
                    hint=f"leave out {option('compile')} and {option('checkpointing')}",
                )
            return PreparedLoss(ordinary.loss, ordinary, self.notes)
        wanted = self.compute.checkpointing
        decoder.checkpoint(wanted == "on" or (wanted == "auto" and short_of_memory))
        if decoder.checkpointing:
            self._say("layers are computed again in the backward pass (checkpointing)")
        loss: Loss = decoder.loss
        if self.compute.compiles(self.ids_BT.device):
            self._compile(decoder)
            if decoder.compiled and self._replays():
                loss = self._replay(decoder)
        return PreparedLoss(loss, decoder, self.notes)

    def _layers(self, ordinary: PlainDecoder) -> TrainingDecoder | None:
        if self.fast.outline is None:
            if self.sharding is not None:
                raise UnsupportedGraphError(
                    "the weights cannot lie in parts: the layers cannot be told apart",
                    where=self.fast.model_class,
                    hint=f"leave out {option('shard')}",
                )
            self._say("the layers cannot be told apart: the whole graph runs as it is")
            return None
        decoder = TrainingDecoder(
            self.fast, objective=self.objective, join=self.compute.join, sharding=self.sharding
        )
        reference = (
            ordinary
            if decoder.shards is None
            else GatheredDecoder(self.plain, decoder.shards, self.objective)
        ).trial_loss
        alone = self.masks if self.masks.dim() == 1 else self.masks[0]
        short = self.ids_BT[:1, :SHORT]
        found = compare(decoder.trial_loss, reference, short, alone, self.plain.dtype, self.sizes)
        good, found = self._holds(found, reference, short, alone)
        if not good:
            if decoder.shards is not None:
                raise VerificationError(
                    f"the layers with weights in parts differ from the whole graph: {found}"
                )
            self._say(f"the layers differ from the ordinary capture ({found}): the whole graph runs as it is")
            return None
        return decoder

    def _replays(self) -> bool:
        # A graph would have to hold what the ranks say to each other.
        on_one = self.sharding is None
        return on_one and self.compute.replay != "off" and self.ids_BT.device.type == "cuda"

    def _compile(self, decoder: TrainingDecoder) -> None:
        kept = decoder.checkpointing

        def reference(ids_BT: Tensor, masks: Tensor) -> Tensor:
            # Plain layers keep more than compiled ones; checkpoints do not change what they compute.
            decoder.compile_layers(False)
            decoder.checkpoint(True)
            return decoder.trial_loss(ids_BT, masks)

        def compiled(ids_BT: Tensor, masks: Tensor) -> Tensor:
            decoder.compile_layers(True)
            decoder.checkpoint(kept)
            return decoder.trial_loss(ids_BT, masks)

        try:
            found = self._compare(compiled, reference)
        except torch.OutOfMemoryError:
            if kept or self.compute.checkpointing != "auto" or self.sharding is not None:
                raise
            torch.cuda.empty_cache()
            decoder.checkpoint(True)
            self._say("the layers' values do not fit: they are computed again in the backward pass")
            return self._compile(decoder)
        except Exception as error:
            self._refuse_if_asked(error)
            self._say(f"layers are not compiled: {first_line(error)}")
            found = None
        good, found = self._holds(found, reference, self.ids_BT, self.masks)
        decoder.compile_layers(good)
        decoder.checkpoint(kept)
        if good:
            kinds = len(decoder.layered.outline.kinds)
            self._say(f"{kinds} kind(s) of layers compiled; difference to plain ones: {found}")
        elif found is not None:
            self._say(f"layers are not compiled: compiled ones differ from plain ones ({found})")

    def _refuse_if_asked(self, error: Exception) -> None:
        # If one rank stopped in the middle of a layer, all other ranks wait for it.
        if self.compute.compile == "on" or self.sharding is not None:
            raise DispfxError(
                f"the layers cannot be compiled: {first_line(error)}",
                hint=f"use {option('compile', 'off')}",
            ) from error

    def _replay(self, decoder: TrainingDecoder) -> Loss:
        replayed, found = None, None
        try:
            replayed = ReplayedLoss(decoder.loss, self.ids_BT, self.masks)
            found = self._compare(replayed, decoder.loss)
        except Exception as error:
            self._say(f"no CUDA graph: {first_line(error)}")
        if not self.agree(found is not None and found.holds) or replayed is None:
            if found is not None:
                self._say(f"no CUDA graph: it differs from the plain pass ({found})")
            return decoder.loss
        self._say("the decoder's pass is replayed as one CUDA graph")
        return replayed

    def _holds(
        self, found: Comparison | None, reference: Loss, ids_BT: Tensor, masks: Tensor
    ) -> tuple[bool, Comparison | None]:
        """Whether a comparison holds on every rank, if needed relative to the effect of rounding alone."""
        if self.agree(found is not None and found.holds):
            return True, found
        if is_exact(self.plain.dtype):
            return False, found
        if found is not None:
            found = beside_rounding(found, reference, ids_BT, masks, self.sizes)
        return self.agree(found is not None and found.holds), found

    def _compare(self, loss: Loss, reference: Loss) -> Comparison:
        return compare(loss, reference, self.ids_BT, self.masks, self.plain.dtype, self.sizes)

    def _say(self, text: str) -> None:
        self.notes.append(text)
        self.note(text)
