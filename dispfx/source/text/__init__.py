"""From the arguments of --data to token ids.

reading     common to all forms: sharing the limit, joining, checking
plain       UTF-8 files, and evenly spaced pieces of a large file
json_lines  .jsonl, .ndjson, .json, or .gz   documents    records with a field → one text
json_array  a list of JSON records
parquet     .parquet (pyarrow)
dataset     datasets:NAME (datasets)
token_file  .safetensors, mapped into memory
tokenizing  text → token ids, in bounded memory, and the tokens that every sequence begins with
legibility  share of a text that the tokenizer does not know
"""

from dispfx.source.text.reading import (
    ReadText,
    Words,
    check_readable,
    listed,
    read_apart,
    read_text,
)
from dispfx.source.text.token_file import joined_tokens, largest_id
from dispfx.source.text.tokenizing import bos_tokens, encode, tokens_in_front, with_bos

__all__ = [
    "ReadText", "Words", "bos_tokens", "check_readable", "encode", "joined_tokens", "largest_id", "listed",
    "read_apart", "read_text", "tokens_in_front", "with_bos",
]  # fmt: skip
