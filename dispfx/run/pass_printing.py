"""`--print-after`: the graph after a pass, wherever a command runs this pass.

with printing(["lower-gates"], observer):
    ...                                 # every pipeline in here prints after lower-gates
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dispfx.compiler.stages import PASSES
from dispfx.ir.pipeline import printing_after
from dispfx.report import NullObserver, Observer
from dispfx.words.choices import require_choice


@contextmanager
def printing(names: Sequence[str], observer: Observer | None = None) -> Iterator[None]:
    """Give graphs after the passes of these names to an observer; note which of them did not run.

    Raises:
        DispfxError: if there is no pass of a name, listing the passes that there are.
    """
    for name in names:
        require_choice(PASSES, name, "a pass to print after")
    watcher = observer or NullObserver()
    with printing_after(names, watcher.printed) as printer:
        yield
    for name in dict.fromkeys(names):
        if name not in printer.printed:
            watcher.note(f"{name} did not run in this command, so there is no graph to print after it")
