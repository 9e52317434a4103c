"""Checks of a user's arguments before anything slow begins.

Nothing here imports torch, so that wrong arguments are reported at once.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from dispfx.errors import DataError, DispfxError, OutputError
from dispfx.files.json_text import read_json
from dispfx.words.given import path_given
from dispfx.words.option_names import option
from dispfx.words.python_code import current_folder


def check_current_folder() -> None:
    """Check that the current folder still exists: libraries read it on import.

    Raises:
        DispfxError: if it does not exist, or may not be read.
    """
    if current_folder() is None:
        raise DispfxError(
            "the current folder does not exist any more, or may not be read",
            hint="change to a folder that exists",
        )


def check_select(select: str, *, constrained: bool, costs: bool) -> None:
    """Check that a selection before the norms applies to the whole residual stream.

    Raises:
        DispfxError: if branches would select separately, or be left dense by their latency.
    """
    if select == "after-norm":
        return
    if not constrained:
        raise DispfxError(
            f"{option('select', 'before-norm')} makes one selection for the whole residual stream",
            hint=f"add {option('constrained', True)} to it",
        )
    if costs:
        raise DispfxError(
            "one selection for the whole stream cuts every branch, "
            f"so {option('costs')} cannot leave a branch dense",
            hint=f"leave out {option('costs')}",
        )


def check_files(paths: Sequence[str | os.PathLike[str]], what: str) -> None:
    """Check that every path is a non-empty file.

    Args:
        paths: what the user named.
        what: what the files should be, for messages: "text", "plan".

    Raises:
        DataError: with the first one that is missing, a folder, or empty.
    """
    for path in (Path(path).expanduser() for path in paths):
        if not path.exists():
            raise DataError(f"the {what} file does not exist", where=str(path))
        if path.is_dir():
            raise DataError(f"a {what} file was expected, but this is a folder", where=str(path))
        if path.is_file() and path.stat().st_size == 0:
            raise DataError(f"the {what} is empty", where=str(path))


def is_saved_again(folder: Path) -> bool:
    """Whether transformers saved a pruned decoder into this folder, which then has no report."""
    if (folder / "report.json").is_file():
        return False
    try:
        section = read_json(folder / "config.json")["quantization_config"]
        return section["quant_method"] == "dispfx"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_new_files(folder: Path) -> None:
    """Check that files can be written into a folder, which is created later if it does not exist.

    Raises:
        OutputError: if it, or the closest folder above it that exists, is a file or cannot be written.
    """
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not above.is_dir():
        problem = "a folder is needed to write into, and this is a file"
    elif not os.access(above, os.W_OK | os.X_OK):
        problem = "this folder cannot be written"
    else:
        return
    raise OutputError(problem, where=str(above), hint=f"name another folder with {option('out')}")


# What opens an adapter of a pruned decoder, and what makes a decoder of it.
WHOLE_FOLDER = (
    f"PEFT opens it; recover with {option('train', 'lora')} and {option('merge', True)} writes a whole folder"
)


def refuse_adapter(folder: Path) -> None:
    """Check that a folder is not an adapter's, without a decoder.

    Raises:
        OutputError: otherwise.
    """
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise OutputError(
            "the folder holds only an adapter, and no decoder",
            where=str(folder),
            hint=WHOLE_FOLDER,
        )


def refuse_rounded(folder: Path) -> None:
    """Check that a folder's weights are not rounded.

    Raises:
        OutputError: with the scheme of those that are.
    """
    try:
        scheme = read_json(folder / "config.json")["quantization_config"]["rounded"]["scheme"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    raise OutputError(
        f"this needs plain weights, and those of this folder have been rounded to {scheme}",
        where=str(folder),
        hint="use the folder that it was made from; eval, generate and transformers take this one",
    )


def check_folder(path: str | os.PathLike[str], *, report: bool = False) -> None:
    """Check that a path is the folder of a pruned decoder.

    Args:
        report: whether it must have a report. A folder that transformers saved has none.

    Raises:
        OutputError: if the folder does not exist, or does not hold a decoder pruned by dispfx.
    """
    folder = path_given(path, "a folder that `dispfx compile` wrote")
    if not folder.is_dir():
        problem = "this is a file, not a folder" if folder.exists() else "the folder does not exist"
        raise OutputError(problem, where=str(path), hint="pass one that dispfx wrote")
    refuse_adapter(folder)
    saved_again = is_saved_again(folder)
    if saved_again and report:
        refuse_rounded(folder)
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


def check_new_page(page: Path) -> None:
    """Check that a page and its plot can be written, and that neither name is taken.

    Raises:
        OutputError: otherwise.
    """
    if page.suffix != ".html" or not page.parent.is_dir():
        raise OutputError(f"{option('out')} must be an .html file in an existing folder", where=str(page))
    for file in (page, page.with_suffix(".png")):
        if os.path.lexists(file):
            raise OutputError(
                "the page and its plot must not exist yet",
                where=str(file),
                hint=f"name another file with {option('out')}",
            )
