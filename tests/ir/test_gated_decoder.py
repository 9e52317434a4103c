"""The gated decoder takes one mask of the right size for every site, and refuses all others by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dispfx
from dispfx.errors import PlanMismatchError
from tests.plain_decoders import FORMS, build
from tests.programs import token_ids

PROGRAM = dispfx.capture(build(FORMS["pre-norm"], layers=1))
GATED = dispfx.gate(PROGRAM)
IDS = token_ids(4, 9)
FIRST = PROGRAM.sites[0]


def masks() -> list[Tensor]:
    return [torch.ones(site.size) for site in PROGRAM.sites]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: [torch.ones(1), *masks()[1:]], rf"shape \({FIRST.size},\) .* shape \(1,\)"),
        (lambda: [torch.ones(99), *masks()[1:]], rf"shape \({FIRST.size},\) .* shape \(99,\)"),
        (lambda: [torch.ones(()), *masks()[1:]], r"shape \(\)"),
        (lambda: [torch.ones(1, 1, FIRST.size), *masks()[1:]], r"shape \(1, 1, 32\)"),
        (lambda: [[1.0] * FIRST.size, *masks()[1:]], "a list was given"),
        (lambda: {FIRST.name: torch.ones(1)}, r"shape \(1,\)"),
        # Three masks divide batch and tokens in one, 36, but no four sequences.
        (lambda: [torch.ones(3, FIRST.size), *masks()[1:]], "3 masks do not divide a batch of 4"),
    ],
)
def test_a_mask_of_another_size_is_refused_with_its_site(given: Callable[[], Any], message: str):
    with pytest.raises(PlanMismatchError, match=message) as caught:
        GATED(IDS, given())
    assert caught.value.where == FIRST.name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: masks()[1:], "each of 5 sites was expected, but 4 were given"),
        (lambda: [*masks(), torch.ones(3)], "each of 5 sites was expected, but 6 were given"),
        (lambda: torch.cat(masks()), "a Tensor was given"),
        (lambda: None, "None was given"),
    ],
)
def test_another_number_of_masks_is_refused(given: Callable[[], Any], message: str):
    with pytest.raises(PlanMismatchError, match=message):
        GATED(IDS, given())


def test_masks_of_any_collection_give_one_result():
    expected = PROGRAM.graph_module(IDS)
    own = nn.ParameterList(masks())
    several = [mask.expand(2, -1) for mask in masks()]
    for given in (masks(), tuple(masks()), own, {}, several, (mask.bool() for mask in masks())):
        assert torch.equal(GATED(IDS, given), expected)
