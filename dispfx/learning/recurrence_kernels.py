"""The GPU kernels of `dispfx.learning.recurrence`: one program a direction, its weights in registers.

Legend: G rows, H width of a direction, 2 directions; X = 3H and Y = 4H values a row.
"""

# Triton comes with torch for GPUs only, and its kernels are no plain functions.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 8


def rows_forward(given_2GX: Tensor, weights_2XH: Tensor, biases_2X: Tensor) -> tuple[Tensor, Tensor]:
    """As `recurrence.rows_forward`."""
    directions, rows, width = *given_2GX.shape[:2], weights_2XH.shape[2]
    hidden_2GH = torch.empty(directions, rows, width, dtype=given_2GX.dtype, device=given_2GX.device)
    kept_2GY = torch.empty(directions, rows, 4 * width, dtype=given_2GX.dtype, device=given_2GX.device)
    operands = (given_2GX.contiguous(), weights_2XH.contiguous(), biases_2X.contiguous())
    with torch.cuda.device_of(given_2GX):
        _forward[(directions,)](*operands, hidden_2GH, kept_2GY, rows, H=width, num_warps=_WARPS)
    return hidden_2GH, kept_2GY


def rows_backward(
    gradient_2GH: Tensor, hidden_2GH: Tensor, kept_2GY: Tensor, weights_2XH: Tensor
) -> tuple[Tensor, Tensor]:
    """As `recurrence.rows_backward`."""
    directions, rows, width = hidden_2GH.shape
    shape, device = (directions, rows, 3 * width), hidden_2GH.device
    of_given_2GX, of_state_2GX = (torch.empty(shape, dtype=hidden_2GH.dtype, device=device) for _ in range(2))
    operands = (gradient_2GH.contiguous(), hidden_2GH, kept_2GY, weights_2XH.contiguous())
    with torch.cuda.device_of(gradient_2GH):
        _backward[(directions,)](*operands, of_given_2GX, of_state_2GX, rows, H=width, num_warps=_WARPS)
    return of_given_2GX, of_state_2GX


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _forward(given, weights, biases, hidden, kept, rows, H: tl.constexpr):
    direction = tl.program_id(0)
    lane = tl.arange(0, H)
    tile = lane[:, None] * H + lane[None, :]
    weights += direction * 3 * H * H
    w_r, w_z, w_n = (
        tl.load(weights + tile),
        tl.load(weights + H * H + tile),
        tl.load(weights + 2 * H * H + tile),
    )
    biases += direction * 3 * H + lane
    b_r, b_z, b_n = tl.load(biases), tl.load(biases + H), tl.load(biases + 2 * H)
    step = 1 - 2 * direction
    row = direction * rows + direction * (rows - 1)
    h = tl.zeros((H,), tl.float32)
    at = given + row * 3 * H + lane
    i_r, i_z, i_n = tl.load(at), tl.load(at + H), tl.load(at + 2 * H)
    for place in range(rows):
        # Loaded one row ahead: what is loaded does not wait for what is computed.
        ahead = given + (row + step) * 3 * H + lane
        inside = lane < H * (rows - 1 - place)  # none of them behind the last row
        next_r = tl.load(ahead, mask=inside, other=0.0)
        next_z = tl.load(ahead + H, mask=inside, other=0.0)
        next_n = tl.load(ahead + 2 * H, mask=inside, other=0.0)
        r = tl.sigmoid(i_r + tl.sum(w_r * h[None, :], 1) + b_r)
        z = tl.sigmoid(i_z + tl.sum(w_z * h[None, :], 1) + b_z)
        m = tl.sum(w_n * h[None, :], 1) + b_n
        n = _tanh(i_n + r * m)
        h = (1.0 - z) * n + z * h
        tl.store(hidden + row * H + lane, h)
        out = kept + row * 4 * H + lane
        tl.store(out, r)
        tl.store(out + H, z)
        tl.store(out + 2 * H, n)
        tl.store(out + 3 * H, m)
        i_r, i_z, i_n = next_r, next_z, next_n
        row += step


@triton.jit
def _backward(gradient, hidden, kept, weights, of_given, of_state, rows, H: tl.constexpr):
    direction = tl.program_id(0)
    lane = tl.arange(0, H)
    tile = lane[:, None] * H + lane[None, :]
    weights += direction * 3 * H * H
    w_r, w_z, w_n = (
        tl.load(weights + tile),
        tl.load(weights + H * H + tile),
        tl.load(weights + 2 * H * H + tile),
    )
    step = 1 - 2 * direction
    row = direction * rows + (1 - direction) * (rows - 1)
    carried = tl.zeros((H,), tl.float32)
    for place in range(rows):
        inside = lane < H * (rows - 1 - place)  # before the first row is zero
        before = tl.load(hidden + (row - step) * H + lane, mask=inside, other=0.0)
        at = kept + row * 4 * H + lane
        r, z, n, m = tl.load(at), tl.load(at + H), tl.load(at + 2 * H), tl.load(at + 3 * H)
        g = tl.load(gradient + row * H + lane) + carried
        g_n = g * (1.0 - z) * (1.0 - n * n)
        g_z = g * (before - n) * z * (1.0 - z)
        g_r = g_n * m * r * (1.0 - r)
        a_n = g_n * r
        out = of_given + row * 3 * H + lane
        tl.store(out, g_r)
        tl.store(out + H, g_z)
        tl.store(out + 2 * H, g_n)
        out = of_state + row * 3 * H + lane
        tl.store(out, g_r)
        tl.store(out + H, g_z)
        tl.store(out + 2 * H, a_n)
        back = w_r * g_r[:, None] + w_z * g_z[:, None] + w_n * a_n[:, None]
        carried = g * z + tl.sum(back, 0)
        row -= step
