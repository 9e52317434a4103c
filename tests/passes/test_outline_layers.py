"""outline-layers: parts give what the whole gives, and layers of one kind share one body."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.compiler.programs import lower_program
from dispfx.fast_decoder.layered import LayeredDecoder
from dispfx.ir.ops import aten, packet
from dispfx.ir.outline import Outline
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.passes.insert_gates import InsertGates
from dispfx.passes.outline_layers import OutlineLayers
from tests.plain_decoders import (
    FORMS,
    HEADS,
    VOCABULARY,
    WIDTH,
    Attention,
    Decoder,
    Form,
    Layer,
    build,
    perturb,
)
from tests.programs import program_of, token_ids


def outlined(program: Program) -> Program:
    return Pipeline([InsertGates(), OutlineLayers()]).run(program.clone())


def outline_of(program: Program) -> Outline:
    assert program.outline is not None
    return program.outline


def random_masks(program: Program) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.rand(site.size, generator=generator) for site in program.sites]


@pytest.mark.parametrize("form", list(FORMS))
def test_every_arrangement_has_one_kind_of_layer_and_the_very_bits_of_the_whole(form: str):
    program = outlined(program_of(form, layers=3))
    outline = outline_of(program)
    assert (len(outline.layers), len(outline.kinds)) == (3, 1)
    masks = random_masks(program)
    for shape in ((2, 9), (3, 5)):
        ids = token_ids(*shape)
        assert torch.equal(LayeredDecoder(program)(ids, *masks), program.graph_module(ids, *masks))


def test_gradients_of_the_masks_are_those_of_the_whole():
    program = outlined(program_of("fused-gate-up", layers=3))
    ids, found = token_ids(2, 9), []
    for module in (program.graph_module, LayeredDecoder(program)):
        masks = [mask.requires_grad_() for mask in random_masks(program)]
        module(ids, *masks).square().mean().backward()
        found.append([mask.grad for mask in masks])
    for whole, parts in zip(*found, strict=True):
        assert whole is not None and bool(whole.abs().sum() > 0)
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-9)


class Alternating(Decoder):
    """Layers of two kinds in turn."""

    def __init__(self) -> None:
        super().__init__(Form(), layers=0)
        plain, gated = Form(mlp="plain"), Form()
        self.layers = nn.ModuleList(Layer(plain if index % 2 else gated) for index in range(4))


def test_layers_of_several_kinds_have_one_body_a_kind():
    """Rule 5."""
    torch.manual_seed(0)
    program = outlined(dispfx.capture(perturb(Alternating())))
    outline = outline_of(program)
    assert [outline.kinds.index(layer.body) for layer in outline.layers] == [0, 1, 0, 1]


class PostNorm(nn.Module):
    """The stream itself is normed after every branch, the last one included."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        inner = build(Form(norm="layer"), layers=3).layers
        self.layers = nn.ModuleList(inner)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer.attention_norm(x + layer.attention(x))  # type: ignore[operator]
            x = layer.mlp_norm(x + layer.mlp(x))  # type: ignore[operator]
        return self.head(x)


def test_norms_of_the_stream_itself_belong_to_the_layer_before():
    """Rule 1."""
    torch.manual_seed(0)
    outline = outline_of(outlined(dispfx.capture(perturb(PostNorm()))))
    assert (len(outline.layers), len(outline.kinds)) == (3, 1)
    assert {tuple(path.split(".")[1] for path in layer.tensors) for layer in outline.layers} == {
        tuple([str(index)] * len(layer.tensors)) for index, layer in enumerate(outline.layers)
    }


class SharedInput(Decoder):
    """Every layer adds an embedding of its own for the same tokens, computed beside the stream."""

    def __init__(self) -> None:
        super().__init__(Form(), layers=3)
        self.beside = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x * torch.sigmoid(self.beside(ids)))
        return self.head(self.norm(x))


def test_what_depends_on_tokens_alone_is_computed_once_in_the_prologue():
    """Rule 2."""
    torch.manual_seed(0)
    program = Pipeline([OutlineLayers("canonical")]).run(dispfx.capture(perturb(SharedInput())))
    outline = outline_of(program)
    sigmoids = [node for node in outline.prologue.body.graph.nodes if "sigmoid" in node.name]
    assert len(sigmoids) == 1
    assert sum("sigmoid" in node.name for node in program.graph.nodes) == 3
    ids = token_ids(2, 9)
    assert torch.equal(LayeredDecoder(program)(ids), program.graph_module(ids))


