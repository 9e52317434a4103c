"""T(s) equals the number of elements of really sliced tensors, whatever the labels."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dispfx.errors import BudgetError, PassError
from dispfx.ir.sites import Site, Slice
from dispfx.plan.hardening import Groups, ParameterCount, hard_masks
from tests.ir.site_strategies import decoder_sites, mixtures, site, sliced_count


@settings(max_examples=100, deadline=None, derandomize=True)
@given(mixtures(), st.sampled_from(["blocks", "total"]), st.integers(0, 2**31))
def test_the_count_equals_the_elements_of_sliced_tensors(decoder, of, seed):
    """Rules 1, 2 and 3 of parameter_count."""
    sites, shapes = decoder
    count = ParameterCount.of_sites(sites, shapes, of)
    generator = torch.Generator().manual_seed(seed)
    for keep in (0.0, 0.3, 0.8, 1.0):
        masks = [torch.rand(one.size, generator=generator) < keep for one in sites]
        flat = torch.cat(masks)
        expected = sliced_count(sites, shapes, masks, of)
        assert count.count_kept(flat) == expected
        assert float(count.count(flat.float())) == expected
    assert count.dense == sliced_count(sites, shapes, [torch.ones(one.size) for one in sites], of)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(mixtures(), st.integers(0, 2**31))
def test_a_gradient_is_what_one_feature_adds(decoder, seed):
    sites, shapes = decoder
    count = ParameterCount.of_sites(sites, shapes, "total")
    generator = torch.Generator().manual_seed(seed)
    masks = (torch.rand(sum(one.size for one in sites), generator=generator) < 0.7).double()
    # The exact derivative of a polynomial: the count has degree 3 in a feature at most, so a central
    # difference of order 4 has no truncation error.
    masks.requires_grad_()
    count.count(masks).backward()
    assert masks.grad is not None
    with torch.no_grad():
        for feature in range(len(masks)):
            values = []
            for shift in (-2.0, -1.0, 1.0, 2.0):
                moved = masks.clone()
                moved[feature] += shift
                values.append(float(count.count(moved)))
            difference = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / 12
            assert math.isclose(float(masks.grad[feature]), difference, rel_tol=1e-9, abs_tol=1e-6)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(mixtures(), st.integers(0, 2**31))
def test_several_masks_are_counted_as_each_alone(decoder, seed):
    sites, shapes = decoder
    count = ParameterCount.of_sites(sites, shapes)
    generator = torch.Generator().manual_seed(seed)
    features = sum(one.size for one in sites)
    masks = torch.rand(3, features, generator=generator, dtype=torch.float64).requires_grad_()
    together = count.count(masks)
    alone = torch.stack([count.count(mask) for mask in masks])
    assert together.shape == (3,) and torch.allclose(together, alone, rtol=1e-14)
    weights = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((together * weights).sum(), masks, retain_graph=True)
    (expected,) = torch.autograd.grad((alone * weights).sum(), masks)
    assert torch.allclose(gradient, expected, rtol=1e-12)


def test_experts_are_counted_by_what_each_keeps():
    """Two experts of three features keep 2 and 1: three rows of four, twice, and three biases."""
    shapes = {"up": (2, 3, 4), "bias": (2, 3), "down": (2, 4, 3), "router": (2, 4)}
    slices = (Slice("up", 1, None, True), Slice("bias", 1, None, True), Slice("down", 2, None, True))
    inner = Site("inner", "mlp", "mlp", "inner", 6, slices, experts=2)
    count = ParameterCount.of_sites([inner], shapes)
    assert count.dense == 24 + 6 + 24
    assert count.count_kept(torch.tensor([1, 1, 0, 0, 0, 1])) == 3 * 4 + 3 + 3 * 4


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ((Slice("up", 0, None, True),), "axis 0 of up"),
        ((Slice("narrow", 1, None, True),), "must hold the 2 experts"),
        ((Slice("up", 2, None, True),), "4 positions, but 3 are labelled"),
        ((Slice("up", 1, (0, 1, 5), True),), r"labels must be in \[-1, 3\)"),
        ((Slice("square", 1, None, True), Slice("square", 2, None, True)), "one axis of a stack"),
        ((Slice("up", 1, None, True), Slice("up", 1, (0, 0, 0))), "follows one site"),
    ],
)
def test_a_stack_that_does_not_fit_is_a_pass_error(slices, message):
    shapes = {"up": (2, 3, 4), "narrow": (3, 3), "square": (2, 3, 3)}
    with pytest.raises(PassError, match=message):
        ParameterCount.of_sites([Site("inner", "mlp", "mlp", "inner", 6, slices, experts=2)], shapes)


def test_grouped_query_attention_is_counted_as_it_is_sliced():
    sites, shapes = decoder_sites(2, 12, 20, key_width=4)
    count = ParameterCount.of_sites(sites, shapes)
    widths = [5, 7, 3, 11, 2, 12, 1, 4, 20, 9]
    kept = [torch.arange(width, dtype=torch.int32) for width in widths]
    by_hand = sum(
        attention_read * (12 + 4 + 4) + attention_write * 12 + 2 * mlp_read * inner + inner * mlp_write
        for attention_read, attention_write, mlp_read, inner, mlp_write in (widths[:5], widths[5:])
    )
    assert count.count_kept(hard_masks(sites, kept)) == by_hand
    assert count.dense == 2 * (12 * 20 + 12 * 12 + 3 * 12 * 20)
    assert "embed" not in count.parameters and "layers.0.norm" not in count.parameters


def test_a_feature_costs_what_goes_with_it_in_every_site_that_shares_it():
    """Width 12, keys of width 4, 20 inner features, two layers."""
    sites, shapes = decoder_sites(2, 12, 20, key_width=4)
    count = ParameterCount.of_sites(sites, shapes)
    of_layer = [(12, 12 + 4 + 4), (12, 12), (12, 2 * 20), (20, 2 * 12 + 12), (12, 20)]
    by_hand = [float(cost) for size, cost in 2 * of_layer for _ in range(size)]
    assert count.feature_costs(Groups.alone(sites)).tolist() == by_hand
    shared = count.feature_costs(Groups.constrained(sites)).tolist()
    assert shared == 12 * [2.0 * (20 + 12 + 40 + 20)] + 40 * [36.0]


def test_a_feature_that_no_counted_parameter_follows_costs_one():
    sites = [site("a", 2, Slice("w", 0)), site("b", 1, Slice("w", 1, (0, -1)))]
    lone = [*sites, site("c", 3)]
    count = ParameterCount.of_sites(lone, {"w": (2, 2)})
    assert count.feature_costs(Groups.alone(lone)).tolist() == [2.0, 2.0, 2.0, 1.0, 1.0, 1.0]


def test_total_adds_the_parameters_that_no_site_cuts():
    sites, shapes = decoder_sites(1, 8, 16)
    total = ParameterCount.of_sites(sites, shapes, "total")
    blocks = ParameterCount.of_sites(sites, shapes, "blocks")
    assert total.dense - blocks.dense == 4 * 8 * 8 + 8 + 8
    nothing = torch.zeros(total.features)
    assert total.count_kept(nothing) == total.dense - blocks.dense


@pytest.mark.parametrize("samples", [1, 3])
def test_a_soft_mask_is_counted_where_features_of_unlike_weight_alternate(samples: int):
    """Even features stand twice on the axis and odd ones once: atoms that lie apart, counted by hand."""
    labels = (*range(5), *range(0, 5, 2))
    sites = [site("a", 5, Slice("w", 0, labels)), site("b", 3, Slice("w", 1))]
    count = ParameterCount.of_sites(sites, {"w": (8, 3)})
    masks = torch.rand(samples, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaf, by_hand = masks.clone().requires_grad_(), masks.clone().requires_grad_()
    weights = torch.tensor([2.0, 1.0, 2.0, 1.0, 2.0], dtype=torch.float64)
    expected = (by_hand[:, :5] * weights).sum(1) * by_hand[:, 5:].sum(1)
    found = count.count(leaf)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(
        *torch.autograd.grad(found.square().sum(), leaf),
        *torch.autograd.grad(expected.square().sum(), by_hand),
        rtol=1e-13,
        atol=0,
    )


@pytest.mark.parametrize("samples", [1, 3])
def test_features_are_summed_as_one_vector_and_their_gradient_is_looked_up(samples: int, monkeypatch):
    """The other ways of torch on a GPU sum a segment, or fill its gradient, in a single thread."""
    summed: list[torch.Size] = []
    reduce = torch.segment_reduce

    def watched(data, *arguments, **options):
        summed.append(data.shape)
        return reduce(data, *arguments, **options)

    monkeypatch.setattr(torch, "segment_reduce", watched)
    sites, shapes = decoder_sites(1, 8, 16)
    count = ParameterCount.of_sites(sites, shapes)
    masks = torch.rand(samples, count.features).requires_grad_()
    with torch.profiler.profile(acc_events=True) as profile:
        count.count(masks).sum().backward()
    assert summed == [(samples * count.features,)]
    names = {event.key for event in profile.key_averages()}
    assert "aten::segment_reduce" in names and "aten::_segment_reduce_backward" not in names


def test_a_fused_weight_counts_both_halves_of_every_feature():
    """Rules 1 and 2 of parameter_count."""
    labels = (*range(3), *range(3), -1)
    sites = [site("inner", 3, Slice("fused", 0, labels), Slice("bias", 0, labels))]
    count = ParameterCount.of_sites(sites, {"fused": (7, 5), "bias": (7,)})
    assert count.count_kept(torch.tensor([1, 0, 0])) == (1 + 1 + 1) * 5 + 3


def test_two_sites_on_one_axis_keep_a_position_only_together():
    """Rule 3 of parameter_count."""
    sites = [site("a", 2, Slice("w", 0, (0, 1, -1))), site("b", 1, Slice("w", 0, (-1, 0, 0)))]
    count = ParameterCount.of_sites(sites, {"w": (3, 2)})
    assert count.count_kept(torch.tensor([1, 1, 1])) == 6
    assert count.count_kept(torch.tensor([1, 1, 0])) == 2
    assert count.count_kept(torch.tensor([0, 1, 1])) == 4


def test_the_count_is_the_same_in_the_parts_of_a_soft_mask():
    sites, shapes = decoder_sites(1, 8, 16)
    count = ParameterCount.of_sites(sites, shapes)
    assert float(count.count(torch.full((count.features,), 0.5))) == pytest.approx(
        0.5 * (4 * 64) + 0.25 * (3 * 8 * 16)
    )


def test_tables_move_with_the_count():
    sites, shapes = decoder_sites(1, 8, 16)
    moved = ParameterCount.of_sites(sites, shapes).to("cpu")
    assert moved.count_kept(torch.ones(moved.features)) == moved.dense


def test_no_cut_parameter_is_a_budget_error():
    with pytest.raises(BudgetError, match="no site cuts any"):
        ParameterCount.of_sites([site("a", 2)], {"w": (2, 2)})


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (Slice("missing", 0), "existing axis"),
        (Slice("w", 2), "existing axis"),
        (Slice("w", 0), "3 positions, but 2 are labelled"),
        (Slice("w", 0, (0, 1)), "3 positions, but 2 are labelled"),
        (Slice("w", 0, (0, 1, 2)), r"labels must be in \[-1, 2\)"),
    ],
)
def test_a_slice_that_does_not_fit_is_a_pass_error(cut, message):
    with pytest.raises(PassError, match=message):
        ParameterCount.of_sites([site("a", 2, cut)], {"w": (3, 4)})
