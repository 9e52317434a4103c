"""Give every operation one form and erase no-ops.

    b = to(a, float32)      # a is float32 already
    c = slice(b, 1, 0, max)
    d = mul(c, 2)               →   d = mul(a, 2)

Rules:
1. Assertions about metadata are erased: they hold at every shape that was traced.
2. A cast to the dtype and device a value has, a slice of everything, dropout in evaluation mode,
   `alias`, `detach` and `lift_fresh_copy` give their operand, so users take that.
3. `view` and `_unsafe_view` become `reshape`, which is the same where the operand is contiguous and
   also holds where slicing made it not so.  `broadcast_to` becomes `expand`.
4. An `expand` that only feeds pointwise operations which have another operand of the full shape gives
   its operand, since those broadcast by themselves.
5. `view_as_complex` reads a contiguous operand: it needs even strides, which a cut neighbour can make odd.
6. `copy(x, y)`, which remains of an in-place copy, is `y` in the shape and dtype of `x`; it has no gradient.
7. `zeros_like(x)` and similar operations state their sizes, as `new_zeros(x, sizes)`: a value that only
   gives its shape need not be cut together with the result.
8. A parameter or buffer is read by one node.
9. Values that nobody uses are erased.  Parameters that nobody reads then are kept as `Program.unused`.
10. `ceil(a / b)` of sizes becomes `-(-a // b)`, and `floor(a / b)` becomes `a // b`, because torch cannot
    store other forms in a file.
11. `addcmul(x, a, b)` becomes `x + a * b`, `addcdiv(x, a, b)` becomes `x + a / b`, `lerp(x, y, w)` becomes
   `(1 - w) * x + w * y`, where all operands have the type of the result: an addition to the residual stream
   is then seen as one.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dispfx.ir import ops
from dispfx.ir.ops import argument, aten, packet
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Program

_ASSERTIONS = ops.packets("_assert_tensor_metadata _assert_async _assert_scalar sym_constrain_range_for_size")
_NO_OPS = ops.packets("alias detach lift_fresh_copy")
_EXPANDS = ops.packets("expand expand_as")
_END = 2**63 - 1
_SIZED: dict[object, torch._ops.OpOverload] = {
    aten.zeros_like: aten.new_zeros.default,
    aten.ones_like: aten.new_ones.default,
    aten.full_like: aten.new_full.default,
    aten.empty_like: aten.new_empty.default,
}


@dataclass(frozen=True)
class Canonicalize:
    """Erase no-ops and rewrite the rest to one form."""

    name = "canonicalize"
    requires = "captured"
    ensures = "canonical"

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place."""
        before = len(program.graph.nodes)
        changed = False
        for step in _STEPS:
            changed = step(program.graph) or changed
        parameters = program.parameters
        program.rebuild(dict(program.tensors()))
        read = program.parameters
        unread = {path: tensor for path, tensor in parameters.items() if path not in read}
        program.unused = {**program.unused, **unread}
        erased = before - len(program.graph.nodes)
        return PassResult(changed or erased > 0, f"{erased} of {before} values erased")


def _erase_no_ops(graph: fx.Graph) -> bool:
    changed = False
    for node in list(graph.nodes):
        if packet(node) in _ASSERTIONS:
            graph.erase_node(node)
            changed = True
        elif _does_nothing(node):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
            changed = True
    return changed


def _does_nothing(node: fx.Node) -> bool:
    test = _TESTS.get(packet(node))
    operand = node.args[0] if node.args else None
    if test is None or not isinstance(operand, fx.Node) or not ops.is_tensor(operand):
        return False
    return test(node, operand)


def _always(node: fx.Node, operand: fx.Node) -> bool:
    return True


def _same_type(node: fx.Node, operand: fx.Node) -> bool:
    result, value = node.meta["val"], operand.meta["val"]
    formats = (node.kwargs.get("memory_format"), node.kwargs.get("layout"))
    plain = formats[0] in (None, torch.preserve_format) and formats[1] in (None, torch.strided)
    return plain and (result.dtype, result.device) == (value.dtype, value.device)


