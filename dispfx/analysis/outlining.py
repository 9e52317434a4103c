"""Take a graph apart: which part computes a value, and the body of a part.

Entry points: `Placement.of` says where every value is computed, `parts_of` builds the parts.  Rules 2 to 4
of `dispfx.passes.outline_layers` are kept here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx.node import map_arg

from dispfx.ir import ops
from dispfx.ir.ops import aten, packet

PROLOGUE = -1
# Of tensors and masks alone: computed in every part that uses it.
ANYWHERE = -2


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the values of a graph are computed.

    Args:
        graph: the whole graph.
        cuts: cut i is carried to part i by the part before; part -1 is the prologue.
        place: the part of every value, or ANYWHERE.
        first: for every value the first that equals it, itself in most cases.
        order: position of every value in the graph.
    """

    graph: fx.Graph
    cuts: tuple[fx.Node, ...]
    place: Mapping[fx.Node, int]
    first: Mapping[fx.Node, fx.Node]
    order: Mapping[fx.Node, int]

    @staticmethod
    def of(graph: fx.Graph, cuts: Sequence[fx.Node]) -> "Placement":
        """Place every value; `cuts` are stream values, in order."""
        number = {cut: index for index, cut in enumerate(cuts)}
        ids = next(iter(graph.nodes))
        place: dict[fx.Node, int] = {}
        for node in graph.nodes:
            inputs = [number.get(value, place[value]) for value in node.all_input_nodes]
            sized = is_size(node) and any(value.op == "placeholder" for value in node.all_input_nodes)
            place[node] = max(inputs, default=PROLOGUE if node is ids else ANYWHERE)
            if sized:
                place[node] = max(place[node], PROLOGUE)
        order = {node: index for index, node in enumerate(graph.nodes)}
        return Placement(graph, tuple(cuts), place, _first_equals(graph, place), order)

    def carried(self, part: int) -> fx.Node:
        """Return what a part is given first: token ids, or the stream."""
        return next(iter(self.graph.nodes)) if part == PROLOGUE else self.cuts[part]

    def returned(self) -> list[fx.Node]:
        """Return what the graph returns, in order."""
        values = self.graph.output_node().args[0]
        return list(values) if isinstance(values, list | tuple) else [values]  # type: ignore[list-item,return-value]


@dataclass(frozen=True, eq=False)
class RawPart:
    """A part whose body is not compared with others yet; the fields are those of `outline.Part`."""

    graph: fx.Graph
    values: tuple[str, ...]
    tensors: tuple[str, ...]
    results: tuple[str, ...]


def parts_of(placement: Placement) -> list[RawPart]:
    """Return prologue, layers and epilogue.

    From the last to the first, since what a part takes is what an earlier one must give.
    """
    order = placement.order
    taken: set[fx.Node] = set(placement.returned())
    parts = []
    last = len(placement.cuts) - 1
    for number in range(last, PROLOGUE - 1, -1):
        own = sorted(
            (node for node in taken if placement.place[node] == number), key=lambda node: order[node]
        )
        if number == last:
            results = placement.returned()
        else:
            ahead = placement.cuts[number + 1]
            results = [ahead, *(node for node in own if node is not ahead)]
        builder = _Builder(placement, number)
        parts.append(builder.part(results))
        taken |= set(builder.values)
    return parts[::-1]


