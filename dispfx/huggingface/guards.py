"""Guards in transformers: two against silently losing the pruning, and one for what fewer heads cannot do.

1. A config alone cannot give the pruned decoder, so building a model from it is an error.
2. A saved config gets its lock back, which transformers removes; `dispfx.huggingface.entries` has the
   purpose. The plan is copied too, because commands of dispfx need it to open the folder.
3. Continuous batching has one number of heads for all layers, that of the config.  Where layers keep fewer,
   transformers logs errors and returns empty texts, so it is refused.

Importing this module installs the guards.
"""

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.modeling_utils import PreTrainedModel

from dispfx.errors import DispfxError, OutputError
from dispfx.files.disk import replacing
from dispfx.files.json_text import read_json
from dispfx.huggingface.entries import LOCK, METHOD, REFUSAL, SECTION
from dispfx.plan.plan import Plan

PLAN_FILE = "plan.safetensors"
_HEADS = re.compile(r"(.*): heads (\d+) of (\d+)")


def is_pruned(config: Any) -> bool:
    """Whether a transformers config is of a pruned decoder."""
    section = getattr(config, "quantization_config", None)
    if isinstance(section, Mapping):
        return section.get("quant_method") == METHOD
    return getattr(section, "quant_method", None) == METHOD


def is_unlocked(config: Any) -> bool:
    """Whether `from_pretrained` is building a model from a config; a class with a head builds its body so."""
    return getattr(config, LOCK, REFUSAL) is None


def _guard_building() -> None:
    """A config alone cannot give the pruned decoder, and must not silently give the dense one."""
    build = PreTrainedModel._from_config.__func__  # type: ignore[attr-defined]

    def guarded(cls: type, config: Any, **kwargs: Any) -> Any:
        if is_pruned(config) and not is_unlocked(config):
            raise OutputError(
                "this config describes a pruned decoder, whose kept indices are stored with its weights",
                where=str(getattr(config, "name_or_path", "") or type(config).__name__),
                hint="use from_pretrained(folder); for the dense decoder, delete config.quantization_config",
            )
        return build(cls, config, **kwargs)

    PreTrainedModel._from_config = classmethod(guarded)  # type: ignore[assignment,method-assign]


def _guard_saving() -> None:
    """A saved config of a pruned decoder gets the entry that stops programs without dispfx, and its plan."""
    write = PreTrainedConfig.to_json_file

    def guarded(self: Any, json_file_path: Any, *args: Any, **kwargs: Any) -> None:
        write(self, json_file_path, *args, **kwargs)
        if is_pruned(self):
            path = Path(json_file_path)
            entries = read_json(path)
            entries[LOCK] = REFUSAL
            path.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            _carry_plan(self, entries[SECTION], path.with_name(PLAN_FILE))

    PreTrainedConfig.to_json_file = guarded  # type: ignore[method-assign]


def plan_bytes(folder: Path, section: Mapping[str, Any]) -> bytes | None:
    """Return the plan file of a folder, or None if it has none that the section was written with."""
    source = folder / PLAN_FILE
    try:
        return source.read_bytes() if Plan.load(source).digest == section.get("selections") else None
    except (DispfxError, OSError):
        return None


def _carry_plan(config: Any, section: Mapping[str, Any], target: Path) -> None:
    """Write the plan that was read with the decoder, or that of the folder that the config names.

    Warn if it is missing, because commands of dispfx cannot open the saved folder without it.
    """
    held = getattr(getattr(config, "quantization_config", None), "plan", None)
    plan = held or plan_bytes(Path(str(getattr(config, "name_or_path", ""))), section)
    if plan is not None:
        with replacing(target) as partial:
            partial.write_bytes(plan)
    elif plan_bytes(target.parent, section) is None:
        warnings.warn(
            f"{target.parent} is saved without {PLAN_FILE}: the folder that the decoder was loaded from has "
            "none that belongs to it. Copy the file into it, otherwise dispfx cannot open it.",
            stacklevel=2,
        )


def _guard_batching() -> None:
    """Continuous batching fails where layers keep other numbers of heads than the config says."""
    begin = ContinuousMixin.init_continuous_batching

    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self.config, "quantization_config", None)
        sites = (getattr(config, "section", None) or {}).get("sites", ())
        for name, kept, heads in (found.groups() for one in sites if (found := _HEADS.fullmatch(one))):
            if kept != heads:
                raise OutputError(
                    "continuous batching (generate_batch) needs the same number of heads in all layers, and "
                    f"this decoder keeps {kept} of {heads} here",
                    where=name,
                    hint="generate takes it; a plan without the site of heads has all of them",
                )
        return begin(self, *args, **kwargs)

    ContinuousMixin.init_continuous_batching = guarded  # type: ignore[method-assign]


_guard_batching()
_guard_building()
_guard_saving()
