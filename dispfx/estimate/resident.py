"""How much is held for a step's tensors: on a CPU, where glibc hands out the memory, and on a GPU.

On a CPU torch asks for blocks that begin at multiples of 64 bytes.  glibc (`_int_memalign` in its malloc.c)
cuts such a block out of one that is up to 96 bytes larger and gives back the ends, so a block that was freed
is too small for the next tensor of its own size, unless a neighbour is free too.  Values of a step come in
few sizes: what is freed between two that are kept stays unused, and resident, until the step is over.
(Tried: two blocks of 512 KiB kept and one between them freed, 200 times, take 1.50 times what is held where
they are aligned so, and 1.00 times where they come from `malloc`.)  Blocks could be mapped one by one instead
(`MALLOC_MMAP_THRESHOLD_` in the environment), which gives every byte back and makes steps of small batches
40% slower.

How much that comes to was measured and not derived: the process takes 1.6 times what a step's tensors take
at their largest.  What stays through all steps is laid out once, and takes what it is.  `docs/trust.md` has
the decoders that the factor was chosen on, and those that it was tried on afterwards.

On a GPU the allocator of torch keeps every segment that it took until someone empties its cache, and cuts
blocks from them: one that was cut for a small tensor is no place for the next large one, and segments of
2 and 20 MiB are begun in every stream and in the pool of a graph.  On an H100 1.04, 1.08 and 1.12 times a
step's blocks were reserved for three decoders, the smallest of them last (`docs/trust.md`).  The factor and
the constant are above these, and above what the same rules give, block by block, for decoders whose loss is
most of a step (`tests/measure/caching_allocator.py`).
"""

import torch

from dispfx.estimate.allocator import keeps_freed_blocks

RETAINED = 1.6
RESERVED = 1.15
BEGUN_BYTES = 100_000_000
# Graphs, their code, and what is imported on the way.
PROCESS_BYTES = 10_000_000


def resident_bytes(held: float, step: float, device: torch.device) -> int:
    """Return what a process needs on a device to compute steps.

    Args:
        held: bytes of the tensors that stay from step to step.
        step: bytes of those that a step allocates and frees, at their largest.
    """
    if device.type == "cuda":
        return int(held + step * RESERVED) + BEGUN_BYTES
    if device.type != "cpu":
        return int(held + step)
    return int(held + step * (RETAINED if keeps_freed_blocks() else 1.0)) + PROCESS_BYTES
