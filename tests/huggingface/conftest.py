"""A pruned folder of a tiny decoder, made once for the tests of this folder."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import nn

from dispfx.api import capture
from dispfx.api.compilation import apply
from dispfx.ir.plan import Plan
from dispfx.ir.program import Program
from tests.tiny_transformers import tiny_transformer


@dataclass(frozen=True, eq=False)
class Folder:
    """A folder, and what it was made from."""

    path: Path
    dense: nn.Module
    program: Program
    plan: Plan


def write_folder(path: Path, dense: nn.Module, *, ratio: float = 0.4, seed: int = 3) -> Folder:
    """Prune a decoder by a random plan and write its folder, verified."""
    program = capture(dense)
    plan = Plan.random(program, ratio, seed)
    apply(dense, plan, out=path, export="none")
    return Folder(path, dense, program, plan)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A pruned llama with grouped-query attention and random widths."""
    return write_folder(tmp_path_factory.mktemp("llama") / "pruned", tiny_transformer("llama"))
