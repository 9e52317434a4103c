"""Adapters of PEFT find the modules of a pruned decoder by the names and kinds that the dense one has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.programs import relative_error, token_ids
from tests.pruned_modules import writers
from tests.tiny_transformers import VOCABULARY, tiny_transformer

peft: Any = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # GPT-2 has linear layers of both orientations; PEFT sets this itself, with a warning.
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    # Of patterns that PEFT makes itself for a mixture of experts, a dense one as well.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not:RuntimeWarning"),
]
IDS = token_ids(2, 9, vocabulary=VOCABULARY)
WRITERS = {
    "llama": ["o_proj", "down_proj"],
    "gpt2": ["c_proj"],
    "mixtral": ["o_proj"],
    "gemma3": ["o_proj", "down_proj"],
}


def lora(targets: Any, **chosen: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **chosen)


def ia3(targets: Any) -> Any:
    return peft.IA3Config(target_modules=targets, feedforward_modules=[], task_type="CAUSAL_LM")


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def trained(model: Any) -> list[float]:
    """Train what can be trained for a few steps, and return the losses."""
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model.train()(input_ids=IDS, labels=IDS).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


CONFIGS: dict[str, Callable[[str], Any]] = {
    "all linear": lambda name: lora("all-linear"),
    "by name": lambda name: lora(WRITERS[name]),
    "with magnitudes": lambda name: lora(WRITERS[name], use_dora=True),
    "ia3": lambda name: ia3(WRITERS[name]),
}
CASES = [(name, kind) for name in WRITERS for kind in CONFIGS]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_adapters_train_are_saved_read_again_and_merged(
    unverified: Callable[[str], Path], name: str, kind: str, tmp_path: Path
) -> None:
    model = peft.get_peft_model(load(unverified(name)), CONFIGS[kind](name))
    # GPT-2 drops some activations; nothing else does.
    torch.manual_seed(0)
    losses = trained(model)
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")

    again = peft.PeftModel.from_pretrained(load(unverified(name)), tmp_path / "adapter")
    assert torch.equal(logits(again), expected) and losses[-1] < losses[0]
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")

    reloaded = load(tmp_path / "merged")
    assert relative_error(logits(reloaded), expected) < 1e-5
    assert torch.equal(logits(reloaded), logits(merged))
    assert len(writers(reloaded)) == len(writers(load(unverified(name)))) > 0
    assert reloaded.state_dict().keys() == load(unverified(name)).state_dict().keys()


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_modules_get_adapters_as_in_the_dense_decoder(
    unverified: Callable[[str], Path], name: str
) -> None:
    pruned, dense = (
        peft.get_peft_model(model, lora("all-linear"))
        for model in (load(unverified(name)), tiny_transformer(name))
    )

    found, expected = (
        {key for key, value in model.named_parameters() if value.requires_grad} for model in (pruned, dense)
    )
    assert found == expected != set()


def test_adapters_on_the_writers_have_the_pruned_width(unverified: Callable[[str], Path]) -> None:
    base = load(unverified("llama"))
    width = base.model.layers[0].mlp.down_proj.out_features

    model = peft.get_peft_model(base, lora(["down_proj"]))

    adapted = model.base_model.model.model.layers[0].mlp.down_proj
    assert adapted.lora_B["default"].out_features == width < 32
    adapters = writers(model)[1::2]
    assert adapters and all(isinstance(module, peft.tuners.lora.Linear) for module, _ in adapters)


def test_modules_that_are_trained_whole_gather_once(
    unverified: Callable[[str], Path], tmp_path: Path
) -> None:
    """PEFT keeps the module, with its hooks, and a copy of it, in one that stands in its place."""
    config = lora(["q_proj"], modules_to_save=["down_proj", "input_layernorm"])
    untouched = logits(load(unverified("llama")))
    model = peft.get_peft_model(load(unverified("llama")), config)
    assert torch.equal(logits(model), untouched)

    losses = trained(model)
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")

    again = peft.PeftModel.from_pretrained(load(unverified("llama")), tmp_path / "adapter")
    assert torch.equal(logits(again), expected) and losses[-1] < losses[0]
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(load(tmp_path / "merged")), logits(merged))
    assert relative_error(logits(merged), expected) < 1e-5


def test_an_adapter_compiles_without_a_graph_break(unverified: Callable[[str], Path]) -> None:
    model = peft.get_peft_model(load(unverified("llama")), lora("all-linear", init_lora_weights=False)).eval()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    assert relative_error(logits(compiled), logits(model)) < 1e-6


class _Rounded(nn.Module):
    """A layer with weights of its own in place of a linear one, as libraries of quantised weights do it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().max() / 127
        self.whole: torch.Tensor
        self.register_buffer("whole", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.whole * self.scale)


def test_what_replaces_a_module_gets_its_indices(unverified: Callable[[str], Path]) -> None:
    model, expected = load(unverified("llama")), logits(load(unverified("llama")))

    for layer in model.model.layers:
        layer.self_attn.o_proj = _Rounded(layer.self_attn.o_proj)
        layer.mlp.down_proj = _Rounded(layer.mlp.down_proj)

    assert len(writers(model)) == 4
    assert 0 < relative_error(logits(model), expected) < 2e-2
    assert "model.layers.0.mlp.down_proj.dispfx_write" in model.state_dict()


def test_a_module_that_is_put_back_gathers_again(unverified: Callable[[str], Path]) -> None:
    model, expected = load(unverified("llama")), logits(load(unverified("llama")))
    layer = model.model.layers[0]
    held = layer.mlp.down_proj, layer.input_layernorm

    layer.mlp.down_proj, layer.input_layernorm = nn.Sequential(held[0]), nn.Sequential(held[1])
    assert torch.equal(logits(model), expected)
    layer.mlp.down_proj, layer.input_layernorm = held

    assert torch.equal(logits(model), expected)
