"""How fast ONNX models with a cache run.

Shape legend: B batch, T new tokens, P cached tokens.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import onnxruntime
import torch

from dispfx.benchmark.onnx_comparison import bound_run
from dispfx.deploy.onnx.session import BoundRun, CachedSession
from dispfx.ir.cached_inputs import CachedShape


@dataclass(frozen=True)
class Speed:
    """How long one run takes.

    Args:
        shape: (B, T, P).
        seconds: median of the runs, each waited for.
        fastest, slowest: of the middle eight tenths.
        queued_seconds: of a run among many that were started without waiting; on a GPU only.
        runs: how many were timed.
    """

    shape: CachedShape
    seconds: float
    fastest: float
    slowest: float
    queued_seconds: float | None
    runs: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens of the whole batch a second."""
        return self.shape.batch * self.shape.tokens / self.seconds


def time_session(
    session: CachedSession,
    shape: CachedShape,
    *,
    seconds: float = 2.0,
    most_runs: int = 200,
    warm_up: int = 5,
) -> Speed:
    """Time a model at one shape, its inputs and outputs bound to memory of its device.

    Args:
        seconds: how long to go on, at the most; five runs are timed in any case.
    """
    run = bound_run(session, shape)
    for _ in range(warm_up):
        run.run()
    times = _times(run.run, seconds, most_runs)
    tenths = statistics.quantiles(times, n=10)
    queued = _queued(run, len(times)) if session.device.type == "cuda" else None
    return Speed(shape, statistics.median(times), tenths[0], tenths[-1], queued, len(times))


def _times(run: Callable[[], None], seconds: float, most_runs: int) -> list[float]:
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 5 or (len(times) < most_runs and time.perf_counter() - start < seconds):
        before = time.perf_counter()
        run()
        times.append(time.perf_counter() - before)
    return times


def _queued(run: BoundRun, runs: int) -> float:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(runs):
        run.session.run_with_iobinding(run.binding, options)
    torch.cuda.synchronize()
    return (time.perf_counter() - before) / runs
