"""What is read is what was there when the reading began."""

import torch

from dispfx.learning.learner import reading


def test_numbers_that_are_overwritten_meanwhile_are_read_as_they_were():
    numbers = torch.tensor([0.1, float("inf"), 3.0], dtype=torch.float64)
    read = reading(numbers)
    numbers.zero_()
    assert read() == [0.1, float("inf"), 3.0]