def _whole_slice(node: fx.Node, operand: fx.Node) -> bool:
    start, stop, step = argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)
    return start in (None, 0) and stop in (None, _END) and step == 1


def _evaluation_dropout(node: fx.Node, operand: fx.Node) -> bool:
    return argument(node, 2, "train") is False or argument(node, 1, "p") == 0.0


_TESTS: dict[object, Callable[[fx.Node, fx.Node], bool]] = {
    **dict.fromkeys(_NO_OPS, _always),
    **dict.fromkeys(ops.packets("to _to_copy type_as"), _same_type),
    aten.slice: _whole_slice,
    aten.dropout: _evaluation_dropout,
}


def _spell_shapes(graph: fx.Graph) -> bool:
    changed = False
    for node in graph.nodes:
        if packet(node) in (aten.view, aten._unsafe_view) and node.target is not aten.view.dtype:
            node.target = aten.reshape.default
            changed = True
        elif packet(node) is aten.broadcast_to:
            node.target = aten.expand.default
            changed = True
    return changed


def _drop_expands(graph: fx.Graph) -> bool:
    changed = False
    for node in list(graph.nodes):
        if packet(node) in _EXPANDS and node.users and all(_broadcasts(user, node) for user in node.users):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
            changed = True
    return changed


def _broadcasts(user: fx.Node, expanded: fx.Node) -> bool:
    """Whether a pointwise user gets the shape of `expanded` from another operand too."""
    if not ops.is_pointwise(user) or packet(user) in ops.CASTS | ops.COPIES:
        return False
    values = [value for value in user.all_input_nodes if value is not expanded and ops.is_tensor(value)]
    return any(value.meta["val"].shape == expanded.meta["val"].shape for value in values)


def _make_contiguous(graph: fx.Graph) -> bool:
    changed = False
    for node in list(graph.nodes):
        value = node.args[0] if packet(node) is aten.view_as_complex else None
        if isinstance(value, fx.Node) and packet(value) is not aten.contiguous:
            with graph.inserting_before(node):
                whole = graph.call_function(aten.contiguous.default, (value,))
            whole.meta = dict(value.meta)
            node.replace_input_with(value, whole)
            changed = True
    return changed


def _spell_copies(graph: fx.Graph) -> bool:
    changed = False
    for node in list(graph.nodes):
        if packet(node) is not aten.copy:
            continue
        target, value = node.args[0], node.args[1]
        assert isinstance(target, fx.Node) and isinstance(value, fx.Node)
        with graph.inserting_before(node):
            if value.meta["val"].shape != node.meta["val"].shape:
                value = graph.call_function(aten.expand_as.default, (value, target))
                value.meta = dict(node.meta)
            if value.meta["val"].dtype != node.meta["val"].dtype or packet(value) is aten.expand_as:
                value = graph.call_function(aten.to.dtype, (value, node.meta["val"].dtype))
                value.meta = dict(node.meta)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
        changed = True
    return changed


def _spell_sizes(graph: fx.Graph) -> bool:
    changed = False
    for node in list(graph.nodes):
        sized = _SIZED.get(packet(node))
        if sized is None:
            continue
        value, *rest = node.args
        assert isinstance(value, fx.Node)
        with graph.inserting_before(node):
            sizes = [_size(graph, value, dim) for dim in range(ops.rank(value))]
            kept = {name: option for name, option in node.kwargs.items() if name != "memory_format"}
            spelled = graph.call_function(sized, (value, sizes, *rest), kept)
        spelled.meta = dict(node.meta)
        node.replace_all_uses_with(spelled)
        graph.erase_node(node)
        changed = True
    return changed


def _size(graph: fx.Graph, value: fx.Node, dim: int) -> int | fx.Node:
    """Return a size as a number where it is fixed, else as the node that asks for it."""
    size = value.meta["val"].shape[dim]
    if isinstance(size, int):
        return size
    asked = graph.call_function(aten.sym_size.int, (value, dim))
    asked.meta["val"] = size
    return asked


