"""The config of an output folder: the decoder's own entries, and the two that are ours.

`dispfx.huggingface.entries` says what the two are for.  Nothing here imports transformers: configs and
tokenizers save themselves.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dispfx.errors import DataError
from dispfx.files.json_text import read_json
from dispfx.huggingface.entries import LOCK, METHOD, REFUSAL, SCHEMA_VERSION, SECTION, checked_section
from dispfx.huggingface.layout import Layout
from dispfx.ir.sites import Site
from dispfx.plan.plan import Plan

CONFIG_FILE = "config.json"
OUR_ENTRIES = (SECTION, LOCK)


def add_section(
    folder: Path,
    plan: Plan,
    sites: Sequence[Site],
    config: Any,
    dtype: torch.dtype,
    layout: Layout | str,
) -> None:
    """Add our entries to the folder's config.json, and the dtype that its weights have.

    Args:
        sites: in the order of the plan's selections.
        config: the decoder's transformers config, for what its file does not say.
        layout: of the decoder's modules, or why it cannot be built from modules.
    """
    entries = read_config(folder)
    entries["dtype"] = str(dtype).removeprefix("torch.")
    entries[SECTION] = _section(plan, sites, config)
    known = isinstance(layout, Layout)
    entries[SECTION] |= {"layout": layout.to_json()} if known else {"layout": None, "reason": layout}
    entries[LOCK] = REFUSAL
    write_config(folder, entries)


@dataclass(frozen=True, eq=False)
class ModelFiles:
    """A decoder's own files next to its weights, as transformers writes them.

    Args:
        config: its transformers config; not changed.
        architecture: name of its class, if the config does not contain it.
        generation_config: its transformers generation config, or None.
        tokenizer: its transformers tokenizer, or None.
    """

    config: Any
    architecture: str | None = None
    generation_config: Any = None
    tokenizer: Any = None

    def write(self, folder: Path) -> None:
        """Write config.json, generation_config.json and the tokenizer's files into `folder`.

        The config stays as it is, but for the section of a weight format that was undone when the decoder
        was read (a quantised source is a plain decoder by now).
        """
        own = copy.deepcopy(self.config)
        for entry in OUR_ENTRIES:
            if hasattr(own, entry):
                delattr(own, entry)
        if self.architecture is not None:
            own.architectures = [self.architecture]
        own.save_pretrained(folder)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def read_section(folder: Path) -> dict[str, Any]:
    """Return the dispfx section of the folder's config.json.

    Raises:
        DataError: if config.json is missing or no JSON object.
        OutputError: if it has no dispfx section, or one of another version.
    """
    return checked_section(read_config(folder).get(SECTION), str(folder))


def read_layout(folder: Path) -> Layout | None:
    """Return the layout of the folder's modules, or None where its decoder is a graph alone.

    Raises:
        DataError, OutputError: as `read_section`.
        PlanMismatchError: if the section holds no usable layout.
    """
    entries = read_section(folder).get("layout")
    return None if entries is None else Layout.from_json(entries)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the entries of the folder's config.json.

    Raises:
        DataError: if it is missing or no JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        entries = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"the config cannot be read: {error}", where=str(path)) from error
    if not isinstance(entries, dict):
        raise DataError(f"a JSON object was expected, {type(entries).__name__} found", where=str(path))
    return entries


def write_config(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write the folder's config.json."""
    text = json.dumps(entries, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def _section(plan: Plan, sites: Sequence[Site], config: Any) -> dict[str, Any]:
    return {
        "quant_method": METHOD,
        "schema_version": SCHEMA_VERSION,
        "fingerprint": plan.fingerprint,
        "selections": plan.digest,
        "ratio": plan.budget.ratio,
        "achieved": plan.achieved,
        "of": plan.budget.of,
        "attention": getattr(config, "_attn_implementation", None),
        "experts": getattr(config, "_experts_implementation", None),
        # One text a site: transformers copies a config again and again while it loads a model.
        "sites": [
            f"{selection.site}: {site.kind} {len(selection.kept)} of {selection.size}"
            for site, selection in zip(sites, plan.selections, strict=True)
        ],
    }
