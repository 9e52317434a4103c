"""One weight on a grid: which numbers it may have, and what rounding by a text does better."""

import itertools

import pytest
import torch
from torch import Tensor

from dispfx.quantization.weight_rounding import Grid, error, rounded, to_nearest

GRIDS = [
    Grid(4, 32),
    Grid(4, 32, scales=torch.bfloat16),
    Grid(4, 16, symmetric=True),
    Grid(8, symmetric=True),
    Grid(8, floating=True),
]


def weight(outputs: int = 24, inputs: int = 70, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def moments(inputs: int = 70, tokens: int = 400) -> Tensor:
    """Second moments of inputs that depend on each other, one of which is always zero."""
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(tokens, inputs, generator=generator) @ torch.randn(
        inputs, inputs, generator=generator
    )
    mixed[:, 5] = 0
    return mixed.T @ mixed / tokens


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_number_is_a_code_of_the_grid(grid: Grid):
    """Rule 1, number by number."""
    for found in (to_nearest(weight(), grid), rounded(weight(), moments(), grid)):
        size = grid.of_groups(70)
        assert found.scales.shape == (24, -(-70 // size))
        assert torch.equal(found.scales, found.scales.to(grid.scales).float())
        for n, k in itertools.product(range(0, 24, 7), range(0, 70, 3)):
            code, group = found.codes[n, k].float(), k // size
            assert found.numbers[n, k] == (code - found.zeros[n, group]) * found.scales[n, group]
        if not grid.floating:
            assert int(found.codes.max()) < 2**grid.bits


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_nearest_number_is_at_most_half_a_step_away(grid: Grid):
    found = to_nearest(weight(), grid)
    groups = torch.arange(70) // grid.of_groups(70)
    step = found.scales[:, groups]
    if grid.floating:
        step = (weight().abs() / 8).clamp(min=2**-9 * step)
    # Scales of half precision may cut off the largest number of a group.
    slack = 0.07 if grid.scales == torch.bfloat16 else 1e-4
    assert ((found.numbers - weight()).abs() <= (0.5 + slack) * step).all()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_text_lowers_the_error_of_the_results(grid: Grid):
    """Rules 2 and 3."""
    before = error(weight(), to_nearest(weight(), grid).numbers, moments())
    after = error(weight(), rounded(weight(), moments(), grid).numbers, moments())
    assert 0 < after < 0.8 * before


def test_the_error_is_the_mean_square_of_the_change_of_results():
    """Rule 3."""
    x = torch.randn(50, 70, generator=torch.Generator().manual_seed(2))
    changed = weight(seed=3)
    expected = (x @ (weight() - changed).T).square().sum(1).mean()
    assert error(weight(), changed, x.T @ x / 50) == pytest.approx(float(expected), rel=1e-4)


def test_independent_inputs_of_one_group_give_the_nearest_numbers_of_the_chosen_range():
    """With H a multiple of the identity nothing can be made up for, so only the range differs."""
    grid = Grid(4, 70)
    found = rounded(weight(), torch.eye(70), grid)
    codes = (weight() / found.scales + found.zeros).round().clamp(0, 15)
    assert torch.equal(found.codes.float(), codes)
    assert error(weight(), found.numbers, torch.eye(70)) <= error(
        weight(), to_nearest(weight(), grid).numbers, torch.eye(70)
    )


def test_two_inputs_that_are_always_equal_make_up_for_each_other():
    """The best sum of two rounded numbers is found, where rounding each to nearest is off by a whole step."""
    grid = Grid(2, 4)
    one = torch.tensor([[0.4, 0.4, 3.0, 0.0]])
    x = torch.tensor([[1.0, 1.0, 0.1, 0.1]])
    found = rounded(one, x.T @ x, grid).numbers
    assert abs(float((one - found) @ x.T)) < abs(float((one - to_nearest(one, grid).numbers) @ x.T))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_zeros_stay_zero_and_a_text_without_information_changes_nothing(grid: Grid):
    zero = torch.zeros(3, 70)
    assert not rounded(zero, moments(), grid).numbers.any()
    assert not to_nearest(zero, grid).numbers.any()
    silent = rounded(weight(), torch.zeros(70, 70), grid)
    assert torch.isfinite(silent.numbers).all()
    assert (silent.numbers - weight()).norm() <= 0.2 * weight().norm()


def test_further_outputs_are_zero():
    found = rounded(weight(), moments(), Grid(4, 32)).with_zeros(3)
    assert found.numbers.shape == (27, 70)
    assert not found.numbers[24:].any()
    assert torch.equal(found.numbers[:24], rounded(weight(), moments(), Grid(4, 32)).numbers)
