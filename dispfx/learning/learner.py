"""One step of learning, and its state.

    logits = sharpness · hypernetwork()                      (K, N), one row for every knot of the ratios
    masks, surrogate = estimator.sample(mixed(logits))       (S, N) each; no gradient passes the masks
    loss = loss of the predictions(gated(ids, masks split by site)) + λ · R
    ∂loss/∂logits = Σ over S of ∂loss/∂mask · slope          then one backward pass of the hypernetwork

    R = mean over S of budget_loss(count(mask)),             or budget_loss(count(sigmoid(logits))); eased
      + as much for the cache, if a share of it is asked for; with limits, count is the share of the tightest

A run for one ratio has one knot.  A run for a range draws a ratio for every mask, and mixes the rows of the
knots around it (`dispfx.plan.knots`).

The masks are a leaf, so several forward passes may accumulate their gradient, and the hypernetwork's
backward pass runs once per step.  N is the number of features of all groups of sites.

With S > 1 samples, every B / S consecutive sequences of a batch have their own mask: the gradient is
estimated from S draws instead of one, at the same cost.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dispfx.distributed.ranks import ALONE, Ranks
from dispfx.errors import DispfxError, PassError, memory_shortage
from dispfx.ir.sites import Site
from dispfx.learning.estimators import OwnEstimator, estimator
from dispfx.learning.hypernetwork import build_hypernetwork
from dispfx.learning.interrupt import uninterrupted
from dispfx.learning.objective import NEXT_TOKEN, OBJECTIVES, Objective, Term, loss_of_logits
from dispfx.learning.state import Position, restore_run, run_tensors
from dispfx.learning.text import Batches, Prefetcher
from dispfx.learning.update import StepTensors, Surrogate, Update, fastest_update
from dispfx.plan.hardening import Groups, ParameterCount
from dispfx.plan.knots import Knots, mixed
from dispfx.settings.learning_settings import LearnSettings, seed_for
from dispfx.words.option_names import option

# Kernels round differently for a batch than for one sequence, in bfloat16 by about 1e-2 of a logit.
_SAMPLE_TOLERANCE = 2e-3
# Cosine of the gradients of one site from the same kernels: 1 up to rounding, far less after a sort.
_SAMPLE_AGREEMENT = 0.8
_NOTICED = 1e-3
# What a share of 1 is in a budget loss, whose numbers are at least 1.
_WHOLE = 1e6

Gated = Callable[[Tensor, Sequence[Tensor]], Tensor]


@runtime_checkable
class WithLoss(Protocol):
    """A decoder that computes its losses without materialising all logits."""

    def loss(self, ids_BT: Tensor, masks: Tensor) -> Tensor:
        """Return what is learned from a batch under masks (N,) or (S, N) of all sites."""
        ...

    def next_token_loss(self, ids_BT: Tensor, masks: Tensor) -> Tensor:
        """Return the mean cross entropy with the next token under masks (N,) or (S, N) of all sites."""
        ...


@dataclass(frozen=True, eq=False)
class Problem:
    """The constants of learning.

    Args:
        gated: (ids_BT, masks of every site, (size,) or (S, size)) -> logits_BTV.
        sites: in the order of the masks.
        groups: which sites share a selection.
        count: the number of remaining parameters, for the same sites.
        knots: the ratio, or the range of ratios, to learn for.
        text: batches to learn from.
        settings: of the run.
        device: of the decoder and all tensors.
        ranks: the processes that share every batch.
        scoring: told how many sequences were scored, and of how many.
        cache_target: bytes of the cache per token that should remain; None without a share of its own.
        floor: with limits, the ratio that was asked for, or 0.
    """

    gated: Gated
    sites: tuple[Site, ...]
    groups: Groups
    count: ParameterCount
    knots: Knots
    text: Batches
    settings: LearnSettings
    device: torch.device
    ranks: Ranks = ALONE
    scoring: Callable[[int, int], None] = lambda done, total: None
    cache_target: float | None = None
    floor: float = 0.0

    @property
    def further_terms(self) -> list[Term]:
        """The terms of the budget loss besides that of the parameters."""
        cache, target = self.count.cache, self.cache_target
        terms = [Term(self._tightest, _WHOLE)] if self.count.limits else []
        if cache is not None and target is not None:
            terms.append(Term(lambda masks: cache.count(self.groups.expand(masks)), target))
        return terms

    def remaining(self, masks: Tensor) -> Tensor:
        """Return the remaining parameters under masks (G,) or (S, G) of all groups."""
        return self.count.count(self.groups.expand(masks))

    def _tightest(self, masks: Tensor) -> Tensor:
        """Return the largest share of a limit, or of the ratio that was asked for, that is taken."""
        shares = [limit.left(self.groups.expand(masks)) / limit.most for limit in self.count.limits]
        if self.floor:
            left = self.remaining(masks) / ((1.0 - self.floor) * self.count.dense)
            shares.append(left.amax(-1) if left.dim() == masks.dim() else left)
        return _WHOLE * torch.stack(shares).amax(0)

    @property
    def features(self) -> int:
        """Features of all sites; those of a group are counted once per site."""
        return sum(site.size for site in self.sites)

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """Shape of the masks that a step draws for all groups: (G,), or (S, G) with S > 1 samples."""
        samples, features = self.settings.samples, self.groups.features
        return (features,) if samples == 1 else (samples, features)

    def batch(self, index: int) -> Tensor:
        """Return this rank's sequences of batch `index`."""
        return self.ranks.rows(self.text.batch(index))

    def loss(self, ids_BT: Tensor, masks: Tensor) -> Tensor:
        """Return what is learned from a batch under masks (N,) or (S, N) of all sites."""
        return self._loss(ids_BT, masks, OBJECTIVES[self.settings.objective])

    def next_token_loss(self, ids_BT: Tensor, masks: Tensor) -> Tensor:
        """Return the next-token loss of a batch under masks (N,) or (S, N) of all sites.

        With everything kept its gradient says how much a feature matters; that of a divergence from the dense
        decoder is zero there.
        """
        return self._loss(ids_BT, masks, NEXT_TOKEN)

    def _loss(self, ids_BT: Tensor, masks: Tensor, objective: Objective) -> Tensor:
        ids_BT = ids_BT.to(self.device)
        with self.ranks.reaching():
            if isinstance(self.gated, WithLoss):
                learned = objective == OBJECTIVES[self.settings.objective]
                found = self.gated.loss if learned else self.gated.next_token_loss
                return found(ids_BT, masks)
            sizes = [site.size for site in self.sites]

            def logits(as_dense: bool) -> Tensor:
                return self.gated(ids_BT, (torch.ones_like(masks) if as_dense else masks).split(sizes, -1))

            return loss_of_logits(objective, logits, ids_BT)


