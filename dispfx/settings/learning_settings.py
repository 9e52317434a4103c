"""How masks are learned: every constant of the method, with the paper's values as defaults.

Constants of arXiv 2410.11988, appendix: bias 3, temperature 1, λ 6, AdamW with learning rate 1e-3 and weight
decay 0.05, 10,000 steps of one sequence of 2048 tokens.  `docs/recipe.md` says what the `informed` recipe
changes, and what each change was worth.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dispfx.errors import DispfxError
from dispfx.settings.field import Section, plain_values, refuse_unknown_names, setting
from dispfx.words.choices import choice
from dispfx.words.option_names import option

EstimatorName = Literal["reinmax", "gumbel", "straight-through"]
HypernetworkName = Literal["full", "linear", "none"]
Schedule = Literal["constant", "cosine"]
Start = Literal["uniform", "sensitivity"]
ObjectiveName = Literal["ce", "kl", "mix"]
Packing = Literal["joined", "documents"]
BudgetOn = Literal["masks", "probabilities"]
Method = Literal["learned", "magnitude", "wanda", "flap", "fisher", "random"]
METHOD_ALIASES = {"activation": "wanda", "fluctuation": "flap", "sensitivity": "fisher"}
RecipeName = Literal["paper", "informed"]

DEFAULT_RECIPE: RecipeName = "informed"
# What a recipe sets; `paper` is the defaults of LearnSettings.  Both learn from 20.5 million tokens.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "paper": {},
    "informed": {
        "steps": 5_000,
        "batch_size": 2,
        "lr": 3e-3,
        "samples": 2,
        "antithetic": True,
        "sharpen": 3.0,
        "start": "sensitivity",
        "weight_decay": 1.0,
        "schedule": "cosine",
        "objective": "kl",
    },
}
# Additional settings of a recipe for runs of fewer than FEW_STEPS steps (docs/recipe.md).
FEW_STEPS = 2_500
RECIPES_OF_FEW_STEPS: Mapping[str, Mapping[str, Any]] = {
    "informed": {"budget_on": "probabilities", "budget_width": 0.1},
}
# The demo is small.  Four hundred steps are too few for a falling learning rate to gain anything.
DEMO: Mapping[str, Any] = {
    "steps": 400,
    "seq_len": 128,
    "batch_size": 8,
    "lr": 3e-3,
    "schedule": "constant",
    "weight_decay": 0.05,
}
# Over a range of ratios the demo needs more steps, and gains from a falling learning rate.
DEMO_RANGE: Mapping[str, Any] = {
    **DEMO,
    "steps": 600,
    "schedule": "cosine",
    "weight_decay": 1.0,
}
_USUAL, _BRIEF = RECIPES[DEFAULT_RECIPE], RECIPES_OF_FEW_STEPS[DEFAULT_RECIPE]
# Settings that adapt to the decoder while they have their defaults.
_ADAPTABLE = ("samples", "seq_len", "batch_size")


@dataclass(frozen=True)
class RecipeSettings(Section):
    """Which defaults learning starts from."""

    recipe: RecipeName | None = setting(
        None, "Learning settings to start from; each has its own option.", default=DEFAULT_RECIPE
    )


@dataclass(frozen=True)
class LearnSettings(Section):
    """How masks are learned.

    Args:
        adaptable: names of settings left at their default.  These may be adapted to the model; explicit ones
            never are.
    """

    method: Method = setting(
        "learned",
        "Learn the masks, or score the features once.",
        functions=True,
    )
    steps: int = setting(
        10_000,
        "Optimizer steps.",
        default=f"{_USUAL['steps']:,}; demo: {DEMO['steps']}",
        least=1,
        common=True,
    )
    seq_len: int = setting(
        2048,
        "Tokens per sequence.",
        default=f"2048, or the decoder's context if shorter; demo: {DEMO['seq_len']}",
        least=2,
        common=True,
    )
    batch_size: int = setting(
        1,
        "Sequences per forward pass, over all processes.",
        default=f"{_USUAL['batch_size']}, more if short; demo: {DEMO['batch_size']}",
        least=1,
        common=True,
    )
    accumulate: int = setting(1, "Forward passes per step; they share one sample of the masks.", least=1)
    packing: Packing = setting(
        "joined", "What a sequence is: a piece of the text, or documents without attention between them."
    )
    objective: ObjectiveName = setting(
        "ce",
        "Loss of the masks: cross entropy with the next token, KL from the dense decoder, or half of each.",
        default=_USUAL["objective"],
    )
    lr: float = setting(1e-3, "Learning rate of AdamW.", default=f"{_USUAL['lr']:g}", above=0.0, most=3e38)
    weight_decay: float = setting(
        0.05,
        "Weight decay of AdamW.",
        default=f"{_USUAL['weight_decay']:g}; demo: {DEMO['weight_decay']:g}",
        least=0.0,
    )
    lambda_: float = setting(6.0, "Weight of the budget loss.", least=0.0)
    budget_on: BudgetOn = setting(
        "masks",
        "The budget loss counts drawn masks, or the probability that each feature is kept.",
        default=f"masks; {_BRIEF['budget_on']} below {FEW_STEPS:,} steps",
    )
    budget_width: float = setting(
        0.0,
        "Width of the budget loss around the budget (Huber); 0 disables it.",
        default=f"0; {_BRIEF['budget_width']:g} below {FEW_STEPS:,} steps",
        least=0.0,
    )
    samples: int = setting(
        1, "Masks drawn per step, a divisor of the batch size.", default="one per sequence", least=1
    )
    antithetic: bool = setting(
        False, "Draw masks in pairs from u and 1 − u.", default="on; acts with two or more masks"
    )
    sharpen: float = setting(
        1.0,
        "Final factor of the logits, reached over the second half of the steps; 1 disables it.",
        default=f"{_USUAL['sharpen']:g}",
        least=1.0,
    )
    adaptable: tuple[str, ...] = ()
    start: Start = setting(
        "uniform", "Initial logits: all equal, or by the sensitivity of the loss.", default=_USUAL["start"]
    )
    estimator: EstimatorName = setting("reinmax", "Gradient estimator of the sampled masks.", functions=True)
    hypernetwork: HypernetworkName = setting(
        "full", "Network that predicts the logits; none: they are parameters."
    )
    constrained: bool = setting(False, "Share one selection between all reads and writes.")
    bias: float = setting(3.0, "Added to every logit, so that learning starts with nearly everything kept.")
    temperature: float = setting(1.0, "Temperature of the estimator.", above=0.0)
    schedule: Schedule = setting(
        "constant",
        "Learning rate over the steps; cosine falls to 0.",
        default=f"{_USUAL['schedule']}; demo: {DEMO['schedule']}",
    )
    seed: int = setting(0, "Seed of everything random. The same seed gives the same result.")
    save_every: int = setting(500, "Steps between two saved states.", least=1, per_run=True)
    max_bad_steps: int = setting(
        10, "Consecutive steps without a finite loss and gradient that stop the run.", least=1, per_run=True
    )
    log_every: int = setting(1, "Steps between two records.", least=1, on_command_line=False, per_run=True)
    held_out_every: int = setting(
        0,
        "Steps between two measurements of the held-out loss; 0 never measures.",
        least=0,
        on_command_line=False,
        per_run=True,
    )

    def __post_init__(self) -> None:
        """Reject values with which no run makes sense.

        Raises:
            DispfxError: naming the setting, what it may be and what was given.
        """
        if isinstance(self.method, str):
            object.__setattr__(self, "method", METHOD_ALIASES.get(self.method, self.method))
        super().__post_init__()
        if self.batch_size % self.samples:
            raise DispfxError(
                f"{option('samples')} must be a divisor of {option('batch_size')} ({self.batch_size}), "
                f"and {self.samples} was given",
            )

    @property
    def depends_on_steps(self) -> bool:
        """Whether steps depend on the length of the run, so that a finished run cannot be continued."""
        return self.schedule != "constant" or self.sharpen != 1.0

    def sharpness(self, step: int) -> float:
        """Return the factor of the logits in a step, counted from 0."""
        return 1.0 + (self.sharpen - 1.0) * max(0.0, 2.0 * step / self.steps - 1.0)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * step / self.steps))


def learn_settings(
    model: object = None, *, recipe: str | None = None, for_range: bool = False, **chosen: Any
) -> LearnSettings:
    """Return the chosen settings, over those of the demo and of a recipe.

    Args:
        model: MODEL; `demo` has its own sizes.
        recipe: `informed`, the default, or `paper`.
        for_range: whether masks are learned for a range of ratios.
        chosen: single settings by their names.

    Raises:
        UnknownSettingError: if a name is no setting of learning.
        DispfxError: if the recipe is unknown, or a value makes no sense.
    """
    refuse_unknown_names(tuple(chosen), tuple(LearnSettings.__dataclass_fields__))
    chosen = plain_values(LearnSettings, chosen)
    demo = DEMO_RANGE if for_range else DEMO
    changes = {**(demo if isinstance(model, str) and model == "demo" else {}), **chosen}
    name = recipe or DEFAULT_RECIPE
    few = (changes.get("steps") or FEW_STEPS) < FEW_STEPS
    settings = {**choice(RECIPES, name, "recipe"), **(RECIPES_OF_FEW_STEPS.get(name, {}) if few else {})}
    return LearnSettings(**_consistent_sizes(settings | changes, chosen))


def changed_settings(settings: LearnSettings, changes: Mapping[str, Any]) -> LearnSettings:
    """Return the settings with further choices.

    The number of steps no longer selects a recipe's settings for short runs.

    Raises:
        UnknownSettingError: if a name is no setting of learning.
        DispfxError: if a value makes no sense.
    """
    refuse_unknown_names(tuple(changes), tuple(LearnSettings.__dataclass_fields__))
    changes = plain_values(LearnSettings, changes)
    chosen = {name: getattr(settings, name) for name in _ADAPTABLE if name not in settings.adaptable}
    return LearnSettings(**_consistent_sizes(asdict(settings) | dict(changes), chosen | dict(changes)))


def _consistent_sizes(settings: dict[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Adapt batch size and samples to each other if only one of them was chosen."""
    batch_size = settings.get("batch_size", LearnSettings.batch_size)
    samples = settings.get("samples", LearnSettings.samples)
    if "samples" not in chosen and samples > 1:
        samples = batch_size  # one per sequence, in a batch of another size too
    if "batch_size" not in chosen:
        batch_size = max(batch_size, samples)
    adaptable = tuple(name for name in _ADAPTABLE if name not in chosen)
    return settings | {"batch_size": batch_size, "samples": samples, "adaptable": adaptable}


def seed_for(seed: int, purpose: str) -> int:
    """Return the seed for one use of randomness, so that two uses never draw the same numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{purpose}".encode()).digest()[:8], "big") >> 1
