"""Where the time of a step goes: its kernels, with the bytes that the whole step must at least read."""

from collections import defaultdict
from dataclasses import dataclass

import torch

from dispfx.api.speed import Contender, step_call
from dispfx.ir.cached_inputs import CachedShape
from dispfx.ir.program import Program
from dispfx.measure.bound import step_cost

_REPEATS = 10
_SHOWN = 24
_NAME = 90


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step.

    Args:
        calls: in one step.
        seconds: of all of them.
    """

    name: str
    calls: float
    seconds: float


def profile_step(program: Program, shape: CachedShape, kernels: str) -> list[Kernel]:
    """Return the kernels of a compiled step, the slowest first."""
    call = step_call(program, shape, "compiled", kernels)
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(_REPEATS):
            call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or ():
        if "CUDA" in str(event.device_type):
            found[event.name].append(event.device_time / 1e6)
    torch._dynamo.reset()
    kernels_found = [
        Kernel(name, len(times) / _REPEATS, sum(times) / _REPEATS) for name, times in found.items()
    ]
    return sorted(kernels_found, key=lambda kernel: -kernel.seconds)


def profile_markdown(name: str, one: Contender, shape: CachedShape, kernels: list[Kernel]) -> str:
    """Return a table: kernel, calls, time, share; and what the step must read and compute."""
    total = sum(kernel.seconds for kernel in kernels)
    cost = step_cost(one.reference, shape)
    lines = [
        f"\nProfile of a step {tuple(shape)}, {name}: kernels take {total * 1e6:.0f} µs; the step must read "
        f"{cost.bytes / 1e6:.0f} MB ({cost.bytes / total / 1e12:.2f} TB/s) and compute "
        f"{cost.operations / 1e12:.3f} · 10¹² operations ({cost.operations / total / 1e12:.0f} TFLOP/s).\n",
        "| kernel | calls | µs | share |",
        "| --- | --- | --- | --- |",
    ]
    for kernel in kernels[:_SHOWN]:
        shown = kernel.name[:_NAME].replace("|", "¦")
        lines.append(
            f"| `{shown}` | {kernel.calls:.0f} | {kernel.seconds * 1e6:.1f} | {kernel.seconds / total:.1%} |"
        )
    return "\n".join(lines) + "\n"
