"""Where the time of a step goes: its kernels, with the bytes that the whole step must at least read."""

import torch
from kernels import Kernel, kernel_rows, kernels_of

from dispfx.benchmark.bound import step_cost
from dispfx.benchmark.decoder_speed import Contender, step_call
from dispfx.ir.cached_inputs import CachedShape
from dispfx.ir.program import Program

_SHOWN = 24


def profile_step(program: Program, shape: CachedShape, kernels: str) -> list[Kernel]:
    """Return the kernels of a compiled step, the slowest first."""
    found = kernels_of(step_call(program, shape, "compiled", kernels))
    torch._dynamo.reset()
    return found


def profile_markdown(name: str, one: Contender, shape: CachedShape, kernels: list[Kernel]) -> str:
    """Return a table: kernel, calls, time, share; and what the step must read and compute."""
    total = sum(kernel.seconds for kernel in kernels)
    cost = step_cost(one.reference, shape)
    lines = [
        f"\nProfile of a step {tuple(shape)}, {name}: kernels take {total * 1e6:.0f} µs; the step must read "
        f"{cost.bytes / 1e6:.0f} MB ({cost.bytes / total / 1e12:.2f} TB/s) and compute "
        f"{cost.operations / 1e12:.3f} · 10¹² operations ({cost.operations / total / 1e12:.0f} TFLOP/s).\n",
        *kernel_rows(kernels, _SHOWN),
    ]
    return "\n".join(lines) + "\n"
