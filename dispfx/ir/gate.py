"""The gate operation: `dispfx::gate(x, mask, dim, experts)` multiplies one dimension of `x` by a mask.

Size legend: x (R, …, N, …) with N features at `dim`; mask (N,) or (S, N), with experts (E N,) or (S, E N);
experts (R,); S samples, E experts.

The mask is cast to the dtype of `x`.  With a mask of ones no bit of `x` changes, since 1 · x = x for
every number, infinities and both zeros among them, and a NaN stays a NaN; a zero removes the feature.
Gates are the only operation that dispfx adds to a graph before lowering, and the only one a lowered
graph may not contain.

With S masks, dimension 0 of `x` is S runs of equal length, and each run has a mask of its own.  Where
dimension 0 is the batch, or batch and tokens in one, the sequences of a batch so have different masks.

With experts, position r of dimension 0 is multiplied by the part of the mask that belongs to expert
`experts[r]`: features `experts[r] · N` and on.  A number that is no expert's, which some kernels take for
"none", counts as the nearest one.
"""

import torch
from torch import Tensor

__all__ = ["GATE", "gate", "gate_product"]


@torch.library.custom_op("dispfx::gate", mutates_args=())
def gate(x: Tensor, mask: Tensor, dim: int, experts: Tensor | None = None) -> Tensor:
    """Return `x` with feature i of dimension `dim` multiplied by `mask[i]`.

    Args:
        x: activation, shape (R, …, N, …).
        mask: shape (N,) or (S, N), any float dtype; 1.0 keeps a feature and 0.0 removes it.  With experts,
            the features of all of them side by side.
        dim: the gated dimension, counted from the front; not 0 with several masks or experts.
        experts: (R,) integers, the expert of each position of dimension 0.

    Returns:
        A new tensor of the shape and dtype of `x`.
    """
    runs = _runs(x, mask, dim, experts)
    return (runs * _aligned(runs, mask, dim, experts)).view(x.shape)


@gate.register_fake
def _(x: Tensor, mask: Tensor, dim: int, experts: Tensor | None = None) -> Tensor:
    if mask.dim() not in (1, 2):
        raise ValueError(f"a mask has one dimension or two, this one has shape {tuple(mask.shape)}")
    features, wanted = mask.shape[-1], x.shape[dim]
    if features != wanted and (experts is None or features % wanted):
        raise ValueError(f"a mask of {features} features cannot gate {wanted}")
    return torch.empty_like(x)


def _runs(x: Tensor, mask: Tensor, dim: int, experts: Tensor | None) -> Tensor:
    """View `x` with the runs of dimension 0 that have one mask each in front, (S, rows, …)."""
    if mask.dim() == 1 and experts is None:
        return x
    samples = mask.shape[0] if mask.dim() == 2 else 1
    if dim == 0 or x.shape[0] % samples:
        raise ValueError(f"{samples} masks do not divide dimension 0 of {tuple(x.shape)}, gated at {dim}")
    return x if experts is not None else x.unflatten(0, (samples, -1))


def _aligned(runs: Tensor, mask: Tensor, dim: int, experts: Tensor | None) -> Tensor:
    """View the mask so that it broadcasts along its dimensions of `runs`."""
    shape = [1] * runs.dim()
    if experts is not None:
        shape[0], shape[dim] = runs.shape[0], runs.shape[dim]
        rows_of_mask = mask.to(runs.dtype).reshape(-1, runs.shape[dim])
        return rows_of_mask[_row_of_mask(runs, mask, dim, experts)].view(shape)
    if mask.dim() == 1:
        shape[dim] = mask.shape[0]
    else:
        shape[0], shape[dim + 1] = mask.shape
    return mask.to(runs.dtype).view(shape)


def _row_of_mask(x: Tensor, mask: Tensor, dim: int, experts: Tensor) -> Tensor:
    """Return for each position of dimension 0 its row of the mask (S E, N)."""
    number = mask.shape[-1] // x.shape[dim]
    row = experts.long().clamp(0, number - 1)
    if mask.dim() == 1:
        return row
    sample = torch.arange(x.shape[0], device=x.device) // (x.shape[0] // mask.shape[0])
    return row + number * sample


def gate_product(x: Tensor, mask: Tensor, dim: int, experts: Tensor | None = None) -> Tensor:
    """Return what `gate` returns by plain operations, into which a compiler can look.

    The product is taken in float32, so that the gradient of the mask is summed there; for masks of zeros and
    ones the bits are those of `gate`.
    """
    wide = _runs(x, mask, dim, experts).float()
    return (wide * _aligned(wide, mask, dim, experts)).to(x.dtype).view(x.shape)


def _save(ctx, inputs, output) -> None:
    x, mask, dim, experts = inputs
    ctx.save_for_backward(x, mask, experts)
    ctx.dim = dim


def _backward(ctx, grad: Tensor):
    """d(x·m)/dx = m and d(x·m)/dm = Σ x over every other dimension."""
    x, mask, experts = ctx.saved_tensors
    runs, grad_runs = (_runs(value, mask, ctx.dim, experts) for value in (x, grad))
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = (grad_runs * _aligned(runs, mask, ctx.dim, experts)).view(x.shape)
    grad_mask = None
    if ctx.needs_input_grad[1]:
        own = ctx.dim + (experts is None and mask.dim() == 2)
        kept = {own} if mask.dim() == 1 and experts is None else {0, own}
        others = [d for d in range(runs.dim()) if d not in kept]
        dtype = torch.promote_types(mask.dtype, torch.float32)
        product = grad_runs * runs
        summed = product.sum(others, dtype=dtype) if others else product.to(dtype)
        if experts is not None:
            row = _row_of_mask(x, mask, ctx.dim, experts)
            by_row = summed.new_zeros(mask.numel() // x.shape[ctx.dim], x.shape[ctx.dim])
            summed = by_row.index_add(0, row, summed).view(mask.shape)
        grad_mask = summed.to(mask.dtype)
    return grad_x, grad_mask, None, None


gate.register_autograd(_backward, setup_context=_save)

GATE = torch.ops.dispfx.gate.default
