"""Tiny pruned decoders with a cache as ONNX models, each made once."""

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor

from dispfx.compiler.programs import lower_program
from dispfx.deploy.onnx.exporting import cached_model
from dispfx.deploy.onnx.files import save_model
from dispfx.deploy.onnx.legalize import PLAIN, Flavor
from dispfx.deploy.onnx.session import CachedSession
from dispfx.ir.cached_inputs import CachedShape, cache_tensors, sample_inputs
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from tests.captures import with_cache
from tests.programs import relative_error
from tests.tiny_transformers import VOCABULARY

# Prefill, decode, several tokens after cached ones, one of which is padding; none was traced.
SHAPES = (CachedShape(2, 5, 7), CachedShape(1, 8, 0), CachedShape(3, 1, 9), CachedShape(1, 1, 1))


@dataclass(frozen=True)
class Exported:
    """A lowered program and its ONNX model."""

    program: Program
    model: ir.Model

    def operators(self) -> list[str]:
        """Return the operators of the model, in order."""
        return [node.op_type for node in self.model.graph]

    def nodes(self, operator: str) -> list[ir.Node]:
        """Return the nodes of one operator."""
        return [node for node in self.model.graph if node.op_type == operator]

    def saved(self) -> Path:
        """Write the model and return its path."""
        path = Path(tempfile.mkdtemp()) / "model.onnx"
        save_model(self.model, path)
        return path


@cache
def lowered(name: str, dtype: torch.dtype = torch.float32, ratio: float = 0.4) -> Program:
    """Return a tiny decoder with its cache, pruned by a random plan, with gather-add writes."""
    program = with_cache(name, dtype)
    return lower_program(program, Plan.random(program, ratio, seed=1, align=4), write="gather-add")


@cache
def exported(
    name: str, dtype: torch.dtype = torch.float32, ratio: float = 0.4, flavor: Flavor = PLAIN
) -> Exported:
    """Return a tiny decoder's ONNX model."""
    program = lowered(name, dtype, ratio)
    return Exported(program, cached_model(program, flavor=flavor))


def inputs_of(program: Program, shape: CachedShape, *, padded: bool = True) -> tuple[Tensor, ...]:
    """Return inputs of a shape."""
    inputs = sample_inputs(cache_tensors(program.graph), shape, VOCABULARY, torch.device("cpu"))
    if not padded:
        inputs[1].fill_(1)
    return inputs


def errors(found: Exported, *, padded: bool = True) -> dict[CachedShape, float]:
    """Return how far every output of a model is from the program's, the worst of each shape."""
    session = CachedSession(found.saved())
    worst = {}
    for shape in SHAPES:
        inputs = inputs_of(found.program, shape, padded=padded)
        with torch.no_grad():
            expected = found.program.graph_module(*inputs)
        actual = session(inputs)
        assert list(actual) == list(found.program.outputs)
        worst[shape] = max(map(relative_error, actual.values(), expected))
    return worst
