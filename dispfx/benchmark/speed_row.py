"""One line of a speed table: a step of the dense and of the pruned decoder, side by side."""

from dataclasses import dataclass, field

from dispfx.ir.cached_inputs import CachedShape


@dataclass(frozen=True)
class Side:
    """One decoder's step.

    Args:
        seconds: median over rounds.
        least_seconds: the fastest round.
        peak_bytes: most memory that tensors took; None on a CPU.
        start_seconds: from the graph to the end of the first step, compiling included.
        kernels: whose products were the faster ones: `library`, or `generated` by the compiler.
    """

    seconds: float
    least_seconds: float
    peak_bytes: int | None
    start_seconds: float
    kernels: str = "library"


@dataclass(frozen=True)
class SpeedRow:
    """A step at one shape, dense against pruned.

    Args:
        name: of the decoder, or of what is special about the row.
        shape: batch, new tokens and cached tokens; one new token is a decode step.
        mode: eager or compiled.
        dense, pruned: what was measured; None where it failed.
        bound: the largest possible speed-up (`dispfx.benchmark.bound`).
        unpruned: share of the pruned step's cost that pruning cannot reach, by part.
        note: why there is no figure.
    """

    name: str
    shape: CachedShape
    mode: str
    dense: Side | None
    pruned: Side | None
    bound: float
    unpruned: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def kind(self) -> str:
        """Prefill or decode."""
        return "decode" if self.shape.tokens == 1 else "prefill"

    @property
    def speedup(self) -> float | None:
        """How many times faster the pruned step is."""
        return self.dense.seconds / self.pruned.seconds if self.dense and self.pruned else None

    @property
    def share_of_bound(self) -> float | None:
        """Speed-up over bound."""
        return self.speedup / self.bound if self.speedup is not None else None

    @property
    def is_slower(self) -> bool:
        """Whether pruning made the step slower."""
        return self.speedup is not None and self.speedup < 1.0

    def tokens_per_second(self, side: Side) -> float:
        """New tokens of all sequences a second."""
        return self.shape.batch * self.shape.tokens / side.seconds
