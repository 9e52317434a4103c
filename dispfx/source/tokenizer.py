"""A checkpoint's tokenizer and its files."""

import contextlib
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoTokenizer

from dispfx.errors import SourceError
from dispfx.files.json_text import read_json
from dispfx.source.location import Location
from dispfx.source.quiet import installation, quiet, short
from dispfx.words.option_names import option

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
)


def load_tokenizer(location: Location, trust_remote_code: bool) -> Any | None:
    """Return the tokenizer at `location`, or None if there are no such files.

    Raises:
        SourceError: if it cannot be read.
    """
    with quiet(location):
        files = () if location.gguf_file else _tokenizer_files(location)
        if not files and not location.gguf_file and not location.hub:
            return None
        try:
            return AutoTokenizer.from_pretrained(
                location.path, trust_remote_code=trust_remote_code, **location.options
            )
        except Exception as error:
            if location.hub and not _tokenizer_files(location):
                return None
            if not trust_remote_code and _own_code(files):
                raise SourceError(
                    "the tokenizer needs code that comes with it",
                    where=location.path,
                    hint=f"read that code, then allow it with {option('trust_remote_code', True)}",
                ) from error
            raise SourceError(
                f"the tokenizer cannot be read: {short(error)}",
                where=location.path,
                hint=installation(error) or f"name another one with {option('tokenizer')}",
            ) from error


def load_folder_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> Any | None:
    """Return the tokenizer in `folder`, or None if it has no such files.

    Args:
        trust_remote_code: whether code that comes with it may run.

    Raises:
        SourceError: if its files cannot be read.
    """
    return load_tokenizer(Location(str(folder)), trust_remote_code)


def _own_code(files: tuple[Path, ...]) -> bool:
    """Whether a tokenizer's own config names code that comes with it."""
    for file in files:
        if file.name == "tokenizer_config.json":
            with contextlib.suppress(OSError, ValueError):
                entries = read_json(file)
                return isinstance(entries, dict) and bool(entries.get("auto_map"))
    return False


def _tokenizer_files(location: Location) -> tuple[Path, ...]:
    if not location.hub:
        paths = [Path(location.path) / name for name in _TOKENIZER_FILES]
        return tuple(path for path in paths if path.is_file())
    cached = [
        try_to_load_from_cache(location.path, name, revision=location.revision) for name in _TOKENIZER_FILES
    ]
    return tuple(Path(path) for path in cached if isinstance(path, str))
