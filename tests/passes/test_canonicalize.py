"""canonicalize: one spelling for every operation, and nothing that does nothing."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.capturing.module_capture import capture
from dispfx.compiler.programs import gate
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.printer import print_program
from dispfx.ir.program import Program
from dispfx.passes.canonicalize import Canonicalize
from tests import plain_decoders
from tests.one_branch import INNER, VOCABULARY, WIDTH, Middle, one_branch, require_one_function
from tests.passes.golden import calls_of, lines_of, names_of
from tests.programs import relative_error, token_ids


class Noisy(nn.Module):
    """A plain MLP with one of everything that does nothing."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x.to(torch.float32)).detach()
        h = self.dropout(h[:, :, :])
        return self.down(F.relu(h))


def captured(mlp) -> Program:
    return capture(one_branch(mlp))


def canonical(mlp) -> Program:
    return Pipeline([Canonicalize()]).run(captured(mlp))


def test_what_does_nothing_is_erased():
    """Rule 2."""
    program = captured(Noisy)
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    before = program.graph_module(ids)
    assert lines_of(program, "to", "linear", "detach", "dropout", "relu", "add") == (
        "  to = to(embedding, torch.float32): (B, T, 16) float32\n"
        "  linear = linear(to, mlp_up_weight, mlp_up_bias): (B, T, 24) float32\n"
        "  detach = detach(linear): (B, T, 24) float32\n"
        "  dropout = dropout(slice_2, 0.1, False): (B, T, 24) float32\n"
        "  relu = relu(dropout): (B, T, 24) float32\n"
        "  add = add(to, linear_1): (B, T, 16) float32"
    )
    Pipeline([Canonicalize()]).run(program)
    assert lines_of(program, "linear", "relu", "add") == (
        "  linear = linear(embedding, mlp_up_weight, mlp_up_bias): (B, T, 24) float32\n"
        "  relu = relu(linear): (B, T, 24) float32\n"
        "  add = add(embedding, linear_1): (B, T, 16) float32"
    )
    assert not {"to", "detach", "dropout", "slice_1", "slice_2"} & names_of(program)
    assert torch.equal(program.graph_module(ids), before)


def test_views_are_spelled_as_reshapes():
    """Rule 3."""
    program = canonical(lambda: Middle(lambda m, h: h.view(-1, INNER).relu().view(h.shape)))
    assert lines_of(program, "view") == "  view = reshape(linear, [-1, 24]): (?, 24) float32"


def test_assertions_about_metadata_are_erased():
    """Rule 1."""
    program = captured(Noisy)
    assert any("assert" in name for name in names_of(program))
    Pipeline([Canonicalize()]).run(program)
    assert not any("assert" in name for name in names_of(program))


NEAR_MISSES = {
    "a cast that changes the dtype": (lambda m, h: h.double().relu().float(), ("to", "to_1")),
    "a slice of a part": (lambda m, h: torch.cat([h[..., :5], h[..., 5:]], -1), ("slice_1", "slice_2")),
    "a slice with a step": (lambda m, h: torch.cat([h[..., ::2], h[..., 1::2]], -1), ("slice_1", "slice_2")),
    "an expand that alone gives the shape": (
        lambda m, h: h.cumsum(1) * m.scale.expand(h.shape[0], h.shape[1], INNER).relu(), ("expand", "relu"),
    ),
    "an expand that a scan reads": (
        lambda m, h: h + m.scale.expand(h.shape[0], h.shape[1], INNER).cumsum(1), ("expand", "cumsum"),
    ),
    "a view of the bits": (lambda m, h: h * (h.view(torch.int32) > 0).float(), ("view", "to")),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(NEAR_MISSES))
def test_what_does_something_is_left_alone(name: str):
    """Rules 2, 3 and 4."""
    middle, kept = NEAR_MISSES[name]
    program = captured(lambda: Middle(middle))
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    lines, before = lines_of(program, *kept), program.graph_module(ids)
    Pipeline([Canonicalize()]).run(program)
    assert lines_of(program, *kept) == lines
    assert torch.equal(program.graph_module(ids), before)


def test_a_second_run_changes_nothing():
    program = canonical(Noisy)
    program.level = "captured"
    again = Pipeline([Canonicalize()])
    again.run(program)
    assert not again.ran[0].result.changed


