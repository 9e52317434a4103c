"""Cut a program into prologue, layers and epilogue; layers of one kind share one body.

    x = embedding(ids); c = cos(arange(T))           prologue   ids → x, c
    y = x + attention(x, c, w₀);  z = y + mlp(y)     layer 0    x, c, w₀ → z
    …                                                layer 1    the same body
    logits = head(norm(z))                           epilogue

Rules:
1. A layer may end where a stream value is the only live value that depends on the stream's first value.
   It starts at an attention (or a mixer), so that an attention and the MLP after it are one layer; a piece
   without a branch, such as a norm of the stream, belongs to a neighbour.  The pass chooses the split with
   the fewest operations in different bodies.
2. What depends on token ids but not on the stream (masks, rotary angles) is computed once, in the prologue;
   values that are equal are computed once.
3. Values that depend only on tensors and masks are computed in every part that uses them.
4. Sizes are read off the value that a part is given, so that a part needs no number from outside.
5. Two layers have one body if they are the same operations on inputs of the same shapes and dtypes.
The graph itself stays as it is: `program.outline` is a fact about it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx

from dispfx.analysis.outlining import Placement, is_size, parts_of
from dispfx.ir import ops
from dispfx.ir.outline import Body, Outline, Part, body_key
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Program
from dispfx.ir.sites import ResidualStream


@dataclass
class OutlineLayers:
    """Find the parts of a program.

    Args:
        requires: the level of the program: canonical, gated or lowered.
    """

    requires: str = "gated"
    ensures: str = field(init=False)

    name = "outline-layers"

    def __post_init__(self) -> None:
        self.ensures = self.requires

    def run(self, program: Program) -> PassResult:
        """Set `program.outline`, or leave it None where the layers cannot be told apart."""
        assert program.stream is not None
        found = _best_outline(program, program.stream)
        before, program.outline = program.outline, found
        if found is None:
            return PassResult(before is not None, "no value carries all of the stream from layer to layer")
        return PassResult(True, f"{len(found.layers)} layers of {len(found.kinds)} kind(s)")


def _best_outline(program: Program, stream: ResidualStream) -> Outline | None:
    nodes = program.nodes
    values = [nodes[name] for name in stream.values if name in nodes]
    points = _crossed_alone(program.graph, values[0]) if values else []
    pieces = list(_pieces(program, stream, [point for point in points if point in set(values)]))
    if not any(piece.writes for piece in pieces):
        return None
    tail = list(_before_next_product(points[points.index(pieces[-1].end) + 1 :]))
    ways = [
        _cuts(pieces, kinds, ahead, end)
        for kinds in (frozenset({"attention"}), frozenset({"attention", "mixer"}))
        for ahead in (False, True)
        for end in (*_ends(pieces), *tail)
    ]
    outlines = [_outline(program, cuts) for cuts in dict.fromkeys(ways)]
    return min(outlines, key=lambda outline: (_operations(outline), len(outline.layers)))


def _operations(outline: Outline) -> int:
    """Return the number of values in the different bodies, which is what there is to compile."""
    bodies = {*outline.kinds, outline.epilogue.body}
    return sum(len(body.graph.nodes) for body in bodies)


def _crossed_alone(graph: fx.Graph, first: fx.Node) -> list[fx.Node]:
    """Return `first` and the later values that no edge between such values passes over (rule 1)."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    later: set[fx.Node] = set()
    reach, found = order[first], []
    for node in graph.nodes:
        if node is not first and not any(value in later for value in node.all_input_nodes):
            continue
        if node.op == "output" or is_size(node):
            continue
        later.add(node)
        if reach <= order[node] and ops.is_tensor(node):
            found.append(node)
        users = [order[user] for user in node.users if user.op != "output" and not is_size(user)]
        reach = max([reach, *users])
    return found


def _before_next_product(points: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Yield the points up to the next product: the end of a norm or a view that closes the last layer."""
    for point in points:
        if ops.contracts(point):
            return
        yield point


@dataclass(frozen=True)
class _Piece:
    """What lies between two neighbouring points of the stream.

    Args:
        start, end: the points.
        kinds: of the branches that end here; empty where the stream itself is only scaled or normed.
    """

    start: fx.Node
    end: fx.Node
    kinds: frozenset[str]

    @property
    def writes(self) -> bool:
        """Whether a branch ends here."""
        return bool(self.kinds)


def _pieces(program: Program, stream: ResidualStream, points: Sequence[fx.Node]) -> Iterator[_Piece]:
    order = {node.name: index for index, node in enumerate(program.graph.nodes)}
    # A write whose branch was refused counts as an attention: a layer may start there.
    kind_at = {order[name]: "attention" for name in stream.writes if name in order}
    kinds: dict[int, set[str]] = {}
    for leaf in program.leaves:
        if leaf.user in order:
            kinds.setdefault(order[leaf.user], set()).add(leaf.kind)
    for start, end in pairwise(points):
        inside = range(order[start.name] + 1, order[end.name] + 1)
        found = {kind for place, held in kinds.items() if place in inside for kind in held}
        if not found:
            found = {kind for place, kind in kind_at.items() if place in inside}
        yield _Piece(start, end, frozenset(found))


def _ends(pieces: Sequence[_Piece]) -> list[fx.Node]:
    """Return the ends of the last piece with a branch and of later pieces."""
    last = max(index for index, piece in enumerate(pieces) if piece.writes)
    return [piece.end for piece in pieces[last:]]


def _cuts(pieces: Sequence[_Piece], kinds: frozenset[str], ahead: bool, end: fx.Node) -> tuple[fx.Node, ...]:
    """Return the points at which layers begin, and the end of the last.

    Args:
        kinds: of branches that start a layer.
        ahead: pieces without a branch belong to the layer that follows, not to the one before.
        end: of the last layer.
    """
    starts: list[int] = []
    for index, piece in enumerate(pieces):
        written = bool(starts) and any(before.writes for before in pieces[starts[-1] : index])
        if piece.writes and (not starts or (written and piece.kinds & kinds)):
            starts.append(index)
    if ahead:
        starts = [_over_pieces_without_branch(pieces, index) for index in starts]
    return (*(pieces[index].start for index in starts), end)


def _over_pieces_without_branch(pieces: Sequence[_Piece], index: int) -> int:
    while index and not pieces[index - 1].writes:
        index -= 1
    return index


def _outline(program: Program, cuts: Sequence[fx.Node]) -> Outline:
    bodies: dict[object, Body] = {}
    parts = []
    for raw in parts_of(Placement.of(program.graph, cuts)):
        body = bodies.setdefault(body_key(raw.graph), Body(raw.graph))
        parts.append(Part(body, raw.values, raw.tensors, raw.results))
    return Outline(parts[0], tuple(parts[1:-1]), parts[-1])
