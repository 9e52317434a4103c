"""Expected gradients of the estimators against the exact gradient, over the whole sample space.

With n bits there are 2^n samples, so expectations here are sums and not averages of draws.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dispfx.learning.estimators import GumbelSigmoid, ReinMax, StraightThrough, estimator

BITS = 4
LOGITS = torch.tensor([0.9, -0.4, 2.2, 1.3], dtype=torch.float64)
Objective = Callable[[Tensor], Tensor]
Slope = Callable[[Tensor, Tensor], Tensor]


def all_masks() -> list[Tensor]:
    return [torch.tensor(bits, dtype=torch.float64) for bits in itertools.product((0.0, 1.0), repeat=BITS)]


def probability(logits: Tensor, mask: Tensor) -> Tensor:
    keep = torch.sigmoid(logits)
    return (mask * keep + (1 - mask) * (1 - keep)).prod()


def exact_gradient(objective: Objective) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    expected = torch.stack([probability(logits, mask) * objective(mask) for mask in all_masks()]).sum()
    return torch.autograd.grad(expected, logits)[0]


def expected_gradient(slope: Slope, objective: Objective) -> Tensor:
    total = torch.zeros(BITS, dtype=torch.float64)
    for mask in all_masks():
        leaf = mask.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(leaf), leaf)
        total += probability(LOGITS, mask) * gradient * slope(LOGITS, mask)
    return total


def quadratic(mask: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    pairs = torch.randn(BITS, BITS, generator=generator, dtype=torch.float64)
    return mask @ pairs @ mask + (torch.randn(BITS, generator=generator, dtype=torch.float64) * mask).sum()


def cubic(mask: Tensor) -> Tensor:
    return quadratic(mask) + (torch.tensor([1.0, 1.0, 2.0, -1.5], dtype=torch.float64) * mask**3).sum()


def printed_slope(
    logits: Tensor, mask: Tensor, restore: Callable[[Tensor], Tensor], temperature=1.0
) -> Tensor:
    """Return the slope of the algorithm as it is printed, by automatic differentiation."""
    theta = logits.clone().requires_grad_()
    start = torch.sigmoid(theta)
    first = (mask + torch.sigmoid(theta / temperature)) / 2
    second = torch.sigmoid((restore(first) - theta).detach() + theta)
    third = 2 * second - start / 2
    relaxed = third - third.detach() + mask
    assert torch.equal(relaxed, mask)
    return torch.autograd.grad(relaxed.sum(), theta)[0]


def relative_error(slope: Slope, objective: Objective) -> float:
    exact = exact_gradient(objective)
    return float((expected_gradient(slope, objective) - exact).norm() / exact.norm())


def test_reinmax_is_exact_for_objectives_quadratic_in_every_bit():
    # 1e-12: sixteen float64 terms.
    assert relative_error(ReinMax().slope, quadratic) < 1e-12


def test_reinmax_with_the_printed_logarithm_is_clearly_wrong():
    def with_logarithm(logits: Tensor, mask: Tensor) -> Tensor:
        return printed_slope(logits, mask, torch.log)

    assert relative_error(with_logarithm, quadratic) > 0.1


def test_straight_through_is_biased_for_quadratic_and_exact_for_linear_objectives():
    def linear(mask: Tensor) -> Tensor:
        return (torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64) * mask).sum()

    assert relative_error(StraightThrough().slope, linear) < 1e-12
    assert relative_error(StraightThrough().slope, quadratic) > 0.01


def test_a_cubic_objective_leaves_reinmax_a_bias_smaller_than_straight_throughs():
    bias = relative_error(ReinMax().slope, cubic)
    assert 0.01 < bias < relative_error(StraightThrough().slope, cubic)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_the_closed_form_is_the_corrected_algorithm(temperature):
    for mask in all_masks():
        printed = printed_slope(LOGITS, mask, torch.logit, temperature)
        torch.testing.assert_close(ReinMax(temperature).slope(LOGITS, mask), printed, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_gumbel_slope_is_the_derivative_of_the_relaxed_sample(temperature):
    logits = torch.linspace(-3, 3, 50, dtype=torch.float64).requires_grad_()
    uniform = torch.rand(50, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    soft = torch.sigmoid((logits + torch.log(uniform) - torch.log1p(-uniform)) / temperature)
    (expected,) = torch.autograd.grad(soft.sum(), logits)
    sample = GumbelSigmoid(temperature).sample(logits.detach(), torch.Generator().manual_seed(4))
    torch.testing.assert_close(sample.slope, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(sample.mask, (soft > 0.5).double())


@pytest.mark.parametrize("name", ["reinmax", "straight-through", "gumbel"])
def test_samples_are_bits_with_the_probability_of_the_logit(name):
    draws = 40_000
    logits = torch.tensor([-2.0, -0.3, 0.0, 3.0]).repeat_interleave(draws)
    sample = estimator(name, 1.0).sample(logits, torch.Generator().manual_seed(0))
    assert set(sample.mask.unique().tolist()) == {0.0, 1.0}
    assert sample.mask.dtype == logits.dtype and bool(sample.slope.isfinite().all())
    share = sample.mask.view(4, draws).mean(1)
    # Five standard deviations of a share of 40,000 draws are at most 0.0125.
    torch.testing.assert_close(
        share, torch.sigmoid(torch.tensor([-2.0, -0.3, 0.0, 3.0])), atol=0.0125, rtol=0
    )


@pytest.mark.parametrize("name", ["reinmax", "straight-through", "gumbel"])
def test_extreme_logits_give_certain_bits_and_finite_slopes(name):
    logits = torch.tensor([-1e4, 1e4]).repeat(1000)
    sample = estimator(name, 1.0).sample(logits, torch.Generator().manual_seed(0))
    assert torch.equal(sample.mask, (logits > 0).float())
    assert bool(sample.slope.isfinite().all())


@pytest.mark.parametrize("name", ["reinmax", "straight-through", "gumbel"])
def test_the_generator_decides_the_sample(name):
    logits = torch.zeros(200)
    draw = estimator(name, 1.0).sample
    first, again = (draw(logits, torch.Generator().manual_seed(1)).mask for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, draw(logits, torch.Generator().manual_seed(2)).mask)


@pytest.mark.parametrize("kind", [ReinMax, StraightThrough, GumbelSigmoid])
def test_antithetic_masks_come_in_pairs_and_each_is_drawn_as_it_would_be_alone(kind):
    logits = LOGITS.float().expand(20_001, -1)
    mask = kind(antithetic=True).sample(logits, torch.Generator().manual_seed(0)).mask
    first, second = mask[:10_001], mask[10_001:]
    keep = torch.sigmoid(LOGITS.float())
    for half in (first, second):
        assert torch.allclose(half.mean(0), keep, atol=0.02)
    # Both are zero for no number u, or both are one for none.
    both = first[:10_000] + second
    assert not bool(((both == 0) & (keep > 0.5)).any()) and not bool(((both == 2) & (keep < 0.5)).any())


def test_a_single_mask_has_nothing_to_be_the_opposite_of():
    logits = LOGITS.float()
    for given in (logits, logits[None]):
        drawn = [
            ReinMax(antithetic=antithetic).sample(given, torch.Generator().manual_seed(0)).mask
            for antithetic in (True, False)
        ]
        assert torch.equal(*drawn)
