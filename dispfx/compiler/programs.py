"""From a decoder to its program, and from program and plan to modules.

    module → capture → analyse → gate                 masks multiply what may be removed
                               → lower → gather       smaller weights

The pipelines are those of `dispfx.compiler.pipelines`.

Shape legend: B batch, T tokens, V vocabulary, N features of a site.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dispfx.analysis.finite_weights import require_finite_weights
from dispfx.capturing.module_capture import capture as capture_module
from dispfx.compiler.pipelines import names_of, run_pipeline
from dispfx.errors import CaptureError, PlanMismatchError, UnsupportedGraphError
from dispfx.ir.pipeline import Pass, Pipeline, further_passes
from dispfx.ir.program import Program, own_tensor, require_program
from dispfx.ir.retype import retyped
from dispfx.plan.hardening import hard_masks
from dispfx.plan.plan import Plan, require_same_decoder, site_keys
from dispfx.settings.sections import BudgetSettings, FurtherSites, Select
from dispfx.settings.verb_settings import WriteSpelling
from dispfx.source.experts import Experts, experts_as, has_choice_of_experts
from dispfx.source.source import longest_context, named_context
from dispfx.words.choices import require_choice
from dispfx.words.given import shown, whole_number_given
from dispfx.words.option_names import option


def capture(
    model: nn.Module,
    *,
    skip: Sequence[str] | str = (),
    select: Select = BudgetSettings.select,
    sites: Sequence[FurtherSites] | FurtherSites = BudgetSettings.sites,
    vocabulary_size: int | None = None,
    experts: Experts = "grouped",
    passes: Sequence[Pass] = (),
) -> Program:
    """Return a decoder's program with its branches and sites; the decoder is not changed.

    Args:
        model: takes token ids (B, T) int64 first and returns logits (B, T, V) or an output with them.
        skip: patterns of branch names to leave dense; one, or several.
        select: `after-norm`, with separate selections for the reads and writes of every branch; or
            `before-norm`, one selection for the whole residual stream, including embedding, norms and head.
        sites: what to prune besides the paper's selections, one or several: `heads`, `attention-values`.
        vocabulary_size: token ids that check the capture are below it; by default that of the input
            embedding.
        experts: how a mixture of experts is computed if the decoder has a choice: `grouped`, which is fast
            enough for learning, or `batched`, which can be exported.  If one cannot be captured, the other
            one is used.
        passes: run after those of the analysis, on a canonical program (`docs/extending.md`).

    Raises:
        SourceError: if a weight contains NaN or infinity.
        CaptureError: if torch.export cannot capture the decoder at every batch and length.
        UnsupportedGraphError: if there is no residual stream, or nothing can be pruned.
        DispfxError: if a pass cannot run there.
        PassError: if a pass breaks the graph, or makes a wrong claim.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"capture takes an nn.Module, but {model!r} was given"[:200],
            hint="dispfx.compile(model, ratio, …) also opens names, such as demo, and folders",
        )
    further = further_passes(passes, "canonical", names_of("analyse"))
    require_finite_weights(model)
    program = analyse(
        model, skip=skip, select=select, sites=sites, vocabulary_size=vocabulary_size, experts=experts
    )
    return Pipeline(further).run(program)


def analyse(
    model: nn.Module,
    *,
    skip: Sequence[str] | str = (),
    select: Select = BudgetSettings.select,
    sites: Sequence[FurtherSites] | FurtherSites = BudgetSettings.sites,
    vocabulary_size: int | None = None,
    experts: Experts = "grouped",
    separator: int | None = None,
    longest: int = 0,
) -> Program:
    """As `capture`; with a `separator`, the documents of a sequence are kept apart.

    Args:
        longest: minimum number of tokens that the program must read, if the decoder builds tables of its
            input's length; by default the decoder's context, at most 2048.

    Raises:
        CaptureError, UnsupportedGraphError: as `capture`.
    """

    whole_number_given(longest, 0, "longest")
    config = getattr(model, "config", None)

    def attempt(experts: Experts) -> Program:
        with experts_as(model, experts):
            program = capture_module(
                model,
                vocabulary_size=vocabulary_size,
                separator=separator,
                longest=max(longest, longest_context(config)),
            )
        program.context = named_context(config)
        return run_pipeline("analyse", program, skip=skip, select=select, sites=sites)

    try:
        return attempt(experts)
    except (CaptureError, UnsupportedGraphError) as error:
        if not has_choice_of_experts(model):
            raise
        try:
            return attempt("batched" if experts == "grouped" else "grouped")
        except (CaptureError, UnsupportedGraphError):
            raise error from None


