"""Captures of the tiny transformers decoders, each made once a process; a capture takes seconds.

What is returned is a copy that a test may rewrite.  Its weights are shared, and nobody changes those.
"""

from functools import cache

import torch

from dispfx.compiler.cached_programs import capture_cached
from dispfx.compiler.programs import capture, lower_program
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from tests.tiny_transformers import tiny_transformer


def plain(name: str) -> Program:
    """Return the program of a decoder without its cache."""
    return _plain(name).clone()


def with_cache(name: str, dtype: torch.dtype = torch.float32) -> Program:
    """Return the program of a decoder with its cache."""
    return _with_cache(name, dtype).clone()


def lowered_with_cache(name: str, ratio: float) -> Program:
    """Return a decoder with its cache, cut by a random plan for its capture without one."""
    return lower_program(with_cache(name), Plan.random(plain(name), ratio, seed=1), write="gather-add")


@cache
def _plain(name: str) -> Program:
    return capture(tiny_transformer(name))


@cache
def _with_cache(name: str, dtype: torch.dtype) -> Program:
    return capture_cached(tiny_transformer(name).to(dtype))
