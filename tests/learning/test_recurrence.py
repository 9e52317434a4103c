"""The rows of the hypernetwork, one by one, are those of torch's own GRU."""

import pytest
import torch
from torch import Tensor, nn

from dispfx.learning.recurrence import bidirectional, with_rows
from tests.kernels.interpreter import require_interpreter
from tests.processes import run_code

INPUTS, WIDTH = 8, 16


def results(gru: nn.GRU, output: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), list(gru.parameters()))]


def gru_and_rows(rows: int) -> tuple[nn.GRU, Tensor]:
    torch.manual_seed(rows)
    return nn.GRU(INPUTS, WIDTH, bidirectional=True), torch.randn(rows, INPUTS)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_steps_in_torch_give_the_output_and_gradients_of_the_gru(rows):
    gru, inputs = gru_and_rows(rows)
    expected = results(gru, gru(inputs)[0])
    found = results(gru, with_rows(gru, inputs, kernels=False))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def compare_kernels(rows: int) -> None:
    gru, inputs = gru_and_rows(rows)
    expected = results(gru, with_rows(gru, inputs, kernels=False))
    found = results(gru, with_rows(gru, inputs, kernels=True))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_kernels_give_what_the_steps_in_torch_give(rows):
    require_interpreter()
    # Triton asks for its interpreter once, when it is imported, which another test may have done.
    done = run_code(f"from {__name__} import compare_kernels; compare_kernels({rows})", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_the_gru_itself_runs():
    gru, inputs = gru_and_rows(4)
    assert torch.equal(bidirectional(gru, inputs), gru(inputs)[0])