@dataclass(frozen=True)
class StepOutcome:
    """Numbers of one step; a step that is not `finite` changed nothing."""

    loss: float
    budget_loss: float
    achieved_ratio: float
    finite: bool


class Learner:
    """The hypernetwork, its optimizer, the sampler's generator, and the position in the run.

    Args:
        problem: the constants of learning.
        start_N: initial logits of all groups.
        note: called if a GPU optimisation is unavailable, with the reason.
    """

    def __init__(
        self,
        problem: Problem,
        start_N: Tensor | None = None,
        note: Callable[[str], None] = lambda text: None,
    ):
        settings, device = problem.settings, problem.device
        self.problem = problem
        self.position = Position()
        self._hypernetwork = build_hypernetwork(
            settings.hypernetwork,
            problem.groups.sizes,
            bias=settings.bias,
            seed=settings.seed,
            start_N=start_N,
            knots=problem.knots,
        ).to(device)
        self._optimizer = torch.optim.AdamW(
            self._hypernetwork.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, fused=True
        )
        self._batches = Prefetcher(problem.batch, device)
        self._targets_K = torch.tensor(
            [(1.0 - ratio) * problem.count.dense for ratio in problem.knots.ratios],
            dtype=torch.float64,
            device=device,
        )
        self._shape = problem.mask_shape
        self._counts_masks = settings.budget_on == "masks"
        plain = Update(
            self._hypernetwork,
            problem.remaining,
            settings.lambda_,
            settings.budget_width,
            counts_masks=self._counts_masks,
            # Limits decide how much remains.
            of_ratio=not problem.count.limits,
            further=problem.further_terms,
        )
        # A user's cost runs on the CPU, which no CUDA graph holds.
        own = problem.count.own is not None
        self._update = plain if own else fastest_update(plain, self._empty_step(), device, note)
        self._estimator = estimator(settings.estimator, settings.temperature, antithetic=settings.antithetic)
        if isinstance(self._estimator, OwnEstimator):
            self._estimator.check(self.logits()[0].expand(self._shape))
        self._generator = torch.Generator(device).manual_seed(seed_for(settings.seed, "masks"))
        # As of the last complete step: an interrupted or bad step leaves no trace.
        self._generator_state = self._generator.get_state()

    def logits(self) -> Tensor:
        """Return the logits of all groups at every knot, (K, N), without gradient."""
        with torch.no_grad():
            return self._hypernetwork().view(len(self.problem.knots.ratios), -1)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the state, by flat names."""
        return run_tensors(self._hypernetwork, self._optimizer, self._generator_state)

    def restore(self, position: Position, tensors: dict[str, Tensor]) -> None:
        """Restore the state from `tensors`."""
        restore_run(self._hypernetwork, self._optimizer, self._generator, position, tensors)
        self._generator_state = self._generator.get_state()
        self.position = position

    def advance(self) -> StepOutcome:
        """Do one step.

        A step whose loss or gradient is not finite does not change parameters, optimizer or generator; it is
        counted, and the next step reads the next batch.

        Raises:
            DispfxError: after `max_bad_steps` such steps in a row.
        """
        problem, settings = self.problem, self.problem.settings
        sharpness = settings.sharpness(self.position.step)
        logits_KN = self._update.logits() * sharpness
        ratios_S = problem.knots.drawn(settings.samples, self._generator)
        weights_SK = problem.knots.weights(ratios_S)
        logits = mixed(logits_KN, weights_SK).view(self._shape)
        sample = self._estimator.sample(logits, self._generator)
        masks = problem.ranks.send(sample.mask).requires_grad_()
        loss = backward_decoder(problem, self._batches, masks, self.position.step)
        assert masks.grad is not None
        problem.ranks.average(masks.grad)
        problem.ranks.average(loss)
        rows = (settings.samples, -1)
        of_masks = Surrogate(masks.grad.view(rows), (sample.slope * sharpness).view(rows))
        if self._counts_masks:
            counted = Surrogate(masks.detach().view(rows), of_masks.surrogate)
        else:
            counted = _probabilities(logits_KN, sharpness)
        targets = self._targets(ratios_S)
        on_device = self._update.gradients(StepTensors(loss, of_masks, counted, weights_SK, targets))
        with uninterrupted():
            # The optimizer's work is queued before the host reads the numbers, so that the GPU never waits.
            read = reading(on_device)
            self._optimize(on_device)
            numbers = read()
            finite = all(math.isfinite(number) for number in numbers)
            self._move_on(finite)
        # As large as the hypernetwork, and not needed while the decoder runs.
        self._optimizer.zero_grad(set_to_none=True)
        if self.position.bad_in_a_row >= settings.max_bad_steps:
            raise _diverged(self.position, numbers[0])
        return StepOutcome(numbers[0], numbers[1], 1.0 - numbers[2] / problem.count.dense, finite)

    def _targets(self, ratios_S: Tensor) -> Tensor:
        """Return the number of parameters that should remain for every row of what is counted."""
        if self._counts_masks and self.problem.knots.is_range:
            return (1.0 - ratios_S.double()) * self.problem.count.dense
        return self._targets_K

    def _empty_step(self) -> StepTensors:
        """Return tensors of the shapes of a step."""
        samples, features = self.problem.settings.samples, self.problem.groups.features
        knots, device = len(self.problem.knots.ratios), self.problem.device
        counted = samples if self._counts_masks else knots
        of_masks, of_counted = (
            Surrogate(*torch.ones(2, rows, features, device=device)) for rows in (samples, counted)
        )
        weights_SK = torch.ones(samples, knots, device=device)
        targets = self._targets(torch.zeros(samples, device=device))
        return StepTensors(torch.zeros((), device=device), of_masks, of_counted, weights_SK, targets)

    def _optimize(self, numbers: Tensor) -> None:
        """Step the optimizer; nothing changes if one of the numbers is not finite."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.problem.settings.learning_rate(self.position.step)
        for parameter, product in self._update.outer.items():
            parameter.grad = product.written()
        self._optimizer.found_inf = numbers.isfinite().all().logical_not().float()  # type: ignore[attr-defined]
        self._optimizer.step()

    def _move_on(self, finite: bool) -> None:
        before = self.position
        if finite:
            self._generator_state = self._generator.get_state()
            self.position = Position(before.step + 1, before.bad_steps)
        else:
            self._generator.set_state(self._generator_state)
            self.position = Position(before.step + 1, before.bad_steps + 1, before.bad_in_a_row + 1)