def test_dropout_in_training_mode_is_refused_rather_than_erased():
    """The capture holds the module in evaluation mode, so such a node can only be someone's own."""
    program = captured(Noisy)
    node = program.node("dropout")
    node.args = (*node.args[:2], True)
    Pipeline([Canonicalize()]).run(program)
    assert "dropout" in names_of(program)


class _Expanding(nn.Module):
    def forward(self, ids):
        x = self.embedding(ids)
        bias = self.bias.expand_as(x) if self.kept else self.bias.expand(*x.shape)
        return self.head(x + bias), bias

    def __init__(self, kept: bool):
        super().__init__()
        self.kept = kept
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)


@pytest.mark.parametrize("kept", [True, False])
def test_an_expand_that_a_pointwise_operation_does_by_itself_is_dropped(kept: bool):
    """Rule 4."""
    program = capture(_Expanding(kept))
    ids = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
    before = program.graph_module(ids)
    Pipeline([Canonicalize()]).run(program)
    assert "expand" not in print_program(program)
    assert torch.equal(program.graph_module(ids), before)


class _Rotating(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        pairs = torch.view_as_complex(self.embedding(ids).unflatten(-1, (-1, 2)))
        return self.head(torch.view_as_real(pairs * 2).flatten(-2))


def test_complex_views_read_contiguous_values_since_a_cut_neighbour_can_make_strides_odd():
    """Rule 5."""
    program = capture(_Rotating())
    ids = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
    before = program.graph_module(ids)
    Pipeline([Canonicalize()]).run(program)
    lines = print_program(program).splitlines()
    at = next(index for index, line in enumerate(lines) if "view_as_complex(" in line)
    assert "contiguous(" in lines[at - 1]
    assert torch.equal(program.graph_module(ids), before)


class _Copying(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        whole = torch.zeros_like(x)
        whole.copy_(x * 2)
        rows = torch.zeros_like(x)
        rows.copy_(x.mean(1, keepdim=True))
        return self.head(whole + rows)


def test_what_is_left_of_an_in_place_copy_lets_gradients_through():
    """Rule 6."""
    program = capture(_Copying())
    ids = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
    before = program.graph_module(ids)
    Pipeline([Canonicalize()]).run(program)
    assert " copy(" not in print_program(program)
    assert torch.equal(program.graph_module(ids), before)
    program.graph_module.embedding.weight.requires_grad_()  # type: ignore[union-attr]
    program.graph_module(ids).sum().backward()
    assert program.graph_module.embedding.weight.grad.abs().sum() > 0  # type: ignore[union-attr]


class Placed(nn.Module):
    """Values put among zeros of the stream's shape."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return torch.where(y > 0, y, torch.zeros_like(x)) + torch.full_like(x, 0.0)


def test_what_lends_only_its_shape_need_not_be_cut_with_it():
    """Rule 7."""
    model = one_branch(Placed)
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    program = canonical(Placed)
    assert "zeros_like" not in print_program(program) and "full_like" not in print_program(program)
    assert calls_of(program, "new_zeros") == "new_zeros(embedding, [B, T, 16]): (B, T, 16) float32" or (
        "[sym_size" in calls_of(program, "new_zeros")
    )
    assert torch.equal(program.graph_module(ids), model(ids))
    pruned = dispfx.capture(model)
    assert not pruned.refused and "write" in {site.kind for site in pruned.sites}
    require_one_function(model, pruned)


def test_a_parameter_is_read_by_one_node():
    """Rule 8."""
    program = captured(lambda: Middle(lambda m, h: h * m.scale + m.scale))
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    before, read = program.graph_module(ids), program.node("mlp_scale")
    with program.graph.inserting_after(read):
        again = program.graph.get_attr("mlp.scale")
    again.meta = dict(read.meta)
    program.node("add").replace_input_with(read, again)
    Pipeline([Canonicalize()]).run(program)
    assert [node.target for node in program.graph.nodes if node.op == "get_attr"].count("mlp.scale") == 1
    assert torch.equal(program.graph_module(ids), before)


def test_values_that_nobody_uses_are_erased_and_their_parameters_kept_apart():
    """Rule 9."""
    program = captured(lambda: Middle(lambda m, h: h * m.scale))
    product = program.node("mul")
    product.replace_all_uses_with(program.node("linear"))
    assert "mlp.scale" in program.parameters and "mlp.scale" not in program.unused
    Pipeline([Canonicalize()]).run(program)
    assert not {"mul", "mlp_scale"} & names_of(program)
    assert "mlp.scale" not in program.parameters and "mlp.scale" in program.unused


class ByLength(nn.Module):
    """An MLP whose output is scaled by numbers that follow from the length."""

    def __init__(self):
        super().__init__()
        self.body = Middle(lambda m, h: F.relu(h))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        return self.body(x) * math.ceil(tokens / 4) / (math.floor(tokens / 3) + math.ceil(tokens * 0.3))


def test_rounded_quotients_of_sizes_are_whole_and_other_roundings_stay():
    """Rule 10."""
    program = captured(ByLength)
    ids = [token_ids(2, length, vocabulary=VOCABULARY) for length in (3, 8, 13)]
    before = [program.graph_module(x) for x in ids]
    Pipeline([Canonicalize()]).run(program)
    targets = [node.target for node in program.graph.nodes]
    assert math.floor not in targets and targets.count(math.ceil) == 1
    assert all(torch.equal(program.graph_module(x), y) for x, y in zip(ids, before, strict=True))
    again = Pipeline([Canonicalize()])
    program.level = "captured"
    again.run(program)
    assert not again.ran[0].result.changed


def scaled_product(layer: Any, x: Tensor, branch: Tensor) -> Tensor:
    return torch.addcmul(x, branch, layer.scale, value=0.5)


def product(layer: Any, x: Tensor, branch: Tensor) -> Tensor:
    return torch.addcmul(x, layer.scale.expand_as(x), branch)


def quotient(layer: Any, x: Tensor, branch: Tensor) -> Tensor:
    return torch.addcdiv(x, branch, layer.scale)


def between(layer: Any, x: Tensor, branch: Tensor) -> Tensor:
    return torch.lerp(x, branch, 0.4)


def between_in_place(layer: Any, x: Tensor, branch: Tensor) -> Tensor:
    return x.clone().lerp_(branch, 0.7)


def between_by_features(layer: Any, x: Tensor, branch: Tensor) -> Tensor:
    return torch.lerp(x, branch, layer.scale)


class Added(nn.Module):
    """A layer that adds to the residual stream by one operation."""

    def __init__(self, layer: Any, add: Callable[[Any, Tensor, Tensor], Tensor]):
        super().__init__()
        self.layer, self.add = layer, add
        self.scale = nn.Parameter(0.5 + torch.rand(plain_decoders.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.add(self, x, self.layer.attention(self.layer.attention_norm(x)))
        return self.add(self, x, self.layer.mlp(self.layer.mlp_norm(x)))


def adding_by(add: Callable[[Any, Tensor, Tensor], Tensor]) -> nn.Module:
    model: Any = plain_decoders.build(plain_decoders.FORMS["pre-norm"])
    model.layers = nn.ModuleList(Added(layer, add) for layer in model.layers)
    return model.eval()


ADDITIONS = [scaled_product, product, quotient, between, between_in_place, between_by_features]


@pytest.mark.parametrize("add", ADDITIONS)
def test_an_addition_that_torch_fuses_with_a_product_is_an_addition_to_the_stream(
    add: Callable[[Any, Tensor, Tensor], Tensor],
):
    """Rule 11."""
    model = adding_by(add)
    program = dispfx.capture(model)
    assert len(program.stream.writes) == 4  # type: ignore[union-attr]
    ids = token_ids(2, 9)
    ones = [torch.ones(site.size) for site in program.sites]
    with torch.no_grad():
        assert torch.equal(gate(program)(ids, ones), program.graph_module(ids))
        assert relative_error(program.graph_module(ids), model(ids)) <= 1e-6
    require_one_function(model, program)


def test_a_fused_addition_in_several_types_stays_as_it_is():
    """Rule 11: it may compute in another type than its parts would."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            return self.down(torch.addcmul(h, h.double(), h.double()).to(x.dtype))

    assert "addcmul" in print_program(canonical(Mixed))