def _spell_additions(graph: fx.Graph) -> bool:
    """Spell operations that add a product as an addition and a product (rule 11)."""
    found = [node for node in graph.nodes if packet(node) in _FUSED and _has_one_type(node)]
    for node in found:
        with graph.inserting_before(node):
            spelled = _FUSED[packet(node)](_Spelling(graph, node), *node.args, **node.kwargs)
        node.replace_all_uses_with(spelled)
        graph.erase_node(node)
    return bool(found)


def _has_one_type(node: fx.Node) -> bool:
    dtypes = {value.meta["val"].dtype for value in (node, *ops.operands(node)) if ops.is_tensor(value)}
    return len(dtypes) == 1 and dtypes.pop().is_floating_point


@dataclass(frozen=True)
class _Spelling:
    """What is written in place of a node, from its line."""

    graph: fx.Graph
    node: fx.Node

    def __call__(self, target: torch._ops.OpOverload, *args: Any) -> fx.Node:
        spelled = self.graph.call_function(target, args)
        values = (arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args)
        spelled.meta = {**self.node.meta, "val": target(*values)}
        return spelled

    def times(self, value: Any, by: Any) -> Any:
        """Return a product with a tensor or a number, and the value itself for 1."""
        if isinstance(by, int | float) and by == 1:
            return value
        return self(aten.mul.Tensor, value, by)

    def plus(self, one: Any, other: Any) -> fx.Node:
        """Return a sum."""
        return self(aten.add.Tensor, one, other)


def _addcmul(spell: _Spelling, x: fx.Node, a: fx.Node, b: fx.Node, *, value: Any = 1) -> fx.Node:
    return spell.plus(x, spell.times(spell.times(a, b), value))


def _addcdiv(spell: _Spelling, x: fx.Node, a: fx.Node, b: fx.Node, *, value: Any = 1) -> fx.Node:
    return spell.plus(x, spell.times(spell(aten.div.Tensor, a, b), value))


def _lerp(spell: _Spelling, x: fx.Node, y: fx.Node, weight: Any) -> fx.Node:
    is_number = not isinstance(weight, fx.Node)
    rest = 1 - weight if is_number else spell.plus(spell(aten.neg.default, weight), 1)
    return spell.plus(spell.times(x, rest), spell.times(y, weight))


_FUSED: dict[object, Callable[..., fx.Node]] = {
    aten.addcmul: _addcmul,
    aten.addcdiv: _addcdiv,
    aten.lerp: _lerp,
}


def _merge_reads(graph: fx.Graph) -> bool:
    first: dict[object, fx.Node] = {}
    changed = False
    for node in list(graph.nodes):
        if node.op == "get_attr" and first.setdefault(node.target, node) is not node:
            node.replace_all_uses_with(first[node.target])
            graph.erase_node(node)
            changed = True
    return changed


def _spell_quotients(graph: fx.Graph) -> bool:
    """Spell `ceil` and `floor` of a quotient of sizes with whole numbers (rule 10)."""
    found = [node for node in graph.nodes if node.target in (math.ceil, math.floor) and _is_quotient(node)]
    for node in found:
        over, under = node.args[0].args  # type: ignore[union-attr]
        up = node.target is math.ceil
        with graph.inserting_before(node):
            whole = _whole(graph, operator.floordiv, _whole(graph, operator.neg, over) if up else over, under)
            whole = _whole(graph, operator.neg, whole) if up else whole
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
    return bool(found)


def _is_quotient(node: fx.Node) -> bool:
    quotient = node.args[0]
    if not isinstance(quotient, fx.Node) or quotient.target is not operator.truediv:
        return False
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in quotient.args]
    return all(isinstance(value, int | torch.SymInt) for value in values)


def _whole(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
    return node


_STEPS = (
    _erase_no_ops,
    _spell_copies,
    _spell_shapes,
    _drop_expands,
    _make_contiguous,
    _spell_sizes,
    _spell_additions,
    _spell_quotients,
    _merge_reads,
)
