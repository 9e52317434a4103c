"""Find what writes into the residual stream: attention, MLP and other branches.

    h = add(x, add(attention(x), mlp(x)))     →   leaves: attention, mlp, both reading x

Rules:
1. The written operand of each residual addition is computed from the stream; the nodes between are its
   cone.  Some cones also read earlier stream values, such as the embedding in addition to the layer's input:
   each product selects from its own operand, so this needs no special case.
2. The operand is split at additions whose two operands both hold a product.  Where it mixes the branch
   with the stream it reads, as `α · (branch - x)` does, the branch alone is the leaf.
3. A leaf is attention if it holds scaled dot-product attention, or a product of two activations with
   a softmax after one of them, which may be written as `e / e.sum()` of `exp`; it is a mixer if anything else
   in it mixes tokens: a convolution, a scan, a product of two activations that sums over tokens; otherwise it
   is an MLP.
4. Leaves of one kind under one addition, such as routed and shared experts, are one leaf.
5. A branch is named after the module that holds its weights, with its kind where that is not unique.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from dispfx.analysis.flow import Flow
from dispfx.analysis.token_mixing import behind_softmax, mixes_tokens
from dispfx.ir import ops
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Leaf, Program
from dispfx.ir.sites import Refusal, ResidualStream


@dataclass(frozen=True)
class _Found:
    """A leaf by its nodes."""

    top: fx.Node
    user: fx.Node
    nodes: frozenset[fx.Node]
    entry: fx.Node
    kind: str


@dataclass(frozen=True)
class FindBranches:
    """Find the leaves that write into the stream, and name them."""

    name = "find-branches"
    requires = "canonical"
    ensures = "canonical"

    def run(self, program: Program) -> PassResult:
        """Set `program.leaves`; add a refusal for each write that is not a branch."""
        assert program.stream is not None
        flow = Flow.of(program.graph)
        found: list[_Found] = []
        refused: list[Refusal] = []
        for write, operand in _written(program, program.stream):
            leaves = _leaves(write, operand, program.stream, flow)
            if isinstance(leaves, Refusal):
                refused.append(leaves)
            else:
                found += leaves
        leaves = tuple(_named(found))
        before = (program.leaves, program.refused)
        program.leaves = leaves
        program.refused = tuple(dict.fromkeys((*program.refused, *refused)))
        return PassResult(
            before != (program.leaves, program.refused), f"{len(leaves)} branches, {len(refused)} refused"
        )


def _written(program: Program, stream: ResidualStream) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each residual addition and the operand that is not the stream."""
    nodes = program.nodes
    values = set(stream.values)
    for name in stream.writes:
        write = nodes[name]
        a, b = write.args[0], write.args[1]
        assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
        yield (write, b) if a.name in values else (write, a)


def _leaves(write: fx.Node, operand: fx.Node, stream: ResidualStream, flow: Flow) -> list[_Found] | Refusal:
    values = set(stream.values)
    nodes, entries = flow.cone(operand, stop=lambda node: node.name in values)
    holding = _holding_products(nodes, flow)
    if operand not in holding:
        reason = "a branch without a matrix product"
        return Refusal(_module_path(nodes) or operand.name, reason, source=ops.source_line(operand))
    entry = max(entries, key=lambda node: flow.order[node])
    leaves = []
    for top, user in _split(operand, write, holding, flow, entry):
        inside, _ = flow.cone(top, stop=lambda node: node.name in values)
        leaves.append(_Found(top, user, frozenset(inside), entry, _kind(inside, flow)))
    return _merged(leaves, operand, write, nodes)


def _holding_products(nodes: set[fx.Node], flow: Flow) -> set[fx.Node]:
    """Return the nodes that have a product at or below them within the cone."""
    holding: set[fx.Node] = set()
    for node in sorted(nodes, key=lambda item: flow.order[item]):
        if ops.is_product(node) or any(value in holding for value in flow.inputs(node)):
            holding.add(node)
    return holding


def _split(
    top: fx.Node, user: fx.Node, holding: set[fx.Node], flow: Flow, entry: fx.Node
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the parts of a written operand and who takes each (rule 2); `entry` is the stream value read."""
    root = flow.root(top)
    parts = [value for value in flow.inputs(root) if value in holding]
    sums = ops.packet(root) in (ops.aten.add, ops.aten.sub) and len(flow.inputs(root)) == 2
    if sums and len(parts) == 1 and set(flow.inputs(root)) - set(parts) == {entry}:
        yield from _split(parts[0], root, holding, flow, entry)
    elif ops.packet(root) is ops.aten.add and len(parts) == 2 and len(root.users) == 1:
        for part in parts:
            yield from _split(part, root, holding, flow, entry)
    else:
        yield top, user


def _merged(leaves: list[_Found], operand: fx.Node, write: fx.Node, nodes: set[fx.Node]) -> list[_Found]:
    """Make one leaf of several of one kind (rule 4)."""
    kinds = [leaf.kind for leaf in leaves]
    if len(leaves) > 1 and len(set(kinds)) == 1:
        return [_Found(operand, write, frozenset(nodes), leaves[0].entry, kinds[0])]
    return leaves


def _kind(nodes: set[fx.Node], flow: Flow) -> str:
    packets = {ops.packet(node) for node in nodes}
    if packets & ops.ATTENTION:
        return "attention"
    between_activations = [
        node for node in nodes if ops.is_product(node) and len(ops.activations(node, flow.dependent)) > 1
    ]
    if any(behind_softmax(node, flow, nodes) for node in between_activations):
        return "attention"
    return "mixer" if any(mixes_tokens(node, flow) for node in nodes) else "mlp"


def _named(leaves: list[_Found]) -> Iterator[Leaf]:
    prefixes, earlier_nodes = [], set()
    for leaf in leaves:
        # Weights that a branch shares with an earlier one, such as a router's, do not name it.
        prefixes.append(_module_path(leaf.nodes - earlier_nodes) or leaf.top.name)
        earlier_nodes |= leaf.nodes
    names = [
        f"{prefix}.{leaf.kind}" if prefixes.count(prefix) > 1 else prefix
        for prefix, leaf in zip(prefixes, leaves, strict=True)
    ]
    for index, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        earlier = names[:index].count(name)
        yield Leaf(
            branch=f"{name}.{earlier + 1}" if names.count(name) > 1 else name,
            kind=leaf.kind,
            top=leaf.top.name,
            user=leaf.user.name,
            nodes=frozenset(node.name for node in leaf.nodes),
            entry=leaf.entry.name,
        )


def _module_path(nodes: Iterable[fx.Node]) -> str:
    """Return the path of the module that holds the weights of the products, or ""."""
    weights = [path for node in nodes if ops.is_product(node) for path in ops.tensors_read(node)]
    paths = [path.split(".")[:-1] for path in sorted(set(weights))]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
