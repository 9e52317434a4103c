"""What the compiler knows about operations, by the role they play and not by model.

Every table holds `torch.ops` packets; `role` questions take a node.  An operation that no table names
is opaque: the analysis stops there and says so.
"""

import operator
import os
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from dispfx.ir.gate import GATE

aten = torch.ops.aten


# The thousandth prime is 7,919, and no traced size is near it.
_FIRST_STAND_IN = 1000


def packets(names: str) -> frozenset[object]:
    """Return the named aten operations, those that this torch does not have left out."""
    return frozenset(getattr(aten, name) for name in names.split() if hasattr(aten, name))


CASTS = packets("to _to_copy type_as")
COPIES = packets("clone contiguous alias detach dropout lift_fresh_copy")
VIEWS = packets("view reshape _unsafe_view flatten unflatten unsqueeze squeeze")
MULTIPLE = packets("split split_with_sizes chunk unbind unsafe_chunk unsafe_split")
SHAPE_OPS = VIEWS | MULTIPLE | packets(
    "transpose permute t expand slice select cat stack movedim narrow swapaxes numpy_T mT"
)  # fmt: skip
PRODUCTS = packets(
    "linear addmm mm bmm baddbmm matmul einsum tensordot mv addmv dot vdot inner addbmm chain_matmul "
    "linalg_multi_dot linalg_vecdot bilinear cdist conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d convolution"
)
# Products of runs of rows with one matrix of a stack each.  Known by name: a library may bring its own.
GROUPED_PRODUCTS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
# An operation of another namespace is a library's own.
_OWN_NAMESPACES = ("aten", "prims", "dispfx", "_c10d_functional", "higher_order")
CONVOLUTIONS = packets("conv1d convolution")
ATTENTION = packets("scaled_dot_product_attention")
SOFTMAX = packets("softmax _softmax _safe_softmax")
EXPONENTIALS = packets("exp exp2")
MIXERS = packets(
    "conv1d convolution conv2d cumsum cumprod pad constant_pad_nd roll flip fft_fft logcumsumexp"
)
NORMS = packets("layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm")
AVERAGES = packets("mean sum")
# What takes its statistics over a number of features that it knows.
STATISTICS = packets("mean layer_norm rms_norm")
REDUCTIONS = AVERAGES | packets(
    "amax amin max min var var_mean std norm linalg_vector_norm argmax prod all any logsumexp"
)  # fmt: skip
ORDERED = SOFTMAX | packets("topk sort argsort cumsum cumprod log_softmax")
GATHERS = packets("index index_select")
METADATA_ONLY = packets(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty "
    "sym_size sym_numel sym_stride"
)  # fmt: skip
FACTORIES = packets("zeros ones full empty")
# Pointwise by definition, though torch does not tag them so.
UNTAGGED_POINTWISE = packets(
    "hardswish hardsigmoid hardtanh leaky_relu log_sigmoid mish multiply masked_fill __and__ __or__ "
    "logaddexp where"
)  # fmt: skip


def is_filled(node: fx.Node) -> bool:
    """Whether the value is a tensor whose elements are all alike, read from nothing."""
    return is_tensor(node) and packet(node) in METADATA_ONLY | FACTORIES


def packet(node: fx.Node) -> object:
    """Return the operation without its overload, or the Python function, or None."""
    if node.op != "call_function":
        return None
    return getattr(node.target, "overloadpacket", node.target)


def operation(node: fx.Node) -> str:
    """Return the name of a node's operation; where it takes one of several results, of what gave them."""
    many = node.args[0] if node.target is operator.getitem else node
    return str(packet(many if isinstance(many, fx.Node) else node))


def is_pointwise(node: fx.Node) -> bool:
    """Whether position i of the result depends on position i of each operand only."""
    if packet(node) in CASTS | COPIES | UNTAGGED_POINTWISE:
        return is_tensor(node)  # `where` of a condition alone gives positions
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.pointwise in tags


def is_product(node: fx.Node) -> bool:
    """Whether the node contracts a dimension of two operands, or may do so where nothing is known of it."""
    if packet(node) in PRODUCTS:
        return not is_depthwise(node)
    return is_grouped(node) or _is_of_a_library(node)


def _is_of_a_library(node: fx.Node) -> bool:
    """Whether a custom operation takes a matrix of parameters and an activation."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace in _OWN_NAMESPACES:
        return False
    values = operands(node)
    read = [value for value in values if is_parameter(_unviewed(value))]
    return any(rank(value) > 1 for value in read) and len(read) < len(values)


def is_grouped(node: fx.Node) -> bool:
    """Whether the node multiplies runs of rows (S, K) with one matrix each of a stack (E, K, N)."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() in GROUPED_PRODUCTS


def contracts(node: fx.Node) -> bool:
    """Whether the node is a product, or an attention, which holds two."""
    return is_product(node) or packet(node) in ATTENTION


def groups_of(node: fx.Node) -> int:
    """Return the number of channel groups of a convolution."""
    groups = argument(node, 8 if packet(node) is aten.convolution else 6, "groups", 1)
    assert isinstance(groups, int)
    return groups


def is_depthwise(node: fx.Node) -> bool:
    """Whether the node is a convolution that filters every channel by itself."""
    if packet(node) not in CONVOLUTIONS or not isinstance(node.args[0], fx.Node):
        return False
    channels = shape_of(node.args[0])[1]
    return groups_of(node) == channels == shape_of(node)[1]


