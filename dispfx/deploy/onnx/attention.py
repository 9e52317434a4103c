"""Give every Attention what the operator can do by itself: the cache, grouped heads, tokens first.

    k = Concat(past, Transpose(Reshape(x)))
    y = Reshape(Transpose(Attention(q, Reshape(Expand(Unsqueeze(k))), …)))
        →   y, present_k, present_v = Attention(x_q, x_k, x_v, mask, past_k, past_v)

Rules:
1. Keys and values that are repeated for every head of a group are given as they are; the operator
   groups heads in the same order.
2. A concatenation of a cache that comes in with new keys is left to the operator, which returns what
   goes out.  Keys and values must both be of that form.
3. A transposition from tokens first to heads first in front of the operator, or of a RotaryEmbedding in
   front of it, is left to it too: it takes and gives (B, T, heads · size).  Query, keys, values and
   the result must all be of that form.
4. Each rule holds by itself; what does not fit stays as the exporter wrote it.
"""

from dataclasses import dataclass

import onnx_ir as ir

from dispfx.deploy.onnx.patterns import (
    HEADS_FIRST,
    heads_first,
    integer_constant,
    integers,
    like,
    made_by,
    only_user,
    size_of,
    sizes,
)


@dataclass(frozen=True)
class _Cached:
    """Keys or values that go out: the cache that came in, and what is new."""

    past: ir.Value
    new: ir.Value
    present: ir.Value


@dataclass(frozen=True)
class _TokensFirst:
    """An operand (B, heads, T, size) that was (B, T, heads, size), and the rotation after that."""

    value: ir.Value
    heads: int
    size: int
    rotation: ir.Node | None


def legalize_attention(graph: ir.Graph) -> int:
    """Rewrite every Attention of the graph in place, and return how many changed."""
    nodes = [node for node in graph if node.op_type == "Attention" and node.domain == ""]
    changed = sum(any((_group(node), _take_cache(node), _take_tokens_first(graph, node))) for node in nodes)
    # A present key was made before the operator, and is made by it now.
    graph.sort()
    return changed


def _group(node: ir.Node) -> bool:
    """Apply rule 1."""
    heads = size_of(node.inputs[0], 1, 4)
    keys, values = (_ungrouped(value, heads) for value in node.inputs[1:3])
    if keys is None or values is None or size_of(keys, 1, 4) != size_of(values, 1, 4):
        return False
    node.replace_input_with(1, keys)
    node.replace_input_with(2, values)
    return True


def _ungrouped(value: ir.Value | None, heads: int | None) -> ir.Value | None:
    """Return x (B, groups, T, size) of keys that hold every head of x several times in a row."""
    reshape = made_by(value, "Reshape")
    expand = made_by(reshape.inputs[0], "Expand") if reshape else None
    unsqueeze = made_by(expand.inputs[0], "Unsqueeze") if expand else None
    if expand is None or unsqueeze is None or integers(unsqueeze.inputs[1]) not in ((2,), (-3,)):
        return None
    x = unsqueeze.inputs[0]
    groups, repeats = size_of(x, 1, 4), size_of(expand.outputs[0], 2, 5)
    if groups is None or repeats is None or groups * repeats != heads or size_of(value, 1, 4) != heads:
        return None
    return x


def _take_cache(node: ir.Node) -> bool:
    """Apply rule 2."""
    keys, values = (_cached(value) for value in node.inputs[1:3])
    if keys is None or values is None or len(node.outputs) > 1 or len(node.inputs) > 4:
        return False
    node.resize_inputs(6)
    node.resize_outputs(3)
    for position, cache in enumerate((keys, values), start=1):
        node.replace_input_with(position, cache.new)
        node.replace_input_with(position + 3, cache.past)
        _take_name(node.outputs[position], cache.present)
    return True


