"""Every link rule against brute force: perturb one position of an operand, see what moves.

For a pair of an operand's dimension (size N) and a result's dimension (size M) the influence is the
(N, M) table of which positions of the result move when everything at one position of the operand is
changed.  A rule is right when

1. each link says exactly the influence, and
2. a pair without a link is unrelated: either the position does not matter, or it is the same for all
   positions; unless the closure refuses or gates the dimension (mixed, contracted), and
3. masking one side of a contraction gives what masking the other side gives.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers its grouped product)
from torch import Tensor, fx

from dispfx.analysis.links import _RULES, Alternatives, Contraction, Link, Mixing, links
from dispfx.analysis.links.connections import Connection, Dimension, Free, ends
from dispfx.ir.ops import contracts, is_pointwise

aten = torch.ops.aten
TRIALS = 8


@dataclass(frozen=True)
class Case:
    """One call of an operation.

    Args:
        target: the overload.
        args: arguments; tensors among them are operands.
        kwargs: as `args`.
        item: which result is looked at, where the operation returns several.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None


def call(target: Any, *args: Any, item: int | None = None, **kwargs: Any) -> Case:
    return Case(target, args, kwargs, item)


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def ids(*shape: int, below: int = 7) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(sum(shape)))


CASES: dict[str, Case] = {
    "linear": call(aten.linear.default, x(2, 3, 4), x(5, 4), x(5)),
    "linear without bias": call(aten.linear.default, x(3, 4), x(5, 4)),
    "linear by a vector": call(aten.linear.default, x(2, 3, 4), x(4)),
    "matmul": call(aten.matmul.default, x(2, 3, 4), x(4, 5)),
    "matmul of a vector": call(aten.matmul.default, x(4), x(4, 5)),
    "matmul by a vector": call(aten.matmul.default, x(3, 4), x(4)),
    "matmul of batches": call(aten.matmul.default, x(2, 3, 4), x(2, 4, 5)),
    "matmul that broadcasts": call(aten.matmul.default, x(3, 4), x(2, 4, 5)),
    "mm": call(aten.mm.default, x(3, 4), x(4, 5)),
    "bmm": call(aten.bmm.default, x(2, 3, 4), x(2, 4, 5)),
    "addmm": call(aten.addmm.default, x(5), x(3, 4), x(4, 5)),
    "grouped product": call(
        torch.ops.transformers.grouped_mm_fallback.default, x(6, 4), x(3, 4, 5), torch.tensor([2, 2, 6])
    ),
    "baddbmm": call(aten.baddbmm.default, x(2, 3, 5), x(2, 3, 4), x(2, 4, 5)),
    "einsum as linear": call(aten.einsum.default, "btd,fd->btf", [x(2, 3, 4), x(5, 4)]),
    "einsum over two letters": call(aten.einsum.default, "bthk,dhk->btd", [x(2, 3, 4, 5), x(6, 4, 5)]),
    "einsum with dots": call(aten.einsum.default, "...d,fd->...f", [x(2, 3, 4), x(5, 4)]),
    "einsum with dots that broadcast": call(
        aten.einsum.default, "...dk,...kf->...df", [x(2, 3, 4, 5), x(3, 5, 6)]
    ),
    "tensordot": call(aten.tensordot.default, x(2, 3, 4), x(4, 5), [2], [0]),
    "tensordot of two dimensions": call(aten.tensordot.default, x(2, 3, 4), x(4, 5, 3), [1, -1], [2, 0]),
    "einsum that sums one operand": call(aten.einsum.default, "ij,k->ik", [x(3, 4), x(5)]),
    "attention": call(aten.scaled_dot_product_attention.default, x(2, 3, 5, 4), x(2, 3, 6, 4), x(2, 3, 6, 7)),
    "embedding": call(aten.embedding.default, x(7, 4), ids(2, 3)),
    "transpose": call(aten.transpose.int, x(2, 3, 4), -1, 0),
    "swapaxes": call(aten.swapaxes.default, x(2, 3, 4), 1, 2),
    "permute": call(aten.permute.default, x(2, 3, 4), [2, 0, -2]),
    "t": call(aten.t.default, x(3, 4)),
    "numpy_T": call(aten.numpy_T.default, x(2, 3, 4)),
    "mT": call(aten.mT.default, x(2, 3, 4)),
    "movedim": call(aten.movedim.int, x(2, 3, 4), -1, 0),
    "movedim of two": call(aten.movedim.intlist, x(2, 3, 4, 5), [0, 1], [2, 0]),
    "stack": call(aten.stack.default, [x(3, 4), x(3, 4)], 1),
    "stack at the end": call(aten.stack.default, [x(3, 4), x(3, 4)], -1),
    "slice_scatter": call(aten.slice_scatter.default, x(3, 7, 2), x(3, 4, 2), 1, 2, 6),
    "view_as_complex": call(aten.view_as_complex.default, x(3, 4, 2)),
    "expand": call(aten.expand.default, x(3, 1, 4), [2, 3, 5, 4]),
    "expand_as": call(aten.expand_as.default, x(3, 1, 4), x(2, 3, 5, 4)),
    "flip": call(aten.flip.default, x(2, 5), [-1]),
    "flip of two dimensions": call(aten.flip.default, x(2, 5, 3), [0, 1]),
    "roll": call(aten.roll.default, x(3, 7), [2], [1]),
    "roll backwards": call(aten.roll.default, x(3, 7), [-3], [-1]),
    "roll of two dimensions": call(aten.roll.default, x(5, 7), [2, 3], [0, 1]),
    "roll of everything": call(aten.roll.default, x(5, 7), [1]),
    "pad": call(aten.pad.default, x(3, 4), [2, 1]),
    "pad by nothing": call(aten.pad.default, x(3, 4), [0, 0]),
    "pad of two dimensions": call(aten.pad.default, x(2, 3, 4), [0, 1, 2, 0], "constant", 3.0),
    "pad that cuts off": call(aten.pad.default, x(3, 6), [-2, 1]),
    "pad with what is there": call(aten.pad.default, x(2, 3, 4), [2, 1], "reflect"),
    "constant pad": call(aten.constant_pad_nd.default, x(3, 4), [1, -2], 1.0),
    "slice": call(aten.slice.Tensor, x(3, 9), 1, 2, 8, 3),
    "slice from the end": call(aten.slice.Tensor, x(3, 9), -1, -4, 2**63 - 1),
    "slice of the first dimension": call(aten.slice.Tensor, x(5, 3)),
    "select": call(aten.select.int, x(3, 4, 5), 1, 2),
    "split": call(aten.split.Tensor, x(3, 8), 3, -1, item=2),
    "split with sizes": call(aten.split_with_sizes.default, x(3, 8), [1, 5, 2], 1, item=1),
    "chunk": call(aten.chunk.default, x(8, 3), 2, item=1),
    "unbind": call(aten.unbind.int, x(3, 2, 4), 1, item=1),
    "unbind of the first dimension": call(aten.unbind.int, x(3, 2, 4), item=0),
    "cat": call(aten.cat.default, [x(3, 2), x(3, 4)], -1),
    "cat of nothing": call(aten.cat.default, [x(0), x(3, 4)], -1),
    "cat of the first dimension": call(aten.cat.default, [x(2, 3), x(4, 3)]),
    "glu": call(aten.glu.default, x(3, 8)),
    "glu of an earlier dimension": call(aten.glu.default, x(8, 3), 0),
    "index": call(aten.index.Tensor, x(7, 4, 5), [ids(2, 3)]),
    "index of two dimensions": call(aten.index.Tensor, x(7, 7, 5), [ids(3), ids(3)]),
    "index of the last dimension": call(aten.index.Tensor, x(4, 5, 7), [None, None, ids(3)]),
    "index of a middle dimension": call(aten.index.Tensor, x(4, 7, 5), [None, ids(2, 3)]),
    "index_select": call(aten.index_select.default, x(3, 7), -1, ids(4)),
    "type_as": call(aten.type_as.default, x(3, 4), x(3, 4)),
    "view": call(aten.view.default, x(2, 3, 4), [6, 4]),
    "reshape into factors": call(aten.reshape.default, x(2, 12), [2, 3, 4]),
    "reshape of factors": call(aten.reshape.default, x(2, 3, 4, 5), [2, 12, 5]),
    "reshape with ones": call(aten.reshape.default, x(2, 1, 3, 1), [1, 2, 3]),
    "reshape that mixes": call(aten.reshape.default, x(4, 6), [6, 4]),
    "unsafe view": call(aten._unsafe_view.default, x(2, 3, 4), [2, 12]),
    "flatten": call(aten.flatten.using_ints, x(2, 3, 4), 1),
    "unflatten": call(aten.unflatten.int, x(2, 12), -1, [3, 4]),
    "unsqueeze": call(aten.unsqueeze.default, x(2, 3), 1),
    "squeeze": call(aten.squeeze.dim, x(2, 1, 3), 1),
    "mean": call(aten.mean.dim, x(2, 3, 4), [-1], True),
    "mean that drops its dimension": call(aten.mean.dim, x(2, 3, 4), [1]),
    "mean of everything": call(aten.mean.default, x(2, 3)),
    "sum of two dimensions": call(aten.sum.dim_IntList, x(2, 3, 4), [0, 2]),
    "amax": call(aten.amax.default, x(2, 3, 4), [1], True),
    "amin": call(aten.amin.default, x(2, 3), [-1]),
    "max of two": call(aten.max.other, x(2, 3), x(2, 3)),
    "min of two": call(aten.min.other, x(2, 3), x(2, 3)),
    "var": call(aten.var.correction, x(2, 3, 4), [1], correction=0, keepdim=True),
    "std": call(aten.std.correction, x(2, 3), [-1]),
    "norm": call(aten.norm.ScalarOpt_dim, x(2, 3, 4, 5), 2, [-1], True),
    "vector norm": call(aten.linalg_vector_norm.default, x(2, 3, 4, 5), 2, [-1], True),
    "vector norm of everything": call(aten.linalg_vector_norm.default, x(2, 3)),
    "argmax": call(aten.argmax.default, x(3, 4), -1),
    "prod": call(aten.prod.dim_int, x(3, 4), -1),
    "all": call(aten.all.dim, x(5, 2) > 0, -1),
    "any": call(aten.any.dim, x(5, 2) > 0, -1),
    "logsumexp": call(aten.logsumexp.default, x(3, 4), [-1]),
    "max along a dimension": call(aten.max.dim, x(2, 3, 4), 1, item=0),
    "min that keeps its dimension": call(aten.min.dim, x(2, 3, 4), -1, True, item=0),
    "largest of a dimension": call(aten.topk.default, x(2, 5), 2, item=0),
    "sorted along a dimension": call(aten.sort.default, x(3, 9), 0, item=0),
    "softmax": call(aten.softmax.int, x(2, 3, 4), -1),
    "_softmax": call(aten._softmax.default, x(2, 3, 4), 1, False),
    "_safe_softmax": call(aten._safe_softmax.default, x(3, 4), -1),
    "log_softmax": call(aten.log_softmax.int, x(3, 4), -1),
    "cumsum": call(aten.cumsum.default, x(3, 4), 1),
    "cumprod": call(aten.cumprod.default, x(3, 4), 1),
    "argsort": call(aten.argsort.default, x(3, 9), -1),
    "layer norm": call(aten.layer_norm.default, x(2, 3, 4), [4], x(4), x(4)),
    "layer norm of two dimensions": call(aten.layer_norm.default, x(2, 3, 4), [3, 4]),
    "rms norm": call(aten.rms_norm.default, x(2, 3, 4), [4], x(4)),
    "zeros_like": call(aten.zeros_like.default, x(2, 3)),
    "ones_like": call(aten.ones_like.default, x(2, 3)),
    "full_like": call(aten.full_like.default, x(2, 3), 2.0),
    "new_zeros": call(aten.new_zeros.default, x(2, 3), [2, 3]),
    "new_ones": call(aten.new_ones.default, x(2, 3), [2, 3]),
    "new_full": call(aten.new_full.default, x(2, 3), [2, 3], 1.0),
    "zeros": call(aten.zeros.default, [2, 3]),
    "ones": call(aten.ones.default, [2, 3]),
    "full": call(aten.full.default, [2, 3], 2.0),
    "add that broadcasts": call(aten.add.Tensor, x(2, 3, 4), x(3, 1)),
    "mul by a vector": call(aten.mul.Tensor, x(2, 3, 4), x(4)),
    "where a number": call(aten.where.ScalarOther, x(5, 6) > 0, x(5, 6), 0.0),
    "where": call(aten.where.self, x(5, 6) > 0, x(5, 6), x(6)),
    "masked_fill": call(aten.masked_fill.Scalar, x(5, 6), x(5, 6) > 0, 0.0),
    "conv1d": call(aten.conv1d.default, x(2, 3, 6), x(5, 3, 2), x(5)),
    "conv1d of every channel": call(aten.conv1d.default, x(2, 3, 6), x(3, 1, 2), x(3), [1], [1], [1], 3),
    "conv1d of groups": call(aten.conv1d.default, x(2, 4, 6), x(6, 2, 2), None, [1], [0], [1], 2),
    "convolution of every channel": call(
        aten.convolution.default, x(2, 3, 6), x(3, 1, 2), x(3), [1], [1], [1], False, [0], 3
    ),
    "index_add": call(aten.index_add.default, x(2, 7, 3), 1, ids(4), x(2, 4, 3)),
    "index_put": call(aten.index_put.default, x(7, 3), [ids(4)], x(4, 3)),
    "index_put at a pair": call(aten.index_put.default, x(7, 7, 3), [ids(4), ids(4)], x(4, 3)),
    "repeat": call(aten.repeat.default, x(2, 3), [1, 2]),
    "repeat in front": call(aten.repeat.default, x(2, 3), [4, 1, 1]),
    "tile of the last dimension": call(aten.tile.default, x(2, 3), [2]),
    "repeat_interleave": call(aten.repeat_interleave.self_int, x(2, 3), 2, 1),
    "silu": call(aten.silu.default, x(2, 3)),
    "cast": call(aten.to.dtype, x(2, 3), torch.float32),
    "pow": call(aten.pow.Tensor_Scalar, x(2, 3), 2),
}  # fmt: skip

