"""The pipeline: passes in their place, honest about what they changed, named when they break something."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dispfx.capturing.module_capture import capture
from dispfx.errors import PassError, UnsupportedGraphError
from dispfx.ir.ops import aten
from dispfx.ir.pipeline import Pass, PassResult, Pipeline, printing_after
from dispfx.ir.program import Program
from dispfx.ir.sites import ResidualStream
from dispfx.passes.canonicalize import Canonicalize
from dispfx.passes.find_residual_stream import FindResidualStream
from tests.one_branch import Middle, one_branch


@pytest.fixture(scope="module")
def captured() -> Program:
    return capture(one_branch(lambda: Middle(lambda m, h: F.relu(h).detach())))


@dataclass
class Step:
    """A pass that does what a test says."""

    act: Callable[[Program], None] = field(default=lambda program: None)
    changed: bool = False
    name: str = "step"
    requires: str = "captured"
    ensures: str = "captured"

    def run(self, program: Program) -> PassResult:
        self.act(program)
        return PassResult(self.changed)


def rename_relu(program: Program) -> None:
    """Put another relu in the place of the one there is."""
    node = program.node("relu")
    with program.graph.inserting_after(node):
        twin = program.graph.call_function(aten.relu.default, (node.args[0],))
    twin.meta = dict(node.meta)
    node.replace_all_uses_with(twin)
    program.graph.erase_node(node)


def test_every_pass_of_the_compiler_fits_the_protocol():
    assert isinstance(Canonicalize(), Pass) and isinstance(Step(), Pass)
    assert not isinstance(object(), Pass)


def test_passes_run_in_order_and_their_notes_are_logged(captured: Program, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger="dispfx.passes")
    pipeline = Pipeline([Canonicalize(), FindResidualStream()])
    program = pipeline.run(captured.clone())
    assert program.level == "canonical"
    assert [ran.name for ran in pipeline.ran] == ["canonicalize", "find-residual-stream"]
    assert caplog.messages[0].startswith("canonicalize: ") and caplog.messages[0].endswith("values erased")


def test_a_misplaced_pass_is_named_with_the_levels(captured: Program):
    with pytest.raises(
        PassError, match="pass find-residual-stream: it needs a canonical program, this one is"
    ):
        Pipeline([FindResidualStream()]).run(captured.clone())


def test_a_fault_names_the_passes_that_ran_before(captured: Program):
    with pytest.raises(PassError, match="it needs a captured program, this one is canonical") as error:
        Pipeline([Canonicalize(), FindResidualStream(), Canonicalize()]).run(captured.clone())
    assert error.value.where == "passes that ran before: canonicalize, find-residual-stream"
    assert error.value.exit_code == 1
    with pytest.raises(PassError) as first:
        Pipeline([FindResidualStream()]).run(captured.clone())
    assert first.value.where == "passes that ran before: none"


def test_a_pass_that_returns_nothing_is_named(captured: Program):
    class Silent(Step):
        def run(self, program: Program) -> PassResult:
            return None  # type: ignore[return-value]

    with pytest.raises(PassError, match="pass step: it must return a PassResult, and returned NoneType"):
        Pipeline([Silent()]).run(captured.clone())


LIES = {
    "says it changed something": Step(changed=True),
    "hides a changed graph": Step(rename_relu),
    "hides a changed argument": Step(lambda p: p.node("linear_1").update_arg(1, p.node("mlp_down_weight"))
                                     or p.node("embedding").update_arg(0, p.node("head_weight"))),
    "hides a fact": Step(lambda p: setattr(p, "stream", ResidualStream(16, ("add",), ("add",)))),
    "hides another order": Step(lambda p: p.node("head_weight").append(p.node("mlp_up_bias"))),
    "hides a sliced tensor": Step(lambda p: setattr(
        p.graph_module.get_submodule("mlp.up"), "bias", nn.Parameter(torch.zeros(3)))),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LIES))
def test_a_pass_that_lies_about_what_it_changed_is_caught(captured: Program, name: str):
    claimed = LIES[name].changed
    with pytest.raises(PassError, match=f"pass step: it claims changed={claimed}, and changed={not claimed}"):
        Pipeline([LIES[name]]).run(captured.clone())


def test_an_honest_pass_is_left_alone(captured: Program):
    for step in (Step(), replace(LIES["hides a changed graph"], changed=True)):
        Pipeline([step]).run(captured.clone())


def two_outputs(program: Program) -> None:
    program.graph.output_node().args = ((program.node("add"), program.node("linear_2")),)


def extra_input(program: Program) -> None:
    with program.graph.inserting_after(next(iter(program.graph.nodes))):
        program.graph.placeholder("another")


def missing_tensor(program: Program) -> None:
    program.node("head_weight").target = "head.weights"


def module_for_a_tensor(program: Program) -> None:
    program.node("head_weight").target = "head"


def use_before_definition(program: Program) -> None:
    program.node("relu").prepend(program.node("linear_1"))


def gate_too_early(program: Program) -> None:
    from dispfx.ir.gate import GATE

    relu = program.node("relu")
    with program.graph.inserting_after(relu):
        gate = program.graph.call_function(GATE, (relu, program.node("mlp_up_bias"), 2))
    gate.meta = dict(relu.meta)
    relu.replace_all_uses_with(gate, delete_user_cb=lambda user: user is not gate)


BROKEN = {
    "two outputs": (two_outputs, r"this program returns 1 tensor\(s\), the graph 2"),
    "a second input": (extra_input, r"a captured program has 1 input\(s\), this one has 2"),
    "a tensor that is not there": (missing_tensor, "head_weight target head.weights references nonexistent"),
    "a module for a tensor": (module_for_a_tensor, "head_weight reads head, which does not exist"),
    "a value used before it exists": (use_before_definition, "the graph is broken"),
    "a gate before its time": (gate_too_early, "is a gate in a captured program"),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_pass_that_breaks_the_graph_is_named(captured: Program, name: str):
    act, problem = BROKEN[name]
    with pytest.raises(PassError, match=f"pass step: .*{problem}"):
        Pipeline([Step(act, changed=True)]).run(captured.clone())


def test_an_unknown_level_is_refused(captured: Program):
    with pytest.raises(PassError, match="'finished' is no level"):
        Pipeline([Step(ensures="finished", changed=True)]).run(captured.clone())


def test_an_error_on_purpose_passes_through_and_an_accident_is_wrapped(captured: Program):
    def refuse(program: Program) -> None:
        raise UnsupportedGraphError("nothing to prune")

    def stumble(program: Program) -> None:
        raise ZeroDivisionError("division by zero")

    with pytest.raises(UnsupportedGraphError, match="nothing to prune"):
        Pipeline([Step(refuse)]).run(captured.clone())
    with pytest.raises(PassError, match="pass step: ZeroDivisionError: division by zero") as error:
        Pipeline([Step(stumble)]).run(captured.clone())
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_without_verification_nothing_is_checked(captured: Program):
    Pipeline([Step(two_outputs)], verify=False).run(captured.clone())


def test_graphs_are_shown_after_the_passes_that_were_named(captured: Program):
    shown: list[tuple[str, str]] = []
    passes = [Canonicalize(), FindResidualStream()]
    with printing_after(("canonicalize", "no-such-pass"), lambda *pair: shown.append(pair)) as printer:
        Pipeline(passes).run(captured.clone())
    assert printer.printed.keys() == {"canonicalize"}
    ((name, text),) = shown
    assert name == "canonicalize" and "(canonical)" in text.splitlines()[0] and "* " not in text
    with printing_after(("find-residual-stream",), lambda *pair: shown.append(pair)):
        Pipeline(passes).run(captured.clone())
    assert "\n* embedding = " in shown[1][1]