class SharedScale(Decoder):
    """Every layer reads the stream scaled by one number that is computed from a parameter."""

    def __init__(self) -> None:
        super().__init__(Form(), layers=3)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        x, scale = self.embedding(ids), self.scale.exp()
        for layer in self.layers:
            x = layer(x * scale)
        return self.head(self.norm(x))


def test_what_depends_on_tensors_alone_is_computed_in_every_part_that_uses_it():
    """Rule 3."""
    torch.manual_seed(0)
    program = Pipeline([OutlineLayers("canonical")]).run(dispfx.capture(perturb(SharedScale())))
    outline = outline_of(program)
    assert sum("exp" in node.name.split("_") for node in program.graph.nodes) == 1
    for layer in outline.layers[1:]:
        assert "scale" in layer.tensors
        assert sum("exp" in node.name.split("_") for node in layer.body.graph.nodes) == 1
    ids = token_ids(2, 9)
    assert torch.equal(LayeredDecoder(program)(ids), program.graph_module(ids))


class Viewed(Attention):
    """Attention that spells the sizes of its heads out, which a graph reads off the token ids."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.view(batch, tokens, HEADS, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))


def test_a_part_reads_sizes_off_its_own_values_and_takes_no_number():
    """Rule 4."""
    decoder = build(Form(), layers=3)
    for layer in decoder.layers:
        layer.attention = Viewed(Form())  # type: ignore[assignment]
    outline = outline_of(outlined(dispfx.capture(perturb(decoder))))
    inside = [node for body in outline.kinds for node in body.graph.nodes]
    assert any(packet(node) is aten.sym_size for node in inside)
    given = [node.meta["val"] for node in inside if node.op == "placeholder"]
    assert given and all(isinstance(value, Tensor) for value in given)


@pytest.mark.parametrize("write", ["index-add", "gather-add"])
def test_a_lowered_decoder_has_a_body_for_every_shape_of_layer(write):
    """Rule 5."""
    program = program_of("pre-norm", layers=3)
    full = lower_program(program, dispfx.Plan.random(program, 0.0, seed=0), write=write)
    cut = lower_program(program, dispfx.Plan.random(program, 0.4, seed=0), write=write)
    for lowered, kinds in ((full, 1), (cut, 3)):
        Pipeline([OutlineLayers("lowered")]).run(lowered)
        outline = outline_of(lowered)
        assert (len(outline.layers), len(outline.kinds)) == (3, kinds)
        ids = token_ids(2, 9)
        assert torch.equal(LayeredDecoder(lowered)(ids), lowered.graph_module(ids))


class Crossing(Decoder):
    """The last layer also reads what the first layer gave, so no single value is carried."""

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.layers[0](self.embedding(ids))
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return self.head(self.norm(x * torch.sigmoid(first)))


def test_layers_that_a_value_passes_over_are_one_part():
    """Rule 1."""
    torch.manual_seed(0)
    decoder = perturb(Crossing(Form(), layers=3))
    program = dispfx.capture(decoder)
    Pipeline([OutlineLayers("canonical")]).run(program)
    ids = token_ids(2, 9)
    outline = outline_of(program)
    # The first layer ends where the value is made; nothing can be cut until it is used.
    assert len(outline.layers) == 1
    assert torch.equal(LayeredDecoder(program)(ids), program.graph_module(ids))


def test_a_second_run_changes_no_graph_and_rewriting_drops_the_outline():
    program = outlined(program_of("pre-norm"))
    before = [node.format_node() for node in program.graph.nodes]
    again = Pipeline([OutlineLayers()]).run(program)
    assert [node.format_node() for node in again.graph.nodes] == before
    program.rebuild(dict(program.tensors()))
    assert program.outline is None


def test_parts_share_a_tied_weight_and_keep_paths():
    program = outlined(program_of("tied-embeddings"))
    layered = LayeredDecoder(program)
    paths = {name for part in layered.parts for name, _ in part.named_parameters()}
    assert paths == set(program.parameters)
    prologue, epilogue = dict(layered.prologue.named_parameters()), dict(layered.epilogue.named_parameters())
    assert prologue["embedding.weight"] is epilogue["embedding.weight"]


def test_a_body_replaced_once_is_replaced_in_every_layer_that_has_it():
    program = outlined(program_of("pre-norm", layers=3))
    layered, calls = LayeredDecoder(program), []
    body = outline_of(program).kinds[0]
    inner = layered.bodies[body]

    def counted(*operands: Tensor) -> tuple[Tensor, ...]:
        calls.append(len(operands))
        return inner(*operands)

    layered.replace_body(body, counted)
    layered(token_ids(2, 5), *random_masks(program))
    assert len(calls) == 3
