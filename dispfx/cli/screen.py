"""Where progress and results go: progress to people, results to stdout.

With --json, stdout carries one JSON document and progress goes to stderr.  With --quiet, only errors
are shown, and the JSON that was asked for.
"""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dispfx.settings.field import setting

if TYPE_CHECKING:
    from dispfx.report import TerminalObserver


@dataclass(frozen=True)
class Screen:
    """How one verb shows its work."""

    json: bool = setting(False, "Print the result as JSON; progress goes to stderr.")
    quiet: bool = setting(False, "Print nothing but errors.")
    debug: bool = setting(False, "Show tracebacks and warnings.")

    @property
    def console(self) -> Console:
        """The console for people."""
        return Console(stderr=self.json, quiet=self.quiet, soft_wrap=False)

    def observer(self, leads: bool = True) -> "TerminalObserver":
        """Return what shows progress; to be used as a context manager.

        Args:
            leads: whether this process leads its run; the others show nothing.
        """
        from dispfx.report import TerminalObserver

        return TerminalObserver(Console(stderr=self.json), self.quiet or not leads)

    def print_json(self, plain: Any) -> None:
        """Print the result, if it was asked for as JSON."""
        if self.json:
            escaped = (getattr(sys.stdout, "encoding", None) or "utf-8").lower() != "utf-8"
            print(json.dumps(plain, indent=2, allow_nan=False, ensure_ascii=escaped))

    def print_text(self, text: str) -> None:
        """Print the result as it is, unless JSON or silence was asked for."""
        if not self.json and not self.quiet:
            print(text)
