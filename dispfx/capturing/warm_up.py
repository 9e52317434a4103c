"""Masks and tables that a module makes on first use, or where a text is longer than they are.

A trace would keep those of the traced length.  So the module runs once at the longest length first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram

from dispfx.errors import CaptureError

_SHORTEST = 32


def warm_up(run: Callable[[int], None], longest: int) -> bool:
    """Run a module at `longest` tokens, or a half, a quarter, … of them; return whether it ran.

    Args:
        run: runs it on so many tokens; raises CaptureError where it cannot.
    """
    tokens = longest
    while tokens >= _SHORTEST:
        try:
            run(tokens)
        except CaptureError:
            tokens //= 2
        else:
            return True
    return False


def length_bound(exported: ExportedProgram, name: str) -> int | None:
    """Return the most tokens that an input (B, T) of an exported module may have, or None."""
    size = next(node for node in exported.graph.nodes if node.name == name).meta["val"].shape[1]
    if not isinstance(size, torch.SymInt):
        return int(size)
    symbol: Any = size.node.expr
    bounds = exported.range_constraints.get(symbol)
    return int(bounds.upper) if bounds is not None and bounds.upper.is_Integer else None
