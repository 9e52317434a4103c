"""Scores of features that need no learning: methods to compare with, on the same sites and lowering.

    magnitude   ‖W_j‖                    norm of the weights that read feature j, or that write it
    wanda       ‖x_j‖₂ · ‖W_j‖           contribution of feature j to its readers (arXiv 2306.11695)
    flap        var(x_j) · ‖W_j‖²        loss from replacing it by its mean (arXiv 2312.11983)
    fisher      E[(∂loss/∂m_j)²] / c_j   Fisher information of its gate m_j (arXiv 1801.05787) per parameter
    random      a normal number

The names `activation`, `fluctuation` and `sensitivity` are aliases of `wanda`, `flap` and `fisher`.

x_j is feature j at its gate, W_j the weights that read it there (no weight reads a write, so its ‖W_j‖ is
one), and c_j the number of parameters of feature j.  The scale of the first three differs between sites, so
they are standardised within a site, as in FLAP, to allow one threshold for all sites.  If experts have their
own features, x_j is zero for tokens of other experts, and its variance is weighted by the share of the tokens
that reach its expert.

A custom score, `mine.py:score` or a Python function, takes a `Scored` and returns a dict from site name to
the scores of its features, (size,).  Features with the smallest scores are removed first.  Scores are
compared across sites, and the plan does not depend on their scale.

Entry point: `select_by_score`.  Legend: T tokens, N features of all groups of sites.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from dispfx.errors import DispfxError
from dispfx.ir import ops
from dispfx.ir.sites import UNTOUCHED, GatePoint, Site, Slice
from dispfx.learning.learner import Problem
from dispfx.plan.budget import Budget
from dispfx.plan.hardening import Groups, hard_masks, harden
from dispfx.plan.plan_making import site_scores
from dispfx.settings.learning_settings import Method, seed_for
from dispfx.words.option_names import option
from dispfx.words.own_function import OwnFunction, own_or_choice, shown

SEQUENCES = 64
_SMALLEST = 1e-30
# With the bias of 3, logits from -1 to 7.
_FARTHEST = 4.0


def select_by_score(
    problem: Problem, graph_module: fx.GraphModule, budget: Budget, sequences: int = SEQUENCES
) -> list[Tensor]:
    """Return the sorted int32 indices that every site keeps by `problem.settings.method`.

    Args:
        problem: the decoder's sites, count and text.
        graph_module: the gated graph, with weights; its gates are named as `InsertGates` does.
        budget: for the same count.
        sequences: number of sequences to measure the scores on.

    Raises:
        BudgetError: if no widths meet the budget.
        DispfxError: if a score is not finite, for example because the decoder's values are not.
    """
    scores_N = score(problem, graph_module, problem.settings.method, sequences)
    _require_finite(scores_N, problem)
    return harden(scores_N, problem.sites, problem.count, budget, groups=problem.groups)


def score(
    problem: Problem, graph_module: fx.GraphModule, method: Method, sequences: int = SEQUENCES
) -> Tensor:
    """Return the score of every feature of every group of sites, flat, (N,) float32 on the CPU.

    The arguments are those of `select_by_score`; `method` is any but `learned`.

    Raises:
        DispfxError: if the score is unknown.
    """
    found = own_or_choice(SCORES, method, "method")
    scored = Scored(problem, graph_module, sequences)
    return _by_own(found, scored) if isinstance(found, OwnFunction) else found(scored)


@dataclass(frozen=True, eq=False)
class Scored:
    """The inputs of a score.

    Args:
        problem: sites, count, settings and device of the run.
        graph_module: the gated decoder, forward(ids_BT, one (size,) mask per site) -> logits_BTV.
        sequences: number of sequences to measure scores on.
    """

    problem: Problem
    graph_module: fx.GraphModule
    sequences: int

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites, each with `name`, `kind`, `size`, and the `slices` of its parameters."""
        return self.problem.sites

    @property
    def weights(self) -> dict[str, Tensor]:
        """The decoder's parameters by path."""
        return dict(self.graph_module.named_parameters(remove_duplicate=False))

    def batches(self) -> Iterator[Tensor]:
        """Yield sequences of the text, ids (1, T) int64 on the decoder's device."""
        for ids_T in _sequences(self.problem, self.sequences):
            yield ids_T[None].to(self.problem.device)

    def masks(self) -> dict[str, Tensor]:
        """Return masks of ones by site, which require gradients."""
        device = self.problem.device
        return {site.name: torch.ones(site.size, device=device, requires_grad=True) for site in self.sites}

    def loss(self, ids_BT: Tensor, masks: Mapping[str, Tensor]) -> Tensor:
        """Return the mean next-token loss under masks of all sites, differentiable in them."""
        return self.problem.next_token_loss(ids_BT, torch.cat([masks[site.name] for site in self.sites]))

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return by site the mean and the mean square of its features at their gates, (size,) each."""
        found = _moments(self)
        return {
            site.name: (own.total / own.seen.clamp_min(1), own.squares / own.seen.clamp_min(1))
            for site, own in zip(self.sites, found, strict=True)
        }

    def weight_norms(self) -> dict[str, Tensor]:
        """Return by site the norm of the weights that read each feature, or else write it, (size,)."""
        found = _weight_norms(self.graph_module, self.sites, writers=True)
        return {site.name: own for site, own in zip(self.sites, found, strict=True)}


def _by_own(function: OwnFunction, scored: Scored) -> Tensor:
    """Return the result of a custom score, after checking it.

    Raises:
        SourceError: if the function raises an error.
        PlanMismatchError: if a site has no scores, scores have no site, or do not fit their site.
    """
    values = torch.cat(site_scores(scored.sites, function(scored))).float()
    return _by_group(values.to(scored.problem.device), scored.problem.groups).cpu()


def _require_finite(scores_N: Tensor, problem: Problem) -> None:
    sizes = [site.size for site in problem.sites]
    by_site = problem.groups.to(scores_N.device).expand(scores_N).split(sizes)
    for site, scores in zip(problem.sites, by_site, strict=True):
        if not bool(scores.isfinite().all()):
            method = shown(problem.settings.method)
            raise DispfxError(
                f"the scores of {option('method', method)} must be finite: "
                f"found NaN or infinity in {site.name}; the decoder's activations contain NaN or infinity",
                where=site.slices[0].parameter,
                hint=f"use {option('dtype', 'float32')} or bfloat16, or another {option('method')}",
            )


def _random(scored: Scored) -> Tensor:
    generator = torch.Generator().manual_seed(seed_for(scored.problem.settings.seed, "scores"))
    return torch.randn(scored.problem.groups.features, generator=generator)


def _by_activations(scored: Scored, *, fluctuation: bool) -> Tensor:
    norms = _weight_norms(scored.graph_module, scored.sites, writers=False)
    values = [
        moment.score(norm, fluctuation=fluctuation)
        for moment, norm in zip(_moments(scored), norms, strict=True)
    ]
    return _by_group(torch.cat([_standardised(of_site) for of_site in values]), scored.problem.groups)


SCORES: dict[str, Callable[[Scored], Tensor]] = {
    "magnitude": lambda scored: _by_group(
        magnitudes(scored.graph_module, scored.sites), scored.problem.groups
    ),
    "wanda": partial(_by_activations, fluctuation=False),
    "flap": partial(_by_activations, fluctuation=True),
    "fisher": lambda scored: _sensitivity(scored.problem, scored.sequences).cpu(),
    "random": _random,
}


def magnitudes(graph_module: fx.GraphModule, sites: Sequence[Site]) -> Tensor:
    """Return the score `magnitude` of every feature of every site, flat, (N,) float32; it needs no text.

    Args:
        graph_module: the gated graph, with weights.
    """
    values = _weight_norms(graph_module, sites, writers=True)
    return torch.cat([_standardised(of_site) for of_site in values])


def starting_logits(problem: Problem) -> Tensor:
    """Return what to add to the first logits so that the loss-sensitive features are kept longest, (N,).

    The Fisher score, centred at its median and clipped, so that every feature can still be sampled either
    way.
    """
    sensitivity_N = _sensitivity(problem, SEQUENCES)
    return (sensitivity_N - sensitivity_N.median()).clamp(-_FARTHEST, _FARTHEST)


def logits_of_plan(problem: Problem, kept: Sequence[Tensor]) -> Tensor:
    """Return what to add to the first logits so that learning starts from a plan, (N,).

    Features that the plan keeps start with the usual logit, `bias`, and removed ones with its negative:
    nearly all of these are removed at first, but every feature can still be sampled either way.
    """
    removed = _by_group(1.0 - hard_masks(problem.sites, kept, device=problem.device), problem.groups)
    shared = _by_group(torch.ones(problem.features, device=problem.device), problem.groups)
    return -2.0 * max(problem.settings.bias, 1.0) * removed / shared


def _sensitivity(problem: Problem, sequences: int) -> Tensor:
    """Return the logarithm of every feature's Fisher information per parameter, (N,)."""
    costs_N = problem.count.feature_costs(problem.groups)
    return (_fisher(problem, sequences) / costs_N).clamp_min(_SMALLEST).log()


