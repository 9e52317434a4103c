"""How fast a device computes, for estimates of time.

Peaks are the makers' figures for dense products (NVIDIA's data sheets of the H100 SXM, H200 SXM,
A100 SXM 80 GB, L40S and RTX 4090): bfloat16 on tensor cores, float32 off them, as torch computes by default.

What learning reaches of the peak was measured on one H100 with a decoder of 7B shape, batch 1 × 2048
tokens, bfloat16: forward and backward of the gated decoder and the loss took 170 ms without compiling and
110 ms with compiled layers.  `dispfx.estimate.step_work` counts 61.8 · 10¹² operations for that step (with
attention over all pairs of tokens; 57.3 · 10¹² and 521 TFLOP/s with the causal half), so 364 and
562 TFLOP/s, which is 0.37 and 0.57 of 989.
"""

import time
from dataclasses import dataclass

import torch

EAGER_EFFICIENCY = 0.37
COMPILED_EFFICIENCY = 0.57
# Of a product's own speed on a CPU, where pointwise operations and the loss take their time too.
CPU_EFFICIENCY = 0.5

_MEASURED_SIZE = 768
_MEASURED_REPEATS = 5


@dataclass(frozen=True)
class Device:
    """A device's peak.

    Args:
        name: for people.
        flops_per_second: by dtype; what one dense product reaches at best.
        memory_bytes: of the device, or 0 where unknown.
        efficiency: share of the peak that a step of learning reaches.
    """

    name: str
    flops_per_second: dict[torch.dtype, float]
    memory_bytes: int = 0
    efficiency: float = EAGER_EFFICIENCY

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
    return Device("this CPU", {dtype: rate}, efficiency=CPU_EFFICIENCY)
