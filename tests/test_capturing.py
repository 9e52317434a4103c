"""Capture: the graph is the module's function under its own names, and the module is left alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.capturing.module_capture import OTHER_SHAPE, TRACED_SHAPE, capture, module_logits
from dispfx.deploy.exported import export_program
from dispfx.errors import CaptureError, DispfxError
from dispfx.plan.plan import Plan
from tests.one_branch import VOCABULARY, WIDTH, Middle, OneBranch, one_branch, require_one_function, to_logits
from tests.plain_decoders import FORMS, build, perturb
from tests.programs import token_ids


def decoder(finish: Callable[[OneBranch, Tensor], Any] = to_logits) -> OneBranch:
    torch.manual_seed(0)
    return perturb(OneBranch(Middle(lambda m, h: F.gelu(h)), finish))  # type: ignore[return-value]


IDS = token_ids(2, 9, vocabulary=VOCABULARY)


def test_the_graph_gives_the_modules_bits_at_other_shapes():
    model = decoder()
    program = capture(model)
    for shape in ((1, 1), (2, 9), (5, 30)):
        ids = token_ids(*shape, vocabulary=VOCABULARY)
        assert torch.equal(program.graph_module(ids), model(ids))
    assert set(program.identity) == {TRACED_SHAPE, OTHER_SHAPE}
    assert program.identity and all(error.relative == 0.0 for error in program.identity.values())
    assert (program.vocabulary_size, program.dtype, program.device.type) == (VOCABULARY, torch.float32, "cpu")


def test_the_users_module_is_left_as_it_was():
    model = decoder().train()
    model.mlp.eval()
    model.head.weight.requires_grad_(False)
    seen: list[str] = []
    handle = model.mlp.register_forward_hook(lambda *words: seen.append("hook"))
    before = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    identities = {path: id(tensor) for path, tensor in model.named_parameters()}
    random = torch.get_rng_state()
    dispfx.lower(program := dispfx.capture(model), Plan.random(program, 0.5, 0))
    assert torch.equal(torch.get_rng_state(), random), "no random number of the user's was drawn"
    assert (model.training, model.mlp.training, model.mlp.up.training) == (True, False, False)
    assert not model.head.weight.requires_grad and model.mlp.up.weight.requires_grad
    assert model.mlp.up.weight.grad is None
    assert {path: id(tensor) for path, tensor in model.named_parameters()} == identities
    assert all(torch.equal(tensor, before[path]) for path, tensor in model.state_dict().items())
    count = len(seen)
    model(IDS)
    assert len(seen) == count + 1, "the hook is still there"
    handle.remove()


def test_training_flags_come_back_after_a_failure():
    model = decoder(lambda m, x: x.mean(1)).train()
    with pytest.raises(CaptureError):
        capture(model)
    assert all(module.training for module in model.modules())


def test_the_callers_gradient_mode_is_left_alone():
    assert torch.is_grad_enabled()
    capture(decoder())
    assert torch.is_grad_enabled()


def test_buffers_that_the_module_writes_come_back():
    def count(m: OneBranch, x: Tensor) -> Tensor:
        m.calls.add_(1)  # type: ignore[operator]
        return m.head(x)

    model = decoder(count)
    model.register_buffer("calls", torch.zeros(()))
    capture(model)
    assert float(model.calls) == 0.0  # type: ignore[arg-type]


def test_a_module_whose_logits_change_from_call_to_call_is_refused():
    def drift(m: OneBranch, x: Tensor) -> Tensor:
        m.calls.add_(1)  # type: ignore[operator]
        return m.head(x) * m.calls

    model = decoder(drift)
    model.register_buffer("calls", torch.zeros(()))
    with pytest.raises(CaptureError, match="depend on a buffer that each call changes"):
        capture(model)


def test_weights_are_shared_and_never_trained():
    model = decoder()
    program = capture(model)
    kept = {**program.parameters, **program.unused}
    for path, tensor in model.named_parameters():
        assert kept[path].data_ptr() == tensor.data_ptr(), path
        assert not kept[path].requires_grad


def test_tied_weights_are_one_parameter_under_their_first_path():
    model = build(FORMS["tied-embeddings"], layers=1)
    program = capture(model)
    assert program.ties == {"head.weight": "embedding.weight"}
    assert "head.weight" not in program.parameters
    assert torch.equal(program.graph_module(IDS), model(IDS))


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = Middle(lambda m, h: F.gelu(h))
        self.second = self.first
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.first(x)
        return self.head(x + self.second(x))


def test_a_module_under_two_names_is_tied_path_by_path():
    torch.manual_seed(0)
    model = perturb(Shared())
    program = dispfx.capture(model)
    assert program.ties["second.up.weight"] == "first.up.weight"
    assert not any(path.startswith("second.") for path in program.parameters)
    require_one_function(model, program)


def test_parameters_that_the_graph_does_not_read_are_kept_for_the_checkpoint():
    model = decoder()
    model.spare = nn.Linear(2, 3)
    program = dispfx.capture(model)
    lowered = dispfx.lower(program, Plan.random(program, 0.3, 0))
    kept = dict(lowered.named_parameters())
    assert torch.equal(kept["spare.weight"], model.spare.weight)
    assert set(dict(model.named_parameters())) <= set(kept), "every path of the decoder's own is there"


def test_buffers_and_constants_are_read_and_kept():
    table = torch.randn(WIDTH)

    def shifted(m: OneBranch, x: Tensor) -> Tensor:
        return m.head(x + m.shift + table)  # type: ignore[operator]

    model = decoder(shifted)
    model.register_buffer("shift", torch.randn(WIDTH))
    model.register_buffer("hidden_shift", torch.randn(WIDTH), persistent=False)
    program = capture(model)
    assert torch.equal(dict(program.graph_module.named_buffers())["shift"], model.get_buffer("shift"))
    assert torch.equal(program.graph_module(IDS), model(IDS))


GRADIENT_MODES = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference off": lambda: torch.set_grad_enabled(False),
}


@pytest.mark.parametrize("name", sorted(GRADIENT_MODES))
def test_gradient_modes_inside_the_module_are_inlined(name: str):
    def within(m: OneBranch, x: Tensor) -> Tensor:
        with GRADIENT_MODES[name]():
            y = torch.tanh(x) * 2
        return m.head(y + x)

    model = decoder(within)
    program = capture(model)
    assert all("wrap_with" not in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.graph_module(IDS), model(IDS))


def test_autocast_that_is_switched_off_is_inlined():
    def within(m: OneBranch, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return m.head(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    model = decoder(within)
    program = capture(model)
    assert all("autocast" not in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.graph_module(IDS), model(IDS))


class InPlace(nn.Module):
    """Adds its residual, and activates, in place."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Middle(lambda m, h: F.relu(h, inplace=True))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x += self.mlp(self.norm(x))
        x.add_(self.mlp(self.norm(x)), alpha=0.5)
        return self.head(x)


