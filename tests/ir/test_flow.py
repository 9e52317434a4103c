"""Choke points and products on the way, against counting every path of small random graphs."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import fx

from dispfx.analysis.flow import Flow
from dispfx.ir import ops

aten = torch.ops.aten
SEEDS = range(60)


def random_graph(seed: int) -> fx.Graph:
    """Return a graph of additions, products and relus over one (4, 4) input and two weights."""
    dice = random.Random(seed)
    graph = fx.Graph()
    ids = graph.placeholder("ids")
    weights = [graph.get_attr(name) for name in ("w", "v")]
    values = [ids]
    for _ in range(dice.randint(3, 12)):
        pool = values[-3:] if dice.random() < 0.8 else values
        a, b = dice.choice(pool), dice.choice([*values, *weights])
        kind = dice.choice(("add", "product", "relu"))
        if kind == "add":
            values.append(graph.call_function(aten.add.Tensor, (a, b)))
        elif kind == "product":
            values.append(graph.call_function(aten.mm.default, (a, b)))
        else:
            values.append(graph.call_function(aten.relu.default, (a,)))
    graph.output(values[-1])
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(4, 4)
    return graph


def paths(start: fx.Node, end: fx.Node) -> Iterator[list[fx.Node]]:
    """Yield every path from one node to another."""
    if start is end:
        yield [end]
        return
    for user in start.users:
        for rest in paths(user, end):
            yield [start, *rest]


@pytest.mark.parametrize("seed", SEEDS)
def test_choke_points_are_the_nodes_on_every_path(seed: int):
    graph = random_graph(seed)
    ids, output = next(iter(graph.nodes)), graph.output_node()
    every = [set(path) for path in paths(ids, output)]
    assert Flow.of(graph).choke_points(graph) == (set.intersection(*every) if every else {output})


@pytest.mark.parametrize("seed", SEEDS)
def test_feeds_through_product_is_a_path_with_a_product_after_its_start(seed: int):
    graph = random_graph(seed)
    flow = Flow.of(graph)
    nodes = [node for node in graph.nodes if node in flow.dependent and node.op != "output"]
    assert len(nodes) > 1
    for source in nodes:
        for target in nodes:
            expected = any(any(ops.is_product(node) for node in path[1:]) for path in paths(source, target))
            assert flow.feeds_through_product(source, target) == expected, (source, target)


@pytest.mark.parametrize("seed", SEEDS)
def test_feeds_is_a_path(seed: int):
    graph = random_graph(seed)
    flow = Flow.of(graph)
    nodes = [node for node in graph.nodes if node in flow.dependent and node.op != "output"]
    assert len(nodes) > 1
    for source in nodes:
        for target in nodes:
            assert flow.feeds(source, target) == any(True for _ in paths(source, target)), (source, target)


def test_dependence_leaves_weights_and_shapes_out():
    graph = fx.Graph()
    ids, weight = graph.placeholder("ids"), graph.get_attr("w")
    length = graph.call_function(aten.sym_size.int, (ids, 1))
    zeros = graph.call_function(aten.new_zeros.default, (ids, [4]))
    scaled = graph.call_function(aten.mul.Tensor, (weight, 2.0))
    product = graph.call_function(aten.mm.default, (ids, scaled))
    graph.output(product)
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(4, 4)
    length.meta["val"] = 4
    assert Flow.of(graph).dependent == {ids, product, graph.output_node()}
    assert zeros not in Flow.of(graph).dependent


def test_a_comparison_of_activations_depends_on_ids_and_one_of_ids_does_not():
    """The mask of a spiking layer carries features; that of padding does not."""
    graph = fx.Graph()
    ids, table = graph.placeholder("ids"), graph.get_attr("w")
    value = graph.call_function(aten.embedding.default, (table, ids))
    padding = graph.call_function(aten.ne.Scalar, (ids, 0))
    spikes = graph.call_function(aten.gt.Scalar, (value, 0.0))
    either = graph.call_function(aten.logical_not.default, (spikes,))
    graph.output(graph.call_function(aten.mul.Tensor, (either, padding)))
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(4, 4)
    ids.meta["val"] = ids.meta["val"].long()
    for node in (padding, spikes, either):
        node.meta["val"] = node.meta["val"].bool()
    assert {value, spikes, either} < Flow.of(graph).dependent
    assert padding not in Flow.of(graph).dependent


def test_a_root_is_found_below_casts_views_and_constant_scalings():
    graph = fx.Graph()
    ids, weight = graph.placeholder("ids"), graph.get_attr("w")
    base = graph.call_function(aten.relu.default, (ids,))
    scaled = graph.call_function(aten.mul.Tensor, (base, 2.0))
    shifted = graph.call_function(aten.add.Tensor, (weight, scaled))
    cast = graph.call_function(aten.to.dtype, (shifted, torch.float64))
    shaped = graph.call_function(aten.reshape.default, (cast, [16]))
    squared = graph.call_function(aten.mul.Tensor, (shaped, shaped))
    graph.output(squared)
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(4, 4)
    flow = Flow.of(graph)
    assert flow.root(shaped) is base
    assert flow.root_path(shaped) == [shaped, cast, shifted, scaled, base]
    assert flow.root(squared) is squared, "a square is no scaling by a constant"


def test_a_cone_ends_at_its_stops():
    graph = random_graph(3)
    flow = Flow.of(graph)
    top = graph.output_node().args[0]
    assert isinstance(top, fx.Node)
    ids = next(iter(graph.nodes))
    inside, met = flow.cone(top, stop=lambda node: node is ids)
    reaching = {node for node in graph.nodes if node.op == "call_function" and any(paths(node, top))}
    assert inside == {node for node in reaching if node in flow.dependent} and met == {ids}
