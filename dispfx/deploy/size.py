"""How large the pruned decoder of a folder is, counted from its files."""

from pathlib import Path

from dispfx.deploy import exported, weights
from dispfx.deploy.section import CONFIG_FILE


def stored_size(folder: Path) -> tuple[int, int]:
    """Return parameters and bytes of the weight files, or of `program.pt2` where that is all there is.

    Raises:
        DataError: if a file is missing or damaged.
    """
    if (folder / CONFIG_FILE).is_file():
        return weights.count_parameters(folder), weights.count_bytes(folder)
    return exported.count_parameters(folder), (folder / exported.PROGRAM_FILE).stat().st_size