def _probabilities(logits_KN: Tensor, sharpness: float) -> Surrogate:
    """Return the probability that each feature is kept, and its slope for the unsharpened logit."""
    keep_KN = torch.sigmoid(logits_KN)
    return Surrogate(keep_KN, keep_KN * (1 - keep_KN) * sharpness)


def backward_decoder(problem: Problem, batches: Prefetcher, sampled: Tensor, step: int) -> Tensor:
    """Add the gradient of a step's loss to the masks, and return the loss, both for this rank's sequences."""
    passes = problem.settings.accumulate
    total = torch.zeros((), device=problem.device)
    for index in range(step * passes, (step + 1) * passes):
        masks = problem.groups.expand(problem.ranks.masks(sampled))
        loss = problem.loss(batches.get(index), masks) / passes
        with problem.ranks.reaching():
            loss.backward()
        total += loss.detach()
    return total


def check_gates(problem: Problem) -> None:
    """Check that every gate acts: with everything kept, every mask gets a gradient.

    Raises:
        PassError: with the sites whose gradient is zero everywhere.
        DispfxError: if the loss of the dense decoder is not finite.
    """
    sizes = [site.size for site in problem.sites]
    mask_N = torch.ones(sum(sizes), device=problem.device)
    masks = problem.ranks.masks(_as_drawn(mask_N, problem.settings)).clone().requires_grad_()
    loss = problem.next_token_loss(problem.batch(0), masks)
    if not loss.requires_grad:
        where = f"rank {problem.ranks.rank}" if problem.ranks.size > 1 else None
        raise PassError("the logits depend on no gate, so there is nothing to learn", where=where)
    if not math.isfinite(loss.item()):
        raise DispfxError(
            f"the decoder's loss with everything kept is {loss.item()} at the start",
            hint=f"use {option('dtype', 'float32')} or bfloat16, "
            "and check that the tokenizer belongs to the decoder",
        )
    loss.backward()
    assert masks.grad is not None
    dead = [
        site.name
        for site, gradient in zip(problem.sites, masks.grad.split(sizes, -1), strict=True)
        if not bool(gradient.count_nonzero())
    ]
    if dead:
        raise PassError(
            f"every gate must act on the loss, but {len(dead)} of {len(sizes)} get a gradient of zero",
            where=", ".join(dead[:5]) + (" …" if len(dead) > 5 else ""),
            hint=f"leave these branches dense with {option('skip')}",
        )


