"""The two dispfx entries of config.json, and why there are two.

1. `quantization_config`, the dispfx section: what was pruned, to what widths, and the layout of the modules.
   Programs that support several weight formats read it first, and fail for an unknown method.
2. `transformers_weights`, which transformers reads as the name of the weight file.  It holds a sentence
   instead, so that transformers without dispfx raises it as an error, with any options.  Without this entry
   it warns of the unknown method and fails at the first mismatched shape, except with
   `ignore_mismatched_sizes=True`: then it runs with random weights.

A hand-made config lacks both entries.  Shapes then mismatch, and with `ignore_mismatched_sizes=True`
transformers initialises weights randomly, as requested.  Its report lists all of them and names dispfx,
because the file always holds a tensor with dispfx in its name: an index, or the mark of a decoder without
indices.

Nothing here imports transformers.
"""

from collections.abc import Sequence
from typing import Any

from dispfx.errors import OutputError

METHOD = "dispfx"
# Version 3 held the same in more entries; version 5 is version 4 with rounded weights.
SCHEMA_VERSION, ROUNDED_VERSION, READABLE_VERSIONS = 4, 5, (3, 4, 5)
SECTION, LOCK = "quantization_config", "transformers_weights"
REFUSAL = "this decoder was pruned by dispfx; install dispfx and `import dispfx` before the folder is loaded"


def checked_section(section: Any, where: str | None) -> dict[str, Any]:
    """Return `section` if it is a dispfx section of a supported version.

    Raises:
        OutputError: if it belongs to another format or version.
    """
    if not isinstance(section, dict) or section.get("quant_method") != METHOD:
        raise OutputError(
            "a folder written by dispfx was expected, but its config has no dispfx section", where=where
        )
    if section.get("schema_version") not in READABLE_VERSIONS:
        known = f"{READABLE_VERSIONS[0]} to {READABLE_VERSIONS[-1]}"
        raise OutputError(
            f"the folder has format {section.get('schema_version')}, but this version reads {known}",
            where=where,
            hint="use the version of dispfx that wrote it",
        )
    return section


def with_rounded_weights(
    section: dict[str, Any], scheme: str, layers: Sequence[str], weights: dict[str, Any]
) -> dict[str, Any]:
    """Return a section that says which layers have rounded weights.

    Args:
        scheme: of `dispfx.quantization.stored_weights`.
        layers: paths of the rounded layers.
        weights: the same for engines, as compressed-tensors says it.
    """
    rounded = {"scheme": scheme, "layers": list(layers), "format": weights}
    return {**section, "schema_version": ROUNDED_VERSION, "rounded": rounded}


def without_rounded_weights(section: dict[str, Any]) -> dict[str, Any]:
    """Return the section of a decoder whose weights are plain again."""
    plain = {name: entry for name, entry in section.items() if name != "rounded"}
    return {**plain, "schema_version": min(section["schema_version"], SCHEMA_VERSION)}
