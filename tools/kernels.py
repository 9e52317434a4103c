"""The kernels of a computation on a GPU, with their times."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_REPEATS = 10
_NAME = 90

# What a kernel is for, by a part of its name; the first that fits.
_CLASSES = (
    ("compiled", ("triton_",)),
    ("attention", ("flash", "fmha", "sdpa", "attention", "cudnn_generated")),
    ("products", ("gemm", "nvjet", "cutlass", "splitkreduce", "cublas", "wgmma")),
    ("copies", ("memcpy", "memset", "copy", "fill", "cat")),
)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a computation.

    Args:
        calls: in one computation.
        seconds: of all of them.
    """

    name: str
    calls: float
    seconds: float

    @property
    def kind(self) -> str:
        """attention, products, compiled (by the compiler), copies or other."""
        lower = self.name.lower()
        return next((kind for kind, words in _CLASSES if any(word in lower for word in words)), "other")


def kernels_of(call: Callable[[], object]) -> list[Kernel]:
    """Return the kernels of a call on the current CUDA device, the slowest first."""
    call()
    with profiled(_REPEATS) as found:
        for _ in range(_REPEATS):
            call()
    return found


@contextmanager
def profiled(computations: int) -> Iterator[list[Kernel]]:
    """Yield a list that holds the kernels of so many equal computations at the end, the slowest first."""
    kernels: list[Kernel] = []
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield kernels
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or ():
        if "CUDA" in str(event.device_type):
            times[event.name].append(event.device_time / 1e6)
    found = [Kernel(name, len(each) / computations, sum(each) / computations) for name, each in times.items()]
    kernels += sorted(found, key=lambda kernel: -kernel.seconds)


def seconds_by_kind(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Return the seconds of each kind of kernel, the longest first."""
    total: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        total[kernel.kind] += kernel.seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def kernel_rows(kernels: Sequence[Kernel], shown: int) -> list[str]:
    """Return the lines of a Markdown table: kernel, calls, time, share."""
    total = sum(kernel.seconds for kernel in kernels)
    lines = ["| kernel | calls | µs | share |", "| --- | --- | --- | --- |"]
    for kernel in kernels[:shown]:
        name = kernel.name[:_NAME].replace("|", "¦")
        lines.append(
            f"| `{name}` | {kernel.calls:.0f} | {kernel.seconds * 1e6:.1f} | {kernel.seconds / total:.1%} |"
        )
    return lines
