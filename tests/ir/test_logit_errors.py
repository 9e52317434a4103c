"""The error between logits, also where some are masked."""

import math

import pytest
import torch

from dispfx.ir.logit_errors import logit_errors, unmasked_scale

MASKS = [torch.finfo(torch.float32).min, -1e9, -65504.0, -1e4, -9999.0, -1000.0]


def logits() -> torch.Tensor:
    return torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)) * 10


@pytest.mark.parametrize("mask", MASKS)
def test_masked_logits_do_not_hide_the_error_of_the_other_ones(mask: float):
    expected = logits()
    actual = expected + 0.5
    plain = logit_errors(expected[..., :60], actual[..., :60])
    for tensor in (expected, actual):
        tensor[..., 60:] = mask
    assert logit_errors(expected, actual) == pytest.approx(plain)


@pytest.mark.parametrize("mask", [-1e4, -1e3])
def test_masks_that_are_added_hide_nothing_either(mask: float):
    expected = logits()
    actual = expected + 0.5
    plain = logit_errors(expected[..., :60], actual[..., :60])
    for tensor in (expected, actual):
        tensor[..., 60:] += mask
    assert logit_errors(expected, actual) == pytest.approx(plain, rel=1e-3)


def test_large_negative_logits_without_a_gap_are_not_masked():
    expected = logits()
    expected[..., 0], expected[..., 1] = -150.0, -1200.0
    assert unmasked_scale(expected) == 1200.0


@pytest.mark.parametrize("mask", MASKS[:3])
def test_a_masked_logit_is_compared_with_itself(mask: float):
    expected = logits()
    expected[..., 60:] = mask
    actual = expected.clone()
    actual[..., 63] = mask * (1 - 1e-3)
    assert logit_errors(expected, actual)[1] == pytest.approx(1e-3, rel=1e-2)


def test_without_masks_the_error_is_that_of_the_contract():
    expected = logits() * 1e6  # large, and none of them is masked
    actual = expected + 3000.0
    largest = float(expected.abs().max())
    assert unmasked_scale(expected) == largest
    assert logit_errors(expected, actual)[1] == pytest.approx(3000.0 / largest, rel=0.1)


def test_all_masked_or_zero_infinite_or_equal():
    masked = torch.full((1, 2, 3), -1e9)
    assert unmasked_scale(masked) == 1e9
    assert logit_errors(masked, masked.clone()) == (0.0, 0.0)
    zeros = torch.zeros(1, 2, 3)
    assert logit_errors(zeros, zeros + 1)[1] == math.inf
    assert logit_errors(zeros, zeros + math.inf) == (math.inf, math.inf)
