"""Replay one forward and backward pass as a CUDA graph.

The weights are frozen and every batch has one shape, so a step of the decoder is the same kernels on the
same memory each time; replayed, it costs one launch instead of thousands.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispfx.kernels.recording import Replayed

Loss = Callable[[Tensor, Tensor], Tensor]


class ReplayedLoss:
    """A loss (ids_BT, masks) -> scalar whose gradient for the masks comes out of the same replay.

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
