"""Which form of MODEL an argument has.

1. `demo` is the embedded decoder; a folder of that name is `./demo`.
2. A name that ends in `.gguf` is a GGUF file; one that ends in `.json` is a config without weights.
3. A folder that exists is a transformers checkpoint.
4. `package.module:function` is a function that returns a module.
5. `name` or `owner/name` is a hub id.

A path that does not exist is rejected here, before slow imports.
"""

import re
from pathlib import Path
from typing import Literal

from dispfx.errors import SourceError
from dispfx.files.json_text import parse_json
from dispfx.words.python_code import suggestion_for

Origin = Literal["demo", "folder", "gguf", "config", "hub", "function"]

FORMS = "MODEL is `demo`, a folder, a .gguf file, a hub id, or package.module:function"

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_LONGEST_HEADER = 100_000_000  # bytes; safetensors reads no longer one
_FOLDER_HINT = "pass the folder that holds config.json and the weights"


def origin_of(spec: str) -> Origin:
    """Return the form of MODEL of `spec`.

    Raises:
        SourceError: if it has no known form, or is a path that does not exist.
    """
    if spec == "demo":
        return "demo"
    path = Path(spec).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise SourceError("MODEL names a GGUF file that does not exist", where=spec)
        return "gguf"
    if path.suffix.lower() == ".json" and path.is_file():
        return "config"
    if spec and path.is_dir():
        return "folder"
    if is_plan_file(path):
        raise SourceError(
            "MODEL is a file that holds a plan, and a decoder is needed",
            where=spec,
            hint="name the decoder first, as in `dispfx apply MODEL PLAN`; `dispfx inspect` shows the plan",
        )
    if spec and path.exists():
        raise SourceError(
            "MODEL is a file; the only single file that can be read is .gguf",
            where=spec,
            hint=suggestion_for(spec) or _FOLDER_HINT,
        )
    if _FUNCTION.fullmatch(spec):
        return "function"
    if _HUB_ID.fullmatch(spec):
        return "hub"
    if "/" in spec or spec.startswith("~"):
        hint = suggestion_for(spec) or _FOLDER_HINT
        raise SourceError("MODEL names a folder that does not exist", where=spec, hint=hint)
    raise SourceError("MODEL has none of the known forms", where=spec, hint=suggestion_for(spec) or FORMS)


def is_plan_file(path: Path) -> bool:
    """Whether a file is a plan, under any name: a safetensors file whose header lists sites and a decoder."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(_LONGEST_HEADER, path.stat().st_size):
                return False
            header = parse_json(parse_json(file.read(length))["__metadata__"]["dispfx"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return isinstance(header, dict) and {"sites", "fingerprint"} <= header.keys()