def mutates(node: fx.Node) -> bool:
    """Whether the node changes one of its operands."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def is_gate(node: fx.Node) -> bool:
    """Whether the node is a gate."""
    return node.target is GATE


def is_tensor(node: fx.Node) -> bool:
    """Whether the value of the node is one tensor."""
    return isinstance(node.meta.get("val"), Tensor)


def is_boolean(node: fx.Node) -> bool:
    """Whether the value of the node is a tensor of truth values."""
    return is_tensor(node) and node.meta["val"].dtype == torch.bool


def carries_features(node: fx.Node) -> bool:
    """Whether the value of the node is a tensor of real numbers or of truth values, not of ids."""
    return is_tensor(node) and (node.meta["val"].dtype.is_floating_point or is_boolean(node))


def size_hint(size: int | torch.SymInt) -> int:
    """Return a dimension's size, or the traced size where it is dynamic.

    A size that depends on data, as the number of tokens of an expert does, was not traced with a number.  A
    large prime stands in for each, so that views are grouped by it as by any other size.
    """
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if hint is not None else _stand_in(size)


def _stand_in(size: torch.SymInt) -> int:
    environment: Any = size.node.shape_env
    expression: Any = size.node.expr
    traced = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
    numbers = {
        symbol: traced[symbol]
        if symbol in traced
        else sympy.prime(_FIRST_STAND_IN + int(str(symbol).lstrip("u")))
        for symbol in expression.free_symbols
    }
    return int(expression.subs(numbers))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the traced shape of a tensor value."""
    return tuple(size_hint(size) for size in node.meta["val"].shape)


def is_dynamic(node: fx.Node, dim: int) -> bool:
    """Whether a dimension's size may change between runs."""
    return not isinstance(node.meta["val"].shape[dim], int)


def rank(node: fx.Node) -> int:
    """Return the number of dimensions of a tensor value."""
    return node.meta["val"].dim()


def argument(node: fx.Node, index: int, name: str, default: object = None) -> object:
    """Return an argument by position or keyword."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def operand(node: fx.Node, index: int) -> fx.Node:
    """Return an argument of an operation that is a value."""
    value = node.args[index]
    assert isinstance(value, fx.Node)
    return value


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the tensor values the node computes with.

    Those that it only asks for a shape, or for where a run of rows ends, are left out.
    """
    if packet(node) in METADATA_ONLY:
        return []
    inputs = [value for value in node.all_input_nodes if not _is_symbolic(value)]
    if is_grouped(node):
        return inputs[:2]
    return inputs[:1] if packet(node) is aten.type_as else inputs


def _is_symbolic(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def logits_of(graph: fx.Graph) -> fx.Node:
    """Return the value of the logits: what the graph returns, or the first of several."""
    returned = graph.output_node().args[0]
    first = returned[0] if isinstance(returned, list | tuple) else returned
    assert isinstance(first, fx.Node)
    return first


def consumers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a value; where a user returns several tensors, each of them instead."""
    for user in node.users:
        if isinstance(user.meta.get("val"), list | tuple):
            yield from (item for item in user.users if item.target is operator.getitem)
        else:
            yield user


def held(node: fx.Node) -> Tensor | None:
    """Return the tensor that a `get_attr` node reads, where its graph belongs to a module."""
    found: object = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, Tensor) else None


def is_parameter(node: fx.Node) -> bool:
    """Whether the node reads a parameter; a buffer is cut where it must be, and is no weight."""
    return node.op == "get_attr" and isinstance(held(node), nn.Parameter)


def weight_of(node: fx.Node) -> str | None:
    """Return the path of the parameter or buffer that a value is a view or a gather of, or None."""
    node = _unviewed(node)
    return str(node.target) if node.op == "get_attr" else None


def _unviewed(node: fx.Node) -> fx.Node:
    """Return what a value is a view or a gather of."""
    through = CASTS | COPIES | SHAPE_OPS | GATHERS
    while packet(node) in through and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def weights_of(node: fx.Node) -> list[str]:
    """Return the paths of what a weight is computed from, as a scaled or rounded one is; [] of an activation.

    Only a value of fixed sizes is looked at, since activations have a dimension of tokens.  Buffers are left
    out where there are parameters too.
    """
    path = weight_of(node)
    if path is not None:
        return [path]
    if not is_tensor(node) or any(is_dynamic(node, dim) for dim in range(rank(node))):
        return []
    found = dict.fromkeys([node])
    pending = [node]
    while pending:
        inputs = [value for value in operands(pending.pop()) if value not in found]
        if any(value.op == "placeholder" for value in inputs):
            return []
        found.update(dict.fromkeys(inputs))
        pending += inputs
    read = [value for value in found if value.op == "get_attr"]
    return [str(value.target) for value in [*filter(is_parameter, read)] or read]


def tensors_read(node: fx.Node) -> list[str]:
    """Return the paths of the parameters and buffers that a node's operands are computed from alone."""
    return [path for value in operands(node) for path in weights_of(value)]


def activations(node: fx.Node, dependent: frozenset[fx.Node]) -> list[fx.Node]:
    """Return the operands that depend on token ids and are no weight, gathered or not."""
    return [value for value in operands(node) if value in dependent and weight_of(value) is None]


def source_line(node: fx.Node) -> str | None:
    """Return the line of the user's model that the node comes from, as `file:line`; not torch's own."""
    trace = node.meta.get("stack_trace")
    lines = [line.strip() for line in (trace or "").splitlines() if line.strip().startswith("File ")]
    own = [line for line in lines if f"{os.sep}torch{os.sep}" not in line]
    if not own:
        return None
    parts = own[-1].split(",")
    return f"{parts[0].removeprefix('File ').strip(chr(34))}:{parts[1].removeprefix(' line ')}"
