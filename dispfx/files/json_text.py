"""Read JSON from untrusted files.

Python's reader raises different errors for text that is not UTF-8, text that is not JSON, and nesting beyond
the recursion limit.  Here all of them are a ValueError, and so are integers too large for a float, which
would fail later.
"""

import json
from pathlib import Path
from typing import Any

# 1e308 is about the largest float.
_MOST_DIGITS = 300


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: if it is not UTF-8 or not JSON, is nested too deeply, or holds an integer too large for a
            float.
        TypeError: if it is not text.
    """
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, parse_int=_whole_number)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def json_value_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, and its end.

    Raises:
        ValueError: as `parse_json`, also if the text ends inside the value.
    """
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole_number)


def read_json(path: Path) -> Any:
    """Return the value of a JSON file.

    Raises:
        OSError: if it cannot be read.
        ValueError: as `parse_json`.
    """
    return parse_json(path.read_bytes())
