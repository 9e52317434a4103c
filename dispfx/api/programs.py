"""From a decoder to its program, and from program and plan to modules that run.

    module → capture → canonicalize → find residual stream → find branches → find sites    (analyse)
           → insert gates                                                                   (gate)
           → lower gates → align groups → gather-add                                        (lower)

Shape legend: B batch, T tokens, V vocabulary, N features of a site.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from dispfx.api.fitting import fitted_settings, settings_for
from dispfx.api.opening import longest_context, named_context
from dispfx.api.training import device_of_learning, prepared_loss
from dispfx.capturing import capture as capture_module
from dispfx.choices import require_choice
from dispfx.errors import CaptureError, DispfxError, PlanMismatchError, UnsupportedGraphError
from dispfx.finite_weights import require_finite_weights
from dispfx.ir.budget import hard_masks
from dispfx.ir.costs import latency_table
from dispfx.ir.lookups import require_readable
from dispfx.ir.plan import Budget, Plan, site_keys
from dispfx.ir.program import Program, own_tensor
from dispfx.ir.sites import Select
from dispfx.learning.scores import select_by_score
from dispfx.learning.text import Batches, TokenBatches, token_vector
from dispfx.learning.trainer import LearningTask, Watch, follow_run
from dispfx.learning.trainer import learn as learn_masks
from dispfx.passes.align_groups import AlignGroups
from dispfx.passes.canonicalize import Canonicalize
from dispfx.passes.find_branches import FindBranches
from dispfx.passes.find_residual_stream import FindResidualStream
from dispfx.passes.find_sites import FindSites
from dispfx.passes.fold_statistics import FoldStatistics
from dispfx.passes.gather_add import GatherAdd
from dispfx.passes.insert_gates import InsertGates
from dispfx.passes.lower_gates import LowerGates
from dispfx.pipeline import Pass, Pipeline, further_passes
from dispfx.ranks import ALONE, Ranks
from dispfx.settings import BudgetSettings, ComputeSettings, LearnSettings, changed_settings, learn_settings
from dispfx.settings.field import section_fields
from dispfx.source.experts import Experts, experts_as, has_choice_of_experts

WriteSpelling = Literal["index-add", "gather-add"]


def analysis(skip: Sequence[str] | str = (), select: Select = "after-norm") -> list[Pass]:
    """Return the passes that find what can be pruned."""
    return [
        Canonicalize(),
        FoldStatistics(),
        FindResidualStream(),
        FindBranches(),
        FindSites((skip,) if isinstance(skip, str) else tuple(skip), select),
    ]


def capture(
    model: nn.Module,
    *,
    skip: Sequence[str] | str = (),
    select: Select = "after-norm",
    vocabulary_size: int | None = None,
    experts: Experts = "grouped",
    passes: Sequence[Pass] = (),
) -> Program:
    """Return a decoder's program with its branches and sites; the decoder is not changed.

    Args:
        model: takes token ids (B, T) int64 first and returns logits (B, T, V) or an output with them.
        skip: patterns of branch names to leave dense; one, or several.
        select: `after-norm`, where every branch reads, and writes, what it likes; or `before-norm`, one
            selection for the whole residual stream, embedding, norms and head included.
        vocabulary_size: ids that the capture is checked with stay below it; by default taken from the
            input embedding.
        experts: how a mixture of experts is computed where the decoder has a choice: `grouped`, which
            learning can afford, or `batched`, which can be exported.  Where one cannot be captured, the
            other is.
        passes: run after those of the analysis, on a canonical program (`docs/extending.md`).

    Raises:
        SourceError: if a weight contains NaN or infinity.
        CaptureError: if torch.export cannot capture the decoder at every batch and length.
        UnsupportedGraphError: if there is no residual stream, or nothing can be pruned.
        DispfxError: if a pass cannot run there.
        PassError: if one breaks the graph, or claims what it did not do.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"capture takes an nn.Module, and {model!r} was given"[:200],
            hint="dispfx.compile(model, ratio, …) also opens names, such as demo, and folders",
        )
    further = further_passes(passes, "canonical", analysis())
    require_finite_weights(model)
    program = analyse(model, skip=skip, select=select, vocabulary_size=vocabulary_size, experts=experts)
    return Pipeline(further).run(program)


