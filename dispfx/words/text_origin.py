"""Which form of text an argument of --data or --eval-data has.

1. `datasets:NAME[:CONFIG[:SPLIT]]` is a data set that the `datasets` library loads: a hub id or a folder.
   SPLIT is `train` by default, and CONFIG may be empty.
2. The ending of a name tells the format of a file, in capitals too: `.safetensors` holds tokens, `.jsonl`,
   `.ndjson` and `.json` JSON, which `.gz` may follow, `.parquet` columns.  Every other file is UTF-8 text.

Nothing here imports torch, so that wrong arguments are reported at once.
"""

import filecmp
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Literal

from dispfx.errors import DataError
from dispfx.words.option_names import option
from dispfx.words.preconditions import check_files

Bos = Literal["auto", "on", "off"]
TextForm = Literal["text", "json-lines", "parquet", "tokens", "dataset"]

DATASET = "datasets:"
TEXT_FIELD = "text"
LINE_BREAK = "\n"
# About 32 million tokens of English; the method's own recipe reads 20.5 million.
TEXT_BYTES = 128 * 2**20

_JSON = (".jsonl", ".ndjson", ".json")
_PACKED_JSON = tuple(f"{ending}.gz" for ending in _JSON)
_ENDINGS: dict[str, TextForm] = {
    ".safetensors": "tokens",
    ".parquet": "parquet",
    **dict.fromkeys((*_JSON, *_PACKED_JSON), "json-lines"),
}
_TABLES = (".csv", ".tsv")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z")
_LIBRARIES = {"parquet": "pyarrow", "dataset": "datasets"}
_FORMS = f"{DATASET}NAME[:CONFIG[:SPLIT]], as in {DATASET}Salesforce/wikitext:wikitext-2-raw-v1:train"


@dataclass(frozen=True)
class TextOrigin:
    """One text.

    Args:
        form: how it is read.
        place: path of the file, or what `datasets` calls the data set.
        config: of a data set, where it has several.
        split: of a data set.
    """

    form: TextForm
    place: str
    config: str | None = None
    split: str = "train"

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.place).expanduser()

    @property
    def name(self) -> str:
        """Name for the report: without parent folders."""
        if self.form != "dataset":
            return PurePath(self.place).name
        local = Path(self.place).expanduser().is_dir()
        place = PurePath(self.place).name if local else self.place
        return DATASET + ":".join([place, *([self.config] if self.config else []), self.split])


def text_origin(word: str | PurePath) -> TextOrigin:
    """Return the form of text of an argument, without checking that it exists.

    Raises:
        DataError: if it is a malformed name of a data set, or a file that is compressed in a way that is
            not read.
    """
    place = str(word)
    if place.startswith(DATASET):
        return _dataset(place)
    name = place.lower()
    ending = next((ending for ending in _ENDINGS if name.endswith(ending)), None)
    if ending is None and name.endswith(_PACKED):
        raise DataError(
            f"the only compressed text format is JSON: {', '.join(_PACKED_JSON)}",
            where=place,
            hint="unpack it, and name the result",
        )
    return TextOrigin("text" if ending is None else _ENDINGS[ending], place)


def check_texts(words: Sequence[str | PurePath], weights: Sequence[float] | None = None) -> None:
    """Check the arguments about text, as far as possible without reading it.

    Raises:
        DataError: if a file is missing, a folder or empty, a library that reads it is not installed, or
            there is not one weight a text.
    """
    for origin in map(text_origin, words):
        if origin.form != "dataset":
            check_files([origin.place], "text")
        library = _LIBRARIES.get(origin.form)
        if library is not None and find_spec(library) is None:
            raise DataError(
                f"reading this text needs {library}, which is not installed",
                where=origin.place,
                hint="pip install 'dispfx[data]'",
            )
    if weights and len(weights) != len(words):
        raise DataError(
            f"{option('data_weight')} must be given once per {option('data')}: "
            f"there are {len(weights)} for {len(words)} texts",
            hint="give one weight per text in the same order, or none",
        )


def same_text(one: TextOrigin, other: TextOrigin) -> bool:
    """Whether both are the same data set, the same file, or files with the same bytes."""
    if "dataset" in (one.form, other.form):
        return one == other
    try:
        if one.path.samefile(other.path):
            return True
        sizes = {one.path.stat().st_size, other.path.stat().st_size}
        return len(sizes) == 1 and max(sizes) <= TEXT_BYTES and filecmp.cmp(one.path, other.path, False)
    except OSError:
        return False  # reading them reports the error


def repeated_texts(data: Sequence[str | PurePath], eval_data: Sequence[str | PurePath]) -> list[str]:
    """Return a warning for every text that is named twice."""
    learned, measured = list(map(text_origin, data)), list(map(text_origin, eval_data))
    twice = [one for index, one in enumerate(learned) if any(same_text(one, o) for o in learned[:index])]
    both = [one for one in measured if any(same_text(one, other) for other in learned)]
    of_both = "{} is learned from and measured on: perplexity is measured on text that was learned from"
    return [
        *(f"{one.name} is named twice: held-out text is also learned from" for one in twice),
        *(of_both.format(one.name) for one in both),
    ]


def tables_as_text(words: Sequence[str | PurePath]) -> list[str]:
    """Return a warning for every table whose columns are not told apart."""
    named = dict.fromkeys(one.name for one in map(text_origin, words) if one.form == "text")
    return [
        f"{name} is read as plain text, with the names of its columns, separators and quotes: convert it to "
        ".jsonl or .parquet to read one column"
        for name in named
        if name.lower().endswith(_TABLES)
    ]


def _dataset(word: str) -> TextOrigin:
    parts = word.removeprefix(DATASET).split(":")
    if not parts[0] or len(parts) > 3 or (len(parts) == 3 and not parts[2]):
        raise DataError("this is not a valid data set name", where=word, hint=_FORMS)
    name, config, split = [*parts, "", ""][:3]
    return TextOrigin("dataset", name, config or None, split or "train")
