"""Text and token files → one tensor of token ids."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dispfx.errors import DataError

TOKENS = "tokens"


def read_tokens(paths: str | Path | Iterable[str | Path], tokenizer: Any | None) -> Tensor:
    """Return the token ids of all files in order, shape (N,), int64.

    1. Neighbouring text files are joined by a line break and tokenised in one piece, without special
       tokens, since a tokenizer sees another text when it is fed line by line.
    2. A `.safetensors` file holds one integer vector named `tokens` and needs no tokenizer.

    Raises:
        DataError: if a file is missing, empty, not UTF-8, or there is no tokenizer for it.
    """
    files = [Path(path).expanduser() for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if not files:
        raise DataError("a text file is needed and none was given")
    parts = []
    for stored, group in groupby(files, key=lambda path: path.suffix == ".safetensors"):
        members = list(group)
        if stored:
            parts.extend(_stored_tokens(path) for path in members)
        else:
            text = "\n".join(_text(path) for path in members)
            parts.append(encode(text, tokenizer, where=str(members[0])))
    return torch.cat(parts)


def _text(path: Path) -> str:
    try:
        # Bytes, not text mode: line ends are part of the text that is measured.
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the text must be UTF-8, and byte {error.start} is not", where=str(path), hint="convert the file"
        ) from error
    except OSError as error:
        raise DataError(f"the text cannot be read: {error.strerror}", where=str(path)) from error
    if not text.strip():
        raise DataError("the text is empty", where=str(path))
    return text


def encode(text: str, tokenizer: Any | None, *, where: str | None = None) -> Tensor:
    """Return the token ids of a text, shape (N,), int64, without special tokens.

    Args:
        where: the file that the text is from, for the message.

    Raises:
        DataError: if there is no tokenizer, or it finds no token.
    """
    if tokenizer is None:
        raise DataError(
            "a tokenizer is needed to read text, and this model has none",
            where=where,
            hint=f"name one with --tokenizer, or pass a .safetensors file with an integer vector '{TOKENS}'",
        )
    # verbose=False: a text longer than one window is the usual case here, not worth a warning.
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise DataError("the tokenizer finds no token in the text", where=where)
    return torch.tensor(ids, dtype=torch.int64)


def _stored_tokens(path: Path) -> Tensor:
    if not path.is_file():
        raise DataError("a token file was expected and there is none", where=str(path))
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            tokens = file.get_tensor(TOKENS) if TOKENS in names else None
    except (SafetensorError, OSError) as error:
        raise DataError(f"this is no safetensors file: {error}", where=str(path)) from error
    if tokens is None:
        raise DataError(
            f"a token file holds a tensor '{TOKENS}', and this one holds {names}", where=str(path)
        )
    if tokens.dim() != 1 or tokens.dtype.is_floating_point or tokens.dtype.is_complex:
        raise DataError(
            f"'{TOKENS}' must be one vector of integers and is {tokens.dtype} {tuple(tokens.shape)}",
            where=str(path),
        )
    if not len(tokens) or int(tokens.min()) < 0:
        raise DataError(f"'{TOKENS}' must hold token ids from 0 upwards", where=str(path))
    return tokens.to(torch.int64)