# Operations that return several tensors of which only the dimensions that pass through matter.
SEVERAL_RESULTS: dict[str, Case] = {
    "max": call(aten.max.dim, x(2, 3, 4), 1),
    "min": call(aten.min.dim, x(2, 3, 4), -1),
    "var_mean": call(aten.var_mean.correction, x(2, 3, 4), [2]),
    "topk": call(aten.topk.default, x(2, 5), 2),
    "sort": call(aten.sort.default, x(2, 5), 0),
    "native_layer_norm": call(aten.native_layer_norm.default, x(2, 3, 4), [4], x(4), x(4), 1e-5),
    "_fused_rms_norm": call(aten._fused_rms_norm.default, x(2, 3, 4).float(), [4], x(4).float(), 1e-5),
}


def node_of(case: Case) -> tuple[fx.Node, dict[fx.Node, Tensor]]:
    """Return the node of a case in a graph of its own, and its operands."""
    graph = fx.Graph()
    operands: dict[fx.Node, Tensor] = {}

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            node = graph.placeholder(f"operand_{len(operands)}")
            node.meta["val"] = value
            operands[node] = value
            return node
        return [placed(entry) for entry in value] if isinstance(value, list) else value

    args = tuple(placed(value) for value in case.args)
    node = graph.call_function(case.target, args, case.kwargs)
    node.meta["val"] = case.target(*case.args, **case.kwargs)
    if case.item is None:
        return node, operands
    taken = graph.call_function(operator.getitem, (node, case.item))
    taken.meta["val"] = node.meta["val"][case.item]
    return taken, operands


