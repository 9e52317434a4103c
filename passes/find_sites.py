"""Find the dimensions of every branch that can be pruned, and everything cut with them.

Rules (each closure follows `dispfx.analysis.label_map`):
1. Read: the products of a branch that sum over the stream's features, because no other product feeds
   them or because their input's features lead to the stream, share one selection (S1, S3).  The gate
   stands on the edges from value to product, so a norm is computed at full width and then selected from.
2. Inner: the contracted features of every other product of a branch, where their closure is complete
   (S4 in an MLP; latents in an attention).  If a product sums over one feature twice, as over a latent
   concatenated with its norm, the two positions are one feature.  Heads are not pruned: an attention's output
   projection contracts over heads, and gets no inner site.
   If experts are stacked and the graph shows the expert of each value, every expert has its own features
   (`dispfx.analysis.stacked_experts`); otherwise they share one selection.
3. Write: the features of the value that is written (S2, S5).
4. A weight that several products use, or that two branches read, belongs to one site.
5. What a branch writes must be zero where its weights are (`dispfx.analysis.zero_values`): a constant that it
   adds cannot be cut with them.
6. A site that does not fit is refused with its reason; the other sites of the branch stay.  So is every axis
   of a block weight that was no seed of a site, such as one that a product of three operands sums over
   (`dispfx.analysis.coverage`).  A layer of width 0 has no site, and nothing of it is cut alone.
7. With `select="before-norm"` one site holds the features of the whole stream and takes the place of all
   reads and writes: embedding, norms, every reader and writer, and the head are cut together, and norms see
   only the kept features (S1 = S2 = S3 = S5, selected before the norm).  If that does not fit, the decoder is
   refused.  Inner features with their own norm, such as latents, are not pruned then.
8. With `sites=("heads",)` the key/value heads of each attention are a site too (S7), with everything that
   `dispfx.analysis.attention_heads` finds to be cut with them.  A branch whose products combine tokens, and
   whose heads cannot go, is refused with the operation that is in the way.
9. With `sites=("attention-values",)` the features of each attention's values are a site too (S6), as
   `dispfx.analysis.attention_values` finds them; every head has its own where that fits.  Heads and values
   cut the same positions: what stays is kept by both.
"""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from dispfx.analysis.attention_heads import attentions, close_heads, why_none
from dispfx.analysis.attention_values import by_head, close_values
from dispfx.analysis.cached_values import cache_size
from dispfx.analysis.coverage import unnamed
from dispfx.analysis.flow import Flow
from dispfx.analysis.label_map import Closure, LabelContext, Mismatch, Statistics, close, sums_over_several
from dispfx.analysis.links import Dimension, contractions
from dispfx.analysis.stacked_experts import ByExpert, by_expert
from dispfx.analysis.token_mixing import mixes_tokens
from dispfx.analysis.zero_values import not_zero
from dispfx.errors import UnsupportedGraphError
from dispfx.ir import ops
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Leaf, Program
from dispfx.ir.sites import (
    FURTHER_KINDS,
    STREAM,
    UNTOUCHED,
    Branch,
    GatePoint,
    Refusal,
    Rows,
    Site,
    SiteKind,
    Slice,
)
from dispfx.settings.sections import BudgetSettings, FurtherSites, Select
from dispfx.words.choices import check_choices
from dispfx.words.given import names_given
from dispfx.words.option_names import option

_BRANCHES_SHOWN = 4


