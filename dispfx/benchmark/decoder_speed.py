"""The speed of a pruned decoder compared with the dense one, in the same run and with the same passes.

A step is one graph: a prefill of T tokens into an empty cache, with the head on the last token, or a decode
step of one token after P cached ones.  Compiled steps are compiled by `torch.compile` and, on a GPU, replayed
as a CUDA graph; eager ones are the same graphs as they are.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from dispfx.benchmark.bound import bound, step_cost
from dispfx.benchmark.speed_row import Side, SpeedRow
from dispfx.benchmark.timing import Call, compare_times, peak_bytes, recorded
from dispfx.compiler.pipelines import run_pipeline, static_programs
from dispfx.errors import DispfxError, first_line
from dispfx.fast_decoder.layered import LayeredDecoder
from dispfx.ir.cached_inputs import CachedShape, cache_tensors
from dispfx.ir.program import Program

Mode = Literal["eager", "compiled"]
# Attention kernels read whole tiles of places.
_PLACES_MULTIPLE = 64


@dataclass(frozen=True)
class Kernels:
    """Whose kernels run a compiled step.

    Args:
        options: of `torch.compile`.
        by_layer: layers are compiled once for each kind, not with the whole graph: a shorter start.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    by_layer: bool = False


# With `generated`, the compiler makes kernels of its own where a product has one row of activations; they
# read selected features where they lie, so a selection costs no kernel and no memory.
KERNELS: Mapping[str, Kernels] = {
    "library": Kernels(),
    "generated": Kernels({"coordinate_descent_tuning": True}),
    "layers": Kernels(by_layer=True),
}


@dataclass(frozen=True, eq=False)
class Contender:
    """One decoder of a comparison.

    Args:
        reference: lowered by index-add, with a cache; its cost is counted.
        fast: the same with gather-add; it is run.
        removed: share of the counted parameters that its plan removes; 0 for a dense decoder.
    """

    reference: Program
    fast: Program
    removed: float = 0.0


def compare(
    name: str,
    dense: Contender,
    pruned: Contender,
    shape: CachedShape,
    mode: Mode,
    *,
    kernels: Sequence[str] = ("library",),
    rounds: int = 7,
) -> SpeedRow:
    """Measure one step of both decoders, and say how much faster the pruned one is.

    Args:
        name: of the row.
        shape: of the step.
        kernels: names in `KERNELS` to try for a compiled step; each decoder keeps its fastest.
        rounds: how often each has its turn.

    Returns:
        A row; with a note and without figures where there is not enough memory, or compiling fails.
    """
    costs = [step_cost(contender.reference, shape) for contender in (dense, pruned)]
    limit = bound(costs[0], costs[1], shape)
    counted = "bytes" if shape.tokens == 1 else "operations"
    shares = {part: share for part, share in costs[1].shares().items() if part.endswith(counted)}
    unpruned = {part: share for part, share in shares.items() if not part.startswith("layer")}
    row = partial(SpeedRow, name, shape, mode, bound=limit, unpruned=unpruned)
    try:
        sides = _measured(
            (dense, pruned), kernels if mode == "compiled" else ("library",), shape, mode, rounds
        )
    except (DispfxError, RuntimeError) as error:
        return row(dense=None, pruned=None, note=first_line(error))
    finally:
        _forget()
    return row(dense=sides[0], pruned=sides[1])


def _measured(
    contenders: Sequence[Contender], kernels: Sequence[str], shape: CachedShape, mode: Mode, rounds: int
) -> list[Side]:
    device = contenders[0].fast.device
    made = [(place, kind) for place in range(len(contenders)) for kind in kernels]
    calls, starts, peaks = [], [], []
    for place, kind in made:
        began = time.perf_counter()
        call = step_call(contenders[place].fast, shape, mode, kind)
        calls.append(call)
        starts.append(time.perf_counter() - began)
        peaks.append(peak_bytes(call, device))
    timings = compare_times(calls, device, rounds=rounds)
    sides = []
    for place in range(len(contenders)):
        own = [index for index, (of, _) in enumerate(made) if of == place]
        best = min(own, key=lambda index: timings[index].median_seconds)
        timing = timings[best]
        sides.append(
            Side(timing.median_seconds, timing.least_seconds, peaks[best], starts[best], made[best][1])
        )
    return sides


def step_call(program: Program, shape: CachedShape, mode: Mode, kernels: str = "library") -> Call:
    """Return a call that runs one step on random inputs; it has run once, so it is compiled and recorded.

    Args:
        program: lowered, with a cache.
    """
    length = -(-(shape.past + shape.tokens) // _PLACES_MULTIPLE) * _PLACES_MULTIPLE
    programs = static_programs(program, length)
    chosen = programs.decode if shape.tokens == 1 else programs.prefill
    inputs = step_inputs(chosen, shape, length)
    graph = compiled(chosen, KERNELS[kernels]) if mode == "compiled" else chosen.graph_module

    def call() -> object:
        with torch.no_grad():
            return graph(*inputs)

    call()
    return recorded(call, program.device) if mode == "compiled" else call


def compiled(program: Program, kernels: Kernels) -> Callable[..., Any]:
    """Return a static program as a compiled callable, whole or layer by layer."""
    options = dict(kernels.options) or None
    make = partial(torch.compile, fullgraph=True, dynamic=False, options=options)
    if not kernels.by_layer:
        return make(program.graph_module)
    run_pipeline("outline", program, requires="static")
    layered = LayeredDecoder(program)
    for body, call in list(layered.bodies.items()):
        layered.replace_body(body, make(call))
    return layered


def step_inputs(program: Program, shape: CachedShape, length: int) -> list[Tensor]:
    """Return the inputs of a static program: random tokens, and random keys and values in the caches."""
    batch, tokens, past = shape
    device = program.device
    ids = torch.randint(program.known_tokens, (batch, tokens), device=device)
    mask = torch.ones(batch, length, dtype=torch.int64, device=device)
    positions = (torch.arange(tokens, device=device) + past).expand(batch, tokens).contiguous()
    start = torch.full((), past, dtype=torch.int64, device=device)
    caches = [cache.zeros(batch, length, device).normal_() for cache in cache_tensors(program.graph)]
    return [ids, mask, positions, start, *caches]


def _forget() -> None:
    """Free what compiling and recording hold."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
