"""How data flows from token ids to logits: order, dependence, products on the way, choke points."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from dispfx.ir import ops


@dataclass(frozen=True, eq=False)
class Flow:
    """Facts about every node of one graph, computed once in its order.

    Args:
        order: position of each node.
        dependent: nodes whose value depends on the token ids.  Booleans of ids (padding, a mask) do not
            count, because they carry no features; comparisons of activations do.
    """

    order: dict[fx.Node, int]
    dependent: frozenset[fx.Node]

    @staticmethod
    def of(graph: fx.Graph) -> "Flow":
        """Return the flow from the first input, the token ids; other inputs count as constants."""
        order = {node: index for index, node in enumerate(graph.nodes)}
        ids = next(node for node in graph.nodes if node.op == "placeholder")
        dependent = {ids}
        # Activations, and whole numbers that are computed from them.
        featured: set[fx.Node] = set()
        for node in graph.nodes:
            inputs = [value for value in ops.operands(node) if value in dependent]
            of_features = any(value in featured for value in inputs)
            if inputs and (of_features or not ops.is_boolean(node)):
                dependent.add(node)
                if of_features or ops.carries_features(node):
                    featured.add(node)
        return Flow(order, frozenset(dependent))

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands that depend on the token ids."""
        return [value for value in ops.operands(node) if value in self.dependent]

    def root(self, node: fx.Node) -> fx.Node:
        """Strip casts, views, and scalings or additions by operands that are the same for all ids."""
        return self.root_path(node)[-1]

    def root_path(self, node: fx.Node) -> list[fx.Node]:
        """Return `node` and every value on the way down to its root."""
        path = [node]
        while (below := self._below(path[-1])) is not None:
            path.append(below)
        return path

    def _below(self, node: fx.Node) -> fx.Node | None:
        transparent = ops.CASTS | ops.COPIES | ops.VIEWS
        if ops.packet(node) in transparent:
            first = node.args[0]
            return first if isinstance(first, fx.Node) and first in self.dependent else None
        if ops.packet(node) not in (ops.aten.add, ops.aten.mul, ops.aten.div, ops.aten.sub):
            return None
        inputs = [value for value in node.all_input_nodes if value in self.dependent]
        return inputs[0] if len(inputs) == 1 and node.args.count(inputs[0]) == 1 else None

    def feeds_through_product(self, source: fx.Node, target: fx.Node) -> bool:
        """Whether some path leads from `source` to `target` through at least one product.

        Only nodes between the two in the graph's order are visited, so a test inside a layer costs no more
        than the layer.
        """
        floor = self.order[source]
        seen: set[tuple[fx.Node, bool]] = set()
        pending = [(target, False)]
        while pending:
            node, crossed = pending.pop()
            if node is source:
                if crossed:
                    return True
                continue
            if (node, crossed) in seen or self.order[node] < floor:
                continue
            seen.add((node, crossed))
            crossed = crossed or ops.contracts(node)
            pending += [(value, crossed) for value in self.inputs(node)]
        return False

    def feeds(self, source: fx.Node, target: fx.Node) -> bool:
        """Whether some path leads from `source` to `target`."""
        _, met = self.cone(target, lambda node: node is source or self.order[node] < self.order[source])
        return source in met

    def cone(self, top: fx.Node, stop: Callable[[fx.Node], bool]) -> tuple[set[fx.Node], set[fx.Node]]:
        """Return the nodes that `top` is computed from, and the stops reached on the way."""
        inside: set[fx.Node] = set()
        met: set[fx.Node] = set()
        pending = [top]
        while pending:
            node = pending.pop()
            if stop(node):
                met.add(node)
            elif node not in inside:
                inside.add(node)
                pending += self.inputs(node)
        return inside, met

    def choke_points(self, graph: fx.Graph) -> set[fx.Node]:
        """Return the nodes that every path from token ids to logits crosses.

        In the graph's order no edge passes over such a node, so one sweep finds them.  Other outputs of the
        graph, such as a cache, are not on a path.
        """
        output, logits = graph.output_node(), ops.logits_of(graph)
        on_path = self._between(graph)
        points: set[fx.Node] = set()
        reach = 0
        for node in graph.nodes:
            if node not in on_path:
                continue
            if reach <= self.order[node]:
                points.add(node)
            users = [
                self.order[user]
                for user in node.users
                if user in on_path and (user is not output or node is logits)
            ]
            reach = max(reach, *users) if users else reach
        return points

    def _between(self, graph: fx.Graph) -> set[fx.Node]:
        logits = ops.logits_of(graph)
        leads_out: set[fx.Node] = {graph.output_node(), logits}
        for node in reversed(list(graph.nodes)):
            if node in self.dependent and any(
                user.op != "output" and user in leads_out and node in ops.operands(user)
                for user in node.users
            ):
                leads_out.add(node)
        return leads_out
