"""Messages and help texts as the command line shows them: settings by their flags."""

from functools import cache

from dispfx.settings.trees import TREES
from dispfx.words.option_names import shown_as_options


@cache
def _options() -> frozenset[str]:
    """Return the name of every setting that a verb has."""
    return frozenset(name for tree in TREES for name in tree.settings())


def spelled(text: str) -> str:
    """Return a text with `seq_len=512` as --seq-len 512."""
    return shown_as_options(text, _options())