def is_size(node: fx.Node) -> bool:
    """Whether the value is a size, or computed from sizes alone."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat | int | float)


def _first_equals(graph: fx.Graph, place: Mapping[fx.Node, int]) -> dict[fx.Node, fx.Node]:
    """Find equal values of the prologue: the same operation on equal operands."""
    first: dict[fx.Node, fx.Node] = {}
    known: dict[object, fx.Node] = {}
    for node in graph.nodes:
        first[node] = node
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.op != "call_function" or place[node] != PROLOGUE or random:
            continue
        key = (
            node.target,
            *(str(map_arg(part, lambda value: first[value])) for part in (node.args, node.kwargs)),
        )
        first[node] = known.setdefault(key, node)
    return first


@dataclass
class _Builder:
    """Builds the body of one part.

    Args:
        placement: of the whole graph.
        number: of the part.
    """

    placement: Placement
    number: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    tensors: dict[fx.Node, fx.Node] = field(default_factory=dict)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def part(self, results: Sequence[fx.Node]) -> RawPart:
        """Return the part that gives `results`."""
        inside = self._inside(results)
        self._open(inside, results)
        for node in inside:
            if node not in self.copies:
                self.copies[node] = self.graph.node_copy(node, self._copy)
        self.graph.output(tuple(self._copy(node) for node in results))
        self.graph.lint()
        return RawPart(
            self.graph,
            tuple(node.name for node in self.values),
            tuple(str(node.target) for node in self.tensors),
            tuple(node.name for node in results),
        )

    def _own(self, node: fx.Node) -> bool:
        """Whether this part computes the value itself."""
        if node.op in ("placeholder", "get_attr") or node is self.placement.carried(self.number):
            return False
        return self.placement.place[node] in (self.number, ANYWHERE)

    def _inside(self, results: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the values that this part computes for `results`, in order."""
        inside: set[fx.Node] = set()
        pending = [self.placement.first[node] for node in results]
        # What changes a tensor in place is needed, whether or not its value is used.
        places = self.placement.place.items()
        pending += [node for node, number in places if number == self.number and ops.mutates(node)]
        while pending:
            node = pending.pop()
            if node in inside or not self._own(node):
                continue
            inside.add(node)
            pending += [self.placement.first[value] for value in node.all_input_nodes]
        return sorted(inside, key=lambda node: self.placement.order[node])

    def _open(self, inside: Sequence[fx.Node], results: Sequence[fx.Node]) -> None:
        """Make the inputs: values first, then tensors, each in order of its first use."""
        self._take(self.placement.carried(self.number))
        used = [value for node in inside for value in node.all_input_nodes]
        outside = [
            node
            for value in (*used, *results)
            if not self._own(node := self.placement.first[value]) and self._rebuilt(node) is None
        ]
        for node in dict.fromkeys(outside):
            if node.op != "get_attr":
                self._take(node)
        for node in dict.fromkeys(outside):
            if node.op == "get_attr":
                self.tensors[node] = self._input(f"tensor_{len(self.tensors)}", node)

    def _take(self, node: fx.Node) -> None:
        if node not in self.values:
            self.values[node] = self._input(f"value_{len(self.values)}", node)

    def _input(self, name: str, node: fx.Node) -> fx.Node:
        taken = self.graph.placeholder(name)
        taken.meta["val"] = node.meta["val"]
        self.copies[node] = taken
        return taken

    def _copy(self, node: fx.Node) -> fx.Node:
        node = self.placement.first[node]
        if node not in self.copies:
            source = self._rebuilt(node)
            assert source is not None, (
                f"{node.name} is neither given to part {self.number} nor computed in it"
            )
            self.copies[node] = self._build(node)
        return self.copies[node]

    def _rebuilt(self, node: fx.Node) -> list[int] | None:
        """Return for every size that a value is computed from the dimension of the stream that has it.

        None where the value is no such size; then it has to be given.
        """
        if not is_size(node) or node.op != "call_function" or self._own(node):
            return None
        if packet(node) is aten.sym_size:
            dims = self._dims(node)
            return dims[:1] or None
        parts = [self._rebuilt(self.placement.first[value]) for value in node.all_input_nodes]
        if any(part is None for part in parts):
            return None
        return [dim for part in parts for dim in part or ()]

    def _dims(self, node: fx.Node) -> list[int]:
        shape = self.placement.carried(self.number).meta["val"].shape
        wanted = str(node.meta["val"])
        return [dim for dim, size in enumerate(shape) if str(size) == wanted]

    def _build(self, node: fx.Node) -> fx.Node:
        """Read a size off the stream, or compute it from such."""
        if packet(node) is not aten.sym_size:
            return self.graph.node_copy(node, self._copy)
        stream = self.copies[self.placement.carried(self.number)]
        size = self.graph.call_function(aten.sym_size.int, (stream, self._dims(node)[0]))
        size.meta["val"] = node.meta["val"]
        return size
