"""The losses are the formulas that their docstrings state."""

import math

import pytest
import torch

from dispfx.learning.objective import budget_loss, eased, next_token_loss

TARGET = torch.tensor([100.0], dtype=torch.float64)


@pytest.mark.parametrize(("left", "expected"), [(50.0, math.log(2)), (200.0, math.log(2)), (100.0, 0.0)])
def test_the_budget_loss_is_the_logarithm_of_the_larger_over_the_smaller(left, expected):
    assert float(budget_loss(torch.tensor([left], dtype=torch.float64), TARGET)) == pytest.approx(expected)


@pytest.mark.parametrize(("left", "slope"), [(50.0, -1 / 50), (200.0, 1 / 200), (100.0, 0.0)])
def test_the_budget_loss_pulls_towards_the_budget_from_both_sides(left, slope):
    value = torch.tensor([left], dtype=torch.float64, requires_grad=True)
    budget_loss(value, TARGET).backward()
    assert value.grad is not None
    assert float(value.grad) == pytest.approx(slope)


@pytest.mark.parametrize(("loss", "slope"), [(0.0, 0.0), (0.01, 0.1), (0.05, 0.5), (0.1, 1.0), (0.7, 1.0)])
def test_an_eased_budget_loss_pulls_in_proportion_below_its_width_and_as_before_above(loss, slope):
    value = torch.tensor(loss, dtype=torch.float64, requires_grad=True)
    found = eased(value, 0.1)
    found.backward()
    assert value.grad is not None and float(value.grad) == pytest.approx(slope)
    expected = loss - 0.05 if loss >= 0.1 else loss**2 / 0.2
    assert found.item() == pytest.approx(expected)


def test_a_budget_loss_with_a_width_of_zero_is_the_loss_itself():
    value = torch.rand(5)
    assert eased(value, 0.0) is value


def test_a_sample_that_keeps_nothing_has_a_finite_budget_loss():
    assert math.isfinite(float(budget_loss(torch.zeros(1, dtype=torch.float64), TARGET)))


def test_the_next_token_loss_scores_each_token_given_those_before():
    ids_BT = torch.tensor([[2, 0, 1]])
    certain_BTV = torch.full((1, 3, 3), -100.0)
    certain_BTV[0, 0, 0] = certain_BTV[0, 1, 1] = 0.0
    assert float(next_token_loss(certain_BTV, ids_BT)) == pytest.approx(0.0)
    assert float(next_token_loss(torch.zeros(1, 3, 3), ids_BT)) == pytest.approx(math.log(3))
    assert next_token_loss(torch.zeros(1, 3, 3, dtype=torch.bfloat16), ids_BT).dtype == torch.float32