def _fisher(problem: Problem, sequences: int) -> Tensor:
    """Return the mean square of every gate's gradient over sequences, with everything kept, (N,).

    Sequences whose gradient is not finite are ignored, as such steps are in learning.
    """
    total_N = torch.zeros(problem.groups.features, device=problem.device)
    counted = torch.zeros((), device=problem.device)
    for gradient_SN in _gradients(problem, sequences):
        squares_SN = gradient_SN.float() ** 2
        finite_S1 = squares_SN.isfinite().all(1, keepdim=True)
        total_N += squares_SN.where(finite_S1, 0.0).sum(0)
        counted += finite_S1.sum()
    return total_N / counted.clamp_min(1.0)


def _gradients(problem: Problem, sequences: int) -> Iterator[Tensor]:
    """Yield the gates' gradient for every sequence, with everything kept: (1, N) or (S, N).

    The square of a mean is not the mean of squares, so every sequence is a separate batch, or has its own
    mask if a step draws that many.
    """
    samples, batch_size = problem.settings.samples, problem.settings.batch_size
    if not (samples == batch_size > 1 and problem.ranks.size == 1):
        for ids_T in _sequences(problem, sequences):
            masks_N = torch.ones(problem.groups.features, device=problem.device, requires_grad=True)
            loss = problem.next_token_loss(ids_T[None], problem.groups.expand(masks_N))
            yield torch.autograd.grad(loss, masks_N)[0][None]
        return
    for index in range(-(-sequences // batch_size)):
        masks_SN = torch.ones(samples, problem.groups.features, device=problem.device, requires_grad=True)
        loss = problem.next_token_loss(problem.text.batch(index), problem.groups.expand(masks_SN))
        # The loss is the mean over sequences, so each one contributes 1 / S.
        yield torch.autograd.grad(loss, masks_SN)[0] * samples
        problem.scoring(min(sequences, (index + 1) * batch_size), sequences)


def _by_group(values: Tensor, groups: Groups) -> Tensor:
    """Sum the scores of the sites of a group, which share their features."""
    groups = groups.to(values.device)
    group_of = groups.expand(torch.arange(groups.features))
    return values.new_zeros(groups.features).index_add(0, group_of, values)


def _sequences(problem: Problem, count: int) -> Iterator[Tensor]:
    """Yield sequences of the text, and tell when each was used."""
    batches = -(-count // problem.text.batch_size)
    found = [ids_T for index in range(batches) for ids_T in problem.text.batch(index)][:count]
    for done, ids_T in enumerate(found, start=1):
        yield ids_T
        problem.scoring(done, len(found))


@dataclass
class _Moments:
    """Sums over all seen values of one site's features, (size,) float64.

    Args:
        count: number of positions, of all experts together.
        seen: number of these positions that had the feature.
        total, squares: sums of the feature and of its square.
    """

    count: int
    seen: Tensor
    total: Tensor
    squares: Tensor

    def score(self, norm: Tensor, *, fluctuation: bool) -> Tensor:
        if fluctuation:
            about_mean = self.squares - self.total**2 / self.seen.clamp_min(1)
            return (about_mean / max(self.count, 1)).clamp_min(0.0) * norm**2
        return (self.squares / max(self.count, 1)).sqrt() * norm


class _Recorder(fx.Interpreter):
    """Runs a gated graph and accumulates the moments of the values at its gates."""

    def __init__(self, graph_module: fx.GraphModule, sites: Sequence[Site]):
        super().__init__(graph_module)
        self.moments = [_Moments(0, *torch.zeros(3, site.size, dtype=torch.float64)) for site in sites]
        self._each = [site.per_axis for site in sites]
        self._points = {
            f"gate_{index}_{at}": (index, point)
            for index, site in enumerate(sites)
            for at, point in enumerate(site.gates)
            if not point.statistics
        }

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; a gate's operand is measured first."""
        if n.name in self._points:
            index, point = self._points[n.name]
            args, _ = self.fetch_args_kwargs_from_env(n)
            self._add(index, point, args[0].detach(), args[3] if len(args) > 3 else None)
        return super().run_node(n)

    def _add(self, index: int, point: GatePoint, value: Tensor, experts: Tensor | None) -> None:
        moments, each = self.moments[index], self._each[index]
        rows = value.movedim(point.dim, -1).double()
        number = len(moments.total) // each
        # A site without features per expert counts as one expert that has every row.
        expert = torch.zeros_like(rows[..., 0], dtype=torch.int64)
        if experts is not None:
            expert += experts.clamp(max=number - 1).view(-1, *[1] * (expert.dim() - 1))
        rows, expert = rows.flatten(0, -2), expert.flatten()
        moments.count += len(rows)
        moments.seen += torch.bincount(expert, minlength=number).cpu().repeat_interleave(each)
        for total, values in ((moments.total, rows), (moments.squares, rows**2)):
            sums = values.new_zeros(number, values.shape[-1]).index_add(0, expert, values)
            total += torch.cat([by_feature(own, point.labels, each) for own in sums.cpu()])


def by_feature(values: Tensor, labels: tuple[int, ...] | None, size: int) -> Tensor:
    """Sum over the positions that follow each feature, (size,)."""
    if labels is None:
        return values
    followed = torch.tensor(labels)
    there = followed != UNTOUCHED
    return values.new_zeros(size).index_add(0, followed[there], values[there])


@torch.no_grad()
def _moments(scored: Scored) -> list[_Moments]:
    recorder = _Recorder(scored.graph_module, scored.sites)
    masks = [torch.ones(site.size, device=scored.problem.device) for site in scored.sites]
    for ids_BT in scored.batches():
        recorder.run(ids_BT, *masks)
    return recorder.moments


def _weight_norms(graph_module: fx.GraphModule, sites: Sequence[Site], *, writers: bool) -> list[Tensor]:
    """Return for every site the norm of the weights that read a feature at its gate, (size,) float64.

    If no weight reads it, as at a write, it is the norm of the weights that produce it with `writers`, and
    one otherwise.
    """
    nodes = {node.name: node for node in graph_module.graph.nodes}
    tensors = dict(graph_module.named_parameters(remove_duplicate=False))
    norms = []
    for index, site in enumerate(sites):
        readers: set[str] = set()
        for at in range(len(site.gates)):
            readers |= _readers(nodes[f"gate_{index}_{at}"])
        slices = [cut for cut in site.slices if tensors[cut.parameter].dim() > 1]
        reading = [cut for cut in slices if cut.parameter in readers]
        chosen = reading or (slices if writers else [])
        norms.append(_norm(chosen, tensors, site))
    return norms


def _readers(gate: fx.Node) -> set[str]:
    """Return the paths of the weights of the products that a gated value reaches through views."""
    found: set[str] = set()
    values = [gate]
    while values:
        for user in ops.consumers(values.pop()):
            if ops.contracts(user):
                found.update(ops.tensors_read(user))
            elif ops.is_gate(user) or ops.packet(user) in ops.CASTS | ops.COPIES | ops.SHAPE_OPS:
                values.append(user)
    return found


def _norm(slices: Sequence[Slice], tensors: Mapping[str, Tensor], site: Site) -> Tensor:
    if not slices:
        return torch.ones(site.size, dtype=torch.float64)
    total = torch.zeros(site.size, dtype=torch.float64)
    for cut in slices:
        tensor = tensors[cut.parameter].detach()
        # A stack has one matrix per expert, with the same labels.
        matrices = [(own, cut.axis - 1) for own in tensor] if cut.by_expert else [(tensor, cut.axis)]
        sums = [_squares(matrix, axis).double().cpu() for matrix, axis in matrices]
        total += torch.cat([by_feature(own, cut.labels, site.size // len(sums)) for own in sums])
    return total.sqrt()


def _squares(matrix: Tensor, axis: int) -> Tensor:
    """Return the sum of squares at each position of one axis."""
    return (matrix.movedim(axis, 0).flatten(1).float() ** 2).sum(1)


def _standardised(values: Tensor) -> Tensor:
    """Standardise values to mean zero and standard deviation one, float32; one feature gives zero."""
    spread = values.std(correction=0).clamp_min(_SMALLEST)
    return ((values - values.mean()) / spread).float()
