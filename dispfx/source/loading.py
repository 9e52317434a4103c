"""MODEL → `Source`, whatever its form."""

from pathlib import Path

import torch

from dispfx.demo import DECODER_FOLDER
from dispfx.errors import SourceError
from dispfx.origin import origin_of
from dispfx.source.causality import check_causal
from dispfx.source.function import build_module
from dispfx.source.location import Location, check_written_by_others, reach_hub
from dispfx.source.pretrained import load_pretrained
from dispfx.source.source import Source
from dispfx.source.tokenizer import load_tokenizer

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
        device: where the decoder shall lie.
        trust_remote_code: whether code that comes with the checkpoint may run.
        tokenizer: folder or hub id of another tokenizer than the decoder's own.

    Raises:
        SourceError: if there is no such decoder, it cannot be read, or it is no decoder.
    """
    origin = origin_of(spec)
    if revision is not None and origin != "hub":
        raise SourceError("--revision chooses a version of a hub id, and MODEL is none", where=spec)
    wanted = _dtype(dtype)
    target = _device(device)
    if origin == "function":
        source = Source(*build_module(spec), name=spec, origin=origin)
    else:
        source = load_pretrained(_location(spec, origin, revision), spec, origin, wanted, trust_remote_code)
    source = _with_tokenizer(source, tokenizer)
    model = source.model.to(device=target, dtype=wanted).eval()
    check_causal(model, spec, target)
    return source


def _location(spec: str, origin: str, revision: str | None) -> Location:
    if origin == "demo":
        return Location(str(DECODER_FOLDER))
    if origin == "hub":
        return reach_hub(spec, revision)
    path = Path(spec).expanduser()
    if origin == "gguf":
        return Location(str(path.parent), gguf_file=path.name)
    check_written_by_others(path)
    return Location(str(path))


def _with_tokenizer(source: Source, tokenizer: str | None) -> Source:
    if tokenizer is None:
        return source
    folder = Path(tokenizer).expanduser()
    location = Location(str(folder)) if folder.is_dir() else reach_hub(tokenizer, None)
    loaded, files = load_tokenizer(location, False)
    if loaded is None:
        raise SourceError("--tokenizer names a folder without a tokenizer", where=tokenizer)
    return Source(
        source.model, loaded, source.config, source.name, source.origin, source.generation_config, files
    )


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise SourceError(f"--dtype {dtype!r} is unknown", hint=f"one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _device(device: str | torch.device) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise SourceError(f"--device {device!r} is unknown", hint="cpu, cuda, or cuda:0") from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise SourceError(
            f"--device {target} was asked and torch sees {found} CUDA device(s)",
            hint="use --device cpu, or install a CUDA build of torch",
        )
    return target