def check_samples(problem: Problem) -> None:
    """Check that every sequence of a batch uses its own mask.

    The loss of a batch is the mean of its sequences' losses, and so is its gradient for each mask.  If a gate
    uses the mask of another sequence, as after a sort of tokens, the loss may hardly differ, but the gradient
    does.

    Raises:
        DispfxError: if a gate is at a place where a batch is not S runs of rows (see `dispfx.ir.gate`).
    """
    samples = problem.settings.samples
    if samples == 1:
        return
    generator = torch.Generator().manual_seed(seed_for(problem.settings.seed, "check-samples"))
    masks = torch.rand(samples, sum(site.size for site in problem.sites), generator=generator)
    masks = (0.5 + masks.round() / 2).to(problem.device)
    ids_BT = problem.text.batch(0)
    if problem.ranks.size > 1:  # no rank holds a whole batch at once
        ids_BT = ids_BT[:: len(ids_BT) // samples]
    runs = ids_BT.split(len(ids_BT) // samples)
    try:
        together, gradient = _loss_of(problem, ids_BT, masks)
        # Alone: the same sequence and mask in every row, to keep the shapes of a step.
        alone = [
            _loss_of(problem, run_BT.repeat(samples, 1), mask_N.expand(samples, -1).contiguous())
            for run_BT, mask_N in zip(runs, masks, strict=True)
        ]
    except (RuntimeError, ValueError) as error:
        if memory_shortage(error) is not None:
            raise
        raise _no_samples(samples, str(error)) from error
    expected = sum(loss for loss, _ in alone) / samples
    difference = abs(together - expected)
    if not difference <= _SAMPLE_TOLERANCE * abs(expected):
        raise _no_samples(samples, f"the loss differs by {difference:.2e} from that of single sequences")
    of_each = torch.stack([of_masks.sum(0) / samples for _, of_masks in alone])
    agreement = _agreement(problem, gradient, of_each)
    if not agreement >= _SAMPLE_AGREEMENT:
        raise _no_samples(
            samples, f"the masks' gradients have cosine {agreement:.2f} with those of single sequences"
        )


def _loss_of(problem: Problem, ids_BT: Tensor, masks: Tensor) -> tuple[float, Tensor]:
    """Return the loss and its gradient for masks (S, N)."""
    # With gradients, as in a step: a compiled decoder may support only that.
    leaf = masks.clone().requires_grad_()
    loss = problem.loss(ids_BT, leaf)
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad.double()


def _agreement(problem: Problem, found: Tensor, expected: Tensor) -> float:
    """Return the smallest cosine, over sites with a gradient, between two gradients (S, N)."""
    sizes = [site.size for site in problem.sites]
    cosines = [
        float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-300))
        for a, b in zip(found.split(sizes, -1), expected.split(sizes, -1), strict=True)
        if float(b.norm()) > _NOTICED * float(expected.norm())
    ]
    return min(cosines, default=1.0)


