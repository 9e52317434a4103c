"""What torch takes on a GPU beside what tensors ask for: whole blocks, and workspaces of cuBLAS.

Blocks (`should_split` and `get_allocation_size` in c10/cuda/CUDACachingAllocator.cpp, the sizes in
c10/core/AllocatorConfig.h; torch 2.11 to 2.14): a size is rounded up to 512 bytes.  From 10 MiB on a tensor
comes out of a segment that is rounded up to 2 MiB, and what is left of it is cut off only if that is more
than 1 MiB.  So a tensor of 43 MiB takes 44, and `torch.cuda.max_memory_allocated` counts 44.

Workspaces (`parseChosenWorkspaceSize` and `setWorkspaceForHandle` in ATen/cuda/CublasHandlePool.cpp): a
thread that computes a product on a stream for the first time allocates one for the two, and keeps it.  It is
32 MiB on Hopper, 8.1 MiB on the cards before, or what `CUBLAS_WORKSPACE_CONFIG` says.  Learning has two such
threads, its own and autograd's, and three streams: the usual one, the one that the hypernetwork's update
warms up on and the one that it is captured on (`dispfx.learning.update`).

What an allocator that grows its segments (`expandable_segments`) cuts off is not told apart: it is less.
"""

import os
import re

import torch

_BLOCK = 512
_CUT_OFF = 2**20
_WHOLE_FROM = 10 * 2**20
_SEGMENT = 2 * 2**20

_THREADS, _STREAMS = 2, 3
_HOPPER = (9, 0)
_HOPPER_WORKSPACE = 32 * 2**20
_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
_KIBI = 1024


def block_bytes(size: int) -> int:
    """Return the bytes of the block that a tensor of that size gets, the segment taken for a new one."""
    rounded = _up(size, _BLOCK)
    segment = _up(size, _SEGMENT)
    return segment if size >= _WHOLE_FROM and segment - rounded <= _CUT_OFF else rounded


def workspaces_bytes(device: torch.device) -> int:
    """Return the bytes of all workspaces that cuBLAS has while masks are learned on a GPU."""
    return _THREADS * _STREAMS * _workspace_bytes(device)


def _workspace_bytes(device: torch.device) -> int:
    chosen = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if chosen:
        return sum(_KIBI * int(size) * int(count) for size, count in chosen)
    return _HOPPER_WORKSPACE if _capability(device) >= _HOPPER else _WORKSPACE


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the card's, or that with the larger workspace where there is no card to ask."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else _HOPPER


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
