"""With one selection for the whole stream a smaller decoder is an ordinary one, which needs no dispfx."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import dispfx
from dispfx.analysis.label_map import Mismatch
from dispfx.api import apply, capture
from dispfx.errors import DispfxError, UnsupportedGraphError
from dispfx.huggingface.widths_of_config import resized
from dispfx.plan.budget import Budget
from dispfx.plan.plan import Plan
from dispfx.report import load_report
from dispfx.run.targets import require_ordinary
from dispfx.settings.learning_settings import LearnSettings
from dispfx.source import Source
from tests.huggingface.conftest import Folder, logits_without_dispfx, write_narrower
from tests.learning_options import options_of
from tests.programs import relative_error, token_ids
from tests.tiny_transformers import VOCABULARY, tiny_transformer

IDS = token_ids(2, 9, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def narrower(
    narrow_llama: Folder, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Folder, torch.Tensor]]:
    """Folders of three decoders by name, and what their ordinary forms compute without dispfx."""
    others = {
        name: write_narrower(name, tmp_path_factory.mktemp(name) / "out") for name in ("phi", "mixtral")
    }
    folders = {"llama": narrow_llama} | others
    found = logits_without_dispfx(IDS, *(folder.path / "dense" for folder in folders.values()))
    return {name: (folder, one) for (name, folder), one in zip(folders.items(), found, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "phi", "mixtral"])
def test_a_smaller_ordinary_decoder_needs_no_dispfx(
    name: str, narrower: dict[str, tuple[Folder, torch.Tensor]]
) -> None:
    made, found = narrower[name]
    plan, report, folder = made.plan, load_report(made.path / "report.json"), made.path / "dense"
    pruned: Any = AutoModelForCausalLM.from_pretrained(made.path)
    ordinary: Any = AutoModelForCausalLM.from_pretrained(folder)
    entries = json.loads((folder / "config.json").read_text())
    with torch.no_grad():
        assert relative_error(found, pruned(IDS).logits) < 1e-5
    assert [line.name for line in report.verify].count("dense = lowered") == 3
    assert entries["hidden_size"] == len(plan.kept["stream"])
    # Of every expert, where there are several: each keeps features of its own.
    experts = 4 if name == "mixtral" else 1
    assert entries["intermediate_size"] * experts == len(plan.kept["model.layers.0.mlp.inner"])
    assert entries["intermediate_size"] < 48
    assert "quantization_config" not in entries and "transformers_weights" not in entries
    # Every parameter of the pruned folder, and no other: nothing is padded and nothing is added.
    assert ordinary.num_parameters() == report.parameters.pruned == pruned.num_parameters()
    assert type(ordinary) is type(tiny_transformer(name))


def test_a_decoder_that_loads_with_dispfx_is_as_small(tmp_path: Path) -> None:
    """Its heads follow its width and its layers differ, so no config fits; the folder has modules still."""
    plan = Plan.random(capture(tiny_transformer("gpt2"), select="before-norm"), 0.4, 1)

    apply(tiny_transformer("gpt2"), plan, out=tmp_path / "out", export="none")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    width = len(plan.kept["stream"])
    assert loaded.transformer.wte.weight.shape == (VOCABULARY, width)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight and loaded.lm_head.in_features == width
    assert loaded.transformer.h[0].ln_1.normalized_shape == (width,)
    assert loaded.transformer.h[0].attn.c_attn.nf == 3 * 32, "heads are not pruned"
    indices = [path for path, buffer in loaded.named_buffers() if buffer.dtype == torch.int32]
    assert indices == ["dispfx_pruned"], "nothing is gathered"
    graph = dispfx.load(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, graph(IDS).logits)
    tied = loaded.transformer.wte.weight.detach().clone()
    loaded(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()
    assert not torch.equal(tied, loaded.lm_head.weight), "a tied weight trains as one"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        # Query, key and value are as wide as the stream, and no number of its config says otherwise.
        ("gpt2", r"c_attn.weight would have to be \(\d+, 96\)"),
        ("roberta", r"query.weight would have to be \(32, \d+\)"),
        # The scale of its embedding follows from its width, and the embedding is the head, too.
        ("gemma3", "its code derives a number from a width"),
    ],
)
def test_a_class_that_cannot_be_built_so_is_refused_by_its_reason(
    name: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedGraphError, match=reason):
        write_narrower(name, tmp_path / "out", align=4)

    assert not (tmp_path / "out").exists()


def narrower_with_heads(*heads: list[int]) -> tuple[nn.Module, Plan]:
    """Return a decoder, and a plan that keeps half of the stream and these heads of its layers."""
    model = tiny_transformer("llama")
    program = capture(model, select="before-norm", sites="heads")
    left = iter(heads)
    kept = {
        site.name: next(left) if site.kind == "heads" else list(range(0, site.size, 2))
        for site in program.sites
    }
    return model, Plan.from_masks(program, kept)


def test_an_ordinary_decoder_has_fewer_heads_where_every_layer_has_as_many(tmp_path: Path) -> None:
    """Each layer keeps another one of its two key/value heads, with the queries that read it."""
    model, plan = narrower_with_heads([0], [1])
    apply(model, plan, out=tmp_path / "out", export="dense")
    config = AutoConfig.from_pretrained(tmp_path / "out" / "dense")
    dense: Any = model.config
    assert (config.num_key_value_heads, config.num_attention_heads) == (1, dense.num_attention_heads // 2)
    assert (config.head_dim, config.num_hidden_layers) == (dense.head_dim, 2)
    ordinary: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "dense")
    with torch.no_grad():
        found = ordinary(IDS, use_cache=True)
        assert relative_error(found.logits, dispfx.load(tmp_path / "out")(IDS).logits) < 1e-5
    assert [layer.keys.shape[1] for layer in found.past_key_values.layers] == [1, 1]


def test_layers_of_unlike_numbers_of_heads_are_refused(tmp_path: Path) -> None:
    model, plan = narrower_with_heads([0], [0, 1])
    with pytest.raises(UnsupportedGraphError, match=r"layers\.\d\.self_attn\.\w+\.weight would have to be"):
        apply(model, plan, out=tmp_path / "out", export="dense")


def test_layers_of_unlike_widths_are_refused(tmp_path: Path) -> None:
    model = tiny_transformer("llama")
    program = capture(model, skip=["*layers.0.mlp"], select="before-norm")
    plan = Plan.random(program, 0.4, 1)

    with pytest.raises(UnsupportedGraphError, match=r"layers\.\d\.mlp\.\w+\.weight would have to be"):
        apply(model, plan, out=tmp_path / "out", export="dense")


def test_what_is_not_possible_is_refused_before_anything_is_learned(tmp_path: Path) -> None:
    tokens = torch.randint(VOCABULARY, (2048,), generator=torch.Generator().manual_seed(0))

    def refuse_to_learn(*_: Any, **__: Any) -> None:
        raise AssertionError("learning began")

    with pytest.MonkeyPatch.context() as patched, pytest.raises(UnsupportedGraphError, match="c_attn"):
        patched.setattr("dispfx.run.plan_learning.learn_within", refuse_to_learn)
        dispfx.compile(
            tiny_transformer("gpt2"),
            0.3,
            out=tmp_path / "out",
            data=tokens,
            **options_of(LearnSettings(steps=3, seq_len=16, batch_size=2, constrained=True)),
            select="before-norm",
            export="dense",
        )
    assert not (tmp_path / "out").exists()


def nine_heads() -> Any:
    """A llama of nine heads: transformers does not load one whose width is no multiple of them."""
    torch.manual_seed(0)
    sizes: Any = {
        "hidden_size": 72,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
    }
    heads: Any = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


@pytest.mark.parametrize("ratio", [0.02, 0.3])
def test_a_width_that_the_config_forbids_is_refused_before_learning(ratio: float) -> None:
    """Even if the random plan, which is tried first, has a width that it allows."""
    model = nine_heads()
    program = capture(model, select="before-norm")
    source = Source(model, None, model.config, "nine", "folder")

    with pytest.raises(
        UnsupportedGraphError, match="is not a multiple of the number of attention heads"
    ) as no:
        require_ordinary(source, program, Budget(ratio, "total", 8))
    assert "`align`" in str(no.value.hint)
    require_ordinary(source, program, Budget(0.3, "total", 9))


def test_verify_compares_the_ordinary_form_as_it_lies_there(narrow_llama: Folder, tmp_path: Path) -> None:
    shutil.copytree(narrow_llama.path, tmp_path / "out")
    folder = tmp_path / "out" / "dense"
    lines = [line for line in dispfx.api.verify(tmp_path / "out") if line.name == "dense = checkpoint"]
    assert len(lines) == 3 and all(line.holds for line in lines)

    damaged: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        damaged.model.norm.weight.mul_(1.5)
    damaged.save_pretrained(folder)

    lines = [line for line in dispfx.api.verify(tmp_path / "out") if line.name == "dense = checkpoint"]
    assert not any(line.holds for line in lines)


def test_numbers_of_a_config_are_found_by_the_shapes_that_they_give() -> None:
    """Width, inner width, vocabulary and number of positions are all 64: only two of them change."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    dense = shapes_of(config)
    smaller = LlamaConfig(**{**config.to_dict(), "hidden_size": 40, "intermediate_size": 24, "head_dim": 16})

    found = resized(config, dense, shapes_of(smaller))

    assert not isinstance(found, Mismatch)
    assert shapes_of(found.config) == shapes_of(smaller)
    assert found.numbers == {"hidden_size": 40, "intermediate_size": 24}
    assert config.hidden_size == 64, "the config itself stays as it was"


def test_shapes_that_no_numbers_give_are_named() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4, num_key_value_heads=4)
    dense = shapes_of(config)
    wanted = {**dense, "model.norm.weight": (24,)}

    found = resized(config, dense, wanted)

    assert isinstance(found, Mismatch) and "model.norm.weight would have to be (24,)" in found.reason


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return {path: tuple(parameter.shape) for path, parameter in model.named_parameters()}


def test_fewer_features_of_values_are_refused_before_anything_is_learned(tmp_path: Path) -> None:
    given: dict[str, Any] = {"constrained": True, "select": "before-norm", "export": "dense", "seq_len": 16}
    given |= {"sites": ("attention-values",), "method": "random"}
    with pytest.raises(DispfxError, match="one size for keys and values"):
        dispfx.compile(tiny_transformer("llama"), 0.3, torch.arange(400) % 96, tmp_path / "out", **given)
    assert not list(tmp_path.iterdir())