def analyse(
    model: nn.Module,
    *,
    skip: Sequence[str] | str = (),
    select: Select = "after-norm",
    vocabulary_size: int | None = None,
    experts: Experts = "grouped",
    separator: int | None = None,
    longest: int = 0,
) -> Program:
    """As `capture`; with a `separator`, the documents of a sequence are kept apart.

    Args:
        longest: tokens that the program is to read at least, if the decoder makes its tables as long as its
            texts; more by default where the decoder's own context is longer, 2048 at most.

    Raises:
        CaptureError, UnsupportedGraphError: as `capture`.
    """

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
        return Pipeline(analysis(skip, select)).run(program)

    try:
        return attempt(experts)
    except (CaptureError, UnsupportedGraphError) as error:
        if not has_choice_of_experts(model):
            raise
        try:
            return attempt("batched" if experts == "grouped" else "grouped")
        except (CaptureError, UnsupportedGraphError):
            raise error from None


def apart(
    model: nn.Module,
    program: Program,
    separator: int,
    *,
    skip: Sequence[str] = (),
    select: Select = "after-norm",
    longest: int = 0,
) -> Program:
    """Return a program of the same decoder in which the documents of a sequence do not see each other.

    A plan that is learned on it is one for `program`.

    Args:
        model: the decoder that `program` was captured from.
        separator: token that ends a document.
        skip, select, longest: as for `program`.

    Raises:
        CaptureError: if the decoder cannot keep documents apart.
        UnsupportedGraphError: if other sites are found in it then.
    """
    twin = analyse(model, skip=skip, select=select, separator=separator, longest=longest)
    found, expected = ([(site.name, site_keys(site)) for site in one.sites] for one in (twin, program))
    if found != expected:
        raise UnsupportedGraphError(
            "documents cannot be kept apart: other dimensions can be pruned then",
            where=program.model_class,
            hint="leave out --packing documents",
        )
    return twin


def exportable(model: nn.Module, program: Program, plan: Plan) -> Program:
    """Return a program whose operations every exporter knows: the same, or with experts `batched`.

    Args:
        model: the decoder that `program` was captured from.
        plan: of the program; it cuts the other one too, for both read the same parameters.
    """
    if not has_choice_of_experts(model):
        return program
    return only_planned(analyse(model, select=plan.select, experts="batched"), plan)


class GatedDecoder(nn.Module):
    """A decoder whose sites are multiplied by masks; its weights are those of the program.

    Gradients reach the masks, and the weights that require them.
    """

    def __init__(self, program: Program):
        super().__init__()
        self.graph = program.graph_module
        self.sites = program.sites

    def forward(self, ids: Tensor, masks: Sequence[Tensor] | Mapping[str, Tensor], *further: Tensor) -> Any:
        """Return what the program returns: logits (B, T, V), followed by caches where it has them.

        Args:
            ids: (B, T) int64.
            masks: one (N,) float tensor a site, in the order of the program's sites; or by the names of
                sites, where a site without a mask keeps everything.  Soft masks multiply features.
            further: the program's inputs after the token ids.
        """
        if isinstance(masks, Mapping):
            masks = self._in_order(masks, ids.device)
        return self.graph(ids, *further, *masks)

    def _in_order(self, masks: Mapping[str, Tensor], device: torch.device) -> list[Tensor]:
        names = [site.name for site in self.sites]
        for name in masks:
            require_choice(names, name, "site")
        return [
            masks[site.name] if site.name in masks else torch.ones(site.size, device=device)
            for site in self.sites
        ]


