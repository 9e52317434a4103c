"""The GPU kernels of `dispfx.kernels.norm_gate`.

Legend: S masks, P programs of a run, D width.
"""

# Triton comes with torch for GPUs only, and its kernels are no plain functions.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from dispfx.kernels.norm_gate import Gradients, Operands

# Tokens of a program, a power of two; with fewer there are more sums to add up at the end.
_MOST_TOKENS, _PROGRAMS = 16, 128
_WARPS, _STAGES = 8, 3
# Sums of a tile that are added up: rows and columns.
_ROWS, _COLUMNS = 128, 16


def gradients(given: Operands) -> Gradients:
    """Return the gradients of x, of what is written, and of both masks, empty where there is none."""
    has_norm, has_write = given.of_normed is not None, given.written is not None
    mask = given.read_mask if has_norm else given.write_mask
    assert mask is not None
    width = given.of_total.shape[-1]
    runs = mask.numel() // width
    rows = given.of_total.numel() // width // runs
    each = min(_MOST_TOKENS, triton.next_power_of_2(max(1, rows * runs // _PROGRAMS)))
    programs = triton.cdiv(rows, each)
    results = given.empty()
    sums_2SPD = given.of_total.new_empty((2, runs, programs, width), dtype=torch.float32)
    # What is not there is never read; another tensor stands for it.
    there = [sums_2SPD if value is None else value.contiguous() for value in given]
    with torch.cuda.device_of(given.of_total):
        _backward_rows[(runs * programs,)](
            *there,
            *results[:2],
            sums_2SPD,
            rows,
            width,
            programs,
            sums_2SPD.stride(0),
            HAS_NORM=has_norm,
            HAS_WRITE=has_write,
            HAS_MEAN=given.mean is not None,
            HAS_BIAS=given.bias is not None,
            EACH=each,
            BLOCK=triton.next_power_of_2(width),
            STAGES=_STAGES,
            num_warps=_WARPS,
        )
        _add_up_all(sums_2SPD, results[3] if has_norm else None, results[2] if has_write else None)
    return results


def _add_up_all(sums_2SPD: Tensor, of_read: Tensor | None, of_write: Tensor | None) -> None:
    """Add the sums of all programs, those of the read mask first, into gradients (D,) or (S, D)."""
    _, runs, programs, width = sums_2SPD.shape
    wanted = [(place, value) for place, value in enumerate((of_read, of_write)) if value is not None]
    first = wanted[0][0]
    _add_up[(triton.cdiv(width, _COLUMNS), runs, len(wanted))](
        sums_2SPD[first],
        wanted[0][1],
        wanted[-1][1],
        programs,
        width,
        sums_2SPD.stride(0),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


@triton.jit
def _backward_rows(
    of_total,
    of_normed,
    total,
    written,
    mean,
    rstd,
    weight,
    bias,
    write_mask,
    read_mask,
    of_x,
    of_written,
    sums,
    rows,
    width,
    programs,
    second,
    HAS_NORM: tl.constexpr,
    HAS_WRITE: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    run = tl.program_id(0) // programs
    feature = tl.arange(0, BLOCK)
    inside = feature < width
    mask_at = run * width + feature
    if HAS_NORM:
        scale = tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
        scale *= tl.load(read_mask + mask_at, mask=inside, other=0.0).to(tl.float32)
        by_normal = tl.zeros((BLOCK,), tl.float32)
        if HAS_BIAS:
            by_bias = tl.zeros((BLOCK,), tl.float32)
    if HAS_WRITE:
        keep = tl.load(write_mask + mask_at, mask=inside, other=0.0).to(tl.float32)
        by_write = tl.zeros((BLOCK,), tl.float32)
    for index in tl.range(0, EACH, num_stages=STAGES):
        row_of_run = (tl.program_id(0) % programs) * EACH + index
        is_row = row_of_run < rows
        there = inside & is_row
        row = run.to(tl.int64) * rows + row_of_run
        at = row * width + feature
        g = tl.load(of_total + at, mask=there, other=0.0).to(tl.float32)
        if HAS_NORM:
            d = tl.load(of_normed + at, mask=there, other=0.0).to(tl.float32)
            normal = tl.load(total + at, mask=there, other=0.0).to(tl.float32)
            root = tl.load(rstd + row, mask=is_row, other=0.0)
            if HAS_MEAN:
                normal = tl.where(there, normal - tl.load(mean + row, mask=is_row, other=0.0), 0.0)
            normal *= root
            by_normal += d * normal
            if HAS_BIAS:
                by_bias += d
            d *= scale
            toward = normal * (tl.sum(d * normal, 0) / width)
            if HAS_MEAN:
                toward += tl.sum(d, 0) / width
            g += root * (d - toward)
            tl.store(of_x + at, g.to(of_x.dtype.element_ty), mask=there)
        if HAS_WRITE:
            by_write += g * tl.load(written + at, mask=there, other=0.0).to(tl.float32)
            tl.store(of_written + at, (g * keep).to(of_written.dtype.element_ty), mask=there)
    sum_at = tl.program_id(0).to(tl.int64) * width + feature
    if HAS_NORM:
        by_normal *= tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            by_normal += by_bias * tl.load(bias + feature, mask=inside, other=0.0).to(tl.float32)
        tl.store(sums + sum_at, by_normal, mask=inside)
    if HAS_WRITE:
        tl.store(sums + second + sum_at, by_write, mask=inside)


@triton.jit
def _add_up(sums, first, last, programs, width, second, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    feature = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    run = tl.program_id(1)
    of_first = tl.program_id(2) == 0
    start = sums + (tl.program_id(2).to(tl.int64) * second + run.to(tl.int64) * programs * width)
    inside = feature < width
    tile = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, programs, ROWS):
        row = begin + tl.arange(0, ROWS)
        there = (row < programs)[:, None] & inside[None, :]
        tile += tl.load(start + row[:, None] * width + feature[None, :], mask=there, other=0.0)
    total = tl.sum(tile, 0)
    tl.store(first + run * width + feature, total, mask=inside & of_first)
    tl.store(last + run * width + feature, total, mask=inside & (tl.program_id(2) != 0))
