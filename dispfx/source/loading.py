"""MODEL in any form → `Source`.

A model must predict each token from earlier tokens only; other models are rejected.  The class name is not
enough: an encoder's checkpoint loads into a causal class without a missing weight.  So the last token is
changed, and the logits before it must not change.

A decoder moves to a device and dtype also if its class overrides `to`:

    nn.Module:   model.to(device=…, dtype=…)
    overridden:  model.to(device), then model.to(dtype), as TransformerLens expects

Legend: B batch, T tokens, V vocabulary
"""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.capturing.logits import logits_of, widths_of
from dispfx.capturing.module_state import in_evaluation_mode
from dispfx.demo import DECODER_FOLDER
from dispfx.errors import CaptureError, SourceError
from dispfx.ir.logit_errors import logit_errors
from dispfx.source.contents import check_checkpoint, check_weights
from dispfx.source.function import build_module
from dispfx.source.location import Location, reach_hub
from dispfx.source.pretrained import build_from_config, load_pretrained
from dispfx.source.source import Source
from dispfx.source.tokenizer import load_tokenizer
from dispfx.words.choices import choice
from dispfx.words.chosen_device import chosen_device
from dispfx.words.model_origin import origin_of
from dispfx.words.option_names import option

# An index names weight files in its folder.
_WEIGHT_ENDINGS = (
    ".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".index.json", ".onnx",
)  # fmt: skip

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_source(
    spec: str,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
) -> Source:
    """Load the decoder that MODEL names, in eval mode, and its tokenizer.

    Args:
        spec: MODEL: `demo`, a folder, a .gguf file, a hub id, or package.module:function.
        revision: branch, tag or commit of a hub id.
        dtype: float32, bfloat16 or float16; None keeps that of the weights (float32 for GGUF).
        device: of the decoder.
        trust_remote_code: whether code that comes with the checkpoint may run.
        tokenizer: folder or hub id of a tokenizer, instead of the decoder's own.

    Raises:
        SourceError: if MODEL does not exist, cannot be read, or is not a decoder.
    """
    origin = origin_of(spec)
    _check_revision(spec, origin, revision)
    if config_alone(spec):
        raise SourceError(
            "the weights cannot be loaded: MODEL is only a config",
            where=spec,
            hint="`dispfx inspect` shows what can be pruned in it; everything else needs the weights",
        )
    wanted = dtype_of(dtype)
    target = chosen_device(device)
    if origin == "function":
        source = Source(*build_module(spec), name=spec, origin=origin)
    else:
        location = _location(spec, origin, revision)
        if origin == "folder":
            check_weights(Path(location.path))
        source = load_pretrained(location, spec, origin, wanted, trust_remote_code)
    source = with_tokenizer(source, tokenizer, trust_remote_code)
    model = moved(source.model, target, wanted).eval()
    check_causal(model, spec, target)
    return source


