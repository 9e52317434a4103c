"""Read a text far larger than memory and print what that took, as JSON.

    python -m tests.source.text.large_files FOLDER

Written by `test_large_files.py`, which runs this in a process of its own: the peak memory of a process can
only be known for the whole of it.
"""

import json
import resource
import struct
import sys
import time
from pathlib import Path

import torch

from dispfx.learning.text import TokenBatches
from dispfx.settings.sections import Reading
from dispfx.source.text import read_text
from dispfx.source.text.plain import spans
from dispfx.source.text.token_file import stored_tokens
from tests.source.byte_tokenizer import byte_tokenizer

TEXT_BYTES = 100 * 2**30
TOKENS = 10**10  # 40 GB as int32
READ_BYTES = 8 * 2**20
LINE = "a line of some words, as they are found in a text\n"


def sparse_text(path: Path) -> None:
    """Write a file of 100 GiB whose holes are where no piece is read; it takes 8 MiB of the disk."""
    block = (LINE * (2**20 // len(LINE) + 2)).encode()
    with path.open("wb") as file:
        for span in spans(TEXT_BYTES, READ_BYTES):
            file.seek(span.start)
            file.write(block[: span.stop - span.start])
        file.truncate(TEXT_BYTES)


def sparse_tokens(path: Path) -> None:
    """Write a token file of 40 GB, all zeros but the last token; it takes a few KB of the disk."""
    end = 4 * TOKENS
    header = json.dumps({"tokens": {"dtype": "I32", "shape": [TOKENS], "data_offsets": [0, end]}}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(end - 4, 1)
        file.write(struct.pack("<i", 77))


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def text_figures(folder: Path) -> dict[str, float | str]:
    """Read 8 MiB of 100 GiB of text."""
    path = folder / "crawl.txt"
    sparse_text(path)
    tokenizer = byte_tokenizer()
    read_text([__file__], tokenizer)
    before, start = peak_bytes(), time.perf_counter()
    read = read_text([path], tokenizer, Reading(data_bytes=READ_BYTES))
    return {
        "name": read.name,
        "tokens": len(read.tokens),
        "text": tokenizer.decode(read.tokens[5_000_000:5_000_060]),
        "seconds": time.perf_counter() - start,
        "grown_bytes": peak_bytes() - before,
    }


def token_figures(folder: Path) -> dict[str, float | str]:
    """Draw a hundred sequences from 40 GB of tokens."""
    path = folder / "tokens.safetensors"
    sparse_tokens(path)
    before, start = peak_bytes(), time.perf_counter()
    tokens = stored_tokens(path)
    text = TokenBatches.split(tokens, seq_len=2048, batch_size=2)
    total = sum(int(text.batch(step).sum()) for step in range(50))
    return {
        "tokens": len(tokens),
        "last": int(tokens[-1]),
        "total": total,
        "digest": text.digest,
        "seconds": time.perf_counter() - start,
        "grown_bytes": peak_bytes() - before,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    print(json.dumps({"tokens": token_figures(place), "text": text_figures(place)}))
