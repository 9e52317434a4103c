"""Make the next batch while the device computes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class Ahead:
    """Batches by number, on a device; the one behind the last is made by a thread meanwhile.

    On a GPU batches wait in pinned memory, so that copying them does not stop the computation.  On a CPU,
    where there is nothing to overlap with, they are made when they are asked for.

    Args:
        batch: makes batch `index`, on the CPU; called from one thread at a time.
        device: where batches are wanted.
    """

    def __init__(self, batch: Callable[[int], Tensor], device: torch.device):
        self._batch = batch
        self._device = device
        self._next: tuple[int, Future[Tensor]] | None = None
        self._thread = ThreadPoolExecutor(1, "batches") if device.type == "cuda" else None

    def get(self, index: int) -> Tensor:
        """Return batch `index` on the device; what making it raised is raised here."""
        if self._thread is None:
            return self._batch(index).to(self._device)
        ready = self._next if self._next is not None and self._next[0] == index else None
        made = ready[1] if ready else self._thread.submit(self._pinned, index)
        batch = made.result()
        self._next = (index + 1, self._thread.submit(self._pinned, index + 1))
        return batch.to(self._device, non_blocking=True)

    def _pinned(self, index: int) -> Tensor:
        return self._batch(index).pin_memory()
