"""Classes that transformers does not know, or would not build from a config: named, or written as graphs."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import dispfx
from dispfx.api import apply
from dispfx.capturing.module_capture import module_logits
from dispfx.deploy.checkpoint import own_config, require_rebuilt
from dispfx.errors import DataError, DispfxError
from dispfx.huggingface.model_loading import load_model
from dispfx.source.transformers_classes import code_of_class, known_config, require_known_class
from tests.api.conftest import Watcher

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


class Mine(nn.Module):
    pass


def folder_of(path: Path, config: object) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("read", [require_known_class, own_config, load_model])
def test_a_class_that_only_the_users_code_registers_is_refused_with_that_reason(read, tmp_path: Path):
    with pytest.raises(DataError, match="no class is registered for 'mine'") as error:
        read(folder_of(tmp_path, {"model_type": "mine"}))
    assert "import that code in Python" in str(error.value) and "pip install" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "trusted"),
    [
        ({"model_type": "llama"}, False),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "own.Config"}}, True),
        # transformers' own class, of a checkpoint that has one of its own too; its file is not here.
        ({"model_type": "llama", "auto_map": {"AutoConfig": "own.Config"}}, False),
        ({}, False),
        ([], False),
        (3, False),
    ],
)
def test_known_classes_and_trusted_code_of_the_checkpoint_pass(config: object, trusted: bool, tmp_path: Path):
    require_known_class(folder_of(tmp_path, config), trusted)


@pytest.mark.parametrize("read", [require_known_class, own_config, load_model])
def test_code_of_a_folder_is_refused_by_its_file_until_it_is_trusted(read, tmp_path: Path):
    with pytest.raises(DataError, match=r"comes with the folder: own\.py, parts\.py") as error:
        auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "parts.Model"}
        read(folder_of(tmp_path, {"model_type": "mine", "auto_map": auto_map}))
    assert "`trust_remote_code=True`" in str(error.value) and len(str(error.value).splitlines()) == 3


def test_the_code_of_a_class_is_named_where_transformers_does_not_have_it():
    assert code_of_class(Mine()) == __name__
    Mine.__module__, before = "transformers_modules.owner.code", Mine.__module__
    try:
        assert code_of_class(Mine()) is None
    finally:
        Mine.__module__ = before


class Scaled(LlamaForCausalLM):
    """A class that is registered nowhere, and computes something else than the one of its config."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        output.logits = output.logits * 2.0
        return output


class OwnConfig(LlamaConfig):
    model_type = "registered_nowhere"


class Wrapped(nn.Module):
    """A module of one's own around a decoder, which passes the decoder's config on."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids).logits


def scaled() -> nn.Module:
    return Scaled(LlamaConfig(**SMALL)).eval()


def unregistered() -> nn.Module:
    return Scaled(OwnConfig(**SMALL)).eval()


def wrapped() -> nn.Module:
    return Wrapped(LlamaForCausalLM(LlamaConfig(**SMALL))).eval()


class Tripled(LlamaMLP):
    """An MLP of one's own, which computes another thing for a single token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (3.0 if x.shape[1] == 1 else 1.0)


def tripled() -> nn.Module:
    model: Any = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    for layer in model.model.layers:
        layer.mlp.__class__ = Tripled
    return model


def other_epsilon() -> nn.Module:
    model: Any = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    model.model.norm.variance_epsilon *= 1.2
    return model


