"""What a command starts from: the decoder, and the defaults that belong to it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from dispfx.choices import require_fields
from dispfx.chosen_device import chosen_device
from dispfx.huggingface.classes import known_config
from dispfx.learning.settings import DEFAULT_RECIPE, LearnSettings
from dispfx.learning.settings import recipe as recipe_of
from dispfx.source import Source, load_source

# What runs a decoder that was written.
Runtime = Literal["torch", "onnx"]

DEMO_CONTEXT = 256
LONGEST_CONTEXT = 2048

_DEMO_SETTINGS: dict[str, Any] = {"steps": 400, "seq_len": 128, "batch_size": 8, "lr": 3e-3}
# Four hundred steps are too few for a falling rate to gain anything (docs/recipe.md).
_DEMO_SETTINGS |= {"schedule": "constant", "weight_decay": 0.05}
# Sizes that give way to the decoder where nobody chose them.
_ADAPTABLE = ("samples", "seq_len", "batch_size")


def learn_settings(
    model: str | nn.Module | None, *, recipe: str | None = None, **chosen: Any
) -> LearnSettings:
    """Return the settings a user chose, over those of a recipe; the demo has sizes of its own.

    Args:
        recipe: `informed`, the default, or `paper`.
        chosen: single settings by their names.

    Raises:
        DispfxError: if there is no such recipe or setting, or a setting has a value with which no run makes
            sense.
    """
    require_fields(LearnSettings, chosen)
    changes = (_DEMO_SETTINGS if model == "demo" else {}) | chosen
    settings = recipe_of(recipe or DEFAULT_RECIPE, changes.get("steps")) | changes
    return LearnSettings(**_sizes(settings, chosen))


def changed_settings(settings: LearnSettings, changes: Mapping[str, Any]) -> LearnSettings:
    """Return the settings with what somebody chose besides, as if it had been chosen from the beginning.

    Raises:
        DispfxError: if there is no such setting, or one has a value with which no run makes sense.
    """
    require_fields(LearnSettings, changes)
    chosen = {name: getattr(settings, name) for name in _ADAPTABLE if name not in settings.adaptable}
    return LearnSettings(**_sizes(asdict(settings) | dict(changes), chosen | dict(changes)))


def _sizes(settings: dict[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose batch and masks fit each other, where somebody chose one of them alone."""
    batch_size, samples = settings.get("batch_size", 1), settings.get("samples", 1)
    if "samples" not in chosen and samples > 1:
        samples = batch_size  # one a sequence, in a batch of another size too
    if "batch_size" not in chosen:
        batch_size = max(batch_size, samples)
    adaptable = tuple(name for name in _ADAPTABLE if name not in chosen)
    return settings | {"batch_size": batch_size, "samples": samples, "adaptable": adaptable}


@dataclass(frozen=True, eq=False)
class Opening:
    """MODEL and how to open it."""

    model: str | nn.Module
    revision: str | None = None
    dtype: str | None = None
    device: str | None = None
    trust_remote_code: bool = False
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        """Check the device, before anything is read.

        Raises:
            DispfxError: if it is none that torch can compute on here.
        """
        chosen_device(self.device)

    def open(self) -> Source:
        """Return MODEL as a `Source`; a module is taken as it is.

        Raises:
            SourceError: if there is no such decoder, or it is none.
        """
        if isinstance(self.model, nn.Module):
            return _source_of(self.model)
        return load_source(
            self.model,
            revision=self.revision,
            dtype=self.dtype,
            device=chosen_device(self.device),
            trust_remote_code=self.trust_remote_code,
            tokenizer=self.tokenizer,
        )


def _source_of(model: nn.Module) -> Source:
    return Source(
        model=model,
        tokenizer=None,
        config=known_config(model),
        name=type(model).__name__,
        origin="function",
        generation_config=getattr(model, "generation_config", None),
    )


def context_of(source: Source) -> int:
    """Return the window that perplexity is measured with: 2048 tokens, or what the decoder can read."""
    if source.origin == "demo":
        return DEMO_CONTEXT
    return longest_context(source.config)


def longest_context(config: Any) -> int:
    """Return 2048 tokens, or what a transformers config says that the decoder can read."""
    return min(LONGEST_CONTEXT, named_context(config) or LONGEST_CONTEXT)


def named_context(config: Any) -> int | None:
    """Return how many tokens a transformers config says that the decoder can read, or None."""
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 1 else None