def separate_documents(
    model: nn.Module,
    program: Program,
    separator: int,
    *,
    skip: Sequence[str] | str = (),
    select: Select = BudgetSettings.select,
    sites: Sequence[FurtherSites] | FurtherSites = BudgetSettings.sites,
    longest: int = 0,
) -> Program:
    """Return a program of the same decoder in which the documents of a sequence do not see each other.

    A plan that is learned on it also fits `program`.

    Args:
        model: the decoder that `program` was captured from.
        separator: token that ends a document.
        skip, select, sites, longest: as for `program`.

    Raises:
        CaptureError: if the decoder cannot keep documents apart.
        UnsupportedGraphError: if its sites differ from those of `program`.
    """
    require_program(program)
    twin = analyse(model, skip=skip, select=select, sites=sites, separator=separator, longest=longest)
    found, expected = ([(site.name, site_keys(site)) for site in one.sites] for one in (twin, program))
    if found != expected:
        raise UnsupportedGraphError(
            "documents cannot be kept apart: the sites would differ",
            where=program.model_class,
            hint=f"leave out {option('packing', 'documents')}",
        )
    return twin


def exportable(model: nn.Module, program: Program, plan: Plan) -> Program:
    """Return a program that every exporter supports: the same, or one with `batched` experts.

    Args:
        model: the decoder that `program` was captured from.
        plan: of the program; it also fits the other one, because both read the same parameters.
    """
    if not has_choice_of_experts(model):
        return program
    return only_planned(analyse(model, select=plan.select, sites=plan.sites, experts="batched"), plan)


class GatedDecoder(nn.Module):
    """A decoder whose sites are multiplied by masks; its weights are those of the program.

    Gradients flow to the masks, and to weights that require them.
    """

    def __init__(self, program: Program):
        super().__init__()
        self.graph = program.graph_module
        self.sites = program.sites

    def forward(self, ids: Tensor, masks: Sequence[Tensor] | Mapping[str, Tensor], *further: Tensor) -> Any:
        """Return the program's outputs: logits (B, T, V), followed by its caches if it has any.

        Args:
            ids: (B, T) int64.
            masks: one (N,) float tensor per site, in the order of the program's sites; or a dict by site
                name, in which a missing site keeps everything.  Soft masks multiply features.
            further: the program's inputs after the token ids.

        Raises:
            PlanMismatchError: if a site has no mask, or one of another size.
        """
        if isinstance(masks, Mapping):
            masks = self._in_order(masks, ids.device)
        return self.graph(ids, *further, *self._fitting(masks, len(ids)))

    def _fitting(self, masks: Any, sequences: int) -> list[Tensor]:
        """Return the masks, one of the right size for every site: a gate would repeat one of size 1."""
        found = list(masks) if isinstance(masks, Iterable) and not isinstance(masks, Tensor) else None
        if found is None or len(found) != len(self.sites):
            given = f"{shown(masks)} was" if found is None else f"{len(found)} were"
            raise PlanMismatchError(
                f"one mask for each of {len(self.sites)} sites was expected, but {given} given",
                hint="give a list in the order of the program's sites, or a dict by site name",
            )
        for site, mask in zip(self.sites, found, strict=True):
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else None
            if shape is None or shape[-1:] != (site.size,) or len(shape) > 2:
                given = shown(mask) if shape is None else f"one of shape {shape}"
                raise PlanMismatchError(
                    f"a mask of shape ({site.size},) was expected, but {given} was given", where=site.name
                )
            if len(shape) == 2 and (shape[0] < 1 or sequences % shape[0]):
                raise PlanMismatchError(
                    f"{shape[0]} masks do not divide a batch of {sequences} sequences", where=site.name
                )
        return found

    def _in_order(self, masks: Mapping[str, Tensor], device: torch.device) -> list[Tensor]:
        names = [site.name for site in self.sites]
        for name in masks:
            require_choice(names, name, "site")
        return [
            masks[site.name] if site.name in masks else torch.ones(site.size, device=device)
            for site in self.sites
        ]


