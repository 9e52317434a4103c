"""Find the residual stream: the full-width value that branches read and add to.

    h = add(x, f(x))    # f holds a product and x is below f: a residual write

Rules (a decoder is known by its dataflow, never by its class):
1. `add(a, b)` is a candidate if some base of `a` is an ancestor of `b` through at least one product.
   The bases of `a` are its root (casts, views, scalings by constants stripped), and where that is a
   candidate itself, the bases of what it adds to: `(x + attention) + mlp` counts with base `x`.
2. The last write is the last candidate that every path from token ids to logits crosses.
3. From there the stream is followed down: a root that is a candidate is the next write; a root that
   leads, without a product on the way, to one candidate only is a norm on the stream (post-norm);
   a root with no candidate below it is the embedding, and the stream is complete.
4. Anything else breaks the chain, and the decoder is refused: several streams, streams that mix
   across layers, and reversible layers end here.
5. Features are the last dimension of the stream; one that holds (batch, features, tokens) is refused.
"""

from dataclasses import dataclass

from torch import fx

from dispfx.analysis.flow import Flow
from dispfx.errors import UnsupportedGraphError
from dispfx.ir import ops
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Program
from dispfx.ir.sites import ResidualStream


@dataclass(frozen=True)
class FindResidualStream:
    """Find the stream's width, its values and the additions that write into it."""

    name = "find-residual-stream"
    requires = "canonical"
    ensures = "canonical"

    def run(self, program: Program) -> PassResult:
        """Set `program.stream`.

        Raises:
            UnsupportedGraphError: if there is no stream, or its chain breaks before the embedding.
        """
        flow = Flow.of(program.graph)
        bases = residual_writes(program.graph, flow)
        if not bases:
            raise UnsupportedGraphError(
                "a decoder with residual branches is required; no addition in this graph is one",
                where=program.model_class,
                hint="dispfx prunes decoders whose layers add to a residual stream",
            )
        values, writes = _follow_down(_last_write(program, flow, bases), bases, flow)
        _require_features_last(values)
        width = ops.shape_of(values[0])[-1]
        _require_one_width(values, width)
        stream = ResidualStream(width, tuple(n.name for n in values), tuple(n.name for n in writes))
        changed = stream != program.stream
        program.stream = stream
        return PassResult(changed, f"width {width}, {len(writes)} writes")


def residual_writes(graph: fx.Graph, flow: Flow) -> dict[fx.Node, fx.Node]:
    """Return every candidate (rule 1) and the operand that it adds to."""
    bases: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if ops.packet(node) is not ops.aten.add or len(flow.inputs(node)) != 2:
            continue
        a, b = node.args[0], node.args[1]
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or ops.shape_of(a) != ops.shape_of(b):
            continue
        if _is_base(a, b, bases, flow):
            bases[node] = a
        elif _is_base(b, a, bases, flow):
            bases[node] = b
    return bases


def _is_base(a: fx.Node, b: fx.Node, bases: dict[fx.Node, fx.Node], flow: Flow) -> bool:
    """Whether `a`, or what `a` adds to within one layer, is an ancestor of `b` through a product."""
    root = flow.root(a)
    if flow.feeds_through_product(root, b):
        return True
    if root in bases and not flow.feeds(root, b):
        return _is_base(bases[root], b, bases, flow)
    return False


def _last_write(program: Program, flow: Flow, bases: dict[fx.Node, fx.Node]) -> fx.Node:
    points = flow.choke_points(program.graph)
    crossed = [node for node in bases if node in points]
    if not crossed:
        raise UnsupportedGraphError(
            "no residual addition is crossed by every path from token ids to logits",
            where=ops.source_line(next(reversed(bases))),
            hint="decoders with several streams cannot be pruned",
        )
    return max(crossed, key=lambda node: flow.order[node])


def _follow_down(
    top: fx.Node, bases: dict[fx.Node, fx.Node], flow: Flow
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the stream's values and writes from the embedding up (rule 3)."""
    values, writes = [top], [top]
    while True:
        path = flow.root_path(bases[writes[-1]])
        root = path[-1]
        if root in bases:
            values += path
            writes.append(root)
            continue
        below = _candidates_below(root, bases, flow)
        if not below:
            values += path
            break
        if len(below) > 1 or None in below:
            raise _broken_chain(root)
        values += path
        write = below.pop()
        assert write is not None
        values.append(write)
        writes.append(write)
    return list(dict.fromkeys(reversed(values))), list(reversed(writes))


def _candidates_below(root: fx.Node, bases: dict[fx.Node, fx.Node], flow: Flow) -> set[fx.Node | None]:
    """Return the candidates that lead to `root` without a product between; None where one is hidden.

    An empty set means that `root` is computed from the token ids without any residual write.
    """
    inside, met = flow.cone(root, stop=lambda node: node in bases)
    if met and any(ops.is_product(node) for node in inside):
        return {None}
    return set(met)


def _broken_chain(root: fx.Node) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        "the residual stream must lead down to the embedding; here it is computed from several streams",
        where=ops.source_line(root) or root.name,
        hint="streams that mix or cross between layers cannot be pruned",
    )


def _require_features_last(values: list[fx.Node]) -> None:
    for node in values:
        if ops.is_dynamic(node, ops.rank(node) - 1):
            raise UnsupportedGraphError(
                "the last dimension of the residual stream must be its features; here it is one whose size "
                "changes between runs, as the number of tokens does",
                where=ops.source_line(node) or node.name,
                hint="let layers add to values of shape (batch, tokens, features)",
            )


def _require_one_width(values: list[fx.Node], width: int) -> None:
    for node in values:
        if ops.shape_of(node)[-1] != width:
            raise UnsupportedGraphError(
                f"the residual stream must keep one width; it is {width} wide at its start and "
                f"{ops.shape_of(node)[-1]} wide here",
                where=ops.source_line(node) or node.name,
            )
