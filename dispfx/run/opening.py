"""Open the decoder of a command, and find its context."""

import torch
from torch import nn

from dispfx.errors import SourceError
from dispfx.run.folders import Opened, open_folder
from dispfx.settings import ModelSettings
from dispfx.source import Source, dtype_of, load_source
from dispfx.source.experts import Experts
from dispfx.source.loading import with_tokenizer
from dispfx.source.transformers_classes import known_config
from dispfx.words.chosen_device import chosen_device, require_default_device
from dispfx.words.option_names import option


def open_model(settings: ModelSettings) -> Source:
    """Return MODEL as a `Source`; a module is used as it is.

    Raises:
        DispfxError: if the device is not available, or the default device of torch is not the CPU.
        SourceError: if MODEL is not a decoder, or does not exist, or a module is not as the settings say.
    """
    require_default_device()
    device = chosen_device(settings.device)
    if isinstance(settings.model, nn.Module):
        _require_as_it_is(settings.model, settings)
        return with_tokenizer(_source_of(settings.model), settings.tokenizer, settings.trust_remote_code)
    return load_source(
        settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        device=device,
        trust_remote_code=settings.trust_remote_code,
        tokenizer=settings.tokenizer,
    )


def open_output(settings: ModelSettings, *, of_dense: bool = False, experts: Experts = "grouped") -> Opened:
    """Return the output folder that MODEL names, with the tokenizer of the settings.

    Args:
        of_dense: whether revision and type are those of a dense decoder that is opened too.
        experts: as for `open_folder`.

    Raises:
        SourceError: if the settings name a revision or a type, which a folder has itself.
        DispfxError: as `open_folder`.
    """
    if not of_dense:
        require_own_form(settings)
    return open_folder(
        settings.model,
        device=settings.device or "cpu",
        trust_remote_code=settings.trust_remote_code,
        experts=experts,
        tokenizer=settings.tokenizer,
    )


def require_own_form(settings: ModelSettings) -> None:
    """Require that the settings name neither revision nor type of an output folder.

    Raises:
        SourceError: with the one that they name.
    """
    for name in ("revision", "dtype"):
        if (value := getattr(settings, name)) is not None:
            raise SourceError(
                f"{option(name, value)} has no effect on a folder that dispfx wrote: it is used as it is",
                where=str(settings.model),
                hint=f"leave out {option(name)}",
            )


def _require_as_it_is(module: nn.Module, settings: ModelSettings) -> None:
    """Require that the settings ask for nothing that a module is not."""
    first = next((one for one in module.parameters() if one.is_floating_point()), None)
    wanted = dtype_of(settings.dtype)
    problem = hint = None
    if settings.revision is not None:
        problem, hint = f"{option('revision')} chooses a version of a hub id", "leave it out"
    elif first is not None and wanted not in (None, first.dtype):
        problem, hint = f"its weights are {first.dtype}", f"convert it first: module.to({wanted})"
    elif first is not None and settings.device is not None and not _is_on(first, settings.device):
        problem, hint = f"it is on {first.device}", f"move it first: module.to({settings.device!r})"
    if problem is not None:
        raise SourceError(f"a module is used as it is, and {problem}", where=type(module).__name__, hint=hint)


def _is_on(tensor: torch.Tensor, device: str) -> bool:
    """Whether a tensor is on a device; one on no device yet, or offloaded, is not moved."""
    wanted = torch.device(device)
    return tensor.is_meta or (
        tensor.device.type == wanted.type and wanted.index in (None, tensor.device.index)
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
