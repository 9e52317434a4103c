"""Logits come out flat, in site order, nearly all kept at the start, and with exact gradients."""

import pytest
import torch

from dispfx.learning.hypernetwork import Falling, GroupHeads, RecurrentHypernetwork, build_hypernetwork
from dispfx.plan.knots import ONE_KNOT, Knots

SIZES = [6, 10, 6, 3, 10, 6]
KINDS = ["full", "linear", "none"]
RANGE = Knots.of_range(0.1, 0.4)


@pytest.mark.parametrize("kind", KINDS)
def test_one_logit_a_feature_and_nearly_everything_kept_at_the_start(kind):
    sizes = [576, 1536, 576, 64] * 4
    logits = build_hypernetwork(kind, sizes, bias=3.0, seed=0)().detach()
    assert logits.shape == (sum(sizes),)
    keep = torch.sigmoid(logits)
    assert 0.93 < float(keep.mean()) < 0.97
    assert float(keep.min()) > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_alone_decides_and_the_callers_random_state_is_left(kind):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build_hypernetwork(kind, SIZES, bias=3.0, seed=5)()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    assert torch.equal(first, build_hypernetwork(kind, SIZES, bias=3.0, seed=5)())
    if kind != "none":
        assert not torch.equal(first, build_hypernetwork(kind, SIZES, bias=3.0, seed=6)())


def test_heads_equal_one_linear_a_group_in_the_order_of_the_groups():
    heads = GroupHeads(SIZES, 4)
    inputs_GF = torch.randn(len(SIZES), 4, requires_grad=True)
    weight_of = {}
    for weight_CWF, width in zip(heads.weights, (6, 10, 3), strict=True):
        groups = [group for group, size in enumerate(SIZES) if size == width]
        weight_of |= dict(zip(groups, weight_CWF, strict=True))
    expected = torch.cat([weight_of[group] @ inputs_GF[group] for group in range(len(SIZES))])
    # Another order of the same four products a logit.
    torch.testing.assert_close(heads(inputs_GF), expected)
    scale = torch.randn(sum(SIZES))
    theirs = torch.autograd.grad((expected * scale).sum(), [inputs_GF, *heads.weights])
    (of_inputs,) = torch.autograd.grad((heads(inputs_GF) * scale).sum(), inputs_GF)
    ours = [of_inputs, *(product.written() for product in heads.outer_gradients(scale).values())]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_there_is_one_parameter_a_width_and_not_one_a_group():
    shapes = [tuple(weight.shape) for weight in GroupHeads(SIZES, 4).weights]
    assert shapes == [
        (3, 6, 4),
        (2, 10, 4),
        (1, 3, 4),
    ]


def test_values_read_without_gradient_do_not_change_what_the_gradient_is_for():
    heads = GroupHeads(SIZES, 4)
    inputs_GF, scale = torch.randn(len(SIZES), 4), torch.randn(sum(SIZES))
    heads(inputs_GF)
    before = heads.outer_gradients(scale)
    with torch.no_grad():
        heads(2 * inputs_GF)
    after = heads.outer_gradients(scale)
    assert list(before) == list(after) == list(heads.weights)
    assert all(torch.equal(before[weight].written(), after[weight].written()) for weight in before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("knots", [ONE_KNOT, RANGE], ids=["one ratio", "a range"])
def test_every_parameter_has_its_gradient_in_one_of_the_two_ways(kind, starts, knots):
    """A small change of any one parameter changes the sum of the logits as its gradient says."""
    start_N = torch.rand(sum(SIZES)) if starts else None
    network = build_hypernetwork(kind, SIZES, bias=3.0, seed=0, start_N=start_N, knots=knots).double()
    logits = network()
    scale = torch.randn_like(logits)
    outer = network.outer_gradients(scale)
    others = [parameter for parameter in network.parameters() if parameter not in outer]
    written = torch.autograd.grad(logits, others, scale) if others else ()
    gradients = dict(zip(others, written, strict=True)) | {key: one.written() for key, one in outer.items()}
    assert bool(outer) == (kind != "none")
    for parameter in network.parameters():
        direction = torch.randn_like(parameter)
        values = []
        for shift in (1e-5, -2e-5):
            with torch.no_grad():
                parameter.add_(shift * direction)
                values.append(float((network() * scale).sum()))
        with torch.no_grad():
            parameter.add_(1e-5 * direction)
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(
            float((gradients[parameter] * direction).sum())
        )


def test_the_full_hypernetwork_has_the_papers_widths_and_no_bias_a_head():
    network = build_hypernetwork("full", SIZES, bias=3.0, seed=0)
    assert isinstance(network, RecurrentHypernetwork)
    assert network.z_G32.shape == (len(SIZES), 32)
    assert network.recurrent.hidden_size == 64 and network.recurrent.bidirectional
    assert not any("heads" in name and "bias" in name for name, _ in network.named_parameters())
    assert not network.z_G32.requires_grad


def test_groups_learn_from_each_other_through_the_recurrent_network():
    network = build_hypernetwork("full", SIZES, bias=3.0, seed=0)
    assert isinstance(network, RecurrentHypernetwork)
    first = network()
    with torch.no_grad():
        network.z_G32[0] += 1.0
    changed = (network() - first).detach().abs().split(SIZES)
    assert all(float(part.max()) > 0 for part in changed)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_range_fall_from_knot_to_knot_by_one_number_a_group(kind):
    network = build_hypernetwork(kind, SIZES, bias=3.0, seed=0, knots=RANGE)
    assert isinstance(network, Falling)
    with torch.no_grad():
        network.steps_KG.copy_(torch.randn_like(network.steps_KG) * 4)
    rows_KN = network().detach()
    assert rows_KN.shape == (4, sum(SIZES))
    for fallen in (rows_KN[:-1] - rows_KN[1:]).split(SIZES, 1):
        assert bool((fallen >= 0).all()) and bool((fallen > 0.1).any())
        torch.testing.assert_close(fallen, fallen[:, :1].expand_as(fallen), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_begins_with_nearly_everything_kept_at_its_smallest_ratio(kind):
    first = build_hypernetwork(kind, [576, 1536, 64], bias=3.0, seed=0, knots=RANGE)().detach()[0]
    assert 0.88 < float(torch.sigmoid(first).mean()) < 0.97
