"""How much of a decoder's layers the sites reach."""

from dataclasses import dataclass

from dispfx.ir import ops
from dispfx.ir.flow import Flow
from dispfx.ir.program import Program


@dataclass(frozen=True)
class Coverage:
    """Weights of the layers.

    Args:
        gated: elements of weights that some site cuts.
        total: elements of all weights that a site could cut: those of an MLP, and those of any branch that
            have an axis as long as the stream is wide.
        ungated: paths of those that no site cuts.
        beside: paths of the others: weights between the heads of an attention or a mixer, which are not
            pruned.
    """

    gated: int
    total: int
    ungated: tuple[str, ...]
    beside: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Share of the weights that is gated; 1 where there is none."""
        return self.gated / self.total if self.total else 1.0


def coverage(program: Program) -> Coverage:
    """Return which weights between the embedding and the last residual write are cut by a site.

    A weight counts if it has two dimensions or more and is an operand of a product that depends on the
    residual stream and that the last write depends on.
    """
    assert program.stream is not None
    nodes = program.nodes
    flow = Flow.of(program.graph)
    first = nodes[program.stream.values[0]]
    inside, _ = flow.cone(nodes[program.stream.writes[-1]], stop=lambda node: node is first)
    read = {path for node in inside if ops.is_product(node) for path in ops.tensors_read(node)}
    sizes = {
        path: tensor.numel()
        for path, tensor in program.parameters.items()
        if tensor.dim() >= 2 and path in read
    }
    cut = {piece.parameter for site in program.sites for piece in site.slices}
    left = sorted(path for path in sizes if path not in cut)
    beside = tuple(path for path in left if _is_beside(program, path))
    ungated = tuple(path for path in left if path not in beside)
    gated = sum(size for path, size in sizes.items() if path in cut)
    return Coverage(gated, gated + sum(sizes[path] for path in ungated), ungated, beside)


def _is_beside(program: Program, path: str) -> bool:
    """Whether a weight has no axis on the stream or inside an MLP."""
    assert program.stream is not None
    nodes = program.nodes
    in_mlp = any(
        path in ops.tensors_read(nodes[name])
        for leaf in program.leaves
        if leaf.kind == "mlp"
        for name in leaf.nodes
    )
    return not in_mlp and program.stream.width not in program.shapes[path]
