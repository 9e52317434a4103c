"""Prefetch the next batch while the device computes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class Ahead:
    """Batches by index, on a device; a thread prepares the next batch in the meantime.

    On a GPU, batches wait in pinned memory, so that copies do not block the computation.  On a CPU there is
    nothing to overlap, so batches are made on demand.

    Args:
        batch: makes batch `index` on the CPU; called from one thread at a time.
        device: of the returned batches.
    """

    def __init__(self, batch: Callable[[int], Tensor], device: torch.device):
        self._batch = batch
        self._device = device
        self._next: tuple[int, Future[Tensor]] | None = None
        self._thread = ThreadPoolExecutor(1, "batches") if device.type == "cuda" else None

    def get(self, index: int) -> Tensor:
        """Return batch `index` on the device; re-raises errors of the thread."""
        if self._thread is None:
            return self._batch(index).to(self._device)
        ready = self._next if self._next is not None and self._next[0] == index else None
        made = ready[1] if ready else self._thread.submit(self._pinned, index)
        batch = made.result()
        self._next = (index + 1, self._thread.submit(self._pinned, index + 1))
        return batch.to(self._device, non_blocking=True)

    def _pinned(self, index: int) -> Tensor:
        return self._batch(index).pin_memory()
