"""Figures as people read them."""

import math

import pytest

from dispfx.report.numbers import shown_perplexity


@pytest.mark.parametrize(
    ("value", "shown"),
    [(3.28, "3.280"), (1234.5, "1,234.500"), (2.8742887927557173e22, "2.87e+22"), (math.inf, "inf")],
)
def test_a_perplexity_has_no_digits_that_say_nothing(value: float, shown: str):
    assert shown_perplexity(value) == shown
