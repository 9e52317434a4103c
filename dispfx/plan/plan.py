"""The plan: the features that every site keeps.  Plan + original checkpoint = pruned decoder.

A plan file is one safetensors file with a sorted int32 tensor per site and a JSON header, so reading it runs
no code.  `Plan.load` checks sizes, order, range and type of every selection.

If experts have their own features, feature `e · each + i` is feature i of expert e, and the header holds the
number of experts.  Plans without this entry have one selection for all experts, and can still be applied.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral
from typing import Any, TypeVar, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dispfx.errors import DataError, DispfxError, PlanMismatchError
from dispfx.files.disk import new_file, replacing
from dispfx.files.json_text import parse_json
from dispfx.files.unreadable import NOT_FETCHED, fetching, is_pointer
from dispfx.ir.lengths import End, Lengths
from dispfx.ir.program import Program, require_program
from dispfx.ir.shown_tables import plan_html, plan_text
from dispfx.ir.sites import FURTHER_KINDS, STREAM, Site
from dispfx.plan.budget import Budget, Counted
from dispfx.plan.decoder_count import count_of
from dispfx.plan.hardening import ParameterCount, hard_masks, harden
from dispfx.plan.latency_table import LatencyTable
from dispfx.settings.sections import FurtherSites, Select
from dispfx.words.constraint_text import parse_constraint
from dispfx.words.given import path_given, require_given
from dispfx.words.option_names import option
from dispfx.words.own_function import names_function

SCHEMA_VERSION = 1
# Entry of the header of a family of plans (`dispfx.plan.family`).
FAMILY = "family"
# Of all sites together, to bound memory.  61 layers of 384 experts with 2,048 features have 48 million.
MOST_FEATURES = 2**27


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Selection:
    """The features one site keeps.

    Args:
        site: name of the site.
        size: number of features of the dense site.
        kept: sorted, distinct int32 indices in [0, size), shape (K,) with K >= 1.
        keys: "parameter.path:axis" of every slice, to find the site in another capture.
        experts: number of experts that the features belong to; every expert keeps equally many.
        symbol: the paper's name, S1 … S5, or "" if it has no name or the plan is older; for display only.
    """

    site: str
    size: int
    kept: Tensor
    keys: tuple[str, ...]
    experts: int = 1
    symbol: str = ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return NotImplemented
        ours, theirs = ((one.site, one.size, one.keys, one.experts) for one in (self, other))
        return ours == theirs and torch.equal(self.kept, other.kept)

    @property
    def kind(self) -> str:
        """Kind of the site, which its name ends with."""
        return self.site.rpartition(".")[2].partition("_")[0]

    @property
    def full(self) -> bool:
        """Whether every feature is kept."""
        return len(self.kept) == self.size

    def for_site(self, site: Site) -> "Selection | None":
        """Return the selection for the site's features, or None if it selects other features.

        One selection for all experts converts to equal selections per expert, and back.
        """
        if (self.size, self.experts) == (site.size, site.experts):
            return self
        each_EK = self.kept.view(self.experts, -1) % (self.size // self.experts)
        if self.size // self.experts != site.per_expert or bool((each_EK != each_EK[0]).any()):
            return None
        starts_E1 = torch.arange(site.experts, dtype=torch.int32)[:, None] * site.per_expert
        return replace(self, size=site.size, kept=(starts_E1 + each_EK[0]).flatten(), experts=site.experts)


def site_keys(site: Site) -> tuple[str, ...]:
    """Name the parameter axes that a site cuts, sorted; heads and values may cut the same ones."""
    kind = ":values" if site.kind == "values" else ""
    return tuple(sorted(f"{cut.parameter}:{cut.axis}{kind}" for cut in site.slices))


@dataclass(frozen=True)
class CacheLeft:
    """Bytes of the KV cache per token, of the dense decoder and of the pruned one."""

    dense: int
    pruned: int

    @property
    def removed(self) -> float:
        """Share that is removed."""
        return 1.0 - self.pruned / self.dense


@dataclass(frozen=True)
class Met:
    """How a constraint is met, in bytes or seconds.

    Args:
        text: of the constraint.
        dense: what the dense decoder takes.
        most: what was allowed.
        left: what the pruned decoder takes.
    """

    text: str
    dense: float
    most: float
    left: float


@dataclass(frozen=True, repr=False)
class Plan:
    """The kept features of every site, for one decoder.

    Args:
        fingerprint: of the decoder the plan was made for.
        budget: that was requested.
        selections: one per site, in the order of the decoder's sites.
        achieved: share of the counted parameters that the selections remove.
        seed: of the run.
        versions: of the libraries that made it, for the record.
        bos: beginning-of-sequence tokens of the data it was learned from, for the record.
        lengths: sequence lengths for which the graph of the plan holds; None in older plans.
        schema_version: of the file format.
        made_from: digests of the decoder, text and settings of the run that learned it, by name; empty for a
            plan made otherwise.
        cache: of a budget with a share of the KV cache, what the selections leave of it.
        met: how the selections meet the constraints of the budget.
    """

    fingerprint: str
    budget: Budget
    selections: tuple[Selection, ...]
    achieved: float
    seed: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    lengths: Lengths | None = field(default=None, compare=False)
    schema_version: int = SCHEMA_VERSION
    bos: tuple[int, ...] = ()
    made_from: Mapping[str, str] = field(default_factory=dict, compare=False)
    cache: CacheLeft | None = None
    met: tuple[Met, ...] = ()

    @property
    def select(self) -> Select:
        """Whether the plan selects after every norm, or once for the whole stream."""
        whole = any(selection.site == STREAM for selection in self.selections)
        return "before-norm" if whole else "after-norm"

    @property
    def sites(self) -> tuple[FurtherSites, ...]:
        """What the plan prunes besides the paper's selections."""
        kinds = {selection.kind for selection in self.selections}
        return tuple(word for word in get_args(FurtherSites) if FURTHER_KINDS[word] in kinds)

    @property
    def kept(self) -> dict[str, Tensor]:
        """Kept indices by site name."""
        return {selection.site: selection.kept for selection in self.selections}

    @property
    def digest(self) -> str:
        """Digest of the features that every site keeps."""
        found = hashlib.sha256()
        for selection in self.selections:
            found.update(f"{selection.site}:{selection.size};".encode())
            found.update(selection.kept.to(torch.int32).contiguous().numpy().tobytes())
        return found.hexdigest()

    @property
    def emptied(self) -> tuple[str, ...]:
        """Sites that the plan would empty: they keep the minimum that the alignment allows."""
        return tuple(
            selection.site
            for selection in self.selections
            if len(selection.kept) < selection.size
            and len(selection.kept) <= self.minimum(selection) * selection.experts
        )

    def minimum(self, selection: Selection) -> int:
        """Return how many features a site keeps at least, each expert by itself; heads are not aligned."""
        return 1 if selection.kind == "heads" else self.budget.align

    @staticmethod
    def random(
        program: Program,
        ratio: float,
        seed: int,
        *,
        of: Counted = Budget.of,
        align: int = Budget.align,
    ) -> "Plan":
        """Return a plan of random selections and random widths that meets the ratio.

        Args:
            ratio: in [0, 1); 0.0 keeps everything.
            seed: the same seed gives the same plan.

        Raises:
            BudgetError: if the sites cannot meet the ratio.
            DispfxError: if the seed is no whole number that torch takes.
        """
        require_program(program)
        if not isinstance(seed, Integral) or not -(2**63) <= seed < 2**64:
            raise DispfxError(f"seed must be a whole number of 64 bits, and {seed!r} was given")
        budget = Budget(ratio, of, align)
        count = ParameterCount.of_sites(program.sites, program.shapes, of)
        generator = torch.Generator().manual_seed(int(seed))
        logits = [
            torch.randn(site.size, generator=generator, dtype=torch.float64)
            + 0.5 * torch.randn((), generator=generator, dtype=torch.float64)
            for site in program.sites
        ]
        kept = harden(torch.cat(logits), program.sites, count, budget)
        return Plan.of(program, budget, kept, int(seed))

    @staticmethod
    def from_masks(program: Program, masks: Mapping[str, Any], *, of: Counted = Budget.of) -> "Plan":
        """Return the plan for given masks; its ratio is the share that they remove.

        Args:
            masks: for every site, by name, a boolean mask (size,) or the kept indices (K,) in any order: a
                tensor, a numpy array or a list.
            of: `blocks` or `total`, the parameters that the ratio counts, or a function
                (`dispfx.plan.own_cost`).

        Raises:
            PlanMismatchError: if a site has no mask, a mask has no site, or a mask does not fit its site.
        """
        from dispfx.plan.plan_making import kept_of_masks

        require_program(program)
        plan = Plan.of(program, Budget(0.0, of), kept_of_masks(program.sites, masks), seed=0)
        return replace(plan, budget=replace(plan.budget, ratio=plan.achieved))

    @staticmethod
    def from_scores(
        program: Program,
        scores: Mapping[str, Any],
        ratio: float | Mapping[str, float],
        *,
        per_layer: bool = False,
        align: int = Budget.align,
        of: Counted = Budget.of,
    ) -> "Plan":
        """Return the plan that meets a ratio by keeping the features with the highest scores.

        Scores are compared across sites, with one threshold per ratio.

        Args:
            scores: for every site, by name, the scores of its features, (size,).
            ratio: in [0, 1); or patterns of branch names and their ratios, such as
                `{"layers.0.*": 0.1, "*": 0.4}`; the first pattern that fits a branch counts.
            per_layer: every layer meets the ratio, instead of all layers together.
            align: widths become multiples of this.
            of: `blocks` or `total`, the parameters that the ratio counts; `total` only with a single ratio.

        Raises:
            PlanMismatchError: if a site has no scores, scores have no site, or do not fit their site.
            BudgetError: if a ratio cannot be met, or patterns and branches do not fit together.
        """
        from dispfx.plan.plan_making import kept_of_scores

        require_program(program)
        budget, kept = kept_of_scores(program, scores, ratio, per_layer=per_layer, align=align, of=of)
        return Plan.of(program, budget, kept, seed=0)

    @staticmethod
    def of(program: Program, budget: Budget, kept: Sequence[Tensor], seed: int) -> "Plan":
        """Return the plan that keeps `kept[i]`, as in `from_masks`, at site i of `program`."""
        from dispfx.plan.plan_making import checked_indices

        count = count_of(budget, program)
        indices = [checked_indices(site, mask) for site, mask in zip(program.sites, kept, strict=True)]
        masks = hard_masks(program.sites, indices)
        left = count.count_kept(masks)
        selections = tuple(
            Selection(site.name, site.size, own, site_keys(site), site.experts, site.symbol)
            for site, own in zip(program.sites, indices, strict=True)
        )
        versions = {"torch": torch.__version__}
        achieved = 1.0 - left / count.dense
        budget = budget.removing(achieved)
        cache = count.cache
        return Plan(
            program.fingerprint,
            budget.recorded,
            selections,
            achieved,
            seed,
            versions,
            program.lengths,
            cache=None if cache is None else CacheLeft(cache.dense, cache.count_kept(masks)),
            met=tuple(Met(one.text, one.dense, one.most, one.left_of(masks)) for one in count.limits),
        )

    def __repr__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        return plan_html(self)

    def for_sites(self, sites: Sequence[Site]) -> list[Tensor]:
        """Return the kept indices in the order of `sites`, matched by the parameter axes that they cut.

        Raises:
            PlanMismatchError: if a site has no selection, another size, or a selection has no site, or if a
                selection was changed to one that no file may hold.
        """
        return [selection.kept for selection in self._fitting(sites)]

    def by_site(self, sites: Sequence[Site]) -> dict[str, Tensor]:
        """Return the kept indices by the names of `sites`.

        Raises:
            PlanMismatchError: as `for_sites`.
        """
        return dict(zip([site.name for site in sites], self.for_sites(sites), strict=True))

    def fitted(self, sites: Sequence[Site]) -> "Plan":
        """Return the plan with its selections converted to the features of the sites, in their order.

        Raises:
            PlanMismatchError: as `for_sites`.
        """
        return replace(self, selections=tuple(self._fitting(sites)))

    def _fitting(self, sites: Sequence[Site]) -> list[Selection]:
        self._require_possible()
        by_keys = {selection.keys: selection for selection in self.selections}
        found = []
        for site in sites:
            selection = by_keys.pop(site_keys(site), None)
            fitting = None if selection is None else selection.for_site(site)
            if fitting is None:
                arrived = "none" if selection is None else f"one for {_features(selection)}"
                raise PlanMismatchError(
                    f"the decoder has a site of {_features(site)}, but the plan has {arrived}",
                    where=site.name,
                    hint=self._remedy(sites),
                )
            found.append(fitting)
        if by_keys:
            extra = next(iter(by_keys.values()))
            raise PlanMismatchError(
                f"the plan prunes {len(by_keys)} site(s) that the decoder does not have",
                where=extra.site,
                hint=self._remedy(sites),
            )
        return found

    def _remedy(self, sites: Sequence[Site]) -> str:
        """Say how sites of this plan are found: kinds that are pruned on request must be asked for."""
        found = {site.kind for site in sites}
        missing = [word for word in self.sites if FURTHER_KINDS[word] not in found]
        if missing:
            return f"capture the decoder with {option('sites', missing[0])}, as for the plan"
        extra = [word for word, kind in FURTHER_KINDS.items() if kind in found and word not in self.sites]
        if extra:
            given = option("sites", extra[0]) if self.sites else option("sites")
            return f"capture the decoder without {given}, as for the plan"
        return "apply the plan to the decoder it was learned on"

    def _require_possible(self) -> None:
        """Raise PlanMismatchError for selections that `load` would reject; they are not checked when made."""
        for one in self.selections:
            try:
                _require_equal_experts(
                    one.site, one.size, _checked_kept(one.site, one.size, one.kept), one.experts
                )
            except ValueError as error:
                raise PlanMismatchError(
                    f"the plan was changed: {error}", where=one.site, hint="make plans with Plan.from_masks"
                ) from error
        if len({one.keys for one in self.selections}) < len(self.selections):
            raise PlanMismatchError(
                "the plan was changed: two of its sites cut the same axes",
                hint="make plans with Plan.from_masks",
            )

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> None:
        """Write the plan to `path` atomically.

        Args:
            path: of the file.
            overwrite: whether the plan may take the place of a file; missing folders are made if not.

        Raises:
            OutputError: if the file cannot be written, or exists and is not to be overwritten; the error
                names the file that holds the plan then.
            PlanMismatchError: if a selection was changed to one that cannot be read back.
        """
        write_plan_file(self, path, overwrite=overwrite)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Plan":
        """Read a plan file.

        Raises:
            DataError: if the file is missing, not a plan, or contains an impossible selection.
        """
        return read_plan_file(path, _single_plan, "a plan", "pass a plan.safetensors")


