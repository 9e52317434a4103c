"""Operations that put features elsewhere are pruned exactly: masks, smaller weights and zeros agree."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dispfx
from dispfx.plan.plan import Plan
from tests.one_branch import INNER, VOCABULARY, Middle, one_branch, require_one_function
from tests.programs import relative_error, token_ids

HALF = INNER // 2
MIDDLES: dict[str, tuple[Callable[[Middle, Tensor], Tensor], int]] = {
    "a flip": (lambda m, h: h.flip(-1), INNER),
    "a flip of tokens too": (lambda m, h: h.flip(1, 2), INNER),
    "a roll": (lambda m, h: h.roll(5, -1), INNER),
    "a roll backwards": (lambda m, h: h.roll(-7, -1), INNER),
    "a roll of tokens too": (lambda m, h: h.roll((1, 3), (1, 2)), INNER),
    "a pad by nothing": (lambda m, h: F.pad(h, (0, 0)), INNER),
    "a pad": (lambda m, h: F.pad(h, (2, 3)), INNER + 5),
    "a pad with ones": (lambda m, h: F.pad(h, (2, 3), value=1.0), INNER + 5),
    "a pad that cuts off": (lambda m, h: F.pad(h, (-2, 3)), INNER + 1),
    "a constant order": (lambda m, h: h[..., m.order], INNER),
    "a part of a constant order": (lambda m, h: h[..., m.order[:10]], 10),
    "a constant order twice": (lambda m, h: h[..., torch.cat([m.order, m.order])], 2 * INNER),
    "an order that is computed": (lambda m, h: h.index_select(-1, torch.arange(INNER - 1, -1, -1)), INNER),
    "every second one gates the next": (lambda m, h: h[..., ::2] * h[..., 1::2].sigmoid(), HALF),
    "parts in another order": (lambda m, h: torch.cat(h.chunk(3, -1)[::-1], -1), INNER),
    "the largest of each pair": (lambda m, h: h.unflatten(-1, (HALF, 2)).amax(-1), HALF),
    "the larger of two halves": (lambda m, h: h.unflatten(-1, (2, HALF)).max(-2).values, HALF),
    "copies side by side": (lambda m, h: h.tile(2), 2 * INNER),
    "a dimension that moves": (lambda m, h: h.movedim(-1, 0).relu().movedim(0, -1), INNER),
    "a number where a condition is false": (lambda m, h: torch.where(m.order > 3, h, 0.0), INNER),
    "the mean of everything": (lambda m, h: h - h.mean(), INNER),
    "a mean over tokens and features": (lambda m, h: h - h.mean((1, 2), keepdim=True), INNER),
    "a mean in another dtype": (lambda m, h: h - h.mean(-1, True, dtype=torch.float64).float(), INNER),
    "the sum of everything": (lambda m, h: h - 0.01 * h.sum(), INNER),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_the_inner_features_are_cut_exactly(name: str):
    """Rules 1, 2, 3 and 4."""
    middle, down = MIDDLES[name]
    model = one_branch(lambda: Middle(middle, down=down))
    program = dispfx.capture(model)
    assert not program.refused
    assert [site.kind for site in program.sites] == ["read", "inner", "write"]
    require_one_function(model, program)


def test_a_mean_over_tokens_divides_by_their_number_at_every_length():
    model = one_branch(lambda: Middle(lambda m, h: h - h.mean((1, 2), keepdim=True)))
    program = dispfx.capture(model)
    plan = Plan.random(program, 0.4, seed=0)
    gated, lowered = dispfx.gated(program, plan), dispfx.lower(program, plan)
    for length in (5, 40):
        ids = token_ids(1, length, vocabulary=VOCABULARY)
        assert relative_error(lowered(ids), gated(ids)) <= 1e-5, length


def test_a_condition_on_features_is_cut_and_is_no_parameter():
    """The buffer follows the features, and is neither counted nor named in the plan."""
    model = one_branch(lambda: Middle(lambda m, h: h * (m.order > 3)))
    program = dispfx.capture(model)
    (inner,) = [site for site in program.sites if site.kind == "inner"]
    assert {cut.parameter for cut in inner.slices} == {"mlp.up.weight", "mlp.up.bias", "mlp.down.weight"}
    plan = Plan.random(program, 0.4, seed=0)
    lowered = dispfx.lower(program, plan)
    kept = plan.kept[inner.name].long()
    assert torch.equal(lowered.get_buffer("mlp.order"), model.get_buffer("mlp.order")[kept])
    require_one_function(model, program)