@dataclass(frozen=True)
class FindSites:
    """Find the sites of every branch.

    Args:
        skip: patterns (as of a shell) of branch names to leave dense.
        select: whether every read selects after its norm, or the whole stream has one selection.
        sites: what to prune besides the paper's selections.
    """

    skip: tuple[str, ...] = ()
    select: Select = BudgetSettings.select
    sites: tuple[FurtherSites, ...] = BudgetSettings.sites

    def __post_init__(self) -> None:
        """Check `select` and `sites`; one name may be given as a string.

        Raises:
            DispfxError: if one is unknown or no name.
        """
        for several in ("skip", "sites"):
            object.__setattr__(self, several, names_given(getattr(self, several), several))
        check_choices(self)

    name = "find-sites"
    requires = "canonical"
    ensures = "canonical"

    def run(self, program: Program) -> PassResult:
        """Set `program.sites`, `branches`, `closures` and `cache`; add refusals.

        Raises:
            UnsupportedGraphError: if no site is left, a pattern of `skip` names no branch, or the stream
                cannot be selected as a whole.
        """
        _require_named(program, self.skip)
        before = (program.sites, program.branches, program.refused)
        search = _Search(program, tuple(FURTHER_KINDS[word] for word in self.sites))
        if self.select == "before-norm":
            search.stream()
        for leaf in program.leaves:
            if not any(fnmatch.fnmatch(leaf.branch, pattern) for pattern in self.skip):
                search.leaf(leaf)
        program.sites, program.branches = tuple(search.sites), tuple(search.branches)
        program.closures = search.closures
        program.cache = None if program.caches else cache_size(program)
        program.refused = tuple(dict.fromkeys((*program.refused, *search.refused)))
        if not program.sites:
            raise _nothing_left(program, self.skip)
        rest = unnamed(program)
        program.refused += tuple(rest)
        note = f"{len(program.sites)} sites, {len(search.refused) + len(rest)} refused"
        return PassResult(before != (program.sites, program.branches, program.refused), note)


@dataclass(frozen=True)
class _WeightProduct:
    """A product of one activation and one weight, and the dimension it sums over in each."""

    node: fx.Node
    activation: Dimension
    weight: Dimension
    first: bool

    @property
    def size(self) -> int:
        return ops.shape_of(self.weight[0])[self.weight[1]]


