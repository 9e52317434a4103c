"""The config of an output folder: the decoder's own entries, and the two that are ours.

1. `quantization_config`, the dispfx section: what was pruned and to what widths.  Programs that keep
   several weight formats apart look here first, and stop at a method that they do not know.
2. `transformers_weights`, which transformers reads as the name of the weight file.  A sentence stands
   there, no file name, so transformers without dispfx raises it as an error, whatever the other options.
   Without that entry it warns of the unknown method and stops at the first mismatched shape, except
   with `ignore_mismatched_sizes=True`: then it runs with random weights.

Nothing here imports transformers: configs and tokenizers save themselves.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dispfx.errors import DataError, OutputError
from dispfx.ir.plan import Plan, site_keys
from dispfx.ir.sites import Site

SCHEMA_VERSION = 1
METHOD = "dispfx"
CONFIG_FILE = "config.json"
OUR_ENTRIES = ("quantization_config", "transformers_weights")

_SECTION, _WEIGHTS_NAME = OUR_ENTRIES
_REFUSAL = "this decoder was pruned by dispfx; install dispfx and open the folder with dispfx.load(folder)"


def add_section(folder: Path, plan: Plan, sites: Sequence[Site], config: Any, dtype: torch.dtype) -> None:
    """Add our entries to the folder's config.json, and the dtype that its weights have.

    Args:
        sites: in the order of the plan's selections.
        config: the decoder's transformers config, for what its file does not say.
    """
    entries = read_config(folder)
    entries["dtype"] = str(dtype).removeprefix("torch.")
    entries[_SECTION] = _section(plan, sites, config)
    entries[_WEIGHTS_NAME] = _REFUSAL
    text = json.dumps(entries, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def write_model_files(
    folder: Path,
    *,
    config: Any,
    architecture: str | None = None,
    generation_config: Any = None,
    tokenizer: Any = None,
) -> None:
    """Write the decoder's own config.json, generation_config.json and tokenizer files into `folder`.

    The config stays as it is, but for the section of a weight format that was undone when the decoder
    was read (a quantised source is a plain decoder by now).
    """
    own = copy.deepcopy(config)
    for entry in OUR_ENTRIES:
        if hasattr(own, entry):
            delattr(own, entry)
    if architecture is not None:
        own.architectures = [architecture]
    own.save_pretrained(folder)
    if generation_config is not None:
        generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def read_section(folder: Path) -> dict[str, Any]:
    """Return the dispfx section of the folder's config.json.

    Raises:
        DataError: if config.json is missing or no JSON object.
        OutputError: if it has no dispfx section, or one of another version.
    """
    section = read_config(folder).get(_SECTION)
    if not isinstance(section, dict) or section.get("quant_method") != METHOD:
        raise OutputError(
            "a folder written by dispfx was expected; its config has no dispfx section", where=str(folder)
        )
    if section.get("schema_version") != SCHEMA_VERSION:
        raise OutputError(
            f"the folder has format {section.get('schema_version')}, this program reads {SCHEMA_VERSION}",
            where=str(folder),
            hint="use the version of dispfx that wrote it",
        )
    return section


def read_config(folder: Path) -> dict[str, Any]:
    """Return the entries of the folder's config.json.

    Raises:
        DataError: if it is missing or no JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"the config cannot be read: {error}", where=str(path)) from error
    if not isinstance(entries, dict):
        raise DataError(f"a JSON object was expected, {type(entries).__name__} found", where=str(path))
    return entries


def _section(plan: Plan, sites: Sequence[Site], config: Any) -> dict[str, Any]:
    return {
        "quant_method": METHOD,
        "schema_version": SCHEMA_VERSION,
        "fingerprint": plan.fingerprint,
        "ratio": plan.budget.ratio,
        "achieved": plan.achieved,
        "of": plan.budget.of,
        "attention": getattr(config, "_attn_implementation", None),
        "sites": [
            {
                "name": selection.site,
                "kind": site.kind,
                "size": selection.size,
                "kept": len(selection.kept),
                "slices": list(site_keys(site)),
            }
            for site, selection in zip(sites, plan.selections, strict=True)
        ],
    }
