"""How masks are learned: every constant of the method, with the paper's values as defaults.

Constants of arXiv 2410.11988, appendix: bias 3, temperature 1, λ 6, AdamW with learning rate 1e-3
and weight decay 0.05, 10,000 steps of one sequence of 2048 tokens.  `docs/recipe.md` says what the
`informed` recipe changes, and what each change was worth.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal

from dispfx.choices import check_choices, choice
from dispfx.errors import DispfxError

EstimatorName = Literal["reinmax", "gumbel", "straight-through"]
HypernetworkName = Literal["full", "linear", "none"]
Schedule = Literal["constant", "cosine"]
Start = Literal["uniform", "sensitivity"]
Packing = Literal["joined", "documents"]
BudgetOn = Literal["masks", "probabilities"]
Method = Literal["learned", "magnitude", "activation", "fluctuation", "sensitivity", "random"]


RecipeName = Literal["paper", "informed"]
# What a recipe sets; `paper` is what LearnSettings says.  Both learn from 20.5 million tokens.
DEFAULT_RECIPE: RecipeName = "informed"
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {},
    "informed": {
        "steps": 5_000,
        "batch_size": 2,
        "seq_len": 2048,
        "lr": 3e-3,
        "samples": 2,
        "antithetic": True,
        "sharpen": 3.0,
        "start": "sensitivity",
        "weight_decay": 1.0,
        "schedule": "cosine",
    },
}
# What a recipe sets besides in a run of fewer steps than FEW_STEPS (docs/recipe.md).
FEW_STEPS = 2_500
RECIPES_OF_FEW_STEPS: dict[str, dict[str, Any]] = {
    "informed": {"budget_on": "probabilities", "budget_width": 0.1},
}


def recipe(name: str, steps: int | None = None) -> dict[str, Any]:
    """Return what a recipe sets, by the names of LearnSettings.

    Args:
        steps: of the run; the recipe's own by default.

    Raises:
        DispfxError: naming the recipes that there are.
    """
    found = choice(RECIPES, name, "recipe")
    few = steps is not None and steps < FEW_STEPS
    return {**found, **(RECIPES_OF_FEW_STEPS.get(name, {}) if few else {})}


@dataclass(frozen=True)
class LearnSettings:
    """Settings of one run.

    Args:
        method: how features are chosen; all but `learned` score them once (`dispfx.learning.scores`) and
            take the seed, seq_len and batch_size only.
        steps: optimizer steps.
        seq_len: tokens a sequence.
        batch_size: sequences a forward pass.
        packing: what a sequence is to the decoder: one text, or documents that do not see each other.
        accumulate: forward passes a step; they share one sample of the masks.
        lr: learning rate of AdamW.
        weight_decay: of AdamW.
        lambda_: weight of the budget loss.
        budget_on: what the budget loss counts: the masks that were drawn, or the probability that each
            feature is kept, whose count is the mean over all draws and has no noise.
        budget_width: the budget loss is eased where it is below this (`dispfx.learning.objective.eased`), so
            that near the budget it does not push to and fro; 0 leaves it as it is.
        samples: masks drawn a step; each serves batch_size / samples sequences.
        antithetic: masks are drawn in pairs from opposite random numbers, u and 1 - u, where two are left
            to draw: what one of a pair drops for its number, the other keeps.
        sharpen: over the second half of the steps, logits are multiplied by a number that grows from 1 to
            this before masks are drawn, so that what is drawn comes close to the plan that it ends in.
        adaptable: of `samples`, `seq_len` and `batch_size` those that nobody chose: they become what suits
            a decoder that mixes the sequences of a batch, or reads shorter ones; otherwise it is refused.
        start: logits to start from: the bias alone, or also how sensitive the loss is to each feature.
        estimator: how gradients pass the sampled masks.
        hypernetwork: what the logits come from; `none` learns them one by one.
        constrained: all read and write sites share one selection.
        bias: added to every logit, so that learning starts with nearly everything kept.
        temperature: of the estimators.
        schedule: of the learning rate over the steps.
        seed: of everything random; the same seed gives the same plan.
        save_every: steps between two saved states.
        max_bad_steps: steps in a row without a finite loss and gradient that end the run.
        log_every: steps between two records.
        held_out_every: steps between two measurements of the held-out loss; 0 measures never.
    """

    method: Method = "learned"
    steps: int = 10_000
    seq_len: int = 2048
    batch_size: int = 1
    accumulate: int = 1
    packing: Packing = "joined"
    lr: float = 1e-3
    weight_decay: float = 0.05
    lambda_: float = 6.0
    budget_on: BudgetOn = "masks"
    budget_width: float = 0.0
    samples: int = 1
    antithetic: bool = False
    sharpen: float = 1.0
    adaptable: tuple[str, ...] = ()
    start: Start = "uniform"
    estimator: EstimatorName = "reinmax"
    hypernetwork: HypernetworkName = "full"
    constrained: bool = False
    bias: float = 3.0
    temperature: float = 1.0
    schedule: Schedule = "constant"
    seed: int = 0
    save_every: int = 500
    max_bad_steps: int = 10
    log_every: int = 1
    held_out_every: int = 0

    def __post_init__(self) -> None:
        """Refuse values with which no run makes sense.

        Raises:
            DispfxError: naming the setting, what it may be and what was found.
        """
        least = {"steps": 1, "seq_len": 2, "batch_size": 1, "accumulate": 1, "save_every": 1}
        least |= {"samples": 1, "max_bad_steps": 1, "log_every": 1, "held_out_every": 0}
        for name, smallest in least.items():
            _require(getattr(self, name) >= smallest, name, f"at least {smallest}", getattr(self, name))
        for name in ("lr", "temperature"):
            value = getattr(self, name)
            _require(0.0 < value < math.inf, name, "a positive number", value)
        for name in ("lambda_", "weight_decay", "budget_width"):
            value = getattr(self, name)
            _require(0.0 <= value < math.inf, name, "zero or a positive number", value)
        _require(math.isfinite(self.bias), "bias", "a finite number", self.bias)
        _require(1.0 <= self.sharpen < math.inf, "sharpen", "a number of at least 1", self.sharpen)
        check_choices(self)
        divides = self.batch_size % self.samples == 0
        _require(divides, "samples", f"a divisor of batch_size ({self.batch_size})", self.samples)

    @property
    def depends_on_steps(self) -> bool:
        """Whether a step is another one in a longer run, which a finished run then cannot be made into."""
        return self.schedule != "constant" or self.sharpen != 1.0

    def sharpness(self, step: int) -> float:
        """Return what logits are multiplied by before masks are drawn in a step, counted from 0."""
        return 1.0 + (self.sharpen - 1.0) * max(0.0, 2.0 * step / self.steps - 1.0)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * step / self.steps))


def seed_for(seed: int, purpose: str) -> int:
    """Return the seed of one use of randomness, so that no two uses draw the same numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{purpose}".encode()).digest()[:8], "big") >> 1


def _require(holds: bool, name: str, allowed: str, found: object) -> None:
    if not holds:
        raise DispfxError(f"{name} must be {allowed}, and {found!r} was given", where=f"LearnSettings.{name}")
