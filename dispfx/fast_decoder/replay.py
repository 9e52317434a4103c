"""Replay one forward and backward pass as a CUDA graph.

The weights are frozen and every batch has one shape, so a step of the decoder is the same kernels on the
same memory each time; replayed, it costs one launch instead of thousands.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispfx.kernels.recording import recording, warm_up

Loss = Callable[[Tensor, Tensor], Tensor]

_WARM_UPS = 2


class ReplayedLoss:
    """A loss (ids_BT, masks) -> scalar whose gradient for the masks comes out of the same replay.

    Args:
        loss: differentiable in the masks alone; run twice and then captured, on zeros: a replay that does
            nothing then gives other numbers than any that it is compared on.
        ids_BT: a batch of the shape of all batches, on a CUDA device.
        masks: of the shape of all masks, (N,) or (S, N).
    """

    def __init__(self, loss: Loss, ids_BT: Tensor, masks: Tensor):
        self._loss = loss
        self._ids_BT = torch.zeros_like(ids_BT)
        self._masks = torch.zeros_like(masks).requires_grad_()
        warm_up(self._once, _WARM_UPS, ids_BT.device)
        torch.cuda.empty_cache()
        self._graph = torch.cuda.CUDAGraph()
        with recording(self._graph, ids_BT.device):
            self._value, self._gradient = self._once()

    def __call__(self, ids_BT: Tensor, masks: Tensor) -> Tensor:
        """Return the loss; differentiable in the masks."""
        shapes = ids_BT.shape == self._ids_BT.shape and masks.shape == self._masks.shape
        if not (shapes and masks.requires_grad and torch.is_grad_enabled()):
            return self._loss(ids_BT, masks)
        return _Replay.apply(masks, ids_BT, self)  # type: ignore[return-value]

    def replay(self, ids_BT: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss and gradient; they are overwritten by the next replay."""
        self._ids_BT.copy_(ids_BT)
        with torch.no_grad():
            self._masks.copy_(masks)
        self._graph.replay()
        return self._value, self._gradient

    def _once(self) -> tuple[Tensor, Tensor]:
        loss = self._loss(self._ids_BT, self._masks)
        (gradient,) = torch.autograd.grad(loss, self._masks)
        return loss.detach(), gradient


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, masks: Tensor, ids_BT: Tensor, replayed: ReplayedLoss) -> Tensor:
        loss, gradient = replayed.replay(ids_BT, masks)
        ctx.save_for_backward(gradient.clone())
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None
