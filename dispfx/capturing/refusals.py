"""Why a module cannot be traced, or its graph holds for one length alone: the line, and what helps.

Entry points: `refuse_export` and `refuse_fixed_length`.

1. A length is fixed where torch notes that it was asked to be a number; the note has the line.
2. There is a loop over the tokens only where a longer trace has more operations of one line.
"""

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from dispfx.capturing.graph_export import user_frame
from dispfx.errors import CaptureError, first_line
from dispfx.ir.ops import source_line

_TORCH = str(Path(torch.__file__).parent)
_REPORT = "`dispfx … --debug`, or the traceback in Python, has the whole report of torch.export"
_OF_LOOPS = "a step that needs the one before cannot be compiled; others can be one operation on all tokens"
_OF_NUMBERS = "take sizes there from `ids.shape` as they are: no int(), no list, no table of that length"


def refuse_export(error: Exception, where: str) -> CaptureError:
    """Return what to raise for a module that torch.export cannot trace.

    Args:
        error: that torch.export raised.
        where: the module, for errors without a line of its own.
    """
    of_values = "data-dependent" in str(error)
    reason = "a branch or a size depends on the values of a tensor" if of_values else first_line(error)
    return CaptureError(
        f"torch.export cannot capture this module: {reason}",
        where=user_frame(error) or where,
        hint=_hint(error, of_values),
    )


def _hint(error: Exception, of_values: bool) -> str:
    frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if "_detect_is_causal_mask" in frames:
        return "pass is_causal=True together with the mask; without it torch reads the mask's values"
    if "inference tensor" in str(error):
        return "build the module outside torch.inference_mode()"
    if "unhashable type: non-nested SymInt" in str(error):
        return "nothing can be looked up by a length; compute it, or slice a table of the longest length"
    return f"use masks or torch.where there; {_REPORT}" if of_values else _REPORT


def refuse_fixed_length(
    graph: fx.GraphModule,
    ids: Tensor,
    error: Exception,
    where: str,
    traced_at: Callable[[int], ExportedProgram],
    lengths: tuple[int, int],
) -> CaptureError:
    """Return what to raise for a graph that does not run at another length.

    Args:
        graph: traced at the first of `lengths`.
        ids: (B, T) token ids of another length.
        error: that the graph raised for them.
        where: the module, where no line is found.
        traced_at: traces the module at a length.
        lengths: the traced one and a longer one.
    """
    short, long = (_traced_or_none(traced_at, tokens) for tokens in lengths)
    failed = f"the graph traced at {lengths[0]} tokens does not run at {ids.shape[1]}"
    loop = None if short is None or long is None else _line_of_loop(short, long)
    line = None if short is None else _line_of_number(short)
    if loop is not None:
        reason = f"{failed}: it has every step of a loop over the tokens"
        return CaptureError(reason, where=line or loop, hint=_OF_LOOPS)
    line = line or _failing_line(graph, ids)
    return CaptureError(
        f"{failed}: the length is fixed ({first_line(error)})", where=line or where, hint=_OF_NUMBERS
    )


def _traced_or_none(traced_at: Callable[[int], ExportedProgram], tokens: int) -> ExportedProgram | None:
    try:
        return traced_at(tokens)
    except CaptureError:
        return None


def _line_of_loop(short: ExportedProgram, long: ExportedProgram) -> str | None:
    """Return the line with the most operations that the longer trace has more of."""
    few, many = (Counter(map(source_line, exported.graph.nodes)) for exported in (short, long))
    more = {line: many[line] - few[line] for line in many if line is not None and many[line] > few[line]}
    return max(more, key=lambda line: more[line]) if more else None


def _line_of_number(exported: ExportedProgram) -> str | None:
    """Return the line of the module's own code that asked for a size as a number."""
    sizes = [
        size
        for node in exported.graph.nodes
        for size in getattr(node.meta.get("val"), "shape", ())
        if isinstance(size, torch.SymInt)
    ]
    shapes: Any = sizes[0].node.shape_env if sizes else None
    for guard in shapes.guards if sizes else ():
        asked: Any = getattr(guard.sloc, "framework_loc", None)
        file = getattr(asked, "filename", _TORCH)
        if guard.expr.is_Equality and len(guard.expr.free_symbols) == 1 and not file.startswith(_TORCH):
            return f"{file}:{asked.lineno}"
    return None


class _Stepped(fx.Interpreter):
    at: fx.Node

    def run_node(self, n: fx.Node) -> Any:
        self.at = n
        return super().run_node(n)


def _failing_line(graph: fx.GraphModule, ids: Tensor) -> str | None:
    stepped = _Stepped(graph)
    try:
        stepped.run(ids)
    except Exception:
        return source_line(stepped.at)
    return None
