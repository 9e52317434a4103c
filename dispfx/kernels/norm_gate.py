"""The gradient of what lies between two branches: a gated write, the sum, a norm, a gated read.

    total  = x + written · write_mask
    normed = norm(total) · read_mask                    norm: x̂ · weight + bias, x̂ = (total − mean) · rstd

    with g = ∂/∂total, d = ∂/∂normed · read_mask · weight, D features:
    ∂/∂x           = g + rstd · (d − [Σ d / D] − x̂ · Σ d · x̂ / D)       [only where a mean is subtracted]
    ∂/∂written     = ∂/∂x · write_mask
    ∂/∂write_mask  = Σ over tokens of ∂/∂x · written
    ∂/∂read_mask   = Σ over tokens of ∂/∂normed · norm(total)

A compiler sums over features and over tokens in different kernels, and each of them reads everything again.
Here a program takes a few tokens, one after the other, with their whole width at once: everything is read
once, and sums over tokens stay in registers until the program's last token.  `reference` is what the
operation means, and what runs where there is no GPU.  Without a norm only the write is left, without a write
the rest.

Shape legend: B batch, T tokens, D width, S masks (each for its run of the batch), R = B T rows, P programs
of a run.
"""

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from dispfx.errors import first_line

__all__ = ["Operands", "add_norm_gate_backward", "in_one_kernel", "obstacle", "reference"]

# Bytes of a row: a program holds three rows of four values each in shared memory.
_WIDEST = 16_384
# Relative, Euclidean: one rounding of the result.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


class Operands(NamedTuple):
    """What the operation takes.

    Args:
        of_total: (…, D), gradient of the sum.
        of_normed: (…, D), gradient of the gated norm; none where nothing is normalised.
        total: (…, D), the sum; there with a norm.
        written: (…, D), what a branch wrote; none where nothing is added.
        mean: (R,) float32 of a LayerNorm.
        rstd: (R,) float32 of a norm, one divided by the root of mean square or variance.
        weight, bias: (D,) of the norm.
        write_mask, read_mask: (D,) or (S, D); S masks are for S equal runs of rows.
    """

    of_total: Tensor
    of_normed: Tensor | None = None
    total: Tensor | None = None
    written: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    write_mask: Tensor | None = None
    read_mask: Tensor | None = None

    def empty(self) -> Gradients:
        """Return tensors for the results, of no numbers for those that are not there."""
        of_x = None if self.of_normed is None else self.of_total
        shapes = (of_x, self.written, self.write_mask, self.read_mask)
        none = self.of_total.new_empty(0)
        of_x, of_written, of_write, of_read = (
            none.clone() if like is None else torch.empty_like(like, memory_format=torch.contiguous_format)
            for like in shapes
        )
        return of_x, of_written, of_write, of_read


@torch.library.custom_op("dispfx::add_norm_gate_backward", mutates_args=())
def add_norm_gate_backward(
    of_total: Tensor,
    of_normed: Tensor | None,
    total: Tensor | None,
    written: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    write_mask: Tensor | None,
    read_mask: Tensor | None,
) -> Gradients:
    """Return the gradients of x, of what is written, and of both masks, empty where there is none.

    Without a norm the gradient of x is `of_total`, and is not returned.  The operands are `Operands`.
    """
    return reference(
        Operands(of_total, of_normed, total, written, mean, rstd, weight, bias, write_mask, read_mask)
    )


@add_norm_gate_backward.register_fake
def _(*operands: Tensor) -> Gradients:
    return Operands(*operands).empty()


@add_norm_gate_backward.register_kernel("cuda")
def _(*operands: Tensor) -> Gradients:
    return in_one_kernel(Operands(*operands))


def reference(given: Operands) -> Gradients:
    """As `add_norm_gate_backward`, in plain torch."""
    results = list(given.empty())
    exact = torch.promote_types(given.of_total.dtype, torch.float32)
    of_x = given.of_total.to(exact)
    if given.of_normed is not None:
        assert given.rstd is not None and given.weight is not None and given.read_mask is not None
        normal = _normal(given, exact)
        scaled = normal * given.weight if given.bias is None else normal * given.weight + given.bias
        of_normal = _gated(given.of_normed.to(exact), given.read_mask) * given.weight
        toward = normal * (of_normal * normal).mean(-1, keepdim=True)
        if given.mean is not None:
            toward = toward + of_normal.mean(-1, keepdim=True)
        of_x = of_x + _column(given.rstd, of_x) * (of_normal - toward)
        results[0] = of_x.to(given.of_total.dtype)
        results[3] = _summed(given.of_normed.to(exact) * scaled, given.read_mask)
    if given.written is not None:
        assert given.write_mask is not None
        results[1] = _gated(of_x, given.write_mask).to(given.written.dtype)
        results[2] = _summed(of_x * given.written, given.write_mask)
    return results[0], results[1], results[2], results[3]