@dataclass(frozen=True, eq=False)
class StoredPlan:
    """What a file holds besides a plan: further entries of its header, and further tensors."""

    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def write_plan_file(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    overwrite: bool,
    more: StoredPlan | None = None,
) -> None:
    """Write a plan and what else its file holds, atomically; as `Plan.save`."""
    target = path_given(path, "the plan file to write")
    plan._require_possible()
    header = {
        "schema_version": plan.schema_version,
        "fingerprint": plan.fingerprint,
        "budget": {name: value for name, value in plan.budget.plain.items() if value is not None},
        "achieved": plan.achieved,
        "seed": plan.seed,
        "versions": dict(plan.versions),
        **({"made_from": dict(plan.made_from)} if plan.made_from else {}),
        **({} if plan.cache is None else {"cache": asdict(plan.cache)}),
        **({"met": [asdict(one) for one in plan.met]} if plan.met else {}),
        # The line of the user's code at which they end is not part of a plan.
        **({} if plan.lengths is None else {"lengths": asdict(replace(plan.lengths, where=None))}),
        "sites": [
            {"name": selection.site, "size": selection.size, "keys": list(selection.keys)}
            | ({"experts": selection.experts} if selection.experts > 1 else {})
            | ({"symbol": selection.symbol} if selection.symbol else {})
            for selection in plan.selections
        ],
    } | ({"bos": list(plan.bos)} if plan.bos else {})
    tensors = {selection.site: selection.kept.contiguous() for selection in plan.selections}
    if more is not None:
        header, tensors = header | dict(more.header), tensors | dict(more.tensors)
    with (replacing if overwrite else new_file)(target) as partial:
        save_file(tensors, partial, metadata={"dispfx": json.dumps(header)})


