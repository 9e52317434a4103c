"""Output of a verb: progress for people, results on stdout.

With --json, stdout carries one JSON document and progress goes to stderr.  With --quiet, only errors
and requested JSON are printed.

Python names settings as `seq_len=512`; what is printed here has their flags instead: --seq-len 512.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dispfx.settings.field import setting
from dispfx.settings.trees import TREES
from dispfx.words.option_names import shown_as_options

if TYPE_CHECKING:
    from dispfx.report import TerminalObserver


@dataclass(frozen=True)
class Screen:
    """How one verb shows its work."""

    print_after: tuple[str, ...] = setting(
        (), "Print the graph after this pass (see `dispfx passes`). May be repeated.", repeats=str
    )
    json: bool = setting(False, "Print the result as JSON; progress goes to stderr.")
    quiet: bool = setting(False, "Print nothing but errors.")
    debug: bool = setting(False, "Show tracebacks and warnings.")

    @property
    def console(self) -> Console:
        """The console for people."""
        return Console(stderr=self.json, quiet=self.quiet, soft_wrap=False)

    @contextmanager
    def observer(self, leads: bool = True) -> Iterator["TerminalObserver"]:
        """Show progress and requested graphs while the block runs.

        Args:
            leads: whether this process leads its run; other processes show nothing.

        Raises:
            DispfxError: if a pass to print after does not exist.
        """
        from dispfx import api
        from dispfx.report import TerminalObserver

        shown = TerminalObserver(Console(stderr=self.json), self.quiet or not leads, spelled)
        with shown as observer, api.printing(self.print_after, observer):
            yield observer

    def print_json(self, plain: Any) -> None:
        """Print the result if --json was given."""
        if self.json:
            escaped = (getattr(sys.stdout, "encoding", None) or "utf-8").lower() != "utf-8"
            print(json.dumps(plain, indent=2, allow_nan=False, ensure_ascii=escaped))

    def print_text(self, text: str) -> None:
        """Print the result unless --json or --quiet was given."""
        if not self.json and not self.quiet:
            print(text)


@cache
def _options() -> frozenset[str]:
    """Return the name of every setting that a verb has."""
    return frozenset(name for tree in TREES for name in tree.settings())


def spelled(text: str) -> str:
    """Return a text with `seq_len=512` as --seq-len 512."""
    return shown_as_options(text, _options())
