"""Record what a GPU does as a CUDA graph, on the device of its tensors, whichever is torch's current one."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

_WARM_UPS = 2


class Replayed(Generic[Result]):
    """A function of tensors as one CUDA graph: one launch, however many kernels.

    Args:
        device: a CUDA device.
        function: reads the same other tensors every time.  It is run a few times and then recorded, on zeros:
            a replay that does nothing then gives other numbers than any that it is compared on.
        operands: of the shapes of all later ones.
    """

    def __init__(self, device: torch.device, function: Callable[..., Result], *operands: Tensor):
        self.operands = tuple(torch.zeros_like(one) for one in operands)
        warm_up(lambda: function(*self.operands), _WARM_UPS, device)
        torch.cuda.empty_cache()
        self._graph = torch.cuda.CUDAGraph()
        # The function's own tensors must live as long as the graph.
        self._function = function
        with recording(self._graph, device):
            self._result = function(*self.operands)

    def __call__(self, *operands: Tensor) -> Result:
        """Return the result, which the next call overwrites."""
        for place, given in zip(self.operands, operands, strict=True):
            place.copy_(given.detach())
        self._graph.replay()
        return self._result


def warm_up(work: Callable[[], object], times: int, device: torch.device) -> None:
    """Run on a stream of its own what will be recorded, so that all is compiled and allocated, and wait."""
    side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(times):
            work()
    current.wait_stream(side)
    torch.cuda.synchronize(device)


def recording(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any = None) -> torch.cuda.graph:
    """Return the block whose work becomes the graph.

    Args:
        pool: of another graph, whose memory this one shares.
    """
    return torch.cuda.graph(graph, pool=pool, stream=_capture_stream(device))


@lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which all graphs of a device are recorded.

    One for all: the backward pass of a graph runs on the stream of its forward pass, which may be in a graph
    before, and libraries have a workspace for every stream.
    """
    return torch.cuda.Stream(device)


Loss = Callable[[Tensor, Tensor], Tensor]


class ReplayedLoss:
    """A loss (ids_BT, masks) -> scalar whose gradient for the masks comes out of the same replay.

    The weights are frozen and every batch has one shape, so a step of the decoder is the same kernels on the
    same memory each time; replayed, it costs one launch instead of thousands.

    Args:
        loss: differentiable in the masks alone.
        ids_BT: a batch of the shape of all batches, on a CUDA device.
        masks: of the shape of all masks, (N,) or (S, N).
    """

    def __init__(self, loss: Loss, ids_BT: Tensor, masks: Tensor):
        self._loss = loss
        self._replayed = Replayed(ids_BT.device, self._once, ids_BT, masks)

    def __call__(self, ids_BT: Tensor, masks: Tensor) -> Tensor:
        """Return the loss; differentiable in the masks."""
        shapes = [one.shape for one in self._replayed.operands] == [ids_BT.shape, masks.shape]
        if not (shapes and masks.requires_grad and torch.is_grad_enabled()):
            return self._loss(ids_BT, masks)
        return _Replay.apply(masks, ids_BT, self._replayed)  # type: ignore[return-value]

    def _once(self, ids_BT: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        leaf = masks.detach().requires_grad_()
        loss = self._loss(ids_BT, leaf)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, masks: Tensor, ids_BT: Tensor, replayed: Replayed[tuple[Tensor, Tensor]]) -> Tensor:
        loss, gradient = replayed(ids_BT, masks)
        ctx.save_for_backward(gradient.clone())
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None
