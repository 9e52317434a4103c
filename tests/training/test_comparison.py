"""A comparison sees a wrong loss, a wrong size and a wrong direction, of one site too."""

import pytest
import torch
from torch import Tensor

from dispfx.training.comparison import compare, sample_masks

SIZES = [3] * 40
IDS = torch.zeros(1, 4, dtype=torch.int64)
MASKS = sample_masks((sum(SIZES),), torch.device("cpu"))
WEIGHTS = torch.linspace(1, 2, sum(SIZES))


def sound(ids: Tensor, masks: Tensor) -> Tensor:
    return (masks * WEIGHTS).sum().square()


def other_loss(ids: Tensor, masks: Tensor) -> Tensor:
    return sound(ids, masks) + 0.1 * sound(ids, masks.detach())


def too_large(ids: Tensor, masks: Tensor) -> Tensor:
    loss = sound(ids, masks)
    return loss + 2 * (loss - loss.detach())


def one_site_missing(ids: Tensor, masks: Tensor) -> Tensor:
    first, *others = masks.split(SIZES)
    return sound(ids, torch.cat([first.detach(), *others]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [other_loss, too_large, one_site_missing])
def test_what_is_wrong_does_not_hold(wrong, dtype):
    assert compare(sound, sound, IDS, MASKS, dtype, SIZES).holds
    assert not compare(wrong, sound, IDS, MASKS, dtype, SIZES).holds


def test_a_loss_that_is_no_number_does_not_hold():
    found = compare(lambda ids, masks: sound(ids, masks) * torch.nan, sound, IDS, MASKS, torch.float32, SIZES)
    assert not found.holds


def test_a_site_without_any_gradient_says_nothing():
    def silent(ids: Tensor, masks: Tensor) -> Tensor:
        first, *others = masks.split(SIZES)
        return sound(ids, torch.cat([0 * first, *others]))

    assert compare(silent, silent, IDS, MASKS, torch.float32, SIZES).holds


def test_the_masks_tell_features_apart_and_leave_the_decoder_whole():
    """Without a tenth of its features a trained decoder computes rounding, which says nothing."""
    assert MASKS.min() >= 0.95 and MASKS.max() <= 1.0
    assert len(MASKS.unique()) > 0.99 * len(MASKS)
    assert torch.equal(MASKS, sample_masks((sum(SIZES),), torch.device("cpu")))
