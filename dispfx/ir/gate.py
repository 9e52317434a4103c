"""The gate operation: `dispfx::gate(x, mask, dim)` multiplies one dimension of `x` by a mask.

Size legend: x (..., N, ...) with N features at `dim`; mask (N,).

The mask is cast to the dtype of `x`.  With a mask of ones no bit of `x` changes, since 1 · x = x for
every number, infinities and both zeros among them, and a NaN stays a NaN; a zero removes the feature.
Gates are the only operation that dispfx adds to a graph before lowering, and the only one a lowered
graph may not contain.
"""

import torch
from torch import Tensor

__all__ = ["GATE", "gate"]


@torch.library.custom_op("dispfx::gate", mutates_args=())
def gate(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return `x` with feature i of dimension `dim` multiplied by `mask[i]`.

    Args:
        x: activation, shape (..., N, ...).
        mask: shape (N,), any float dtype; 1.0 keeps a feature and 0.0 removes it.
        dim: the gated dimension, counted from the front.

    Returns:
        A new tensor of the shape and dtype of `x`.
    """
    return x * _aligned(x, mask, dim)


@gate.register_fake
def _(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    if mask.dim() != 1:
        raise ValueError(f"a mask has one dimension, this one has shape {tuple(mask.shape)}")
    return torch.empty_like(x)


def _aligned(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """View the mask so that it broadcasts along `dim` of `x`."""
    shape = [1] * x.dim()
    shape[dim] = mask.shape[0]
    return mask.to(x.dtype).view(shape)


def _save(ctx, inputs, output) -> None:
    x, mask, dim = inputs
    ctx.save_for_backward(x, mask)
    ctx.dim = dim


def _backward(ctx, grad: Tensor):
    """d(x·m)/dx = m and d(x·m)/dm = Σ x over every other dimension."""
    x, mask = ctx.saved_tensors
    grad_x = grad * _aligned(x, mask, ctx.dim) if ctx.needs_input_grad[0] else None
    grad_mask = None
    if ctx.needs_input_grad[1]:
        others = [d for d in range(x.dim()) if d != ctx.dim]
        grad_mask = (
            (grad * x).sum(others, dtype=torch.promote_types(mask.dtype, torch.float32)).to(mask.dtype)
        )
    return grad_x, grad_mask, None


gate.register_autograd(_backward, setup_context=_save)

GATE = torch.ops.dispfx.gate.default
