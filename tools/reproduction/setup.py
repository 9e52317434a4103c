"""What a run is learned with, what all runs of a folder share, and what a run gave."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setup:
    """What one run is learned with.

    Args:
        ratio: share of the layers' weights to remove.
        changes: settings of `LearnSettings` that differ from the tables' own, as (name, value).
        text: which of the texts is learned from.
    """

    ratio: float
    changes: tuple[tuple[str, Any], ...] = ()
    text: int = 0

    @staticmethod
    def of(ratio: float, text: int = 0, **changes: Any) -> "Setup":
        """Return the setup with these settings changed; their order does not matter."""
        return Setup(ratio, tuple(sorted(changes.items())), text)

    @property
    def name(self) -> str:
        """A name for the run's folder, the same for the same setup."""
        words = [f"{self.ratio:g}", *(f"{key}={value}" for key, value in self.changes)]
        return ",".join([*words, *(["other-text"] if self.text else [])])


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Args:
        perplexity: of the pruned decoder on each text that is measured on.
        achieved: share of the counted parameters that the plan removes.
        parameters: of the pruned decoder, counted from its tensors.
        steps: of learning, 0 for a score.
        batch_tokens: tokens per step.
        learning_seconds: preparing and compiling included; None where the run was cut off in between.
        notes: how the decoder was run.
    """

    perplexity: tuple[float, ...]
    achieved: float
    parameters: int
    steps: int
    batch_tokens: int
    learning_seconds: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Common:
    """What all runs of a folder share.

    Args:
        model: MODEL of `dispfx compile`.
        data, other_data: texts to learn from; the demo brings its own two.
        eval_data: text to measure on; by default the last tenth of each text.
        settings: chosen over those of the recipe.
        windows: of perplexity, on each text; None for all.
        remark: what a reader of the tables must know of how they were made.
    """

    model: str = "demo"
    data: tuple[str, ...] = ()
    other_data: tuple[str, ...] = ()
    eval_data: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: str | None = None
    recipe: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    align: int = 1
    context: int | None = None
    windows: int | None = None
    compile: Any = "auto"
    remark: str = ""
