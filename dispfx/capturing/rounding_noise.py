"""How far rounding alone moves what a module gives.

    allowed = 4 · max over three nudges of |module(nudged) − module|        relative to the largest value

Entry point: `allowed_by_rounding`.

1. A nudge moves every number of every parameter to the next one, up or down at random.  On post-norm encoders
   of torch, two to eight layers, another order of sums moved the logits 0.5 to 1.4 times as far.
2. However sensitive a module is, no more than `MOST` is allowed, so that a fault of 1e-4 is found in float32.
3. Half precision rounds so coarsely that faults would pass: module and graph must agree in float32 too.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, fx, nn

from dispfx.ir.retype import retyped

NUDGES, TIMES = 3, 4.0
MOST = {torch.float64: 1e-10, torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_HALF = (torch.float16, torch.bfloat16)
# Of the distance between two numbers: the sum is rounded to the nearest, which is the next one.
_STEP = 0.75

Tensors = Mapping[str, Tensor]
Logits = Callable[[Tensors], Tensor]
Distance = Callable[[Tensor, Tensor], float]


def allowed_by_rounding(
    model: nn.Module, graph: fx.GraphModule, ids: Tensor, logits: Logits, distance: Distance
) -> float:
    """Return how far a module's logits and its graph's may be from each other if both only round otherwise.

    Args:
        graph: of the module.
        ids: (B, T) token ids.
        logits: what the module gives for these ids with other values for some of its tensors, by path.
        distance: of two results, relative to the largest value.
    """
    parameters = dict(model.named_parameters())
    dtypes = {tensor.dtype for tensor in parameters.values()} & {*_HALF}
    for dtype in dtypes:
        if not _agree_in_float32(model, retyped(graph, dtype, torch.float32), ids, logits, distance, dtype):
            return 0.0
    return _moved_by_nudges(parameters, logits, distance)


def _agree_in_float32(
    model: nn.Module,
    twin: fx.GraphModule,
    ids: Tensor,
    logits: Logits,
    distance: Distance,
    dtype: torch.dtype,
) -> bool:
    own = (*model.named_parameters(), *model.named_buffers())
    exact = {path: tensor.detach().float() for path, tensor in own if tensor.dtype == dtype}
    try:
        found = distance(twin(ids), logits(exact))
    except Exception:  # the module's code may insist on its type
        return False
    parameters = {path: exact[path] for path, _ in model.named_parameters() if path in exact}
    return found <= _moved_by_nudges(parameters, lambda moved: logits({**exact, **moved}), distance)


def _moved_by_nudges(parameters: Tensors, logits: Logits, distance: Distance) -> float:
    own = logits(parameters)
    moved = [distance(logits(_nudged(parameters, seed)), own) for seed in range(NUDGES)]
    return min(TIMES * max(moved), most_allowed(parameters.values()))


def most_allowed(tensors: Iterable[Tensor]) -> float:
    """Return `MOST` of the coarsest type among tensors."""
    return max((MOST.get(tensor.dtype, 0.0) for tensor in tensors), default=0.0)


def _nudged(tensors: Tensors, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        path: _next(tensor.detach(), generator)
        for path, tensor in tensors.items()
        if tensor.is_floating_point()
    }


def _next(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return a tensor whose numbers are the next ones, up or down."""
    ways = torch.randint(2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
    return (tensor.double() * (1 + _STEP * torch.finfo(tensor.dtype).eps * ways)).to(tensor.dtype)