def _normal(given: Operands, exact: torch.dtype) -> Tensor:
    """Return (total − mean) · rstd, (…, D)."""
    assert given.total is not None and given.rstd is not None
    total = given.total.to(exact)
    centred = total if given.mean is None else total - _column(given.mean, total)
    return centred * _column(given.rstd, total)


def _column(of_rows: Tensor, like: Tensor) -> Tensor:
    """View (R,) as (…, 1)."""
    return of_rows.view(*like.shape[:-1], 1)


def _gated(values: Tensor, mask: Tensor) -> Tensor:
    """Multiply (…, D) by (D,) or by (S, D), each for its run of rows."""
    if mask.dim() == 1:
        return values * mask
    return (values.reshape(len(mask), -1, mask.shape[-1]) * mask[:, None]).view(values.shape)


def _summed(values: Tensor, mask: Tensor) -> Tensor:
    """Sum (…, D) over rows, for every mask of its own, in the dtype of the mask."""
    return values.reshape(*mask.shape[:-1], -1, mask.shape[-1]).sum(-2).to(mask.dtype)


def in_one_kernel(given: Operands) -> Gradients:
    """As `add_norm_gate_backward`, by a Triton kernel, and one that adds up its programs' sums."""
    # Triton is there with torch for GPUs only.
    from dispfx.kernels.norm_gate_kernels import gradients

    return gradients(given)


@lru_cache
def obstacle(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Return why the kernel is not to be used for rows of that many numbers on a device, or None.

    It is tried once on a few rows and compared with `reference`.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return "the kernel is for CUDA"
    if dtype not in _TOLERANCE or width * dtype.itemsize > _WIDEST:
        return f"the kernel is for rows of at most {_WIDEST} bytes in half or single precision"
    try:
        apart = max(apart_from_reference(device, dtype, width))
    except Exception as error:  # a Triton that is not there, or cannot compile for this card
        return f"the kernel fails: {first_line(error)}"
    return None if apart <= _TOLERANCE[dtype] else f"the kernel's numbers are {apart:.1e} from torch's"


def apart_from_reference(device: torch.device, dtype: torch.dtype, width: int) -> list[float]:
    """Return |a − b| / |b| of every gradient, for both norms with and without a write, and a write alone."""
    apart: list[float] = []
    for norm, writes, masks in product(("rms", "layer", None), (True, False), (1, 2)):
        if norm is None and not writes:
            continue
        given = drawn_operands(norm, width, dtype, writes=writes, masks=masks, device=device)
        for found, expected in zip(in_one_kernel(given), reference(given), strict=True):
            if expected.numel():
                gap = (found.double() - expected.double()).norm() / expected.double().norm()
                apart.append(float(gap.nan_to_num(nan=torch.inf)))
    return apart


def drawn_operands(
    norm: str | None,
    width: int,
    dtype: torch.dtype,
    *,
    writes: bool = True,
    masks: int = 1,
    device: torch.device | None = None,
) -> Operands:
    """Return random operands, 2 × 133 rows of them, for a norm `rms` or `layer`, or for none.

    A program of the kernel then takes two rows, and the last one of a run a single row.
    """
    generator = torch.Generator().manual_seed(width)
    exact = torch.promote_types(dtype, torch.float32)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=exact).to(device)

    of_total, of_normed, total, written = drawn(4, 2, 133, width).to(dtype)
    weight, bias = drawn(2, width).to(dtype)
    write_mask, read_mask = drawn(2, masks, width).squeeze(1)
    given = Operands(of_total)
    if writes:
        given = given._replace(written=written, write_mask=write_mask)
    if norm is None:
        return given
    rows = total.to(exact).flatten(0, 1)
    given = given._replace(of_normed=of_normed, total=total, weight=weight, read_mask=read_mask)
    if norm == "rms":
        return given._replace(rstd=rows.square().mean(-1).add(1e-5).rsqrt())
    rstd = rows.var(-1, correction=0).add(1e-5).rsqrt()
    return given._replace(bias=bias, mean=rows.mean(-1), rstd=rstd)
