"""A comparison sees a wrong loss, a wrong size and a wrong direction, of one site too."""

import pytest
import torch
from torch import Tensor

from dispfx.fast_decoder.comparison import Comparison, beside_rounding, compare, sample_masks

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


def rounding(ids: Tensor, masks: Tensor, phase: float = 0.0) -> Tensor:
    """A gradient that is another wherever a mask moves a little, as rounding makes it."""
    noise = (1e5 * masks.detach() + phase).sin()
    return (masks * WEIGHTS * (1 + 0.35 * noise)).sum()


def rounding_otherwise(ids: Tensor, masks: Tensor) -> Tensor:
    return rounding(ids, masks, 2.0)


def beside(way, dtype: torch.dtype) -> Comparison:
    return beside_rounding(
        compare(way, rounding, IDS, MASKS, dtype, [60, 60]), rounding, IDS, MASKS, [60, 60]
    )


def test_what_differs_by_no_more_than_rounding_does_holds_in_half_precision():
    found = compare(rounding_otherwise, rounding, IDS, MASKS, torch.bfloat16, [60, 60])
    assert not found.holds and found.gradient > 0.25 and found.direction > 0.8
    found = beside(rounding_otherwise, torch.bfloat16)
    assert found.holds and found.rounding is not None and 0.3 < found.rounding.gradient < 0.6
    assert str(found).endswith(
        f"; by rounding alone {found.rounding.gradient:.1e} and {found.rounding.direction:.3f}"
    )
    assert not beside(rounding_otherwise, torch.float32).holds, "nothing rounds so much there"


@pytest.mark.parametrize("wrong", [other_loss, too_large, one_site_missing])
def test_what_is_wrong_does_not_hold_beside_rounding_either(wrong):
    found = compare(wrong, sound, IDS, MASKS, torch.bfloat16, SIZES)
    found = beside_rounding(found, sound, IDS, MASKS, SIZES)
    assert found.rounding is not None and found.rounding.gradient < 0.01 and not found.holds


def test_much_rounding_lets_little_pass():
    loud = Comparison(0.0, 10.0, -1.0, torch.bfloat16)
    for gradient, direction, holds in ((0.49, 0.81, True), (0.51, 0.9, False), (0.1, 0.79, False)):
        assert Comparison(0.0, gradient, direction, torch.bfloat16, loud).holds is holds
    lost = Comparison(0.0, float("nan"), 1.0, torch.bfloat16)
    assert not Comparison(0.0, 0.3, 0.9, torch.bfloat16, lost).holds
    assert Comparison(0.0, 0.2, 0.9, torch.bfloat16, lost).holds


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
