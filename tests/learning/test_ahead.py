"""Batches come in the order they are asked for, whoever makes them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dispfx.learning.text import Prefetcher


def made_by_a_thread(batch) -> Prefetcher:
    """Return batches as a GPU gets them, without the pinned memory that only a GPU needs."""
    ahead = Prefetcher(batch, torch.device("cpu"))
    ahead._thread = ThreadPoolExecutor(1)
    ahead._pinned = batch  # type: ignore[method-assign]
    return ahead


@pytest.mark.parametrize("make", [lambda batch: Prefetcher(batch, torch.device("cpu")), made_by_a_thread])
def test_every_batch_is_the_one_that_was_asked_for(make):
    ahead = make(lambda index: torch.tensor([index]))
    assert [int(ahead.get(index)) for index in (0, 1, 2, 7, 8, 3)] == [0, 1, 2, 7, 8, 3]


def test_the_next_batch_is_made_before_it_is_asked_for():
    asked = []

    def batch(index: int) -> torch.Tensor:
        asked.append(index)
        return torch.tensor([index])

    ahead = made_by_a_thread(batch)
    ahead.get(4)
    assert ahead._next is not None
    ahead._next[1].result()
    assert asked == [4, 5]
    ahead.get(5)
    assert asked.count(5) == 1


def test_what_making_a_batch_raised_is_raised_where_it_is_asked_for():
    def batch(index: int) -> torch.Tensor:
        if index == 1:
            raise ValueError("the file is gone")
        return torch.tensor([index])

    ahead = made_by_a_thread(batch)
    ahead.get(0)
    with pytest.raises(ValueError, match="the file is gone"):
        ahead.get(1)
