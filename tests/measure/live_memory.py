"""The memory that torch holds, counted storage by storage while a step really runs."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dispfx.ir.program import Program
from dispfx.run.learning_setup import prepared_loss
from dispfx.run.mask_learning import batches_of
from dispfx.settings import ComputeSettings
from dispfx.settings.learning_settings import LearnSettings
from dispfx.settings.sections import Switch
from tests.programs import token_ids


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, until each is freed.

    Args:
        there: tensors that are not counted.
    """

    def __init__(self, there: Iterable[Tensor]):
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata: 0 for tensor in there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self.now += self._known[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self._known.pop(key)


def peak_of_a_step(program: Program, settings: LearnSettings, checkpointing: Switch = "off") -> int:
    """Return the most bytes that one forward and backward pass of learning holds beside the weights."""
    ids = token_ids(settings.batch_size, settings.seq_len, vocabulary=program.vocabulary_size)
    text = batches_of(ids.repeat(1, 2).flatten(), settings, held_out=ids.flatten())
    prepared = prepared_loss(program, text, settings, ComputeSettings("off", checkpointing))
    features = sum(site.size for site in program.sites)
    masks = torch.ones(settings.samples, features) if settings.samples > 1 else torch.ones(features)
    masks.requires_grad_()
    there = [masks, ids, *dict(program.tensors()).values()]
    there += [*prepared.decoder.parameters(), *prepared.decoder.buffers()]
    with LiveMemory(there) as memory:
        prepared.loss(ids, masks).backward()
    assert masks.grad is not None and bool(masks.grad.any())
    return memory.peak
