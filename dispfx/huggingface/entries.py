"""The two entries of config.json that are ours, and why there are two.

1. `quantization_config`, the dispfx section: what was pruned, to what widths, and the layout of the modules.
   Programs that keep several weight formats apart look here first, and stop at a method that they do not
   know.
2. `transformers_weights`, which transformers reads as the name of the weight file.  A sentence stands there,
   no file name, so transformers without dispfx raises it as an error, whatever the other options.  Without
   that entry it warns of the unknown method and stops at the first mismatched shape, except with
   `ignore_mismatched_sizes=True`: then it runs with random weights.

Who hands transformers a config made by hand takes both entries away.  Shapes then mismatch, and with
`ignore_mismatched_sizes=True` it makes weights up, as it was told to; its report names every one of them, and
names dispfx, for the file always holds a tensor whose name says so: an index, or the mark of a decoder
without indices.

Nothing here imports transformers.
"""

from typing import Any

from dispfx.errors import OutputError

METHOD = "dispfx"
# Version 3 held the same in more entries.
SCHEMA_VERSION, READABLE_VERSIONS = 4, (3, 4)
SECTION, LOCK = "quantization_config", "transformers_weights"
REFUSAL = "this decoder was pruned by dispfx; install dispfx and `import dispfx` before the folder is loaded"


def checked_section(section: Any, where: str | None) -> dict[str, Any]:
    """Return `section` if it is a dispfx section of this version.

    Raises:
        OutputError: if it is another format's, or of another version.
    """
    if not isinstance(section, dict) or section.get("quant_method") != METHOD:
        raise OutputError(
            "a folder written by dispfx was expected; its config has no dispfx section", where=where
        )
    if section.get("schema_version") not in READABLE_VERSIONS:
        known = " and ".join(str(version) for version in READABLE_VERSIONS)
        raise OutputError(
            f"the folder has format {section.get('schema_version')}, this program reads {known}",
            where=where,
            hint="use the version of dispfx that wrote it",
        )
    return section
