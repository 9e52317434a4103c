"""Sibling weights lie together while masks are learned, are there once, and lie apart again behind it."""

import pytest
import torch
from torch import Tensor, nn

import dispfx
from dispfx.api.programs import batches_of
from dispfx.api.training import prepared_loss
from dispfx.ir.program import Program
from dispfx.learning.settings import LearnSettings
from dispfx.passes.fuse_projections import lie_stacked
from dispfx.passes.insert_gates import InsertGates
from dispfx.pipeline import Pipeline
from dispfx.training.decoder import TrainingDecoder
from dispfx.training.preparation import Compute, PlainDecoder
from dispfx.training.stacked import stacked_weights
from tests.plain_decoders import FORMS, build
from tests.programs import token_ids

LAYERS = 2
SETTINGS = LearnSettings(steps=4, seq_len=16, batch_size=2)
# The same sums, but a larger product may run in another kernel.
OTHER_KERNEL = 1e-5


def captured(form: str = "pre-norm") -> tuple[nn.Module, Program]:
    module = build(FORMS[form], layers=LAYERS)
    return module, dispfx.capture(module)


def gated(program: Program) -> Program:
    return Pipeline([InsertGates()]).run(program.clone())


def storages(module: nn.Module) -> set[int]:
    return {weight.untyped_storage().data_ptr() for weight in module.parameters()}


def siblings_of(module: nn.Module) -> list[list[Tensor]]:
    weights = dict(module.named_parameters())
    names = (("attention.query", "attention.key", "attention.value"), ("mlp.gate", "mlp.up"))
    return [
        [weights[f"layers.{layer}.{name}.weight"] for name in group]
        for layer in range(LAYERS)
        for group in names
    ]


def test_siblings_become_views_of_one_storage_and_lie_apart_again():
    module, program = captured()
    before = {path: weight.detach().clone() for path, weight in module.named_parameters()}
    with stacked_weights(gated(program)) as groups:
        assert groups == 2 * LAYERS
        assert all(lie_stacked(group) for group in siblings_of(module))
        assert len(storages(module)) == len(before) - 3 * LAYERS
        assert all(torch.equal(weight, before[path]) for path, weight in module.named_parameters())
    for path, weight in module.named_parameters():
        assert torch.equal(weight, before[path])
        assert weight.untyped_storage().nbytes() == weight.nbytes, path


def test_they_lie_apart_again_where_the_run_fails():
    module, program = captured()
    with pytest.raises(RuntimeError, match="in the run"), stacked_weights(gated(program)):
        raise RuntimeError("in the run")
    assert len(storages(module)) == len(list(module.parameters()))


def test_they_stay_together_where_there_is_no_memory_to_part_them(monkeypatch):
    module, program = captured()
    before = [weight.detach().clone() for weight in module.parameters()]
    with stacked_weights(gated(program)):

        def nothing_left(weight: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(Tensor, "clone", nothing_left)
    monkeypatch.undo()
    assert all(map(torch.equal, module.parameters(), before))
    assert all(lie_stacked(group) for group in siblings_of(module))


def test_weights_that_are_a_part_of_something_else_are_not_moved():
    module = build(FORMS["pre-norm"], layers=LAYERS)
    query, up = (module.get_parameter(f"layers.0.{name}.weight") for name in ("attention.query", "mlp.up"))
    larger = torch.cat([query.detach(), torch.zeros(1, query.shape[1])])
    query.data = larger[:-1]
    other = module.get_parameter("layers.1.mlp.up.weight")
    other.data = up.data  # two parameters, one storage
    with stacked_weights(gated(dispfx.capture(module))) as groups:
        assert groups == 2 * LAYERS - 3
        with torch.no_grad():
            larger[0, 0] = up[0, 0] = 5.0
        assert query[0, 0] == other[0, 0] == 5.0


def test_every_program_of_a_decoder_moves_with_it():
    module, first = captured()
    second = dispfx.capture(module)
    with stacked_weights(gated(first)):
        for path, weight in second.parameters.items():
            assert weight.data_ptr() == module.get_parameter(path).data_ptr()
            assert first.parameters[path] is weight


def test_values_that_a_decoder_was_given_since_are_not_overwritten():
    module, program = captured()
    query = module.get_parameter("layers.0.attention.query.weight")
    old = query.detach().clone()
    query.data = torch.zeros_like(query)
    with stacked_weights(gated(program)):
        assert not query.any()
        assert torch.equal(program.parameters["layers.0.attention.query.weight"], old)
    assert not query.any()
    assert not dispfx.capture(module).parameters["layers.0.attention.query.weight"].any()


def loss_and_gradient(prepared: PlainDecoder | object, masks: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    masks = masks.clone().requires_grad_()
    loss = prepared.loss(ids, masks)  # type: ignore[attr-defined]
    (gradient,) = torch.autograd.grad(loss, masks)
    return loss.detach(), gradient


@pytest.mark.parametrize("form", ["pre-norm", "parallel-one-add", "layer-norm-with-bias"])
def test_fused_layers_have_the_loss_and_gradients_of_the_plain_graph(form: str):
    module, program = captured(form)
    ids = token_ids(2, 16)
    text = batches_of(ids.repeat(1, 2).flatten(), SETTINGS, held_out=ids.flatten())
    masks = torch.rand(sum(site.size for site in program.sites), generator=torch.Generator().manual_seed(0))
    expected = loss_and_gradient(PlainDecoder(gated(program)), masks, ids)
    storage_count = len(storages(module))
    with prepared_loss(program, text, SETTINGS, Compute(fuse="on")) as prepared:
        assert isinstance(prepared.decoder, TrainingDecoder)
        (body,) = prepared.decoder.layered.outline.kinds
        products = [node for node in body.graph.nodes if "linear" in str(node.target)]
        assert len(products) == 4  # query, key and value; out; gate and up; down
        matrices = [weight for weight in prepared.decoder.parameters() if weight.dim() == 2]
        held = {matrix.untyped_storage().data_ptr() for matrix in matrices}
        assert held <= storages(module), "a weight is there twice"
        actual = loss_and_gradient(prepared, masks, ids)
    for found, right in zip(actual, expected, strict=True):
        assert float((found - right).norm() / right.norm()) <= OTHER_KERNEL
    assert len(storages(module)) == storage_count


def test_by_default_a_cpu_moves_nothing():
    module, program = captured()
    places = storages(module)
    ids = token_ids(2, 16)
    text = batches_of(ids.repeat(1, 2).flatten(), SETTINGS, held_out=ids.flatten())
    with prepared_loss(program, text, SETTINGS) as prepared:
        assert storages(module) == places
    assert not hasattr(prepared, "decoder")
    prepared.close()  # again, which does nothing


def test_learning_with_fused_products_gives_a_plan_and_leaves_the_decoder_as_it_was():
    module, program = captured()
    before = {path: weight.detach().clone() for path, weight in module.named_parameters()}
    tokens = token_ids(1, 400).flatten()
    plan = dispfx.learn(program, tokens, 0.3, settings=SETTINGS, compute=Compute(fuse="on"))
    assert plan.fingerprint == program.fingerprint
    assert all(torch.equal(weight, before[path]) for path, weight in module.named_parameters())
    assert len(storages(module)) == len(before)
