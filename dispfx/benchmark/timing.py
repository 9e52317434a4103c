"""Time calls in turn for a comparison, so that a busy or hot machine slows all of them equally.

Each round runs every call a number of times; a call's time in a round is the mean of these runs, and its
time is the median over rounds (the minimum is kept too).
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dispfx.kernels.recording import Replayed

_MOST_SECONDS = 60.0

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call over all rounds."""

    median_seconds: float
    least_seconds: float


def compare_times(
    calls: Sequence[Call], device: torch.device, *, rounds: int = 7, round_seconds: float = 0.05
) -> list[Timing]:
    """Return the time of each call.

    Args:
        calls: each runs once before anything is timed.
        rounds: how often every call has its turn; fewer, but three, where that takes longer than a minute.
        round_seconds: how long a turn lasts; a call longer than this runs once a turn.
    """
    repeats, turn_seconds = [], 0.0
    for call in calls:
        call()
        alone = _seconds(call, 1, device)
        repeats.append(max(1, round(round_seconds / max(alone, 1e-7))))
        turn_seconds += alone * repeats[-1]
    rounds = min(rounds, max(3, int(_MOST_SECONDS / max(turn_seconds, 1e-9))))
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for found, call, times in zip(seconds, calls, repeats, strict=True):
            found.append(_seconds(call, times, device))
    return [Timing(statistics.median(found), min(found)) for found in seconds]


def _seconds(call: Call, times: int, device: torch.device) -> float:
    """Return the seconds of one of `times` calls in a row."""
    if device.type == "cuda":
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(device)  # another device may be the current one
        torch.cuda.synchronize(device)
        began.record(stream)
        for _ in range(times):
            call()
        ended.record(stream)
        torch.cuda.synchronize(device)
        return began.elapsed_time(ended) / 1e3 / times
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def recorded(call: Call, device: torch.device) -> Call:
    """Return the same work as a CUDA graph: one launch, however many kernels; on a CPU the call itself.

    Args:
        call: reads and writes the same tensors every time; it is run a few times first.
    """
    return Replayed(device, call) if device.type == "cuda" else call


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Return the most memory that tensors took while a call ran, weights included; None on a CPU."""
    if device.type != "cuda":
        call()
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def device_name(device: torch.device) -> str:
    """Return the card's name, or how many threads of this CPU torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread(s)"