def _cached(value: ir.Value | None) -> _Cached | None:
    concat = made_by(value, "Concat")
    if value is None or concat is None or len(concat.inputs) != 2:
        return None
    past, new = concat.inputs
    if past is None or new is None or concat.attributes["axis"].as_int() not in (2, -2):
        return None
    return _Cached(past, new, value) if past.is_graph_input() and value.is_graph_output() else None


def _take_name(value: ir.Value, old: ir.Value) -> None:
    """Replace all reads and returns of `old` by `value`."""
    name = old.name
    value.type, value.shape = old.type, old.shape
    ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    old.name, value.name = f"{name}_replaced", name


def _take_tokens_first(graph: ir.Graph, node: ir.Node) -> bool:
    """Apply rule 3."""
    operands = [_tokens_first(value) for value in node.inputs[:3]]
    query, keys, values = operands
    merged = _merged(node.outputs[0])
    if merged is None or query is None or keys is None or values is None or keys.heads != values.heads:
        return False
    for position, operand in enumerate((query, keys, values)):
        node.replace_input_with(position, _flat(graph, node, operand))
    node.attributes["q_num_heads"] = ir.AttrInt64("q_num_heads", query.heads)
    node.attributes["kv_num_heads"] = ir.AttrInt64("kv_num_heads", keys.heads)
    y = node.outputs[0]
    y.shape = merged.shape
    ir.convenience.replace_all_uses_with(merged, y, replace_graph_outputs=True)
    return True


def _tokens_first(value: ir.Value | None) -> _TokensFirst | None:
    rotation = made_by(value, "RotaryEmbedding")
    shape = sizes(value)
    tokens_first = heads_first(rotation.inputs[0] if rotation else value)
    if tokens_first is None or shape is None or len(shape) != 4 or shape[1] is None or shape[3] is None:
        return None
    # With its own tables for every position the operator has three inputs.
    if rotation is not None and len(rotation.inputs) != 3:
        return None
    return _TokensFirst(tokens_first, shape[1], shape[3], rotation)


def _flat(graph: ir.Graph, before: ir.Node, operand: _TokensFirst) -> ir.Value:
    """Return the operand as (B, T, heads · size), rotated as it was."""
    width = operand.heads * operand.size
    flat = _merge_heads(graph, before, operand.value, width)
    if operand.rotation is None:
        return flat
    old = operand.rotation
    attributes = [*old.attributes.values()]
    rotated = like(flat, f"{old.outputs[0].name}_flat", [*list(flat.shape or ())[:2], width])
    twin = ir.node("RotaryEmbedding", [flat, *old.inputs[1:]], outputs=[rotated])
    for attribute in attributes:
        twin.attributes[attribute.name] = attribute
    twin.attributes["num_heads"] = ir.AttrInt64("num_heads", operand.heads)
    graph.insert_before(before, twin)
    return rotated


def _merge_heads(graph: ir.Graph, before: ir.Node, value: ir.Value, width: int) -> ir.Value:
    """Return (B, T, heads · size) of a value (B, T, heads, size): what it was split from, where it was."""
    split = made_by(value, "Reshape")
    if split is not None and size_of(split.inputs[0], 2, 3) == width:
        assert split.inputs[0] is not None
        return split.inputs[0]
    shape = integer_constant(graph, f"dispfx_tokens_{width}", [0, 0, width])
    flat = like(value, f"{value.name}_flat", [*list(value.shape or ())[:2], width])
    graph.insert_before(before, ir.node("Reshape", [value, shape], outputs=[flat]))
    return flat


def _merged(y: ir.Value) -> ir.Value | None:
    """Return the value (B, T, heads · size) that the result (B, heads, T, size) becomes."""
    transpose = only_user(y, "Transpose")
    if transpose is None or tuple(transpose.attributes["perm"].as_ints()) != HEADS_FIRST:
        return None
    merge = only_user(transpose.outputs[0], "Reshape")
    heads, size = size_of(y, 1, 4), size_of(y, 3, 4)
    if merge is None or heads is None or size is None:
        return None
    merged = merge.outputs[0]
    return merged if size_of(merged, 2, 3) == heads * size else None
