"""Means and norms under a mask compute what they compute over the kept features alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from dispfx.ir.kept_statistics import corrected, gate_statistics, problem_of, restore
from dispfx.ir.ops import aten

H = 12
X_BTH = torch.randn(4, 5, H, generator=torch.Generator().manual_seed(0)) + 0.7
W_H, B_H = torch.randn(2, H, generator=torch.Generator().manual_seed(1))
KEPT = [0, 3, 4, 9, 11]
MASK_H = torch.zeros(H).index_fill(0, torch.tensor(KEPT), 1.0)

KINDS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mean": (aten.mean.dim, ([-1], True)),
    "mean without its dimension": (aten.mean.dim, ([2],)),
    "rms": (aten.rms_norm.default, ([H], W_H, 0.1)),
    "layer": (aten.layer_norm.default, ([H], W_H, B_H, 0.1)),
    "layer without a bias": (aten.layer_norm.default, ([H], W_H, None, 0.1)),
    "layer without a scale": (aten.layer_norm.default, ([H], None, None, 0.1)),
}


def graph_of(kind: str) -> tuple[fx.Graph, fx.Node, fx.Node, fx.Node]:
    """Return a graph of one operation, its operand, the operation, and the mask."""
    target, args = KINDS[kind]
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X_BTH
    mask = graph.placeholder("mask")
    mask.meta["val"] = MASK_H
    constants = []
    for index, arg in enumerate(args):
        if isinstance(arg, Tensor):
            node = graph.placeholder(f"constant_{index}")
            node.meta["val"] = arg
            arg = node
        constants.append(arg)
    user = graph.call_function(target, (x, *constants), name="user")
    user.meta["val"] = target(X_BTH, *args)
    graph.output(user)
    return graph, x, user, mask


def run(graph: fx.Graph, kind: str, mask: Tensor, x: Tensor = X_BTH) -> Tensor:
    tensors = [arg for arg in KINDS[kind][1] if isinstance(arg, Tensor)]
    return fx.GraphModule(torch.nn.Module(), graph)(x, mask, *tensors)


def gated(kind: str) -> fx.Graph:
    graph, x, user, mask = graph_of(kind)
    gate_statistics(graph, x, user, mask, 2, "gate_0_0")
    graph.lint()
    return graph


def over_kept(kind: str, x: Tensor = X_BTH) -> Tensor:
    """Return the operation on the kept features alone, with sliced parameters."""
    target, args = KINDS[kind]
    smaller = [arg[KEPT] if isinstance(arg, Tensor) else [len(KEPT)] if arg == [H] else arg for arg in args]
    return target(x[..., KEPT], *smaller)


def at_kept(kind: str, found: Tensor) -> Tensor:
    return found if kind.startswith("mean") else found[..., KEPT]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_gives_what_the_kept_features_alone_give(kind: str) -> None:
    graph = gated(kind)
    unlike = X_BTH + 100.0 * (1 - MASK_H)  # whatever stands at the removed features

    for x in (X_BTH, unlike):
        found = at_kept(kind, run(graph, kind, MASK_H, x))
        torch.testing.assert_close(found, over_kept(kind, x), rtol=1e-5, atol=1e-6)
    full = KINDS[kind][0](X_BTH, *KINDS[kind][1])
    assert (at_kept(kind, full) - over_kept(kind)).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_ones_changes_no_bit(kind: str) -> None:
    target, args = KINDS[kind]
    assert torch.equal(run(gated(kind), kind, torch.ones(H)), target(X_BTH, *args))


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_has_the_statistics_of_its_own_mask(kind: str) -> None:
    other = 1.0 - MASK_H
    graph = gated(kind)

    found = run(graph, kind, torch.stack([MASK_H, other]))

    alone = [run(graph, kind, mask, x) for mask, x in zip((MASK_H, other), X_BTH.split(2), strict=True)]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_the_mask_is_that_of_the_formula(kind: str) -> None:
    """Of (m·x)² weighted sums over K = Σ m features, written out and differentiated by torch in float64."""
    mask = (MASK_H * 0.5 + 0.3).double().requires_grad_()
    tensors = [arg.double() for arg in KINDS[kind][1] if isinstance(arg, Tensor)]
    graph = fx.GraphModule(torch.nn.Module(), gated(kind))
    weights = torch.randn(H, generator=torch.Generator().manual_seed(2)).double()

    def value(result: Tensor, mask: Tensor) -> Tensor:
        return (result**2).sum() if kind.startswith("mean") else (result * mask * weights).sum()

    (found,) = torch.autograd.grad(value(graph(X_BTH.double(), mask, *tensors), mask), mask)

    x, kept = X_BTH.double(), mask.sum()
    w = W_H.double() if tensors else torch.ones(H).double()
    b = B_H.double() if kind == "layer" else torch.zeros(H).double()
    mean = (mask * x).sum(-1, keepdim=True) / kept
    if kind.startswith("mean"):
        expected = mean
    elif kind == "rms":
        expected = mask * x * w * torch.rsqrt(((mask * x) ** 2).sum(-1, keepdim=True) / kept + 0.1)
    else:
        filled = mask * x + (1 - mask) * mean
        # Over all features, with the mean at the removed ones, as the gated graph has it for soft masks too.
        centre = filled.mean(-1, keepdim=True)
        variance = ((filled - centre) ** 2).sum(-1, keepdim=True) / kept
        expected = (filled - centre) * torch.rsqrt(variance + 0.1) * w + b
    (wanted,) = torch.autograd.grad(value(expected, mask), mask)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_restoring_gives_the_graph_back(kind: str) -> None:
    graph, x, user, mask = graph_of(kind)
    before = str(graph)
    gate_statistics(graph, x, user, mask, 2, "gate_0_0")
    assert corrected("gate_0_0") in {node.name for node in graph.nodes}

    restore({node.name: node for node in graph.nodes}, x, user, "gate_0_0")
    graph.eliminate_dead_code()

    assert str(graph) == before


def test_a_mean_over_more_than_the_features_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X_BTH
    several = graph.call_function(aten.mean.dim, (x, [1, 2]))
    wide = graph.call_function(aten.layer_norm.default, (x, [5, H]))
    alone = graph.call_function(aten.mean.dim, (x, [2]))

    assert "takes other dimensions along" in (problem_of(several, x, 2) or "")
    assert "takes other dimensions along" in (problem_of(wide, x, 2) or "")
    assert problem_of(alone, x, 2) is None