def run(case: Case, node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor:
    """Return the result of a case at other values of its operands."""
    caller = node if case.item is None else node.args[0]
    args = fx.node.map_arg(caller.args, lambda operand: values[operand])  # type: ignore[union-attr]
    result = case.target(*args, **case.kwargs)
    return result if case.item is None else result[case.item]


def influence(
    case: Case, node: fx.Node, operands: dict[fx.Node, Tensor], source: Dimension
) -> list[np.ndarray]:
    """Return for each dimension of the result the (N, M) table of what moves with `source`."""
    operand, dim = source
    sizes = node.meta["val"].shape
    tables = [np.zeros((operands[operand].shape[dim], size), dtype=bool) for size in sizes]
    for trial in range(TRIALS):
        before = {key: redrawn(value, trial) for key, value in operands.items()}
        plain = run(case, node, before)
        for position in range(operands[operand].shape[dim]):
            after = before | {operand: perturbed(before[operand], dim, position, trial)}
            moved = run(case, node, after) != plain
            for to, table in enumerate(tables):
                others = [other for other in range(moved.dim()) if other != to]
                table[position] |= (moved.sum(others) if others else moved).bool().numpy()
    return tables


def redrawn(value: Tensor, trial: int) -> Tensor:
    """Return other conditions in each trial, so that no position stays hidden behind one."""
    if value.dtype != torch.bool:
        return value
    return torch.randint(2, value.shape, generator=torch.Generator().manual_seed(100 + trial)).bool()


def perturbed(value: Tensor, dim: int, position: int, trial: int) -> Tensor:
    """Return `value` with everything at one position of one dimension changed."""
    generator = torch.Generator().manual_seed(trial)
    changed = value.movedim(dim, 0).clone()
    place = changed[position]
    if value.dtype == torch.bool:
        changed[position] = bool(trial % 2)
    elif value.is_floating_point():
        changed[position] = 10 * torch.randn(place.shape, generator=generator, dtype=value.dtype)
    else:
        changed[position] = (place + 1 + trial) % 7
    return changed.movedim(0, dim)


def table_of(link: Link, forward: bool, sizes: tuple[int, int]) -> np.ndarray:
    """Return the (N, M) table that a link claims."""
    here, there = (link.a_positions, link.b_positions) if forward else (link.b_positions, link.a_positions)
    table = np.zeros(sizes, dtype=bool)
    if here is None or there is None:
        assert sizes[0] == sizes[1], "a link without positions joins dimensions of one size"
        return np.eye(sizes[0], dtype=bool)
    table[here, there] = True
    return table


def claims(connections: list[Connection], source: Dimension, target: Dimension) -> list[np.ndarray]:
    """Return the tables that the links between two dimensions claim."""
    found = []
    sizes = (source[0].meta["val"].shape[source[1]], target[0].meta["val"].shape[target[1]])
    for link in flat(connections):
        if (link.a, link.b) == (source, target):
            found.append(table_of(link, True, sizes))
        elif (link.b, link.a) == (source, target):
            found.append(table_of(link, False, sizes))
    return found


def flat(connections: list[Connection]) -> list[Link]:
    links_found: list[Link] = []
    for connection in connections:
        if isinstance(connection, Link):
            links_found.append(connection)
        elif isinstance(connection, Alternatives):
            links_found += connection.factors
    return links_found


def stops(connections: list[Connection]) -> set[Dimension]:
    """Return the dimensions at which labels are gated or refused."""
    found: set[Dimension] = set()
    for connection in connections:
        match connection:
            case Contraction(a=a, b=b):
                found |= {a, b}
            case Mixing(operand=operand):
                found.add(operand)
    return found


@pytest.mark.parametrize("name", sorted(CASES))
def test_links_say_exactly_what_moves(name: str):
    case = CASES[name]
    node, operands = node_of(case)
    connections = links(node)
    assert connections is not None
    stopped = stops(connections)
    for operand, value in operands.items():
        for dim in range(value.dim()):
            tables = influence(case, node, operands, (operand, dim))
            for to, moved in enumerate(tables):
                check_pair(connections, (operand, dim), (node, to), moved, stopped)


def check_pair(
    connections: list[Connection],
    source: Dimension,
    target: Dimension,
    moved: np.ndarray,
    stopped: set[Dimension],
) -> None:
    if source in stopped or target in stopped:
        return
    where = f"{source[0].name} dimension {source[1]} → result dimension {target[1]}"
    claimed = claims(connections, source, target)
    for table in claimed:
        assert not moved.any() or np.array_equal(table, moved), where
    if source[0].meta["val"].is_floating_point():
        assert claimed or unrelated(moved), f"no link for {where}"


def unrelated(moved: np.ndarray) -> bool:
    """Whether all positions that move anything move the same."""
    rows = moved[moved.any(axis=1)]
    return len(rows) == 0 or bool((rows == rows[0]).all())


@pytest.mark.parametrize("name", sorted(CASES))
def test_no_label_is_lost_between_operand_and_result(name: str):
    """A dimension that matters is linked, or it is one where labels are gated or refused."""
    case = CASES[name]
    node, operands = node_of(case)
    connections = links(node) or []
    known = {end for connection in connections for end in ends(connection)}
    for operand, value in operands.items():
        for dim in range(value.dim()):
            matters = any(table.any() for table in influence(case, node, operands, (operand, dim)))
            if value.is_floating_point() and value.shape[dim] > 1 and matters:
                assert (operand, dim) in known, f"{operand.name} dimension {dim}"
    for dim, size in enumerate(node.meta["val"].shape):
        if size > 1:
            assert (node, dim) in known, f"result dimension {dim}"


def contractions(name: str) -> list[tuple[int, Contraction]]:
    """Return the contractions of a case, numbered, but for what is summed over with a softmax between.

    That is the tokens of keys and values, which the closure never crosses.
    """
    found = [entry for entry in links(node_of(CASES[name])[0]) or [] if isinstance(entry, Contraction)]
    return [(at, entry) for at, entry in enumerate(found) if (name, at) != ("attention", 1)]


CONTRACTING = sorted(name for name in CASES if contractions(name))


def test_every_product_contracts_but_those_without_a_sum_over_two_operands():
    products = {name for name in CASES if contracts(node_of(CASES[name])[0])}
    assert len(CONTRACTING) >= 17 and set(CONTRACTING) <= products
    assert products - set(CONTRACTING) == {"einsum that sums one operand", "conv1d of groups"}


@pytest.mark.parametrize("name", CONTRACTING)
def test_masking_one_side_of_a_contraction_masks_the_other(name: str):
    case = CASES[name]
    node, operands = node_of(case)
    found = [entry for entry in links(node) or [] if isinstance(entry, Contraction)]
    for at, _ in contractions(name):
        (a, a_dim), (b, b_dim) = found[at].a, found[at].b
        assert operands[a].shape[a_dim] == operands[b].shape[b_dim]
        mask = torch.arange(operands[a].shape[a_dim]) % 2
        left, right = dict(operands), dict(operands)
        left[a], right[b] = masked(operands[a], a_dim, mask), masked(operands[b], b_dim, mask)
        torch.testing.assert_close(run(case, node, left), run(case, node, right))
        assert not torch.equal(run(case, node, left), run(case, node, operands))


def masked(value: Tensor, dim: int, mask: Tensor) -> Tensor:
    shape = [1] * value.dim()
    shape[dim] = -1
    return value * mask.view(shape)


@pytest.mark.parametrize("name", sorted(SEVERAL_RESULTS))
def test_an_operation_with_several_results_stops_what_it_combines(name: str):
    case = SEVERAL_RESULTS[name]
    node, operands = node_of(case)
    stopped = stops(links(node) or [])
    value = next(iter(operands))
    combined = {(value, dim) for dim in range(operands[value].dim()) if mixes(case, node, operands, dim)}
    assert combined <= stopped


def mixes(case: Case, node: fx.Node, operands: dict[fx.Node, Tensor], dim: int) -> bool:
    """Whether other positions along `dim` matter: cutting `dim` changes what is left of the result."""
    value = next(iter(operands))
    half = operands[value].shape[dim] // 2 + 1
    changed = dict(operands)
    changed[value] = operands[value].clone()
    changed[value].narrow(dim, half, operands[value].shape[dim] - half).mul_(7).add_(3)
    plain, other = run(case, node, operands)[0], run(case, node, changed)[0]
    if plain.dim() < operands[value].dim() or plain.shape[dim] != operands[value].shape[dim]:
        size = operands[value].dim() == plain.dim()
        return size or dim == reduced_dim(operands[value], plain)
    return not torch.equal(plain.narrow(dim, 0, half), other.narrow(dim, 0, half))


def reduced_dim(value: Tensor, result: Tensor) -> int:
    """Return the one dimension that a reduction removed; sizes differ, so shapes tell."""
    left = list(value.shape)
    for dim in range(value.dim()):
        if tuple(left[:dim] + left[dim + 1 :]) == tuple(result.shape):
            return dim
    raise AssertionError("no dimension was removed")


@pytest.mark.parametrize("name", ["expand", "new_ones", "new_zeros", "new_full", "ones", "full"])
def test_positions_of_a_free_dimension_are_alike(name: str):
    node, _ = node_of(CASES[name])
    free = [connection.result for connection in links(node) or [] if isinstance(connection, Free)]
    assert free
    for _, dim in free:
        first = node.meta["val"].narrow(dim, 0, 1)
        assert torch.equal(node.meta["val"], first.expand_as(node.meta["val"]))


def test_every_rule_has_a_case():
    tested = {case.target.overloadpacket for case in (*CASES.values(), *SEVERAL_RESULTS.values())}
    tested.add(operator.getitem)
    numbers_only = {aten.sym_size, aten.sym_numel, aten.sym_stride}
    arbitrary = {aten.empty_like, aten.new_empty, aten.empty}
    rest = set(_RULES) - tested - numbers_only - arbitrary
    assert {str(packet) for packet in rest} <= {
        # Spellings of cases above, which share their rule.
        "aten.narrow", "aten.unsafe_split", "aten.unsafe_chunk", "aten.group_norm", "aten.view_as_real",
    }  # fmt: skip


def test_an_average_is_told_from_a_mixture():
    for name, average in {"mean": True, "sum of two dimensions": True, "amax": False, "var": False}.items():
        node, _ = node_of(CASES[name])
        found = [connection for connection in links(node) or [] if isinstance(connection, Mixing)]
        assert found and all(connection.average is average for connection in found), name


@pytest.mark.parametrize(
    "case",
    [
        call(aten.scatter_add.default, x(7, 3), 0, ids(4, 3), x(4, 3)),
        call(aten.gather.default, x(2, 3), 1, ids(2, 2, below=3)),
        call(aten.mv.default, x(2, 3), x(3)),
        call(aten.bilinear.default, x(2, 4), x(2, 4), x(5, 4, 4)),
        call(aten.index.Tensor, x(7, 4, 7), [ids(3), None, ids(3)]),
        call(aten.tensor_split.sections, x(2, 3), 2, 1, item=0),
    ],
    ids=[
        "scatter_add",
        "gather",
        "mv",
        "bilinear",
        "index of dimensions apart",
        "one result of many",
    ],
)
def test_an_operation_without_a_rule_is_opaque(case: Case):
    node, _ = node_of(case)
    assert links(node) is None


ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    aten.relu.default, aten.gelu.default, aten.silu.default, aten.tanh.default, aten.sigmoid.default,
    aten.mish.default, aten.elu.default, aten.softplus.default, aten.leaky_relu.default, aten.erf.default,
    aten.hardswish.default, aten.log_sigmoid.default, aten.rsqrt.default, aten.hardtanh.default,
]  # fmt: skip


@pytest.mark.parametrize("target", ACTIVATIONS, ids=str)
def test_activations_are_pointwise(target):
    node, _ = node_of(call(target, x(2, 3)))
    assert is_pointwise(node)
