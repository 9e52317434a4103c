"""JSON from files that others may have written.

Python's reader fails in three ways: on text that is no UTF-8, on text that is no JSON, and on lists in lists
beyond Python's depth of calls.  Here all of them are a ValueError, and so are whole numbers that no float
can hold, on which arithmetic would fail later.
"""

import json
from pathlib import Path
from typing import Any

# 1e308 is about the largest float.
_MOST_DIGITS = 300


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: if it is not UTF-8, no JSON, nests deeper than Python follows, or holds a whole number
            beyond all floats.
        TypeError: if it is no text, as an entry of a file can be.
    """
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, parse_int=_whole_number)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def json_value_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, and where it ends.

    Raises:
        ValueError: as `parse_json`, also where the text stops before the value does.
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
