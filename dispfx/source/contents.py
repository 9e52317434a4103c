"""Diagnose folders that are not complete checkpoints of a decoder, with a remedy.

This runs before transformers opens the folder, because its errors name neither file nor remedy.
"""

import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dispfx.errors import SourceError
from dispfx.files.json_text import read_json
from dispfx.files.unreadable import NOT_FETCHED, fetching, is_pointer
from dispfx.words.model_origin import FORMS
from dispfx.words.preconditions import WHOLE_FOLDER

CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"
_PLAN_FILE = "plan.safetensors"
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_DOWNLOAD_AGAIN = "download that file again"

# File that identifies other model folders, their content, and what to pass instead.
_OTHER_KINDS = {
    "model_index.json": ("a diffusion pipeline, not a decoder", FORMS),
    "params.json": (
        "weights in their publisher's own format",
        "convert them to a transformers checkpoint, or download the one that the publisher offers",
    ),
    "*.onnx": ("only an ONNX model", "pass the PyTorch checkpoint that it was exported from"),
    "*.engine": ("a TensorRT engine", "pass the PyTorch checkpoint that it was built from"),
}
_READ = (".safetensors", ".bin", *_INDICES)
_CONVERT = "convert it to a checkpoint in safetensors, or download one"
# Weights in a folder with a config, by file ending.
_OTHER_WEIGHTS = {
    ".onnx": ("an ONNX model", "pass the PyTorch checkpoint that it was exported from"),
    ".gguf": ("a GGUF file", "pass that file itself as MODEL"),
    ".h5": ("a TensorFlow checkpoint", _CONVERT),
    ".msgpack": ("a Flax checkpoint", _CONVERT),
    ".pth": ("weights in their publisher's own format", _CONVERT),
    ".pt": ("weights in their publisher's own format", _CONVERT),
}


def check_checkpoint(folder: Path) -> None:
    """Raise unless a folder holds a transformers config, and was not written by dispfx or PEFT.

    Raises:
        SourceError: with the content of the folder.
    """
    if (folder / _PLAN_FILE).is_file():
        raise SourceError(
            "the folder holds a decoder that dispfx has already pruned",
            where=str(folder),
            hint="name the dense decoder that it was made from; eval, generate, export and recover take this "
            f"folder, and dispfx inspect {folder / _PLAN_FILE} shows its plan",
        )
    if (folder / ADAPTER_FILE).is_file():
        raise _adapter(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise _no_checkpoint(folder)
    for file in sorted(folder.iterdir()):
        _check_fetched(file)


def check_weights(folder: Path) -> None:
    """Raise if a weight file of a folder is missing or truncated, according to indices and headers.

    Raises:
        SourceError: with the file that is missing or damaged.
    """
    names = [file.name for file in folder.iterdir()]
    if not any(name.endswith(_READ) for name in names):
        for ending, (what, hint) in _OTHER_WEIGHTS.items():
            if found := sorted(name for name in names if name.endswith(ending)):
                raise SourceError(
                    f"the folder holds {what}, but no weights that can be read",
                    where=str(folder / found[0]),
                    hint=hint,
                )
    for name in _INDICES:
        _check_shards(folder, name)
    for file in sorted(folder.glob("*.safetensors")):
        _check_whole(file)


def _adapter(folder: Path) -> SourceError:
    base = _entries(folder / ADAPTER_FILE).get("base_model_name_or_path") or "its decoder"
    if (folder / CONFIG_FILE).is_file():
        return SourceError(
            f"the folder holds an adapter for {base} next to the decoder's own files",
            where=str(folder / ADAPTER_FILE),
            hint="merge the adapter (PEFT's merge_and_unload), or move its files away to compile without it",
        )
    if os.path.isfile(os.path.join(str(base), _PLAN_FILE)):
        return SourceError(
            f"the folder holds only an adapter for {base}, which dispfx has already pruned",
            where=str(folder / ADAPTER_FILE),
            hint=WHOLE_FOLDER,
        )
    return SourceError(
        f"the folder holds only an adapter; merge it into {base}, and compile the result",
        where=str(folder / ADAPTER_FILE),
        hint='python -c "from peft import AutoPeftModelForCausalLM as A; A.from_pretrained('
        f"'{folder}').merge_and_unload().save_pretrained('MERGED')\"",
    )


def _no_checkpoint(folder: Path) -> SourceError:
    held, hint = _held(folder)
    return SourceError(
        f"the folder has no config.json, so it is not a transformers checkpoint{held}",
        where=str(folder),
        hint=hint,
    )


def _held(folder: Path) -> tuple[str, str]:
    """Return the content of a folder without a config, as the end of a sentence, and what to pass instead."""
    if ggufs := sorted(folder.glob("*.gguf")):
        return "; it holds GGUF files", f"name one of them: {ggufs[0]}"
    for pattern, (what, hint) in _OTHER_KINDS.items():
        if next(folder.glob(pattern), None) is not None:
            return f"; it holds {what}", hint
    inner = sorted(path.parent for path in folder.glob(f"*/{CONFIG_FILE}"))
    if inner:
        return f"; there is one in {inner[0].name}", f"pass {inner[0]}"
    return "", FORMS


def _check_fetched(file: Path) -> None:
    """Reject a git-lfs pointer file."""
    if is_pointer(file):
        raise SourceError(NOT_FETCHED, where=str(file), hint=fetching(file))


def _check_shards(folder: Path, index: str) -> None:
    """Reject an index that names missing files."""
    weight_map = _entries(folder / index).get("weight_map")
    names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise SourceError(
            f"{len(missing)} of the {len(names)} weight files that the index names are missing: {shown}",
            where=str(folder / index),
            hint="download them into the folder",
        )


def _check_whole(file: Path) -> None:
    """Reject a safetensors file whose header shows that it is truncated or damaged."""
    try:
        with safe_open(file, framework="pt"):
            return
    except (SafetensorError, OSError) as error:
        raise SourceError(
            f"the weight file is truncated or damaged: {error}", where=str(file), hint=_DOWNLOAD_AGAIN
        ) from error


def _entries(file: Path) -> dict[str, Any]:
    """Return the entries of a JSON file; empty if it cannot be read."""
    try:
        entries = read_json(file)
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}
