"""A short text of many kinds, on which every run is measured in addition to its own text.

It was written for this project: prose, dialogue, code, tables, arithmetic, a letter and questions.  Masks
that keep the style of one text and lose the rest show here.
"""

from importlib.resources import files

NAME = "mixed text of dispfx"


def second_text() -> str:
    """Return the text, about 8,000 characters of English and code."""
    return files("dispfx.quality").joinpath("second_text.txt").read_text(encoding="utf-8")
