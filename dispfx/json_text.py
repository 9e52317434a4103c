"""JSON from files that others may have written.

Python's reader fails in three ways: on text that is no UTF-8, on text that is no JSON, and on lists in lists
beyond Python's depth of calls.  Here all of them are a ValueError.
"""

import json
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: if it is not UTF-8, no JSON, or nests deeper than Python follows.
        TypeError: if it is no text, as an entry of a file can be.
    """
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def read_json(path: Path) -> Any:
    """Return the value of a JSON file.

    Raises:
        OSError: if it cannot be read.
        ValueError: as `parse_json`.
    """
    return parse_json(path.read_bytes())