def load_config(
    spec: str,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Source:
    """Build the decoder of MODEL's config on the meta device: shapes without values.

    No weights are read or downloaded, so a decoder of any size takes little memory.  It has no tokenizer.

    Args:
        spec: MODEL, or a config.json; a GGUF file is rejected, because it has no separate config.
        revision, dtype, trust_remote_code: as in `load_source`; the config's own dtype by default.

    Raises:
        SourceError: if the config does not exist, or does not describe a decoder.
    """
    origin = origin_of(spec)
    _check_revision(spec, origin, revision)
    wanted = dtype_of(dtype)
    if origin == "gguf":
        raise SourceError(
            "a GGUF file has no separate config", where=spec, hint=f"leave out {option('config_only')}"
        )
    if origin == "function":
        with torch.device("meta"):
            module, tokenizer, config = build_module(spec)
        return Source(moved(module, torch.device("meta"), wanted).eval(), tokenizer, config, spec, origin)
    location = Location(spec) if origin == "config" else _location(spec, origin, revision)
    return build_from_config(location, spec, origin, wanted, trust_remote_code)


def config_alone(spec: str) -> bool:
    """Whether MODEL is a config.json, or a folder that holds one and no weights."""
    origin = origin_of(spec)
    if origin != "folder":
        return origin == "config"
    files = [file.name for file in Path(spec).expanduser().iterdir()]
    return "config.json" in files and not any(name.endswith(_WEIGHT_ENDINGS) for name in files)


def _check_revision(spec: str, origin: str, revision: str | None) -> None:
    if revision is not None and origin != "hub":
        raise SourceError(
            f"{option('revision')} chooses a version of a hub id, but MODEL is not a hub id", where=spec
        )


def _location(spec: str, origin: str, revision: str | None) -> Location:
    if origin == "demo":
        return Location(str(DECODER_FOLDER))
    if origin == "hub":
        return reach_hub(spec, revision)
    path = Path(spec).expanduser()
    if origin == "gguf":
        return Location(str(path.parent), gguf_file=path.name)
    check_checkpoint(path)
    return Location(str(path))


def with_tokenizer(source: Source, tokenizer: str | None, trust_remote_code: bool) -> Source:
    """Return a source with the tokenizer that was named, or with its own for None."""
    return (
        source
        if tokenizer is None
        else replace(source, tokenizer=named_tokenizer(tokenizer, trust_remote_code))
    )


def named_tokenizer(tokenizer: str, trust_remote_code: bool) -> Any:
    """Return the tokenizer of a folder or hub id.

    Raises:
        SourceError: if it has none.
    """
    folder = Path(tokenizer).expanduser()
    location = Location(str(folder)) if folder.is_dir() else reach_hub(tokenizer, None, option("tokenizer"))
    loaded = load_tokenizer(location, trust_remote_code)
    if loaded is None:
        raise SourceError(f"{option('tokenizer')} names a folder without a tokenizer", where=tokenizer)
    return loaded


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of a name; None stays None.

    Raises:
        DispfxError: if the name is unknown.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    return choice(_DTYPES, dtype, option("dtype"))


# Relative to the largest logit.  Equal prefixes may round differently where experts are grouped by
# token (3e-7 in float32); an untrained bidirectional layer of the usual scale moves them by 4e-4.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}

# Ids 0 and 1 exist in every vocabulary.  The last position differs.
_IDS_BT = ((1, 0, 1, 1, 0, 1, 0, 1), (1, 0, 1, 1, 0, 1, 0, 0))


def check_causal(model: nn.Module, name: str, device: torch.device) -> None:
    """Check that `model` maps token ids to logits, each from earlier tokens only.

    Raises:
        SourceError: if it cannot run, does not return logits, gives other ones each time, or uses later
            tokens.
    """
    runs = (*_IDS_BT, _IDS_BT[0])
    first_TV, second_TV, again_TV = (
        _logits(model, torch.tensor([ids], device=device), name)[0] for ids in runs
    )
    if not bool(first_TV.isfinite().all()):
        return  # The capture names the weight, or says that logits are infinite.
    tolerance = _TOLERANCE.get(first_TV.dtype, 3e-2)
    if logit_errors(first_TV, again_TV)[1] > tolerance:
        raise SourceError(
            "the model gives other logits each time that it runs on the same tokens",
            where=name,
            hint="remove what is random, and what one call leaves for the next",
        )
    if logit_errors(first_TV[:-1], second_TV[:-1])[1] > tolerance:
        raise SourceError(
            "a decoder must predict each token from the tokens before it, "
            "and this model's logits change with a later token",
            where=name,
            hint="encoders and models with bidirectional attention cannot be compiled",
        )


def require_own_call(source: Source) -> None:
    """Check that a decoder of transformers runs with its own default arguments, as its folder's decoder will.

    Raises:
        SourceError: if it cannot run, or does not return logits.
    """
    if source.config is None:
        return
    ids = torch.tensor(_IDS_BT[:1], device=next(source.model.parameters()).device)
    with in_evaluation_mode(source.model):
        _logits(source.model, ids, source.name)


def _logits(model: nn.Module, ids_BT: Tensor, name: str) -> Tensor:
    try:
        with torch.no_grad():
            output = model(ids_BT)
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        raise SourceError(
            f"the model cannot run on token ids (batch, tokens): {type(error).__name__}: {message}",
            where=name,
            hint="its forward must take int64 token ids first and need nothing else",
        ) from error
    try:
        return logits_of(output, ids_BT, widths_of(model))
    except CaptureError as error:
        raise SourceError(error.problem, where=name, hint=error.hint) from error


def moved(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a decoder on a device, with floating-point tensors of a dtype; None keeps their dtypes.

    `to` is not called if nothing has to change.

    Raises:
        SourceError: if weights have no values here, because they are on the meta device.
    """
    if any(one.is_meta for one in model.parameters()) and device.type != "meta":
        raise SourceError(
            "weights of the decoder have no values in memory: they are on the meta device",
            where=type(model).__name__,
            hint="load the decoder whole, without offloading to CPU or disk",
        )
    wanted: dict[str, Any] = {"device": device} if dtype is None else {"device": device, "dtype": dtype}
    if all(_is_there(tensor, device, dtype) for tensor in (*model.parameters(), *model.buffers())):
        return model
    try:
        inspect.signature(model.to).bind(**wanted)
    except TypeError:
        for step in wanted.values():
            own: Any = model.to
            model = own(step) or model  # an in-place `to` may return None
        return model
    together: Any = model.to
    return together(**wanted) or model


def _is_there(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> bool:
    same = dtype is None or not tensor.is_floating_point() or tensor.dtype == dtype
    index = device.index if device.index is not None or device.type == "cpu" else tensor.device.index
    return same and tensor.device.type == device.type and tensor.device.index == index
