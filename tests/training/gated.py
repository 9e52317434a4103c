"""Programs as learning sees them."""

from typing import Any

from torch import fx

from dispfx.compiler.pipelines import for_learning
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.passes.insert_gates import InsertGates
from dispfx.settings.sections import FurtherSites
from tests.programs import program_of


def plain_and_fast(
    form: str = "pre-norm", *, layers: int = 3, tokens: int = 24, sites: tuple[FurtherSites, ...] = ()
) -> tuple[Program, Program]:
    """Return a gated program, and the same made fast to learn on."""
    plain = Pipeline([InsertGates()]).run(program_of(form, layers=layers, sites=sites).clone())
    return plain, for_learning(plain, tokens)


class WithValues(fx.Interpreter):
    """Runs a graph and leaves every value at its node."""

    def run_node(self, n: fx.Node) -> Any:
        """Compute one node."""
        n.meta["val"] = super().run_node(n)
        return n.meta["val"]
