"""Code that comes with a checkpoint (`auto_map`), and is copied into every folder made from it.

transformers copies such code into its cache and imports it from there, as `transformers_modules.…`.  These
copies are written, because they are the code that ran.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils.hub import HF_MODULES_CACHE, TRANSFORMERS_DYNAMIC_MODULE_NAME

from dispfx.files.json_text import read_json

_CONFIG_FILE = "config.json"


def is_own_code(*parts: Any) -> bool:
    """Whether the class of a decoder, config or tokenizer is code that came with a checkpoint."""
    return any(type(part).__module__.partition(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME for part in parts)


def carry_code(folder: Path, parts: Mapping[str, Any]) -> None:
    """Write the code of the parts into `folder`, and make its config.json name only that code.

    Args:
        folder: with a config.json.
        parts: decoder and config by the names of their auto classes.
    """
    named: dict[str, str] = {}
    for auto_class, part in parts.items():
        if not is_own_code(part):
            continue
        file = Path(str(sys.modules[type(part).__module__].__file__))
        for one in dict.fromkeys((file, *map(Path, get_relative_import_files(file)))):
            shutil.copyfile(one, folder / one.name)
        named[auto_class] = f"{file.stem}.{type(part).__name__}"
    entries = read_json(folder / _CONFIG_FILE)
    before = entries.get("auto_map") or {}
    # Other classes, such as the decoder without its head, are kept if their file is written.
    kept = {name: reference for name, reference in before.items() if _is_in(folder, reference)}
    if before == kept | named:
        return
    entries["auto_map"] = kept | named
    if not entries["auto_map"]:
        del entries["auto_map"]
    text = json.dumps(entries, indent=2, sort_keys=True) + "\n"
    (folder / _CONFIG_FILE).write_text(text, encoding="utf-8")


def _is_in(folder: Path, reference: Any) -> bool:
    """Whether `module.Class` names a file of the folder; `owner/name--module.Class` names another one."""
    return isinstance(reference, str) and (folder / f"{reference.partition('.')[0]}.py").is_file()


@contextmanager
def private_code(folder: Path) -> Iterator[None]:
    """Remove transformers' cached copy of a temporary folder's code; the folder has a random suffix."""
    try:
        yield
    finally:
        cache = Path(HF_MODULES_CACHE) / TRANSFORMERS_DYNAMIC_MODULE_NAME
        for copied in cache.glob(f"*{folder.name.rpartition('-')[2]}"):
            shutil.rmtree(copied, ignore_errors=True)
