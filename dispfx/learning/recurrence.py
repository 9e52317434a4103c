"""The recurrent part of the hypernetwork: a bidirectional GRU over a hundred or more rows, one at a time.

A library's GRU starts several kernels a row, and on a GPU waiting for them takes longer than a small
decoder's whole step.  Here a direction is one kernel that keeps its weights in registers:

    r = σ(i_r + W_r h + b_r)     z = σ(i_z + W_z h + b_z)     m = W_n h + b_n     n = tanh(i_n + r m)
    h' = (1 − z) n + z h                              (the GRU of torch.nn, arXiv 1406.1078)

where i = W_i x + b_i comes for all rows from one product.  Backward, from the last row to the first, with g
the gradient of h':

    g_n = g (1 − z)(1 − n²)      g_z = g (h − n) z (1 − z)      g_r = g_n m r (1 − r)
    gradient of i: (g_r, g_z, g_n)      of W h + b: a = (g_r, g_z, g_n r)      of h: g z + Wᵀ a

Entry point: `bidirectional`.  `rows_forward` and `rows_backward` are the same in torch; they are what the
kernels are tested against.

Legend: G rows, F inputs, H width of a direction, 2 directions (the second reads the rows backwards).
"""

import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn


def bidirectional(gru: nn.GRU, inputs_GF: Tensor) -> Tensor:
    """Return what `gru(inputs_GF)[0]` returns, (G, 2H); differentiable in the parameters.

    Args:
        gru: bidirectional, of one layer, with biases.
        inputs_GF: fixed.
    """
    if not _has_kernels(gru, inputs_GF):
        return gru(inputs_GF)[0]
    return with_rows(gru, inputs_GF, kernels=True)


def with_rows(gru: nn.GRU, inputs_GF: Tensor, *, kernels: bool) -> Tensor:
    """As `bidirectional`, by the kernels or by the same steps in torch."""
    ends = ("", "_reverse")
    given_2GX = torch.stack([inputs_GF @ gru.get_parameter(f"weight_ih_l0{end}").T for end in ends])
    given_2GX = given_2GX + torch.stack([gru.get_parameter(f"bias_ih_l0{end}") for end in ends]).unsqueeze(1)
    weights_2XH = torch.stack([gru.get_parameter(f"weight_hh_l0{end}") for end in ends])
    biases_2X = torch.stack([gru.get_parameter(f"bias_hh_l0{end}") for end in ends])
    hidden_2GH = _Rows.apply(given_2GX, weights_2XH, biases_2X, kernels)
    return torch.cat(hidden_2GH.unbind(0), 1)  # type: ignore[union-attr]


