"""find-residual-stream: the stream is known by its dataflow, for every arrangement of a layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dispfx.errors import UnsupportedGraphError
from dispfx.ir.pipeline import Pipeline
from dispfx.passes.find_residual_stream import FindResidualStream
from tests.one_branch import INNER, VOCABULARY, WIDTH
from tests.passes.golden import lines_of
from tests.plain_decoders import FORMS, build, perturb
from tests.programs import program_before, token_ids


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Two branches around an arrangement that a test writes."""

    def __init__(self, arrange):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = Branch(), Branch()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.arrange = arrange

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.arrange(self, self.embedding(ids)))


def decoder(arrange) -> nn.Module:
    torch.manual_seed(0)
    return perturb(Decoder(arrange))


def found(model: nn.Module):
    return Pipeline([FindResidualStream()]).run(program_before(FindResidualStream, model))


def test_the_stream_is_marked_from_the_embedding_to_the_last_write():
    """Rule 3."""
    program = found(decoder(lambda m, x: m.norm(x + m.first(x))))
    assert lines_of(program, "embedding", "linear_1", "add", "linear_2") == (
        "* embedding = embedding(embedding_weight, input_ids): (B, T, 16) float32\n"
        "  linear_1 = linear(gelu, first_down_weight, first_down_bias): (B, T, 16) float32\n"
        "* add = add(embedding, linear_1): (B, T, 16) float32\n"
        "  linear_2 = linear(layer_norm_1, head_weight): (B, T, 31) float32"
    )
    assert program.stream is not None and program.stream.width == WIDTH
    assert program.stream.writes == ("add",)


def two_adds(m: Decoder, x: Tensor) -> Tensor:
    return (x + m.first(x)) + m.second(x)


def post_norm(m: Decoder, x: Tensor) -> Tensor:
    x = m.norm(x + m.first(x))
    return m.norm(x + m.second(x))


def scaled(m: Decoder, x: Tensor) -> Tensor:
    x = x * WIDTH**0.5
    x = x + 0.5 * m.first(x)
    return x * m.scale + m.second(x)


def half_and_back(m: Decoder, x: Tensor) -> Tensor:
    x = x.to(torch.float64)
    x = x + m.first(x.to(torch.float32))
    return (x + m.second(x.to(torch.float32)) * m.scale).to(torch.float32)


ARRANGEMENTS = {
    "sequential": (lambda m, x: (y := x + m.first(x)) + m.second(y), ("add", "add_1")),
    "branch first": (lambda m, x: (y := m.first(x) + x) + m.second(y), ("add", "add_1")),
    "parallel with one add": (lambda m, x: x + (m.first(x) + m.second(x)), ("add_1",)),
    "parallel with two adds": (two_adds, ("add", "add_1")),
    "post-norm": (post_norm, ("add", "add_1")),
    "scaled stream and branch": (scaled, ("add", "add_1")),
    "stream in another dtype": (half_and_back, ("add", "add_1")),
}


@pytest.mark.parametrize("name", sorted(ARRANGEMENTS))
def test_writes_of_every_arrangement_are_found(name: str):
    """Rules 1 and 3."""
    arrange, writes = ARRANGEMENTS[name]
    program = found(decoder(arrange))
    assert program.stream is not None
    assert (program.stream.width, program.stream.writes) == (WIDTH, writes)
    assert "embedding" in program.stream.values


def test_an_addition_without_a_product_is_no_write():
    """Rule 1."""
    program = found(decoder(lambda m, x: (y := x + torch.tanh(x)) + m.first(y)))
    assert program.stream is not None and program.stream.writes == ("add_1",)
    assert "add" in program.stream.values, "what is below every branch is where the stream starts"


def test_an_addition_inside_a_branch_is_no_write():
    """A residual connection of a branch's own does not lie on every path from ids to logits. Rule 2."""

    def inside(m: Decoder, x: Tensor) -> Tensor:
        h = m.first.norm(x)
        return x + m.second(h + m.first(h))

    program = found(decoder(inside))
    assert program.stream is not None and len(program.stream.writes) == 1


@pytest.mark.parametrize("form", ["pre-norm", "parallel-one-add"])
def test_a_second_run_changes_nothing_and_the_graph_is_not_touched(form: str):
    program = program_before(FindResidualStream, build(FORMS[form]))
    ids = token_ids(2, 9)
    before = program.graph_module(ids)
    pipeline = Pipeline([FindResidualStream(), FindResidualStream()])
    pipeline.run(program)
    assert [ran.result.changed for ran in pipeline.ran] == [True, False]
    assert torch.equal(program.graph_module(ids), before)


def test_a_stream_with_its_tokens_last_is_refused():
    """Rule 5."""

    def channels_first(m: Decoder, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for branch in (m.first, m.second):
            x = x + branch(x.transpose(1, 2)).transpose(1, 2)
        return m.norm(x.transpose(1, 2))

    with pytest.raises(
        UnsupportedGraphError, match="last dimension of the residual stream must be its features"
    ):
        found(decoder(channels_first))
