"""Fuse the sibling projections of one value into one product.

    q = linear(x, w_q)                      y = linear(x, w)         w = w_q, w_k and w_v, one above the other
    k = linear(x, w_k)                  →   s = split_with_sizes(y, [rows of w_q, w_k, w_v], 2)
    v = linear(x, w_v, b_v)                 q, k, v = s[0], s[1], s[2]

Rules:
1. Siblings are all `linear` operations that take the same value and whose weight, and bias, is a parameter
   that nothing else reads.  Equal selections of one value are still two values.
2. Weights are concatenated in the order of the graph, under a path in the same module; the original
   parameters are removed from the program.
3. If some siblings have a bias, the remaining ones get zeros.
4. Dtypes must be equal; siblings of another dtype form a separate group.
Every feature is still one sum over the same numbers; a larger product may run in another kernel, so
values agree up to the rounding of that kernel.
"""

import operator
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor, fx, nn

from dispfx.ir import ops
from dispfx.ir.ops import aten, packet
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Program


@dataclass(frozen=True)
class FuseProjections:
    """Make one product of the projections that read one value."""

    name = "fuse-projections"
    requires = "lowered"
    ensures = "lowered"

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place; fused projections get new tensors in place of their own."""
        tensors = dict(program.tensors())
        groups = _siblings(program.graph)
        for group in groups:
            _fuse(program, group, tensors)
        if groups:
            program.rebuild(tensors)
        fused = sum(len(group) for group in groups)
        return PassResult(bool(groups), f"{fused} projections in {len(groups)} products")


def _siblings(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the groups of two and more projections that rule 1 puts together."""
    groups: dict[tuple[fx.Node, torch.dtype], list[fx.Node]] = {}
    for node in graph.nodes:
        if _is_projection(node):
            groups.setdefault((node.args[0], node.meta["val"].dtype), []).append(node)
    return [group for group in groups.values() if len(group) > 1]


def _is_projection(node: fx.Node) -> bool:
    """Whether a node is a product with parameters of its own."""
    if packet(node) is not aten.linear or not isinstance(node.args[0], fx.Node):
        return False
    return all(
        isinstance(value, fx.Node) and value.op == "get_attr" and len(value.users) == 1
        for value in (_weight(node), _bias(node))
        if value is not None
    )


def _weight(node: fx.Node) -> fx.Node:
    weight = ops.argument(node, 1, "weight")
    assert isinstance(weight, fx.Node)
    return weight


def _bias(node: fx.Node) -> fx.Node | None:
    bias = ops.argument(node, 2, "bias")
    assert bias is None or isinstance(bias, fx.Node)
    return bias


def _fuse(program: Program, group: list[fx.Node], tensors: dict[str, Tensor]) -> None:
    graph, first = program.graph, group[0]
    value = ops.operand(first, 0)
    rows = [ops.shape_of(_weight(node))[0] for node in group]
    path = _path_beside([str(_weight(node).target) for node in group], tensors)
    with graph.inserting_before(first):
        operands = [value, *_operands(program, group, path, tensors)]
        whole = graph.call_function(aten.linear.default, tuple(operands))
        whole.meta["val"] = _resized(first, sum(rows))
        dim = ops.rank(first) - 1
        parts = graph.call_function(aten.split_with_sizes.default, (whole, rows, dim))
        parts.meta["val"] = [_resized(node, count) for node, count in zip(group, rows, strict=True)]
    for place, node in enumerate(group):
        # Rewritten in place, so that the program's facts still name it.
        node.target = operator.getitem
        node.args, node.kwargs = (parts, place), {}


def _resized(node: fx.Node, size: int) -> Tensor:
    value = node.meta["val"]
    return value.new_empty((*value.shape[:-1], size))


def _operands(program: Program, group: list[fx.Node], path: str, tensors: dict[str, Tensor]) -> list[fx.Node]:
    """Return the nodes of the weight, and of the bias where a sibling has one (rule 3)."""
    weights = [_taken(program, _weight(node), tensors) for node in group]
    operands = [_put(program.graph, f"{path}.weight", torch.cat(weights), _weight(group[0]), tensors)]
    old = [_bias(node) for node in group]
    given = next((bias for bias in old if bias is not None), None)
    if given is not None:
        biases = [
            weight.new_zeros(len(weight)) if bias is None else _taken(program, bias, tensors)
            for weight, bias in zip(weights, old, strict=True)
        ]
        operands.append(_put(program.graph, f"{path}.bias", torch.cat(biases), given, tensors))
    return operands


def _taken(program: Program, node: fx.Node, tensors: dict[str, Tensor]) -> Tensor:
    """Remove a parameter from the program and return it, so that it is freed once it is copied."""
    owner, _, name = str(node.target).rpartition(".")
    delattr(program.graph_module.get_submodule(owner), name)
    return tensors.pop(str(node.target)).detach()


def _put(graph: fx.Graph, path: str, tensor: Tensor, like: fx.Node, tensors: dict[str, Tensor]) -> fx.Node:
    tensors[path] = nn.Parameter(tensor, requires_grad=False)
    node = graph.create_node("get_attr", path, name=path.replace(".", "_"))
    node.meta["val"] = like.meta["val"].new_empty(tensor.shape)
    return node


def _path_beside(paths: list[str], tensors: dict[str, Tensor]) -> str:
    """Return `a.q_k` for `a.q.weight` and `a.k.weight`: a path that names all of them and is free."""
    modules = [path.rpartition(".")[0] or path for path in paths]
    parents = [module.split(".")[:-1] for module in modules]
    levels = takewhile(lambda names: len(set(names)) == 1, zip(*parents, strict=False))
    shared = [names[0] for names in levels]
    names = ["_".join(module.split(".")[len(shared) :]) for module in modules]
    path = ".".join([*shared, "_".join(names)])
    while any(known == path or known.startswith(f"{path}.") for known in tensors):
        path += "_"
    return path
