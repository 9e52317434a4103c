"""The GPU kernel of `dispfx.learning.outer_adamw`: a program takes a few rows of one matrix.

Legend: C matrices, W rows, F columns.
"""

# Triton comes with torch for GPUs only, and its kernels are no plain functions.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from dispfx.learning.outer_product import OuterProduct

# Numbers of a tile: 16 a thread, in four loads of four.
_TILE, _WARPS = 2048, 4


def outer_adamw(
    parameter: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: OuterProduct,
    on_device: tuple[Tensor, Tensor, Tensor],
    *,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Do one step of AdamW in place.

    Args:
        parameter, mean, square: (C, W, F) float32, contiguous; F is a power of two.
        gradient: of the parameter.
        on_device: lr / (1 − β₁ⁿ), 1 / √(1 − β₂ⁿ), and whether to skip the step, float32 scalars.
        decay: learning rate times weight decay.
        betas, eps: as torch's.
    """
    matrices, rows, columns = parameter.shape
    tile_rows = _TILE // columns
    factors = (gradient.left_CW.contiguous(), gradient.right_CF.contiguous())
    with torch.cuda.device_of(parameter):
        _outer_adamw_step[(matrices * triton.cdiv(rows, tile_rows),)](
            parameter,
            mean,
            square,
            *factors,
            *on_device,
            rows,
            decay,
            1 - betas[0],
            1 - betas[1],
            eps,
            ROWS=tile_rows,
            F=columns,
            num_warps=_WARPS,
        )


@triton.jit
def _outer_adamw_step(
    parameter,
    mean,
    square,
    left,
    right,
    scale,
    unbias,
    skip,
    rows,
    decay,
    rest_1,
    rest_2,
    eps,
    ROWS: tl.constexpr,
    F: tl.constexpr,
):
    tiles = tl.cdiv(rows, ROWS)
    matrix = tl.program_id(0) // tiles
    row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, F)
    # A step that is skipped reads and writes nothing.
    inside = row < tl.where(tl.load(skip) == 0.0, rows, 0)
    place = matrix.to(tl.int64) * rows + row
    tile = place[:, None] * F + column[None, :]
    every = inside[:, None]
    g = tl.load(left + place, mask=inside, other=0.0)[:, None] * tl.load(right + matrix * F + column)[None, :]
    p = tl.load(parameter + tile, mask=every, other=0.0)
    m = tl.load(mean + tile, mask=every, other=0.0)
    v = tl.load(square + tile, mask=every, other=0.0)
    m += rest_1 * (g - m)
    v += rest_2 * (g * g - v)
    p -= decay * p
    p -= tl.load(scale) * m / (tl.sqrt(v) * tl.load(unbias) + eps)
    tl.store(parameter + tile, p, mask=every)
    tl.store(mean + tile, m, mask=every)
    tl.store(square + tile, v, mask=every)