def _as_drawn(mask_N: Tensor, settings: LearnSettings) -> Tensor:
    """Repeat a mask in the shape that a step draws: (N,), or (S, N) with S > 1 samples."""
    return mask_N if settings.samples == 1 else mask_N.repeat(settings.samples, 1)


def _no_samples(samples: int, reason: str) -> DispfxError:
    return DispfxError(
        f"{option('samples', samples)} is not possible, because this decoder mixes its sequences: {reason}",
        hint=f"use {option('samples', 1)}",
    )


def _diverged(position: Position, loss: float) -> DispfxError:
    return DispfxError(
        f"learning was stopped at step {position.step}: the loss ({loss}) or its gradient was not finite "
        f"{position.bad_in_a_row} times in a row",
        hint=f"use a smaller {option('lr')}, or {option('dtype', 'float32')} or bfloat16; "
        f"the last good state is kept for {option('resume')}",
    )


def reading(numbers: Tensor) -> Callable[[], list[float]]:
    """Start copying numbers to the host, and return a function that waits for them and returns them.

    On a GPU it waits only for work queued before this call, not for work queued between the two calls.

    Args:
        numbers: (n,); later work may overwrite them.
    """
    if numbers.device.type != "cuda":
        found = numbers.tolist()
        return lambda: found
    copied = numbers.to("cpu", non_blocking=True)  # torch pins what it copies to in that way
    arrived = torch.cuda.current_stream(numbers.device).record_event()

    def wait() -> list[float]:
        arrived.synchronize()
        return copied.tolist()

    return wait
