"""The speed of a pruned decoder compared with the dense one, both as ONNX models of the same exporter."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dispfx.benchmark.bound import bound, step_cost
from dispfx.benchmark.decoder_speed import Contender
from dispfx.benchmark.speed_row import Side, SpeedRow
from dispfx.benchmark.timing import compare_times
from dispfx.deploy.onnx.exporting import cached_model
from dispfx.deploy.onnx.files import MODEL_FILE, save_model
from dispfx.deploy.onnx.session import BoundRun, CachedSession, SessionOptions
from dispfx.ir.cached_inputs import CachedShape, sample_inputs

MODE = "onnx"


def compare_onnx(
    name: str,
    dense: Contender,
    pruned: Contender,
    shapes: Sequence[CachedShape],
    device: torch.device,
    on_row: Callable[[SpeedRow], None],
) -> list[SpeedRow]:
    """Export both decoders the same way and time them in turn, their inputs and outputs bound to memory.

    Every run gives the logits of all its tokens and is waited for.
    """
    rows = []
    with _session(dense, device) as whole, _session(pruned, device) as smaller:
        for shape in shapes:
            row = _row(name, shape, (dense, *whole), (pruned, *smaller), device)
            rows.append(row)
            on_row(row)
    return rows


def _row(
    name: str,
    shape: CachedShape,
    dense: tuple[Contender, CachedSession, float],
    pruned: tuple[Contender, CachedSession, float],
    device: torch.device,
) -> SpeedRow:
    costs = [step_cost(side[0].reference, shape, last_logits=False) for side in (dense, pruned)]
    timings = compare_times(
        [bound_run(side[1], shape, side[0].fast.known_tokens).run for side in (dense, pruned)], device
    )
    whole, smaller = (
        Side(timing.median_seconds, timing.least_seconds, None, side[2])
        for timing, side in zip(timings, (dense, pruned), strict=True)
    )
    limit = bound(costs[0], costs[1], shape)
    return SpeedRow(name, shape, MODE, whole, smaller, limit, costs[1].shares())


@contextmanager
def _session(side: Contender, device: torch.device) -> Iterator[tuple[CachedSession, float]]:
    """Yield a session on a decoder's ONNX model, and how long it took to get one."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dispfx-bench-") as folder:
        path = Path(folder, MODEL_FILE)
        save_model(cached_model(side.fast), path)
        yield CachedSession(path, SessionOptions(device.type)), time.perf_counter() - start


def bound_run(session: CachedSession, shape: CachedShape, known_tokens: int | None = None) -> BoundRun:
    """Return a run at a shape on random tokens and caches, nothing of it padding.

    Args:
        known_tokens: tokens are drawn below it; the width of the logits by default.
    """
    inputs = sample_inputs(session.caches, shape, known_tokens or session.vocabulary_size, session.device)
    inputs[1].fill_(1)
    positions = torch.arange(shape.past, shape.past + shape.tokens, device=session.device)
    placed: list[Tensor] = [*inputs[:2], positions.expand(shape.batch, -1).contiguous(), *inputs[3:]]
    return session.bind(placed, session.outputs(shape))
