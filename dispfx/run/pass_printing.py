"""`--print-after`: print the graph after a pass, in every pipeline of a command.

with printing(["lower-gates"], observer):
    ...                                 # every pipeline in here prints after lower-gates
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dispfx.compiler.stages import PASSES
from dispfx.pipeline import printing_after
from dispfx.report import NullObserver, Observer
from dispfx.words.choices import require_choice


@contextmanager
def printing(names: Sequence[str], observer: Observer | None = None) -> Iterator[None]:
    """Pass the graphs after the named passes to an observer; note which passes did not run.

    Raises:
        DispfxError: if a name is unknown, listing all passes.
    """
    for name in names:
        require_choice(PASSES, name, "--print-after")
    watcher = observer or NullObserver()
    with printing_after(names, watcher.printed) as printer:
        yield
    for name in dict.fromkeys(names):
        if name not in printer.printed:
            watcher.note(f"{name} did not run in this command, so there is no graph to print after it")
