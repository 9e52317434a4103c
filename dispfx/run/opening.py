"""Open the decoder of a command, and find its context."""

from torch import nn

from dispfx.settings import ModelSettings
from dispfx.source import Source, load_source
from dispfx.source.transformers_classes import known_config
from dispfx.words.chosen_device import chosen_device, require_default_device


def open_model(settings: ModelSettings) -> Source:
    """Return MODEL as a `Source`; a module is used as it is.

    Raises:
        DispfxError: if the device is not available, or the default device of torch is not the CPU.
        SourceError: if MODEL is not a decoder, or does not exist.
    """
    require_default_device()
    device = chosen_device(settings.device)
    if isinstance(settings.model, nn.Module):
        return _source_of(settings.model)
    return load_source(
        settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        device=device,
        trust_remote_code=settings.trust_remote_code,
        tokenizer=settings.tokenizer,
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