@dataclass
class _Search:
    """The sites found so far, and the owner of every parameter axis."""

    program: Program
    further: tuple[SiteKind, ...] = ()
    sites: list[Site] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    closures: dict[str, dict[tuple[str, int], np.ndarray]] = field(default_factory=dict)
    tuples: dict[bytes, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = self.program.nodes
        self.flow = Flow.of(self.program.graph)
        self.around = LabelContext.of(self.program, self.flow)
        # Values cut positions of heads as well, so they have owners apart.
        self.owner: dict[Dimension, np.ndarray] = {}
        self.owner_of_values: dict[Dimension, np.ndarray] = {}
        self.whole_stream = False
        # Buffers that products take as weights.
        read = {
            path
            for node in self.program.graph.nodes
            if ops.is_product(node) and ops.activations(node, self.flow.dependent)
            for value in ops.operands(node)
            if (path := ops.weight_of(value)) is not None
        }
        self.buffers = read - {
            path for path, _ in self.program.graph_module.named_parameters(remove_duplicate=False)
        }

    @property
    def statistics(self) -> Statistics:
        """How means over the features of a branch are treated."""
        return "none" if self.whole_stream else "full"

    def stream(self) -> None:
        """Find the one site of all features of the stream (rule 7)."""
        assert self.program.stream is not None
        width = self.program.stream.width
        seeds = [
            ((node, ops.rank(node) - 1), np.arange(width, dtype=np.int32)) for node in self.around.stream
        ]
        alone = LabelContext(self.flow.dependent, frozenset(), frozenset(), self.program.caches)
        found = close(seeds, alone, statistics="kept")
        if isinstance(found, Mismatch):
            raise _no_whole_stream(found)
        site = Site(
            STREAM,
            STREAM,
            STREAM,
            STREAM,
            width,
            self._slices(found, width, None),
            self._gates(found, width, None),
        )
        self._own(site, found)
        self.whole_stream = True

    def leaf(self, leaf: Leaf) -> None:
        """Find the sites of one leaf."""
        products = list(self._weight_products(leaf))
        readers = [product for product in products if product.first or self._sums_over_stream(product)]
        reads = (STREAM,) if self.whole_stream else self._reads(leaf, readers)
        inner = self._inner(leaf, [product for product in products if product not in readers])
        mixes = leaf.kind != "mlp"
        heads = self._of_attentions(leaf, "heads") if mixes and "heads" in self.further else ()
        values = self._of_attentions(leaf, "values") if mixes and "values" in self.further else ()
        self._name_unfit(leaf)
        writes = (STREAM,) if self.whole_stream else self._writes(leaf)
        if reads or inner or heads or values or writes:
            branch = Branch(leaf.branch, leaf.kind, reads, inner, writes, heads, values)  # type: ignore[arg-type]
            self.branches.append(branch)

    def _weight_products(self, leaf: Leaf) -> Iterator[_WeightProduct]:
        fed: set[fx.Node] = set()
        for node in sorted((self.nodes[name] for name in leaf.nodes), key=lambda item: self.flow.order[item]):
            product = _weight_product(node, self.flow, fed)
            if product is not None:
                yield product
            if ops.contracts(node) or any(value in fed for value in self.flow.inputs(node)):
                fed.add(node)

    def _name_unfit(self, leaf: Leaf) -> None:
        """Refuse by name products with a weight that sum over several dimensions at once."""
        for node in sorted((self.nodes[name] for name in leaf.nodes), key=lambda item: self.flow.order[item]):
            found = sums_over_several(node)
            values = ops.activations(node, self.flow.dependent)
            if found is not None and len(values) == 1 and ops.tensors_read(node):
                self._refuse(leaf, "inner", found, (values[0], ops.rank(values[0]) - 1))

    def _sums_over_stream(self, product: _WeightProduct) -> bool:
        """Whether a product that takes another product's result still sums over the stream's features.

        This is the case for an expert whose tokens, or their weights, a router has chosen.
        """
        assert self.program.stream is not None
        if product.size != self.program.stream.width:
            return False
        labels = np.arange(product.size, dtype=np.int32)
        found = close([(product.activation, labels)], self.around)
        return isinstance(found, Mismatch) and found.stream

    def _reads(self, leaf: Leaf, products: list[_WeightProduct]) -> tuple[str, ...]:
        names = []
        for size in sorted({product.size for product in products}, key=lambda size: -size):
            seeds = [product.weight for product in products if product.size == size]
            names += self._site(leaf, "read", seeds, size)
        return tuple(dict.fromkeys(names))

    def _inner(self, leaf: Leaf, products: list[_WeightProduct]) -> tuple[str, ...]:
        names = []
        for product in products:
            names += self._site(leaf, "inner", [product.activation], product.size, owned=product.weight)
        return tuple(dict.fromkeys(names))

    def _of_attentions(self, leaf: Leaf, kind: SiteKind) -> tuple[str, ...]:
        """Return the sites of heads or of values (rules 8 and 9); several attentions may share one."""
        names = []
        nodes = [self.nodes[name] for name in leaf.nodes]
        known = list(attentions(nodes, self.flow))
        missing = None if known else why_none(nodes, self.flow)
        if missing is not None and missing.node is not None:
            self._refuse(leaf, kind, missing, (missing.node, 0))
        for attention in known:
            find = close_heads if kind == "heads" else close_values
            seed, closure = find(attention, self.flow, self.around)
            owner = self._owner_of(seed, kind)
            if owner is not None:
                names.append(owner)
                continue
            if isinstance(closure, Closure):
                problem = not_zero(closure) or self._conflict(closure, kind) or self._beside(closure, kind)
                closure = problem or closure
            if isinstance(closure, Mismatch):
                self._refuse(leaf, kind, closure, seed)
            elif _cuts_elements(closure):
                of_each = by_head(seed, closure, self.flow, self.around) if kind == "values" else None
                if of_each is None:
                    names.append(self._add(leaf, kind, closure))
                else:
                    names.append(self._add(leaf, kind, of_each.closure, heads=of_each.heads))
        return tuple(dict.fromkeys(names))

    def _writes(self, leaf: Leaf) -> tuple[str, ...]:
        top = self.nodes[leaf.top]
        last = ops.rank(top) - 1
        return tuple(self._site(leaf, "write", [(top, last)], ops.shape_of(top)[last]))

    def _site(
        self, leaf: Leaf, kind: SiteKind, seeds: list[Dimension], size: int, owned: Dimension | None = None
    ) -> list[str]:
        """Make a site of the seeds; return its name, or the names of those that own the seeds."""
        owners = [self._owner_of(seed if owned is None else owned, kind) for seed in seeds]
        free = [seed for seed, owner in zip(seeds, owners, strict=True) if owner is None]
        names = [owner for owner in owners if owner is not None]
        if not free:
            return names
        labels = np.arange(size, dtype=np.int32)
        found = close(
            [(seed, labels) for seed in free],
            self.around,
            crosses_products=kind != "write",
            joins_features=kind == "inner",
            statistics=self.statistics,
        )
        if isinstance(found, Closure) and kind == "inner":
            found = self._with_producers(found)
        if isinstance(found, Closure):
            found = not_zero(found) or self._conflict(found, kind) or self._of_buffer(found, kind) or found
        if isinstance(found, Mismatch):
            self._refuse(leaf, kind, found, free[0])
            return names
        if not _cuts_elements(found):
            return names
        return [*names, self._add(leaf, kind, found)]

    def _with_producers(self, closure: Closure) -> Closure:
        """Cut the producers of other activations that the site's weight is multiplied with, if it fits.

        A down projection that two branches share sums over the features of both.
        """
        for (value, dim, _), labels in list(closure.gates.items()):
            if (value, dim) not in closure.labels:
                seeds = [*closure.labels.items(), ((value, dim), labels)]
                wider = close(seeds, self.around, statistics=self.statistics)
                if isinstance(wider, Closure) and self._conflict(wider, "inner") is None:
                    closure = wider
        return closure

    def _owner_of(self, dimension: Dimension, kind: SiteKind) -> str | None:
        owner = self._owners(kind).get(dimension)
        return self.sites[int(owner.max())].name if owner is not None else None

    def _owners(self, kind: SiteKind) -> dict[Dimension, np.ndarray]:
        return self.owner_of_values if kind == "values" else self.owner

    def _conflict(self, closure: Closure, kind: SiteKind) -> Mismatch | None:
        """Two sites may share a dimension only at different positions; but heads and values may (rule 9)."""
        gated = {(value, dim): labels for (value, dim, _), labels in closure.gates.items()}
        for dimension, labels in {**gated, **closure.labels}.items():
            for owner in (owners.get(dimension) for owners in (self.owner, self.owner_of_values)):
                if owner is None or not np.any((owner != UNTOUCHED) & (labels != UNTOUCHED)):
                    continue
                other = self.sites[int(owner.max())]
                if {kind, other.kind} == {"heads", "values"}:
                    continue
                if dimension in closure.labels or dimension in self._labelled_by(other.name):
                    return Mismatch(f"the features already belong to {other.name}", dimension[0])
        return None

    def _beside(self, closure: Closure, kind: SiteKind) -> Mismatch | None:
        """Other positions may be another site's, but plans know sites by axes, and an edge has one gate."""
        axes = {(str(node.target), dim) for node, dim in closure.labels if ops.is_parameter(node)}
        users: dict[tuple[str, int], set[str]] = {}
        for value, dim, user in closure.gates:
            users.setdefault((value.name, dim), set()).add(user.name)
        for site in self.sites:
            gated = [
                users[at] - set(point.users)
                for point in site.gates
                if (at := (point.value, point.dim)) in users
            ]
            if {kind, site.kind} == {"heads", "values"}:  # one gate after the other, for the same users
                if any(gated):
                    return Mismatch(f"some users of a value are gated by {site.name}, and others are not")
                continue
            same = {(cut.parameter, cut.axis) for cut in site.slices} == axes
            if same or gated:
                what = "heads" if kind == "heads" else "values"
                return Mismatch(f"other {what} of the same projection already belong to {site.name}")
        return None

    def _of_buffer(self, closure: Closure, kind: SiteKind) -> Mismatch | None:
        """A product's weight that is a buffer is in no parameter count, and no read or write cuts it."""
        if kind == "inner":  # the other product of these features has zeros
            return None
        for node, _ in closure.labels:
            if node.op == "get_attr" and str(node.target) in self.buffers:
                return Mismatch(
                    "a weight that is a buffer, and no parameter, is not pruned",
                    node,
                    parameter=str(node.target),
                )
        return None

    def _labelled_by(self, site: str) -> set[Dimension]:
        return {(self.nodes[name], dim) for name, dim in self.closures[site]}

    def _add(self, leaf: Leaf, kind: SiteKind, closure: Closure, heads: int = 1) -> str:
        size = closure.features
        taken = sum(site.branch == leaf.branch and site.kind == kind for site in self.sites)
        name = f"{leaf.branch}.{kind}" if taken == 0 else f"{leaf.branch}.{kind}_{taken + 1}"
        own = self._own_by_expert(closure) if kind == "inner" else None
        experts = 1 if own is None else own.experts
        slices, gates = self._slices(closure, size, own), self._gates(closure, size, own)
        of = (name, leaf.branch, leaf.kind, kind, size * experts)
        site = Site(*of, slices, gates, max(experts, heads))  # type: ignore[arg-type]
        self._own(site, closure)
        return name

    def _own(self, site: Site, closure: Closure) -> None:
        """Add a site, and remember it as the owner of what it cuts."""
        for dimension, labels in closure.labels.items():
            cut = (labels != UNTOUCHED).reshape(-1, labels.shape[-1]).any(0)
            owner = self._owners(site.kind).setdefault(
                dimension, np.full(len(cut), UNTOUCHED, dtype=np.int32)
            )
            owner[cut] = len(self.sites)
        self.sites.append(site)
        self.closures[site.name] = {
            (node.name, dim): labels for (node, dim), labels in closure.labels.items()
        }

    def _own_by_expert(self, closure: Closure) -> ByExpert | None:
        """Return the owners of a closure's values, if every expert may have its own features."""
        found = by_expert(closure)
        paths = {str(node.target) for node, _ in closure.labels if node.op == "get_attr"}
        # Only one axis of a stack may differ by expert, otherwise the result is not a tensor.
        taken = {cut.parameter for site in self.sites for cut in site.slices if cut.by_expert}
        return found if isinstance(found, ByExpert) and not paths & taken else None

    def _slices(self, closure: Closure, size: int, own: ByExpert | None) -> tuple[Slice, ...]:
        cut = [
            Slice(str(node.target), dim, self._compact(labels, size), own is not None)
            for (node, dim), labels in closure.labels.items()
            if ops.is_parameter(node)
        ]
        return tuple(sorted(cut, key=lambda item: (item.parameter, item.axis)))

    def _gates(self, closure: Closure, size: int, own: ByExpert | None) -> tuple[GatePoint, ...]:
        users: dict[tuple[str, int], list[str]] = {}
        labels: dict[tuple[str, int], tuple[int, ...] | None] = {}
        rows: dict[tuple[str, int], Rows | None] = {}
        for edge, positions in closure.gates.items():
            value, dim, user = edge
            if edge not in closure.statistics:
                users.setdefault((value.name, dim), []).append(user.name)
            rows[value.name, dim] = None if own is None else own.owners[value].rows
            labels[value.name, dim] = self._compact(positions, size)
        points = [
            GatePoint(value, dim, tuple(sorted(names)), labels[value, dim], rows[value, dim])
            for (value, dim), names in users.items()
        ]
        # Each mean or norm has its own gate, because its result is corrected too.
        points += [
            GatePoint(value.name, dim, (user.name,), labels[value.name, dim], statistics=True)
            for value, dim, user in sorted(closure.statistics, key=lambda edge: self.flow.order[edge[2]])
        ]
        return tuple(points)

    def _compact(self, labels: np.ndarray, size: int) -> tuple[int, ...] | None:
        """Return labels as a tuple, or None where position i follows feature i.

        Equal labels are one tuple: a fused projection has tens of thousands, and every layer the same.
        """
        if len(labels) == size and np.array_equal(labels, np.arange(size)):
            return None
        key = labels.tobytes()
        if key not in self.tuples:
            self.tuples[key] = tuple(labels.tolist())
        return self.tuples[key]

    def _refuse(self, leaf: Leaf, kind: SiteKind, mismatch: Mismatch, seed: Dimension) -> None:
        """Record a refusal, except for sums over heads, which are not pruned."""
        if kind == "inner" and mismatch.grouped and self._is_over_heads(seed):
            return
        paths = ops.tensors_read(seed[0]) if seed[0].op != "get_attr" else [str(seed[0].target)]
        source = ops.source_line(mismatch.node) if mismatch.node is not None else None
        where = mismatch.parameter or (paths[0] if paths else None)
        self.refused.append(Refusal(f"{leaf.branch}.{kind}", mismatch.reason, where, source))

    def _is_over_heads(self, seed: Dimension) -> bool:
        """Whether the value that a product sums over comes from what mixes tokens, with no weight between."""
        inside, _ = self.flow.cone(
            seed[0], stop=lambda node: node in self.around.stream or self._has_weight(node)
        )
        return any(mixes_tokens(node, self.flow) for node in inside)

    def _has_weight(self, node: fx.Node) -> bool:
        return ops.is_product(node) and len(ops.activations(node, self.flow.dependent)) < 2


def _cuts_elements(closure: Closure) -> bool:
    """Whether a site cuts a parameter: of a layer of width 0 it would cut the bias alone."""
    parameters = [node for node, _ in closure.labels if ops.is_parameter(node)]
    matrices = [node for node in parameters if ops.rank(node) > 1]
    return any(0 not in ops.shape_of(node) for node in matrices or parameters)


def _weight_product(node: fx.Node, flow: Flow, fed: set[fx.Node]) -> _WeightProduct | None:
    if not ops.is_product(node):
        return None
    sums = contractions(node)
    if len(sums) != 1:
        return None
    activations = ops.activations(node, flow.dependent)
    for activation, weight in ((sums[0].a, sums[0].b), (sums[0].b, sums[0].a)):
        if activation[0] in activations and ops.weights_of(weight[0]):
            return _WeightProduct(node, activation, weight, activation[0] not in fed)
    return None


def _no_whole_stream(mismatch: Mismatch) -> UnsupportedGraphError:
    where = None if mismatch.node is None else ops.source_line(mismatch.node) or mismatch.node.name
    return UnsupportedGraphError(
        f"one selection for the whole stream does not fit this decoder: {mismatch.reason}",
        where=where,
        hint=f"prune it with {option('select', 'after-norm')}, the default",
    )


def _require_named(program: Program, skip: tuple[str, ...]) -> None:
    """Require that every pattern names a branch: with a typo its branch would be pruned."""
    branches = list(dict.fromkeys(leaf.branch for leaf in program.leaves))
    for pattern in skip:
        if not fnmatch.filter(branches, pattern):
            more = ", …" if len(branches) > _BRANCHES_SHOWN else ""
            raise UnsupportedGraphError(
                f"{option('skip')} must name a branch, but {pattern!r} names none",
                where=program.model_class,
                hint=f"branches are {', '.join(branches[:_BRANCHES_SHOWN])}{more}; * is any characters",
            )


def _nothing_left(program: Program, skip: tuple[str, ...]) -> UnsupportedGraphError:
    reasons = "; ".join(f"{refusal.name}: {refusal.reason}" for refusal in program.refused[:4])
    hint = f"{option('skip')} leaves out {', '.join(skip)}" if skip else "dispfx inspect shows every refusal"
    return UnsupportedGraphError(
        f"at least one branch must be prunable; all were refused ({reasons or 'none found'})",
        where=program.model_class,
        hint=hint,
    )
