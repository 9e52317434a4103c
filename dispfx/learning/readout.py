"""Read numbers from a device that goes on computing."""

from collections.abc import Callable

import torch
from torch import Tensor


def reading(numbers: Tensor) -> Callable[[], list[float]]:
    """Begin to copy numbers to the host, and return what waits for them and gives them.

    On a GPU the wait is for what was asked of it before, not for what was asked between the two calls.

    Args:
        numbers: (n,); may be overwritten by what the device does next.
    """
    if numbers.device.type != "cuda":
        found = numbers.tolist()
        return lambda: found
    copied = numbers.to("cpu", non_blocking=True)  # torch pins what it copies to in that way
    arrived = torch.cuda.current_stream(numbers.device).record_event()

    def wait() -> list[float]:
        arrived.synchronize()
        return copied.tolist()

    return wait
