"""A setting's name in a message, for Python and for the command line.

    option("seq_len", 512)    →  `seq_len=512`       what the Python API says
    shown_as_options(text)    →  --seq-len 512       what the command line makes of it

Errors and help texts name settings through `option`; only the command line knows about flags.
"""

import ast
import re
from collections.abc import Collection
from typing import Any

_MARKED = re.compile(r"`([a-z]\w*)(?:=([^`\n]*))?`")


def option(name: str, value: Any = None) -> str:
    """Return a setting as messages name it: `name`, or `name=value`."""
    return f"`{name}`" if value is None else f"`{name}={value!r}`"


def flag(name: str) -> str:
    """Return the flag of a setting: `--lambda` for `lambda_`."""
    return "--" + name.strip("_").replace("_", "-")


def shown_as_options(text: str, known: Collection[str]) -> str:
    """Replace every setting that a message names by its flag and value; a switch that is on has no value.

    Args:
        known: names of settings; other names between backticks stay as they are.
    """

    def spelled(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in known:
            return found[0]
        return flag(name) if value in (None, "True") else f"{flag(name)} {_plain(value)}"

    return _MARKED.sub(spelled, text)


def _plain(value: str) -> str:
    """Return a value as it is typed on a command line: without the quotes of Python."""
    try:
        return str(ast.literal_eval(value))
    except (SyntaxError, ValueError):
        return value
