"""cached_attention: only the places in use are read, and the split kernels compute the same."""

import pytest
import torch
from torch import Tensor

from dispfx.kernels import split_attention as split
from dispfx.kernels.cached_attention import CACHED_ATTENTION
from tests.programs import relative_error


def operands(
    batch: int, heads: int, groups: int, places: int, size: int, tokens: int = 1, dtype=torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads + places)
    shapes = [(batch, heads, tokens, size), (batch, groups, places, size), (batch, groups, places, size)]
    query, keys, values = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, keys, values


@pytest.mark.parametrize("start", [0, 6, 15])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_it_is_attention_over_the_places_in_use(start: int, groups: int):
    query, keys, values = operands(2, 4, groups, 16, 8)
    used = start + 1
    repeated = [x[:, :, :used].repeat_interleave(4 // groups, dim=1) for x in (keys, values)]
    weights = (query @ repeated[0].transpose(2, 3) * 8**-0.5).softmax(-1)
    actual = CACHED_ATTENTION(query, keys, values, torch.tensor(start), None)
    assert relative_error(actual, weights @ repeated[1]) <= 1e-6


def test_places_behind_the_last_one_in_use_do_not_matter():
    query, keys, values = operands(1, 2, 2, 16, 8)
    before = CACHED_ATTENTION(query, keys, values, torch.tensor(4), 0.3)
    keys[:, :, 5:], values[:, :, 5:] = 100.0, 100.0
    assert torch.equal(CACHED_ATTENTION(query, keys, values, torch.tensor(4), 0.3), before)


def test_several_tokens_see_one_place_more_each():
    query, keys, values = operands(1, 2, 2, 16, 8, tokens=3)
    together = CACHED_ATTENTION(query, keys, values, torch.tensor(4), None)
    for token in range(3):
        alone = CACHED_ATTENTION(query[:, :, token : token + 1], keys, values, torch.tensor(4 + token), None)
        assert relative_error(together[:, :, token : token + 1], alone) <= 1e-6


def test_the_operation_follows_the_rules_of_torch():
    query, keys, values = operands(2, 4, 2, 16, 8)
    torch.library.opcheck(
        CACHED_ATTENTION, (query, keys, values, torch.tensor(3), None), test_utils="test_schema"
    )
    torch.library.opcheck(
        CACHED_ATTENTION, (query, keys, values, torch.tensor(3), None), test_utils="test_faketensor"
    )


@pytest.mark.parametrize(
    ("independent", "places", "processors", "parts"),
    [(40, 1088, 132, 7), (2560, 384, 132, 1), (8, 4096, 132, 32), (8, 130, 132, 1), (1, 64, 132, 1)],
)
def test_places_are_split_so_that_every_processor_has_work(
    independent: int, places: int, processors: int, parts: int
):
    assert split.parts_for(independent, places, processors) == parts


def test_the_kernels_take_single_tokens_in_half_precision():
    assert split.can_split(*operands(1, 2, 2, 16, 8, dtype=torch.bfloat16))
    assert not split.can_split(*operands(1, 2, 2, 16, 8))
    assert not split.can_split(*operands(1, 2, 2, 16, 8, tokens=2, dtype=torch.bfloat16))
    assert not split.can_split(*operands(1, 2, 2, 16, 512, dtype=torch.float16))
    query, keys, values = operands(1, 2, 2, 16, 8, dtype=torch.float16)
    assert split.can_split(query, keys, torch.zeros(1, 2, 16, 6, dtype=torch.float16)), (
        "values may be smaller"
    )
    assert not split.can_split(query, keys[..., :6], values)
