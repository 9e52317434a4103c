"""The gate operation: `dispfx::gate(x, mask, dim)` multiplies one dimension of `x` by a mask.

Size legend: x (..., N, ...) with N features at `dim`; mask (N,) or (S, N); S samples.

The mask is cast to the dtype of `x`.  With a mask of ones no bit of `x` changes, since 1 · x = x for
every number, infinities and both zeros among them, and a NaN stays a NaN; a zero removes the feature.
Gates are the only operation that dispfx adds to a graph before lowering, and the only one a lowered
graph may not contain.

With S masks, dimension 0 of `x` is S runs of equal length, and each run has a mask of its own.  Where
dimension 0 is the batch, or batch and tokens in one, the sequences of a batch so have different masks.
"""

import torch
from torch import Tensor

__all__ = ["GATE", "gate", "gate_product"]


@torch.library.custom_op("dispfx::gate", mutates_args=())
def gate(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return `x` with feature i of dimension `dim` multiplied by `mask[i]`.

    Args:
        x: activation, shape (..., N, ...).
        mask: shape (N,) or (S, N), any float dtype; 1.0 keeps a feature and 0.0 removes it.
        dim: the gated dimension, counted from the front.

    Returns:
        A new tensor of the shape and dtype of `x`.
    """
    runs = _runs(x, mask, dim)
    return (runs * _aligned(runs, mask, dim)).view(x.shape)


@gate.register_fake
def _(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    if mask.dim() not in (1, 2):
        raise ValueError(f"a mask has one dimension or two, this one has shape {tuple(mask.shape)}")
    if mask.shape[-1] != x.shape[dim]:
        raise ValueError(f"a mask of {mask.shape[-1]} features cannot gate {x.shape[dim]}")
    return torch.empty_like(x)


def _runs(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """View `x` with the runs of dimension 0 that have one mask each in front, (S, rows, ...)."""
    if mask.dim() == 1:
        return x
    if dim == 0 or x.shape[0] % mask.shape[0]:
        raise ValueError(
            f"{mask.shape[0]} masks do not divide dimension 0 of {tuple(x.shape)}, gated at {dim}"
        )
    return x.unflatten(0, (mask.shape[0], -1))


def _aligned(runs: Tensor, mask: Tensor, dim: int) -> Tensor:
    """View the mask so that it broadcasts along its dimensions of `runs`."""
    shape = [1] * runs.dim()
    if mask.dim() == 1:
        shape[dim] = mask.shape[0]
    else:
        shape[0], shape[dim + 1] = mask.shape
    return mask.to(runs.dtype).view(shape)


def gate_product(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return what `gate` returns by plain operations, into which a compiler can look.

    The product is taken in float32, so that the gradient of the mask is summed there; for masks of zeros and
    ones the bits are those of `gate`.
    """
    wide = _runs(x, mask, dim).float()
    return (wide * _aligned(wide, mask, dim)).to(x.dtype).view(x.shape)


def _save(ctx, inputs, output) -> None:
    x, mask, dim = inputs
    ctx.save_for_backward(x, mask)
    ctx.dim = dim


def _backward(ctx, grad: Tensor):
    """d(x·m)/dx = m and d(x·m)/dm = Σ x over every other dimension."""
    x, mask = ctx.saved_tensors
    runs, grad_runs = _runs(x, mask, ctx.dim), _runs(grad, mask, ctx.dim)
    grad_x = (grad_runs * _aligned(runs, mask, ctx.dim)).view(x.shape) if ctx.needs_input_grad[0] else None
    grad_mask = None
    if ctx.needs_input_grad[1]:
        kept = {ctx.dim} if mask.dim() == 1 else {0, ctx.dim + 1}
        others = [d for d in range(runs.dim()) if d not in kept]
        dtype = torch.promote_types(mask.dtype, torch.float32)
        product = grad_runs * runs
        grad_mask = (product.sum(others, dtype=dtype) if others else product.to(dtype)).to(mask.dtype)
    return grad_x, grad_mask, None


gate.register_autograd(_backward, setup_context=_save)

GATE = torch.ops.dispfx.gate.default
