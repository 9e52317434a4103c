"""How fast a device computes, for estimates of time.

    seconds per step = operations / (efficiency · peak) + overhead + branches · overhead per branch

Peaks are the makers' figures for dense products (NVIDIA's data sheets of the H100 SXM, H200 SXM,
A100 SXM 80 GB, L40S and RTX 4090): bfloat16 on tensor cores, float32 off them, as torch computes by default.

What learning adds was measured on one H200 with compiled layers (docs/learning.md).  A step without a decoder
takes 1.8 ms.  Each branch adds about 0.15 ms, from SmolLM2-135M, whose products are short.  With these a step
is estimated at 18.3, 22.2 and 121 ms where it takes 16 to 18 (SmolLM2-135M, 2 × 2048), 21.9 (8 × 1024) and
101 to 103 ms (LLaMA-2-7B).  Other cards were not measured.  On a CPU a step of the demo at 1 × 8 tokens takes
28 ms, one thread.
"""

import time
from dataclasses import dataclass

import torch

COMPILED_EFFICIENCY = 0.57
CPU_EFFICIENCY = 0.75
_CPU_STEP, _CPU_BRANCH = 4e-3, 3e-3

_MEASURED_SIZE = 768
_MEASURED_REPEATS = 5


@dataclass(frozen=True)
class Device:
    """A device's peak.

    Args:
        name: for people.
        flops_per_second: by dtype; what one dense product reaches at best.
        memory_bytes: of the device, or 0 where unknown.
        efficiency: share of the peak that the products of a step reach.
        seconds_a_step, seconds_a_branch: overhead of a step, and of each branch in it.
    """

    name: str
    flops_per_second: dict[torch.dtype, float]
    memory_bytes: int = 0
    efficiency: float = COMPILED_EFFICIENCY
    seconds_a_step: float = 1.8e-3
    seconds_a_branch: float = 0.15e-3

    def seconds(self, flops: float, dtype: torch.dtype) -> float:
        """Return how long products of that many operations take within a step of learning."""
        peak = self.flops_per_second.get(dtype) or min(self.flops_per_second.values())
        return flops / (peak * self.efficiency)


def _card(name: str, half: float, single: float, gigabytes: float) -> Device:
    rates = {torch.bfloat16: half * 1e12, torch.float16: half * 1e12, torch.float32: single * 1e12}
    return Device(name, rates, int(gigabytes * 1e9))


CARDS = {
    "H100": _card("H100", 989.0, 67.0, 80),
    "H200": _card("H200", 989.0, 67.0, 141),
    "A100": _card("A100", 312.0, 19.5, 80),
    "L40S": _card("L40S", 362.0, 91.6, 48),
    "RTX 4090": _card("RTX 4090", 165.2, 82.6, 24),
}


def this_cpu(dtype: torch.dtype) -> Device:
    """Return this machine's CPU, timed with a few products of 768 × 768 on torch's present threads."""
    a = torch.ones(_MEASURED_SIZE, _MEASURED_SIZE, dtype=dtype)
    seconds = []
    for _ in range(_MEASURED_REPEATS + 1):
        began = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - began)
    rate = 2 * _MEASURED_SIZE**3 / min(seconds[1:])
    return Device("this CPU", {dtype: rate}, 0, CPU_EFFICIENCY, _CPU_STEP, _CPU_BRANCH)
