"""Record what a GPU does as a CUDA graph, on the device of its tensors, whichever is torch's current one."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


def warm_up(work: Callable[[], object], times: int, device: torch.device) -> None:
    """Run on a stream of its own what will be recorded, so that all is compiled and allocated, and wait."""
    side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(times):
            work()
    current.wait_stream(side)
    torch.cuda.synchronize(device)


def recording(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any = None) -> torch.cuda.graph:
    """Return the block whose work becomes the graph.

    Args:
        pool: of another graph, whose memory this one shares.
    """
    return torch.cuda.graph(graph, pool=pool, stream=_capture_stream(device))


@lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which all graphs of a device are recorded.

    One for all: the backward pass of a graph runs on the stream of its forward pass, which may be in a graph
    before, and libraries have a workspace for every stream.
    """
    return torch.cuda.Stream(device)
