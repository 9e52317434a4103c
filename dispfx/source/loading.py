"""MODEL in any form → `Source`."""

from pathlib import Path

import torch

from dispfx.demo import DECODER_FOLDER
from dispfx.errors import SourceError
from dispfx.source.causality import check_causal
from dispfx.source.contents import check_checkpoint, check_weights
from dispfx.source.function import build_module
from dispfx.source.location import Location, reach_hub
from dispfx.source.moving import moved
from dispfx.source.pretrained import build_from_config, load_pretrained
from dispfx.source.source import Source
from dispfx.source.tokenizer import load_tokenizer
from dispfx.words.choices import choice
from dispfx.words.chosen_device import chosen_device
from dispfx.words.model_origin import origin_of

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
    source = _with_tokenizer(source, tokenizer, trust_remote_code)
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
        raise SourceError("a GGUF file has no separate config", where=spec, hint="leave out --config-only")
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
        raise SourceError("--revision chooses a version of a hub id, but MODEL is not a hub id", where=spec)


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


def _with_tokenizer(source: Source, tokenizer: str | None, trust_remote_code: bool) -> Source:
    if tokenizer is None:
        return source
    folder = Path(tokenizer).expanduser()
    location = Location(str(folder)) if folder.is_dir() else reach_hub(tokenizer, None, "--tokenizer")
    loaded, files = load_tokenizer(location, trust_remote_code)
    if loaded is None:
        raise SourceError("--tokenizer names a folder without a tokenizer", where=tokenizer)
    return Source(
        source.model, loaded, source.config, source.name, source.origin, source.generation_config, files
    )


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of a name; None stays None.

    Raises:
        DispfxError: if the name is unknown.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    return choice(_DTYPES, dtype, "--dtype")