def rows_forward(given_2GX: Tensor, weights_2XH: Tensor, biases_2X: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden (2, G, H) and what the backward pass needs, (2, G, 4H): r, z, n, m."""
    directions, rows, width = *given_2GX.shape[:2], weights_2XH.shape[2]
    hidden_2GH = given_2GX.new_empty(directions, rows, width)
    kept_2GY = given_2GX.new_empty(directions, rows, 4 * width)
    for direction in range(directions):
        h = given_2GX.new_zeros(width)
        for row in _order(direction, rows):
            i_r, i_z, i_n = given_2GX[direction, row].chunk(3)
            w_r, w_z, m = (weights_2XH[direction] @ h + biases_2X[direction]).chunk(3)
            r, z = torch.sigmoid(i_r + w_r), torch.sigmoid(i_z + w_z)
            n = torch.tanh(i_n + r * m)
            h = (1 - z) * n + z * h
            hidden_2GH[direction, row] = h
            kept_2GY[direction, row] = torch.cat((r, z, n, m))
    return hidden_2GH, kept_2GY


def rows_backward(
    gradient_2GH: Tensor, hidden_2GH: Tensor, kept_2GY: Tensor, weights_2XH: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of i and of W h + b, (2, G, 3H) each."""
    directions, rows, width = hidden_2GH.shape
    of_given_2GX, of_state_2GX = (hidden_2GH.new_empty(directions, rows, 3 * width) for _ in range(2))
    for direction in range(directions):
        carried = hidden_2GH.new_zeros(width)
        order = _order(direction, rows)
        for place in range(rows - 1, -1, -1):
            row = order[place]
            before = hidden_2GH[direction, order[place - 1]] if place else hidden_2GH.new_zeros(width)
            r, z, n, m = kept_2GY[direction, row].chunk(4)
            g = gradient_2GH[direction, row] + carried
            g_n, g_z = g * (1 - z) * (1 - n * n), g * (before - n) * z * (1 - z)
            g_r = g_n * m * r * (1 - r)
            of_given_2GX[direction, row] = torch.cat((g_r, g_z, g_n))
            of_state_2GX[direction, row] = torch.cat((g_r, g_z, g_n * r))
            carried = g * z + weights_2XH[direction].T @ of_state_2GX[direction, row]
    return of_given_2GX, of_state_2GX


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given_2GX: Tensor, weights_2XH: Tensor, biases_2X: Tensor, kernels: bool) -> Tensor:
        forward = _kernels().rows_forward if kernels else rows_forward
        hidden_2GH, kept_2GY = forward(given_2GX, weights_2XH, biases_2X)
        ctx.save_for_backward(hidden_2GH, kept_2GY, weights_2XH)
        ctx.kernels = kernels
        return hidden_2GH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        hidden_2GH, kept_2GY, weights_2XH = ctx.saved_tensors
        backward = _kernels().rows_backward if ctx.kernels else rows_backward
        of_given_2GX, of_state_2GX = backward(grads[0].contiguous(), hidden_2GH, kept_2GY, weights_2XH)
        before_2GH = torch.zeros_like(hidden_2GH)
        before_2GH[0, 1:], before_2GH[1, :-1] = hidden_2GH[0, :-1], hidden_2GH[1, 1:]
        return of_given_2GX, of_state_2GX.transpose(1, 2) @ before_2GH, of_state_2GX.sum(1), None


def _order(direction: int, rows: int) -> range:
    """Return the rows as a direction reads them."""
    return range(rows) if direction == 0 else range(rows - 1, -1, -1)


def _has_kernels(gru: nn.GRU, inputs_GF: Tensor) -> bool:
    """Whether the kernels can run: a GPU, Triton, a width that is a power of two, and the right numbers."""
    width = gru.hidden_size
    fits = gru.bidirectional and gru.num_layers == 1 and gru.bias and 16 <= width <= 64
    on_gpu = inputs_GF.device.type == "cuda" and torch.version.cuda is not None
    return fits and width & (width - 1) == 0 and on_gpu and _agree(inputs_GF.device, gru.input_size, width)


@lru_cache
def _agree(device: torch.device, inputs: int, width: int) -> bool:
    """Whether the kernels give what the steps in torch give, tried once on a few rows."""
    if importlib.util.find_spec("triton") is None:
        return False
    with torch.random.fork_rng(devices=[]):
        gru = nn.GRU(inputs, width, bidirectional=True, device="cpu")
        rows = torch.randn(5, inputs)
    expected = _output_and_gradients(gru, rows, kernels=False)
    try:
        found = _output_and_gradients(gru.to(device), rows.to(device), kernels=True)
    except Exception:  # a Triton that cannot compile for this card; the library's GRU is there
        return False
    return all(torch.allclose(a.cpu(), b, rtol=1e-3, atol=1e-4) for a, b in zip(found, expected, strict=True))


def _output_and_gradients(gru: nn.GRU, inputs_GF: Tensor, *, kernels: bool) -> list[Tensor]:
    with torch.enable_grad():
        output = with_rows(gru, inputs_GF, kernels=kernels)
        gradients = torch.autograd.grad(output.square().sum(), list(gru.parameters()))
    return [output.detach(), *gradients]


def _kernels() -> Any:
    # Triton is there with torch for GPUs only.
    from dispfx.learning import recurrence_kernels

    return recurrence_kernels
