"""`torch.export`, without what it prints.

Entry point: `traced`.  What torch says of a decoder that it cannot trace is hundreds of lines of graph; they
are kept as notes of the error, which a traceback shows.
"""

import inspect
import io
import logging
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import nn
from torch._export import non_strict_utils
from torch.export import ExportedProgram
from torch.fx.experimental import symbolic_shapes


def traced(
    module: nn.Module, inputs: tuple[Any, ...], shapes: tuple[Any, ...], **options: Any
) -> ExportedProgram:
    """Return a module as torch.export traces it.

    While it traces, torch notes what each operation gave for tensors without values, and rebuilds the note
    to see that it is right.  That takes longer than computing the shapes once more, which few operations
    of a decoder need: 40% of the time for two layers, and nothing is won with sixteen.

    Args:
        inputs: sample inputs.
        shapes: which of their sizes are free, as torch.export wants them.
        options: of torch.export.
    """
    from torch._dynamo import config

    with torch_unheard(), _lines_of_callers(), config.patch(fake_tensor_cache_enabled=False):
        return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False, **options)


@contextmanager
def _lines_of_callers() -> Iterator[None]:
    """Let torch note conditions of `min` and `max` with the line that calls them, not with its own."""
    before = symbolic_shapes.uninteresting_files
    files = before() | {inspect.getfile(non_strict_utils)}
    symbolic_shapes.uninteresting_files = lambda: files
    try:
        yield
    finally:
        symbolic_shapes.uninteresting_files = before


@contextmanager
def torch_unheard() -> Iterator[None]:
    """Keep what torch writes to stderr and its log off the terminal, and add it to an error as a note."""
    printed = io.StringIO()
    levels = {handler: handler.level for handler in logging.getLogger("torch").handlers}
    for handler in levels:
        handler.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(printed):
            yield
    except Exception as error:
        if printed.getvalue().strip():
            error.add_note(printed.getvalue())
        raise
    finally:
        for handler, level in levels.items():
            handler.setLevel(level)


def user_frame(error: BaseException) -> str | None:
    """Return the innermost frame outside torch, Python's own library and what traces, as file:line."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename
        and not frame.filename.endswith(_OWN_FILES)
        and Path(frame.filename).parent != _LIBRARY
        and not frame.filename.startswith(_SYMPY)
    ]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


_LIBRARY = Path(sysconfig.get_path("stdlib"))
_SYMPY = str(Path(inspect.getfile(sympy)).parent)
_OWN_FILES = (
    "dispfx/capturing/module_capture.py",
    "dispfx/capturing/cached_capture.py",
    "dispfx/capturing/unlifting.py",
    "dispfx/source/cached_forward.py",
    __file__,
)
