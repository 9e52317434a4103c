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
        total: elements of all weights of products between the embedding and the last write.
        ungated: paths of the weights that no site cuts.
    """

    gated: int
    total: int
    ungated: tuple[str, ...]

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
    ungated = tuple(sorted(path for path in sizes if path not in cut))
    return Coverage(sum(size for path, size in sizes.items() if path in cut), sum(sizes.values()), ungated)