def hook_beyond_forty_tokens() -> nn.Module:
    model: Any = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()

    def halved(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        late = torch.arange(output.shape[1]) >= 40
        return output * torch.where(late, 0.5, 1.0)[None, :, None]

    model.model.norm.register_forward_hook(halved)
    return model


def method_beyond_forty_tokens() -> nn.Module:
    model: Any = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * torch.where(torch.arange(x.shape[1]) >= 40, 0.5, 1.0)[None, :, None]
    return model


def other_frequencies() -> nn.Module:
    model: Any = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    model.model.rotary_emb.inv_freq *= 1.5
    return model


@pytest.mark.parametrize("build", [lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=0.5))])
def test_a_model_in_training_mode_is_compiled_as_in_evaluation_and_stays_in_training(
    build: Callable[[], nn.Module], tmp_path: Path
):
    model = build().train()
    with torch.no_grad():  # nor do gradients that are switched off around it matter
        report = dispfx.compile(model, 0.3, torch.arange(2_000) % 64, tmp_path / "out", steps=2, seq_len=16)
    assert all(line.holds for line in report.verify)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (scaled, "would build LlamaForCausalLM, not Scaled"),
        (unregistered, "no class is registered with AutoModelForCausalLM for OwnConfig"),
        (wrapped, "is not a PreTrainedModel"),
        (lambda: Wrapped(tripled()), "is not a PreTrainedModel"),
    ],
    ids=["another class", "no class", "wrapped", "changed and wrapped"],
)
def test_a_class_that_transformers_would_not_build_gives_a_graph_and_a_note(
    build: Callable[[], nn.Module], reason: str, tmp_path: Path
):
    """transformers would open the folder as another decoder, or not at all."""
    model, watcher = build(), Watcher()
    assert known_config(model) is None
    plan = dispfx.Plan.random(dispfx.capture(model), 0.3, seed=0, align=4)

    apply(model, plan, out=tmp_path / "out", observer=watcher)

    assert any(reason in note and "dispfx.load" in note for note in watcher.notes)
    assert (tmp_path / "out/program.pt2").is_file() and not (tmp_path / "out/config.json").exists()
    ids = torch.arange(18).reshape(2, 9)
    expected: Any = dispfx.lower(dispfx.capture(model), plan)(ids)
    assert torch.allclose(dispfx.load(tmp_path / "out")(ids), expected, atol=1e-5)
    with pytest.raises(DispfxError, match="does not know this module"):
        apply(model, plan, out=tmp_path / "dense", export="dense")


def doubling(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Compile to code that gives other numbers, as rounding does."""
    return lambda *args: tuple(2.0 * one if torch.is_floating_point(one) else one for one in graph(*args))


def compiled_whole(model: Any) -> Any:
    model.compile(backend=doubling)
    return model


def compiled_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend=doubling)
    return model


@pytest.mark.parametrize("compiled", [compiled_whole, compiled_layers])
def test_a_compiled_decoder_is_the_one_that_was_compiled(compiled: Callable[[Any], Any], tmp_path: Path):
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        plain = model(ids).logits
        compiled(model)
        assert torch.equal(module_logits(model, ids), plain)
        assert not torch.equal(model(ids).logits, plain), "it is still compiled"
    plan = dispfx.Plan.random(dispfx.capture(model), 0.3, seed=0, align=4)
    report = apply(model, plan, out=tmp_path / "out")
    assert all(line.holds for line in report.verify) and (tmp_path / "out/config.json").is_file()


def pruned_by_mask(model: Any) -> None:
    prune.random_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5)


def parametrised(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)


def of_old_weight_norm(model: Any) -> None:
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(model.model.layers[0].mlp.up_proj)


def with_adapters(model: Any) -> None:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, which PEFT meets
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["up_proj"]))


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (pruned_by_mask, r"weight_orig(.|\n)*prune\.remove\("),
        (parametrised, r"parametrizations\.weight\.original0(.|\n)*remove_parametrizations\("),
        (of_old_weight_norm, r"weight_g(.|\n)*remove_weight_norm\("),
        (with_adapters, r"up_proj\.base_layer\.weight(.|\n)*merge_and_unload\("),
    ],
)
def test_a_decoder_whose_weights_are_computed_is_refused_with_what_makes_them_ordinary(change, remedy):
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    change(model)
    with pytest.raises(DataError, match=remedy):
        require_rebuilt(model, LlamaConfig(**SMALL))


def test_what_cannot_be_written_or_built_again_is_refused_before_anything_is_learned(tmp_path: Path):
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    learn: dict[str, Any] = {"data": torch.arange(2_000) % 64, "out": tmp_path / "out"}
    model.lm_head = nn.Linear(16, 80, bias=False)
    with pytest.raises(DispfxError, match=r"differs from what its class builds.*lm_head\.weight"):
        dispfx.compile(model, 0.3, **learn)
    model = tripled()
    with pytest.raises(DispfxError, match=r"than its class does when(.|\n)*model\.layers\.0\.mlp"):
        dispfx.compile(model, 0.3, **learn)
    for change in (other_epsilon, hook_beyond_forty_tokens, method_beyond_forty_tokens):
        with pytest.raises(DispfxError, match="than its class does when it is built from its config"):
            dispfx.compile(change(), 0.3, **learn, seq_len=64)
    with pytest.raises(DispfxError, match=r"would lose a buffer(.|\n)*rotary_emb\.inv_freq"):
        dispfx.compile(other_frequencies(), 0.3, **learn, export="dense")
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    model.config.notes = {1, 2}  # no JSON
    with pytest.raises(DispfxError, match="cannot be written"):
        dispfx.compile(model, 0.3, **learn)
    assert list(tmp_path.iterdir()) == []