def read_plan_file(
    path: str | os.PathLike[str], build: Callable[[Plan, StoredPlan], T], what: str, hint: str
) -> T:
    """Read a plan and what else its file holds.

    Args:
        build: makes the result, or raises an error for impossible values.
        what: that the file should be, for messages.
        hint: of the error about another file.

    Raises:
        DataError: if the file is missing, something else, or contains an impossible selection.
    """
    path = path_given(path, f"{what} file")
    if not path.is_file():
        raise DataError(f"the {what.split()[-1]} file does not exist", where=str(path))
    try:
        with safe_open(path, framework="pt") as file:
            header = parse_json((file.metadata() or {})["dispfx"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            sites = {str(entry["name"]) for entry in header["sites"]}
            others = {name: tensor for name, tensor in tensors.items() if name not in sites}
            if FAMILY not in header and others:
                raise ValueError("its header and its tensors name different sites")
            plan = _plan_of_header(header, {name: tensors[name] for name in tensors if name in sites})
            return build(plan, StoredPlan(header, others))
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        if is_pointer(path):
            raise DataError(NOT_FETCHED, where=str(path), hint=fetching(path)) from error
        raise DataError(f"this file is not {what}: {error}", where=str(path), hint=hint) from error


def is_family_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file names itself a family of plans; False for what cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return FAMILY in parse_json((file.metadata() or {})["dispfx"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return False


def _single_plan(plan: Plan, stored: StoredPlan) -> Plan:
    if FAMILY in stored.header:
        raise ValueError(
            "it is a family of plans; `dispfx apply` takes one of them with "
            f"{option('ratio', 'R')}, and Family.load(file).at(program, ratio) in Python"
        )
    return plan


def require_same_decoder(program: Program, plan: Plan) -> None:
    """Raise PlanMismatchError if the plan was made for another decoder."""
    require_program(program)
    require_plan(plan)
    if plan.fingerprint != program.fingerprint:
        raise PlanMismatchError(
            f"the plan was made for a decoder with fingerprint {plan.fingerprint[:12]}, this one has "
            f"{program.fingerprint[:12]}",
            where=program.model_class,
            hint="use the same model, revision and dtype source as when the plan was learned",
        )


def require_plan(plan: Any) -> None:
    """Raise DispfxError for what is no plan."""
    require_given(plan, Plan, "dispfx.learn, Plan.random and Plan.load(file) return one")


def _features(features: Site | Selection) -> str:
    owners = "heads" if features.kind == "values" else "experts"
    many = f" of {features.experts} {owners}" if features.experts > 1 else ""
    return f"{features.size} features{many}"


def _plan_of_header(header: dict[str, Any], tensors: dict[str, Tensor]) -> Plan:
    if header["schema_version"] != SCHEMA_VERSION:
        raise ValueError(
            f"its format is version {header['schema_version']}, this program reads {SCHEMA_VERSION}"
        )
    entries = header["sites"]
    if sorted(entry["name"] for entry in entries) != sorted(tensors):
        raise ValueError("its header and its tensors name different sites")
    if (features := sum(int(entry["size"]) for entry in entries)) > MOST_FEATURES:
        raise ValueError(f"its sites claim {features} features, but at most {MOST_FEATURES} are read")
    selections = tuple(_checked_selection(entry, tensors[entry["name"]]) for entry in entries)
    if len({selection.keys for selection in selections}) < len(selections):
        raise ValueError("two of its sites cut the same axes")
    achieved = float(header["achieved"])
    if not 0.0 <= achieved < 1.0:
        raise ValueError(f"it removes a share of {achieved}")
    versions = {str(name): str(version) for name, version in header["versions"].items()}
    budget, lengths = _checked_budget(header["budget"]), _checked_lengths(header.get("lengths"))
    bos = tuple(int(token) for token in header.get("bos", ()))
    seed = int(header["seed"])
    made_from = {str(name): str(digest) for name, digest in header.get("made_from", {}).items()}
    return Plan(
        str(header["fingerprint"]),
        budget,
        selections,
        achieved,
        seed,
        versions,
        lengths,
        bos=bos,
        made_from=made_from,
        cache=_checked_cache(header.get("cache")),
        met=tuple(_checked_met(entry) for entry in header.get("met", ())),
    )


def _checked_lengths(entry: dict[str, Any] | None) -> Lengths | None:
    if entry is None:
        return None
    most = None if entry["most"] is None else int(entry["most"])
    lengths = Lengths(int(entry["least"]), most, entry["end"])
    if (
        lengths.least < 1
        or lengths.end not in (None, *get_args(End))
        or (most is not None and most < lengths.least)
    ):
        raise ValueError(f"its range of lengths is impossible: {lengths}")
    return lengths


def _checked_cache(entry: dict[str, Any] | None) -> CacheLeft | None:
    if entry is None:
        return None
    cache = CacheLeft(int(entry["dense"]), int(entry["pruned"]))
    if not 0 <= cache.pruned <= cache.dense or cache.dense < 1:
        raise ValueError(f"it leaves {cache.pruned} of {cache.dense} bytes of the cache")
    return cache


def _checked_met(entry: dict[str, Any]) -> Met:
    text = parse_constraint(entry["text"]).text
    numbers = [entry[name] for name in ("dense", "most", "left")]
    if not all(isinstance(one, int | float) and 0.0 < one < math.inf for one in numbers):
        raise ValueError(f"a constraint is met in an impossible way: {numbers}")
    return Met(text, *numbers)


def _checked_budget(entry: dict[str, Any]) -> Budget:
    costs = LatencyTable.of_plain(entry["costs"]) if entry.get("costs") is not None else None
    if names_function(entry["of"]):
        raise ValueError(f"its budget names a function to run: {entry['of']}")
    try:
        return Budget(
            float(entry["ratio"]),
            entry["of"],
            int(entry["align"]),
            costs,
            entry.get("kv_ratio"),
            tuple(entry.get("constraints", ())),
            float(entry.get("floor", 0.0)),
        )
    except DispfxError as error:
        raise ValueError(f"its budget is impossible: {error.problem}") from error


def _checked_selection(entry: dict[str, Any], kept: Tensor) -> Selection:
    name, keys = str(entry["name"]), entry["keys"]
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"site {name}: its keys must be a list of parameter axes, found {keys!r}")
    size, experts = int(entry["size"]), int(entry.get("experts", 1))
    kept = _checked_kept(name, size, kept)
    _require_equal_experts(name, size, kept, experts)
    return Selection(name, size, kept, tuple(keys), experts, str(entry.get("symbol", "")))


def _require_equal_experts(name: str, size: int, kept: Tensor, experts: int) -> None:
    if not 1 <= experts <= len(kept) or size % experts:
        raise ValueError(f"site {name}: {experts} experts for {size} features")
    if experts == 1:
        return
    counts = torch.bincount(kept // (size // experts), minlength=experts)
    if bool((counts != counts[0]).any()):
        raise ValueError(f"site {name}: experts must keep equally many features, found {counts.tolist()}")


def _checked_kept(name: str, size: int, kept: Tensor) -> Tensor:
    if not isinstance(kept, Tensor):
        raise ValueError(f"site {name}: indices are a tensor, found a {type(kept).__name__}")
    if kept.dtype != torch.int32 or kept.dim() != 1 or not 1 <= len(kept) <= size:
        raise ValueError(f"site {name}: {tuple(kept.shape)} {kept.dtype} indices for {size} features")
    if int(kept[0]) < 0 or int(kept[-1]) >= size or not bool((kept[1:] > kept[:-1]).all()):
        raise ValueError(f"site {name}: indices must be strictly increasing in [0, {size})")
    return kept