class HardGatedDecoder(nn.Module):
    """A decoder gated by a plan: removed features are multiplied by zero, nothing is smaller."""

    def __init__(self, program: Program, kept: Sequence[Tensor]):
        super().__init__()
        self.gated = gate(program)
        sizes = [site.size for site in program.sites]
        self.masks = list(hard_masks(program.sites, kept, device=program.device).split(sizes))

    def forward(self, ids: Tensor, *further: Tensor) -> Any:
        """Return what the program returns for token ids (B, T) and its further inputs."""
        return self.gated(ids, self.masks, *further)


def gate(program: Program) -> GatedDecoder:
    """Return the decoder with a gate at every site; masks of ones change no bit."""
    twin = Pipeline([InsertGates()]).run(program.clone())
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
        program: of the decoder; it is not changed, and its tensors are not copied where nothing is cut.
        plan: what to keep.
        write: `index-add` is the spelling of the method; `gather-add` the one that is fast on a GPU.
        passes: run after those of the lowering, on a lowered program (`docs/extending.md`).

    Raises:
        PlanMismatchError: if the plan was made for another decoder.
        DispfxError: if a pass cannot run there.
        PassError: if one breaks the graph, or claims what it did not do.
    """
    require_same_decoder(program, plan)
    own = [InsertGates(), LowerGates({}), AlignGroups(), GatherAdd()]
    further = further_passes(passes, "lowered", own)
    return Pipeline(further).run(lower_program(program, plan, write=write)).graph_module


def lower_program(
    program: Program,
    plan: Plan,
    *,
    write: WriteSpelling = "index-add",
) -> Program:
    """As `lower`, but return the program, and let a decoder pass whose weights are still to come."""
    require_choice(get_args(WriteSpelling), write, "write")
    kept = plan.for_sites(program.sites)
    by_name = {site.name: indices for site, indices in zip(program.sites, kept, strict=True)}
    passes: list[Pass] = [InsertGates(), LowerGates(by_name), AlignGroups()]
    if write == "gather-add":
        passes.append(GatherAdd())
    twin = Pipeline(passes).run(program.clone())
    _attach(twin.graph_module, program.unused)
    return twin


def learn(
    program: Program,
    data: Tensor | np.ndarray | Sequence[int] | Batches,
    ratio: float,
    *,
    settings: LearnSettings | None = None,
    compute: ComputeSettings | None = None,
    watch: Watch | None = None,
    ranks: Ranks | None = None,
    **changes: Any,
) -> Plan:
    """Learn which features every site keeps, and return the plan (arXiv 2410.11988).

    With a `method` other than `learned` in the settings nothing is learned: features are scored once.

    Args:
        program: of the decoder, on the device to learn on.
        data: token ids, (N,) integers, of which the last tenth is held out: a tensor, a numpy array or a
            list; or batches, cut as the settings say.
        ratio: share of the counted parameters to remove, in (0, 1).
        settings: of the learning; those of the `informed` recipe by default.
        compute: how the decoder is run: compiled, with checkpoints, in parts; by default as the device asks.
        watch: where the state is kept, and who is told what happens.
        ranks: the processes of the run, of which this one leads; the others call `follow`.
        changes: single settings of learning and budget, as in `steps=100, align=16, ratio_of="total"`; widths
            are not aligned by default.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        BudgetError: if the sites cannot give up that much.
        DataError: if the text is no vector of token ids, has others than the decoder, or is shorter than one
            sequence.
        DispfxError: if the decoder cannot be run as `compute` says.
    """
    watch = watch or Watch()
    names = [one.name for one in section_fields(BudgetSettings)]
    asked = BudgetSettings(ratio, **{name: changes.pop(name) for name in names if name in changes})
    whole = learn_settings(None, **changes) if settings is None else changed_settings(settings, changes)
    if hasattr(data, "held_out_batches"):  # cut already
        chosen, text = settings_for(program, whole, watch.note), cast(Batches, data)
    else:
        tokens = token_vector(data, program.vocabulary_size)
        chosen = fitted_settings(whole, program=program, note=watch.note)
        text = batches_of(tokens, chosen)
    require_readable(program, text.seq_len)
    budget = Budget(ratio, asked.ratio_of, asked.align or 1, latency_table(asked.costs))
    _check_packing(program, chosen)
    if chosen.method != "learned":
        if compute is not None and compute.shard_on is not None:
            raise DispfxError(
                f"--shard is for learning, and --method {chosen.method} scores features once",
                hint="leave out --shard",
            )
        return Plan.of(program, budget, _scored(program, text, budget, chosen), chosen.seed)
    task = _task(program, text, budget, chosen, compute, ranks or ALONE, watch.note)
    found = learn_masks(task, watch)
    return Plan.of(program, budget, found.kept, chosen.seed)


def follow(
    program: Program,
    text: Batches,
    budget: Budget,
    settings: LearnSettings,
    ranks: Ranks,
    compute: ComputeSettings | None = None,
) -> None:
    """Compute with the process that calls `learn` with the same arguments, until its run ends.

    Raises:
        RankLost: if another process ended.
        BudgetError, DataError: as `learn`.
    """
    if settings.method != "learned":
        return
    settings = settings_for(program, settings, lambda note: None)
    follow_run(_task(program, text, budget, settings, compute, ranks))


def _task(
    program: Program,
    text: Batches,
    budget: Budget,
    settings: LearnSettings,
    compute: ComputeSettings | None,
    ranks: Ranks,
    note: Callable[[str], None] = lambda text: None,
) -> LearningTask:
    return LearningTask(
        gated=prepared_loss(program, text, settings, compute, ranks=ranks, note=note),
        sites=program.sites,
        shapes=program.shapes,
        text=text,
        budget=budget,
        settings=settings,
        device=device_of_learning(program, compute),
        ranks=ranks,
        fingerprint=program.fingerprint,
    )


def _check_packing(program: Program, settings: LearnSettings) -> None:
    if settings.packing != "documents":
        return
    if program.separator is None:
        raise DispfxError(
            "documents are kept apart by the program, and this one does not do so",
            hint="learn on the program that `dispfx.api.apart` returns",
        )
    if settings.method != "learned":
        raise DispfxError(
            f"--packing documents is for learning, and --method {settings.method} scores features once",
            hint="leave out --packing",
        )


def _scored(program: Program, text: Batches, budget: Budget, settings: LearnSettings) -> list[Tensor]:
    gated = gate(program)
    task = LearningTask(
        gated=gated,
        sites=program.sites,
        shapes=program.shapes,
        text=text,
        budget=budget,
        settings=settings,
        device=program.device,
    )
    return select_by_score(task.problem(), gated.graph, budget)


def batches_of(
    tokens: Tensor | np.ndarray, settings: LearnSettings, held_out: Tensor | None = None
) -> TokenBatches:
    """Cut tokens into batches; the last tenth is held out unless other text is given for that."""
    if held_out is not None:
        return TokenBatches(tokens, settings.seq_len, settings.batch_size, settings.seed, held_out)
    return TokenBatches.split(
        tokens, seq_len=settings.seq_len, batch_size=settings.batch_size, seed=settings.seed
    )


def _selections(program: Program, plan: Plan) -> list[Tensor]:
    require_same_decoder(program, plan)
    return plan.for_sites(program.sites)


def require_same_decoder(program: Program, plan: Plan) -> None:
    """Raise PlanMismatchError where the plan was made for another decoder."""
    if plan.fingerprint != program.fingerprint:
        raise PlanMismatchError(
            f"the plan was made for a decoder with fingerprint {plan.fingerprint[:12]}, this one has "
            f"{program.fingerprint[:12]}",
            where=program.model_class,
            hint="use the same model, revision and dtype source as when the plan was learned",
        )


def only_planned(program: Program, plan: Plan) -> Program:
    """Leave out the sites that the plan's decoder was told to skip."""
    planned = {selection.keys for selection in plan.selections}
    program.sites = tuple(site for site in program.sites if site_keys(site) in planned)
    return program


def _attach(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Register parameters that the graph does not read, so that a checkpoint keeps them."""
    for path, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            own_tensor(module, path, tensor)