class HardGatedDecoder(nn.Module):
    """A decoder gated by a plan: removed features are multiplied by zero, shapes are unchanged."""

    def __init__(self, program: Program, kept: Sequence[Tensor]):
        super().__init__()
        self.gated = gate(program)
        sizes = [site.size for site in program.sites]
        self.masks = list(hard_masks(program.sites, kept, device=program.device).split(sizes))

    def forward(self, ids: Tensor, *further: Tensor) -> Any:
        """Return the program's outputs for token ids (B, T) and its further inputs."""
        return self.gated(ids, self.masks, *further)

    def retyped(self, old: torch.dtype, new: torch.dtype) -> Callable[..., Any]:
        """Return the same decoder with every tensor of type `old` converted to `new`."""
        graph = retyped(self.gated.graph, old, new)
        return lambda ids, *further: graph(ids, *further, *self.masks)


def gate(program: Program) -> GatedDecoder:
    """Return the decoder with a gate at every site; with masks of ones it is bit-identical."""
    require_program(program)
    twin = run_pipeline("gate", program.clone())
    return GatedDecoder(twin)


def gated(program: Program, plan: Plan) -> nn.Module:
    """Return the decoder with a plan's masks applied: token ids (B, T) to logits (B, T, V).

    Raises:
        PlanMismatchError: if the plan was made for another decoder.
    """
    return HardGatedDecoder(program, _selections(program, plan))


def lower(
    program: Program,
    plan: Plan,
    *,
    write: WriteSpelling = "index-add",
    passes: Sequence[Pass] = (),
) -> torch.fx.GraphModule:
    """Return the pruned decoder: token ids (B, T) to logits (B, T, V), on sliced weights.

    Args:
        program: of the decoder; not changed.  Tensors that are not cut are shared.
        plan: what to keep.
        write: `index-add` is the form of the paper, `gather-add` the fast one on a GPU.
        passes: run after those of the lowering, on a lowered program (`docs/extending.md`).

    Raises:
        PlanMismatchError: if the plan was made for another decoder.
        DispfxError: if a pass cannot run there.
        PassError: if a pass breaks the graph, or makes a wrong claim.
    """
    require_same_decoder(program, plan)
    further = further_passes(passes, "lowered", names_of("lower", "gather"))
    return Pipeline(further).run(lower_program(program, plan, write=write)).graph_module


def lower_program(
    program: Program,
    plan: Plan,
    *,
    write: WriteSpelling = "index-add",
) -> Program:
    """As `lower`, but return the program, and accept a decoder whose weights are not loaded yet."""
    require_choice(get_args(WriteSpelling), write, "write")
    twin = run_pipeline("lower", program.clone(), kept=plan.by_site(program.sites))
    if write == "gather-add":
        twin = run_pipeline("gather", twin)
    _attach(twin.graph_module, program.unused)
    return twin


def _selections(program: Program, plan: Plan) -> list[Tensor]:
    require_same_decoder(program, plan)
    return plan.for_sites(program.sites)


def only_planned(program: Program, plan: Plan) -> Program:
    """Leave out the sites that were skipped when the plan was made."""
    planned = {selection.keys for selection in plan.selections}
    program.sites = tuple(site for site in program.sites if site_keys(site) in planned)
    return program


def _attach(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Register parameters that the graph does not read, so that a checkpoint keeps them."""
    for path, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            own_tensor(module, path, tensor)
