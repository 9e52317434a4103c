"""The memory that torch holds, counted storage by storage while a step really runs."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dispfx.api import gate
from dispfx.ir.program import Program
from dispfx.learning.objective import next_token_loss
from tests.programs import token_ids


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, until each is freed."""

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
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self._known.pop(key)


def peak_of_a_step(program: Program, batch: int, tokens: int) -> int:
    """Return the most bytes that one forward and backward pass holds beside the weights."""
    gated = gate(program)
    ids = token_ids(batch, tokens, vocabulary=program.vocabulary_size)
    sizes = [site.size for site in program.sites]
    masks = torch.ones(sum(sizes), requires_grad=True)
    there = [masks, ids, *gated.parameters(), *gated.buffers()]
    with LiveMemory(there) as memory:
        next_token_loss(gated(ids, masks.split(sizes)), ids).backward()
    assert masks.grad is not None and bool(masks.grad.any())
    return memory.peak