def test_in_place_operations_become_functional_and_their_writes_are_found():
    torch.manual_seed(0)
    model = perturb(InPlace())
    program = dispfx.capture(model)
    assert torch.equal(program.graph_module(IDS), model(IDS))
    assert program.stream is not None and len(program.stream.writes) == 2
    assert [site.kind for site in program.sites] == ["read", "inner", "write"]
    require_one_function(model, program)


@dataclass
class Output:
    """Not known to torch's pytree."""

    hidden: Tensor
    logits: Tensor


OUTPUTS: dict[str, Callable[[OneBranch, Tensor], Any]] = {
    "a tuple": lambda m, x: (m.head(x), x),
    "a list": lambda m, x: [m.head(x)],
    "a dict": lambda m, x: {"logits": m.head(x)},
    "a dict with more": lambda m, x: {"hidden": x, "logits": m.head(x)},
    "a dict with a loss": lambda m, x: {"loss": x.mean(), "logits": m.head(x)},
    "a dataclass": lambda m, x: Output(x, m.head(x)),
}


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_logits_are_found_in_any_output(name: str):
    model = decoder(OUTPUTS[name])
    program = capture(model)
    assert program.vocabulary_size == VOCABULARY
    expected = model.head(model.embedding(IDS) + model.mlp(model.embedding(IDS)))
    assert torch.equal(program.graph_module(IDS), expected)
    assert torch.equal(module_logits(model, IDS), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_decoder_is_captured_in_the_dtype_it_has(dtype: torch.dtype):
    model = decoder().to(dtype)
    program = dispfx.capture(model)
    assert program.dtype == dtype
    assert program.graph_module(IDS).dtype == dtype and torch.equal(program.graph_module(IDS), model(IDS))


def test_the_fingerprint_sees_class_paths_shapes_and_values():
    same = capture(decoder()).fingerprint
    assert capture(decoder()).fingerprint == same
    changed = decoder()
    with torch.no_grad():
        changed.head.weight[0, 0] += 1
    wider = decoder()
    wider.spare = nn.Linear(2, 2)

    class Other(OneBranch):
        pass

    torch.manual_seed(0)
    others = {
        capture(model).fingerprint
        for model in (changed, wider, perturb(Other(Middle(lambda m, h: F.gelu(h)))))
    }
    assert same not in others and len(others) == 3


def test_the_fingerprint_does_not_see_training_state_or_gradients():
    model = decoder()
    same = capture(model).fingerprint
    model.train().requires_grad_(False)
    assert capture(model).fingerprint == same


def test_zeroed_tensors_are_used_without_touching_the_module():
    model = decoder()
    zeros = {"head.weight": torch.zeros_like(model.head.weight)}
    assert not module_logits(model, IDS, zeros).any()
    assert module_logits(model, IDS).any()


def test_an_embedding_that_changes_its_weights_as_it_runs_is_refused():
    model = decoder()
    path, embedding = next(
        (path, one) for path, one in model.named_modules() if isinstance(one, nn.Embedding)
    )
    embedding.max_norm = 1.0
    with pytest.raises(CaptureError, match="changes its weights each time that it runs") as error:
        dispfx.capture(model)
    assert error.value.where == path


def test_a_rewritten_graph_exports_again_with_batch_and_length_free():
    program = dispfx.capture(decoder())
    lowered = dispfx.lower(program, Plan.random(program, 0.4, 0))
    exported = export_program(lowered, IDS)
    other = token_ids(5, 21, vocabulary=VOCABULARY)
    torch.testing.assert_close(exported.module()(other), lowered(other))


def test_a_vocabulary_is_taken_from_the_first_embedding_or_as_told():
    """Ids past the embedding would raise; a smaller vocabulary than the embedding's is allowed."""
    model = decoder()
    assert capture(model, vocabulary_size=5).vocabulary_size == VOCABULARY
    with pytest.raises(CaptureError, match="the module must take token ids"):
        capture(model, vocabulary_size=10 * VOCABULARY)


def test_one_branch_decoders_of_the_tests_are_decoders():
    model = one_branch(lambda: Middle(lambda m, h: F.gelu(h)))
    assert dispfx.capture(model).model_class == "tests.one_branch.OneBranch"


def rounded_by_a_kernel(error: float, *, reference_too: bool) -> OneBranch:
    """A decoder that gives other numbers than its graph, with every attention kernel or the fast ones."""

    def finish(m: OneBranch, x: Tensor) -> Tensor:
        fast = torch.backends.cuda.flash_sdp_enabled() or reference_too
        if torch.compiler.is_exporting() or not fast:
            return m.head(x)
        return m.head(x) * (1.0 + error)

    return decoder(finish)


def test_a_difference_that_only_a_fast_attention_kernel_makes_is_none():
    program = capture(rounded_by_a_kernel(1e-2, reference_too=False))
    assert program.identity and all(found.relative == 0.0 for found in program.identity.values())


def test_a_difference_that_the_reference_kernel_makes_too_is_refused():
    with pytest.raises(CaptureError, match=r"within 1e-06, at \(3, 13\) tokens it differs by 9.9"):
        capture(rounded_by_a_kernel(1e-2, reference_too=True))


@pytest.mark.parametrize("seed", [None, 1.5, "3", 2**64])
def test_a_random_plan_needs_a_seed_that_is_a_whole_number(seed: Any):
    program = capture(build(FORMS["pre-norm"], layers=1))
    with pytest.raises(DispfxError, match="seed must be a whole number of 64 bits"):
        Plan.random(program, 0.3, seed)
