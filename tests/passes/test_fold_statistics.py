"""Statistics of whole weights are those of the dense decoder, before and after a cut."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.ir.pipeline import Pipeline
from dispfx.passes.fold_statistics import FoldStatistics
from dispfx.plan.plan import Plan
from tests.one_branch import INNER, VOCABULARY, WIDTH, Middle, one_branch, require_one_function
from tests.programs import token_ids

Change = Callable[[Tensor], Tensor]


class Changed(nn.Linear):
    """A linear layer whose weight is computed from its parameter at every call."""

    def __init__(self, inputs: int, outputs: int, change: Change):
        super().__init__(inputs, outputs)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.change(self.weight), self.bias)


class ChangedMiddle(nn.Module):
    def __init__(self, change: Change):
        super().__init__()
        self.up, self.down = Changed(WIDTH, INNER, change), Changed(INNER, WIDTH, change)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def ternary(weight: Tensor) -> Tensor:
    """After BitNet b1.58 (arXiv 2402.17764), section 2: one scale for the whole weight."""
    scale = weight.abs().mean().clamp(min=1e-5)
    return (weight / scale).round().clamp(-1, 1) * scale


CHANGES: dict[str, Change] = {
    "a ternary weight": ternary,
    "the sum of all": lambda w: w / w.abs().sum() * 100,
    "the spread of all": lambda w: w / w.std(),
    "the variance of all": lambda w: w / w.var().sqrt(),
    "the norm of all": lambda w: w / w.norm(),
    "the spectral norm": lambda w: w / torch.linalg.matrix_norm(w, 2),
    "the largest of all": lambda w: w / w.abs().max(),
    "the largest of each row": lambda w: w / w.abs().amax(1, keepdim=True),
    "the largest of each column": lambda w: w / w.max(0, keepdim=True).values,
    "rows of length one": lambda w: F.normalize(w, dim=1),
    "columns of length one": lambda w: F.normalize(w, dim=0),
    "a quantile": lambda w: w / w.abs().flatten().quantile(0.9),
    "what is larger than the mean": lambda w: torch.where(w.abs() > w.abs().mean(), w.sign(), 0.0),
    "a product of all with itself": lambda w: w / torch.dot(w.flatten(), w.flatten()).sqrt(),
    "a straight-through estimate": lambda w: w + (w.sign() * w.abs().mean() - w).detach(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_weight_scaled_by_a_statistic_is_cut_at_all_three_sites(name: str):
    """Rule 1."""
    model = one_branch(lambda: ChangedMiddle(CHANGES[name]))
    program = dispfx.capture(model)
    assert not program.refused and [leaf.branch for leaf in program.leaves] == ["mlp"]
    assert [site.kind for site in program.sites] == ["read", "inner", "write"]
    require_one_function(model, program)


def test_what_is_kept_of_a_ternary_weight_keeps_its_values():
    """Rule 3."""
    model = one_branch(lambda: ChangedMiddle(ternary))
    program = dispfx.capture(model)
    plan = Plan.random(program, 0.5, seed=0)
    lowered = dispfx.lower(program, plan)
    scale = model.get_parameter("mlp.up.weight").abs().mean()
    assert lowered.get_buffer("dispfx_dense.mlp.up.weight.0") == scale
    assert lowered.get_parameter("mlp.up.weight").abs().mean() != scale, "the cut must matter"


NOT_ZERO: dict[str, tuple[Change, str]] = {
    "a mean that is subtracted": (
        lambda w: (w - w.mean(1, True)) / w.std(1, keepdim=True),
        "aten.sub of zero",
    ),
    "a softmax over rows": (lambda w: w.softmax(0), "aten.softmax"),
}


@pytest.mark.parametrize("name", NOT_ZERO)
def test_a_weight_that_is_not_zero_with_its_parameter_refuses_by_name(name: str):
    """The user's module with zeros there would compute something else than the smaller one.

    Rules 2 and 4 of zero_values.
    """
    change, reason = NOT_ZERO[name]
    model = one_branch(lambda: nn.Sequential(Middle(lambda m, h: h), ChangedMiddle(change)))
    refused = {one.name: one.reason for one in dispfx.capture(model).refused}
    assert any(reason in text for text in refused.values()), refused


def test_a_scan_over_a_weight_refuses_its_axis_by_name():
    model = one_branch(lambda: ChangedMiddle(lambda w: w.cumsum(1)))
    program = dispfx.capture(model)
    assert {one.name: one.reason for one in program.refused} == {
        "mlp.read": "aten.cumsum combines all features",
        "mlp.inner": "aten.cumsum combines all features",
    }


class Mixed(nn.Module):
    """The weight is a sum over a stack: nothing else reads the stack, so its sum is no statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, INNER, WIDTH) / 4)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(F.linear(x, self.stack.sum(0))))


def test_a_sum_that_is_the_weight_itself_is_no_statistic():
    """Rule 2."""
    model = one_branch(Mixed)
    program = dispfx.capture(model)
    assert not program.dense_statistics and not program.refused
    require_one_function(model, program)


def test_a_mean_of_activations_is_left_alone_and_a_second_run_changes_nothing():
    """Rule 1."""
    program = dispfx.capture(one_branch(lambda: Middle(lambda m, h: h - h.mean(-1, True))))
    assert not program.dense_statistics
    program = dispfx.capture(one_branch(lambda: ChangedMiddle(ternary)))
    before = [str(node) for node in program.graph.nodes]
    again = Pipeline([FoldStatistics()])
    again.run(program)
    assert not again.ran[0].result.changed and [str(node) for node in program.graph.nodes] == before


def test_the_outputs_keep_their_bits():
    model = one_branch(lambda: ChangedMiddle(ternary))
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    assert torch.equal(dispfx.capture(model).graph_module(ids), model(ids))
