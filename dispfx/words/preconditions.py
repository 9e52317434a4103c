"""What can be checked about a user's words before anything slow begins.

Nothing here imports torch, so that a wrong word is answered at once.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from dispfx.errors import BudgetError, DataError, DispfxError, OutputError
from dispfx.files.json_text import read_json
from dispfx.words.choices import require_choice
from dispfx.words.option_names import option
from dispfx.words.python_code import current_folder

SELECTIONS = ("after-norm", "before-norm")


def check_current_folder() -> None:
    """Check that the folder that the command runs in is still there: libraries look at it when they start.

    Raises:
        DispfxError: if it is not, or may not be looked at.
    """
    if current_folder() is None:
        raise DispfxError(
            "the current folder does not exist any more, or may not be looked at",
            hint="change to a folder that exists",
        )


def check_ratio(ratio: float) -> None:
    """Check the share of parameters to remove.

    Raises:
        BudgetError: unless 0 < ratio < 1.
    """
    if not 0.0 < ratio < 1.0:
        raise BudgetError(
            f"the ratio is the share to remove, between 0 and 1, and {ratio:g} was given",
            hint=f"{option('ratio', 0.3)} removes 30%",
        )


def check_select(select: str, *, constrained: bool, costs: bool) -> None:
    """Check that a selection before the norms is one for the whole residual stream.

    Raises:
        DispfxError: if branches were to select for themselves, or to be left dense by what they cost.
    """
    require_choice(SELECTIONS, select, option("select"))
    if select == "after-norm":
        return
    if not constrained:
        raise DispfxError(
            "a selection before the norms is one for the whole residual stream",
            hint=f"add {option('constrained', True)} to {option('select', 'before-norm')}",
        )
    if costs:
        raise DispfxError(
            "one selection for the whole stream cuts every branch, so none can be left dense by its costs",
            hint=f"leave out {option('costs')}",
        )


def check_files(paths: Sequence[str | os.PathLike[str]], what: str) -> None:
    """Check that every path is a file with something in it.

    Args:
        paths: what the user named.
        what: what they should be, for the message: "text", "plan".

    Raises:
        DataError: naming the first one that is missing, a folder, or empty.
    """
    for path in (Path(path).expanduser() for path in paths):
        if not path.exists():
            raise DataError(f"a {what} file was named and there is none", where=str(path))
        if path.is_dir():
            raise DataError(f"a {what} file was expected and this is a folder", where=str(path))
        if path.is_file() and path.stat().st_size == 0:
            raise DataError(f"the {what} is empty", where=str(path))


def is_saved_again(folder: Path) -> bool:
    """Whether transformers wrote a folder, from a decoder that dispfx had pruned: it then has no report."""
    if (folder / "report.json").is_file():
        return False
    try:
        section = read_json(folder / "config.json")["quantization_config"]
        return section["quant_method"] == "dispfx"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_folder(path: str | os.PathLike[str], *, report: bool = False) -> None:
    """Check that a folder of a pruned decoder can be there.

    Args:
        report: whether it must have a report, which a folder saved again by transformers has not.

    Raises:
        OutputError: if there is no folder of that name, or dispfx did not prune what is in it.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise OutputError("a folder written by dispfx was named and there is none", where=str(path))
    saved_again = is_saved_again(folder)
    if saved_again and report:
        raise OutputError(
            "transformers wrote this folder (save_pretrained), so it has no report",
            where=str(path),
            hint="verify, eval, generate, bench, export and recover open it",
        )
    if not saved_again and not (folder / "report.json").is_file():
        raise OutputError(
            "the folder has no report.json, so dispfx did not write it",
            where=str(path),
            hint="pass a folder that `dispfx compile` wrote",
        )
