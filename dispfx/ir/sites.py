"""What can be pruned: the residual stream, its branches, and their sites.

The paper's five selections per decoder layer (arXiv 2410.11988, section 3) are sites here:

    S1  attention read     S2  attention write
    S3  MLP read           S4  MLP inner          S5  MLP write

On request a plan also chooses among the features of each key/value head's values (S6 here): rows of the value
projection, columns of the output projection, and their part of the cache.  Every head keeps equally many.

On request it also chooses among the key/value heads of each attention (S7 here).  A head is cut with the
queries that read it, its rows of the output projection's input, and its part of the cache.

With one selection for the whole stream (S1 = S2 = S3 = S5, before the norms) one site named "stream" takes
the place of all reads and writes.

All types are frozen and hold names (of graph values) and paths (of parameters), never nodes, so
they can be saved, compared and carried from one capture of a decoder to another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

BranchKind = Literal["attention", "mlp", "mixer"]
SiteKind = Literal["read", "inner", "write", "stream", "heads", "values"]
RowsKind = Literal["ids", "ends", "positions"]

# Kinds of sites whose features are gathered from, or scattered into, values of full width.
GATHERED = ("read", "write", "stream")
# The one site of the whole residual stream, which takes the place of all reads and writes.
STREAM = "stream"

UNTOUCHED = -1

_SYMBOLS = {
    ("attention", "read"): "S1",
    ("attention", "write"): "S2",
    ("mlp", "read"): "S3",
    ("mlp", "inner"): "S4",
    ("mlp", "write"): "S5",
    ("attention", "values"): "S6",
    ("attention", "heads"): "S7",
}
# Kinds of sites that are found on request, by the word that asks for them.
FURTHER_KINDS: Mapping[str, SiteKind] = {"heads": "heads", "attention-values": "values"}


@dataclass(frozen=True)
class Slice:
    """One axis of one parameter that follows a site.

    Args:
        parameter: path of the parameter in the decoder, as in its state dict.
        axis: the axis that is cut.
        labels: for each position of the axis the site's feature that it follows, or `UNTOUCHED`;
            None where position i follows feature i (the usual case).
        by_expert: whether the site has features of its own for each expert, and these matrices are stacked
            along axis 0; labels then count the features of one expert.
    """

    parameter: str
    axis: int
    labels: tuple[int, ...] | None = None
    by_expert: bool = False


@dataclass(frozen=True)
class Rows:
    """Which expert each position of dimension 0 of a gated value belongs to.

    Args:
        kind: `ids` where `value` holds an expert for each position, `ends` where it holds for each expert one
            past its last position, `positions` where position e belongs to expert e.
        value: name of that value; None for positions.
    """

    kind: RowsKind
    value: str | None = None


@dataclass(frozen=True)
class GatePoint:
    """Where a site's gate stands in the canonical graph.

    Args:
        value: name of the gated value.
        dim: its gated dimension, counted from the front.
        users: names of the nodes that take the gated value instead of the plain one.
        labels: as in `Slice`, for the positions of the gated dimension.
        rows: whose features the positions of dimension 0 have, where each expert has its own.
        statistics: whether the one user is a mean or a norm over the features, which takes its statistics
            over the kept ones alone (`dispfx.ir.kept_statistics`).
    """

    value: str
    dim: int
    users: tuple[str, ...]
    labels: tuple[int, ...] | None = None
    rows: Rows | None = None
    statistics: bool = False


@dataclass(frozen=True)
class Site:
    """A dimension of `size` features that can be pruned to a selection.

    If experts are stacked, a site may have separate features for each of them: feature `e · each + i` is
    feature i of expert e.  Every expert then keeps equally many, so that the stack stays one tensor.
    The heads of an attention's values are such experts, too, side by side along an axis and in no stack.

    Args:
        name: unique in a decoder and the same in every capture of it.
        branch: name of the branch it belongs to; "stream" for the site of the whole stream.
        branch_kind: kind of that branch.
        kind: read, inner, write, stream, heads or values.
        size: number of features, of all experts together; all are kept in the dense decoder.
        slices: the parameter axes that follow the selection.
        gates: where the mask multiplies activations.
        experts: how many experts, or heads, have features of their own here; 1 for any other site.
    """

    name: str
    branch: str
    branch_kind: BranchKind | Literal["stream"]
    kind: SiteKind
    size: int
    slices: tuple[Slice, ...]
    gates: tuple[GatePoint, ...] = field(default=(), compare=False)
    experts: int = 1

    @property
    def per_expert(self) -> int:
        """Number of features of one expert; of the site, where there are no experts."""
        return self.size // self.experts

    @property
    def per_axis(self) -> int:
        """Number of features that an axis follows: those of one expert of a stack, or all of them."""
        return self.per_expert if self.is_stacked else self.size

    @property
    def is_stacked(self) -> bool:
        """Whether its experts are matrices of a stack, which one axis of it keeps apart."""
        return self.experts > 1 and any(cut.by_expert for cut in self.slices)

    @property
    def is_gathered(self) -> bool:
        """Whether values of full width are gathered or scattered, so that a folder holds the selection."""
        return self.kind in GATHERED

    @property
    def symbol(self) -> str:
        """The paper's name of this selection, S1 … S5; S6 for values, S7 for heads, "" for others."""
        return _SYMBOLS.get((self.branch_kind, self.kind), "")


@dataclass(frozen=True)
class Branch:
    """One attention, MLP or other residual branch; its tuples name its sites."""

    name: str
    kind: BranchKind
    reads: tuple[str, ...]
    inner: tuple[str, ...]
    writes: tuple[str, ...]
    heads: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of all sites, reads first."""
        return self.reads + self.inner + self.heads + self.values + self.writes


@dataclass(frozen=True)
class ResidualStream:
    """The full-width value that every branch reads and writes.

    Args:
        width: number of features.
        values: names of the graph values that are the stream, in order, the embedding first.
        writes: names of the additions that write into it, in order.
    """

    width: int
    values: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """A branch or site that is left dense, and why.

    Args:
        name: the branch or site.
        reason: what was required and what was found.
        parameter: path of a parameter concerned, where there is one.
        source: the line of the user's model that it comes from, where known.
    """

    name: str
    reason: str
    parameter: str | None = None
    source: str | None = None
