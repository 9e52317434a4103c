"""Print a program: one line a value, with shapes, gates and the residual stream marked."""

from torch import fx

from dispfx.ir import ops
from dispfx.ir.program import Program


def print_program(program: Program) -> str:
    """Return the graph as text, one value a line, `*` in front of the residual stream.

    Batch and length are printed as B and T where they are the traced sizes and dynamic.
    """
    stream = set(program.stream.values) if program.stream else set()
    lines = [f"{program.model_class} ({program.level})"]
    for node in program.graph.nodes:
        mark = "*" if node.name in stream else " "
        lines.append(f"{mark} {_line(node)}")
    return "\n".join(lines)


def signature(program: Program) -> int:
    """Return a number that changes when the graph or a fact changes."""
    graph = tuple(
        (node.name, node.op, str(node.target), str(node.args), str(node.kwargs))
        for node in program.graph.nodes
    )
    facts = (
        program.stream,
        program.leaves,
        program.branches,
        program.sites,
        program.refused,
        program.outline,
    )
    shapes = tuple((path, tuple(tensor.shape)) for path, tensor in program.tensors())
    gates = tuple(site.gates for site in program.sites)
    return hash((graph, facts, shapes, gates))


def _line(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"{node.name}: input{_shape(node)}"
    if node.op == "get_attr":
        return f"{node.name} = {node.target}{_shape(node)}"
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    values = [_argument(value) for value in node.args]
    values += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    return f"{node.name} = {_operation(node)}({', '.join(values)}){_shape(node)}"


def _operation(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return target
    name = str(getattr(target, "overloadpacket", None) or getattr(target, "__name__", target))
    return name.removeprefix("aten.")


def _argument(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_argument(item) for item in value) + "]"
    return str(value)


def _shape(node: fx.Node) -> str:
    if not ops.is_tensor(node):
        return ""
    sizes = []
    for dim, size in enumerate(ops.shape_of(node)):
        sizes.append({3: "B", 13: "T"}.get(size, "?") if ops.is_dynamic(node, dim) else str(size))
    return f": ({', '.join(sizes)}) {str(node.meta['val'].dtype).removeprefix('torch.')}"
