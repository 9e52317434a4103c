"""Folders of decoders that keep some of their key/value heads: modules, caches and ONNX models follow."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
)

import dispfx
from dispfx.api.compilation import apply
from dispfx.errors import OutputError
from dispfx.huggingface.widths import counted_heads
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from dispfx.report import Report, load_report
from dispfx.verification.graphs import zeroed_tensors
from tests.huggingface.conftest import Folder, one_at_a_time, quantized_session
from tests.programs import relative_error, token_ids
from tests.tiny_transformers import VOCABULARY, tiny_transformer

IDS = token_ids(2, 7, vocabulary=VOCABULARY)
FAMILIES = ("llama", "qwen3", "gpt2", "neox", "phi", "gemma2", "mixtral", "deepseek", "roberta")


def one_head_less(program: Program) -> Plan:
    """Return a plan that leaves out one head of the first layer, and half of all features."""
    generator = torch.Generator().manual_seed(0)
    kept: dict[str, Tensor | list[int]] = {}
    first = next(site.name for site in program.sites if site.kind == "heads")
    for site in program.sites:
        if site.kind == "heads":
            kept[site.name] = list(range(int(site.name == first), site.size))
        else:
            each = torch.randperm(site.per_expert, generator=generator)[: site.per_expert // 2]
            starts = torch.arange(site.experts)[:, None] * site.per_expert
            kept[site.name] = (starts + each).flatten()
    return Plan.from_masks(program, kept)


def written(path: Path, name: str, export: str = "none") -> Folder:
    dense = tiny_transformer(name)
    program = dispfx.capture(dense, sites=("heads",))
    plan = one_head_less(program)
    apply(dense, plan, out=path, export=export)  # type: ignore[arg-type]
    return Folder(path, dense, program, plan)


@pytest.fixture(scope="session")
def fewer(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A llama whose first layer keeps one of two key/value heads, with its ONNX model."""
    return written(tmp_path_factory.mktemp("fewer") / "pruned", "llama", "onnx")


@pytest.fixture
def pruned(fewer: Folder) -> Any:
    return AutoModelForCausalLM.from_pretrained(fewer.path)


@pytest.fixture
def masked(fewer: Folder) -> Any:
    """The dense decoder with its removed weights set to zero."""
    model = tiny_transformer("llama")
    model.load_state_dict(zeroed_tensors(fewer.program, fewer.plan), strict=False)
    return model


def cached_heads(model: Any) -> list[int]:
    """Return how many heads each layer caches."""
    with torch.no_grad():
        return [layer.keys.shape[1] for layer in model(IDS, use_cache=True).past_key_values.layers]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_of_a_class_of_transformers_follows(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "out", name)
    model: Any = AutoModelForCausalLM.from_pretrained(folder.path)
    dense, found = cached_heads(folder.dense), cached_heads(model)
    if name != "deepseek":  # Its cache holds latents, and every head is made of them.
        assert found[0] < dense[0] and found[1:] == dense[1:]
    report: Report = load_report(folder.path / "report.json")
    assert report.cache is not None and (report.cache.pruned < report.cache.dense or name == "deepseek")
    model.eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, use_cache=False, **options))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 3, "batch": 1},
    ],
    ids=["greedy", "beams", "static cache", "no cache", "assisted"],
)
def test_generated_tokens_are_those_of_the_masked_dense_decoder(pruned: Any, masked: Any, how: Any) -> None:
    ids = IDS[: how.get("batch", 2)]
    options = {name: value for name, value in how.items() if name != "batch"}
    found = [
        model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, **options)
        for model in (pruned, masked)
    ]
    assert torch.equal(*found)


def test_copies_and_saved_decoders_keep_their_heads(pruned: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = pruned(IDS).logits
        torch.save(pruned, tmp_path / "whole.pt")
        for again in (copy.deepcopy(pruned), torch.load(tmp_path / "whole.pt", weights_only=False)):
            assert torch.equal(again(IDS).logits, expected)
        pruned.save_pretrained(tmp_path / "saved")
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(IDS).logits, expected)


def test_continuous_batching_is_refused_by_name(pruned: Any, tmp_path: Path) -> None:
    """transformers logged errors, and returned empty texts."""
    pruned.save_pretrained(tmp_path)
    for model in (pruned, AutoModelForCausalLM.from_pretrained(tmp_path)):
        with pytest.raises(OutputError, match=r"keeps \d of \d here") as raised:
            model.generate_batch([[1, 2, 3]], GenerationConfig(max_new_tokens=2))
        assert ".heads" in str(raised.value)


def test_another_implementation_of_attention_takes_fewer_heads(pruned: Any) -> None:
    with torch.no_grad():
        expected = pruned(IDS).logits
        pruned.set_attn_implementation("eager")
        assert relative_error(pruned(IDS).logits, expected) < 1e-5
    assert {part.config._attn_implementation for part in pruned.modules() if hasattr(part, "config")} == {
        "eager"
    }


def test_gradients_reach_the_heads_that_are_left(pruned: Any) -> None:
    pruned.train()(IDS, labels=IDS).loss.backward()
    attention = pruned.model.layers[0].self_attn
    assert attention.k_proj.weight.shape[0] == 8 and bool(attention.k_proj.weight.grad.abs().sum() > 0)


def test_the_report_names_heads_and_bytes_of_the_cache(fewer: Folder) -> None:
    report = load_report(fewer.path / "report.json")
    heads = {site.name: site.kept for site in report.sites if site.kind == "heads"}
    assert heads == {"model.layers.0.self_attn.heads": 1, "model.layers.1.self_attn.heads": 2}
    # 2 layers of 2 heads of 8 features, keys and values, in float32.
    assert report.cache is not None and (report.cache.dense, report.cache.pruned) == (256, 192)
    assert all(line.holds for line in report.verify)
    assert any(line.name == "onnx with cache = checkpoint" for line in report.verify)


def test_the_onnx_model_caches_what_is_left(fewer: Folder) -> None:
    from dispfx.deploy.onnx.session import CachedSession

    caches = CachedSession(fewer.path / "onnx" / "model.onnx").caches
    assert [cache.heads for cache in caches] == [1, 1, 2, 2]
    assert not (fewer.path / "onnx" / "genai_config.json").exists(), "genai has one number of heads"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_configs_next_to_an_onnx_model_name_the_heads_that_all_layers_keep(name: str, tmp_path: Path) -> None:
    """The number of the dense decoder gave clients a cache of another shape."""
    model: Any = tiny_transformer(name)
    program = dispfx.capture(model, sites="heads")
    masks = {
        site.name: torch.arange(1 if site.kind == "heads" else site.size, dtype=torch.int32)
        for site in program.sites
    }
    plan = Plan.from_masks(program, masks)
    apply(model, plan, out=tmp_path / "out", export="onnx")

    config = AutoConfig.from_pretrained(tmp_path / "out/onnx")
    assert getattr(config, "num_key_value_heads", 1) == 1
    groups = model.config.num_attention_heads // getattr(
        model.config, "num_key_value_heads", model.config.num_attention_heads
    )
    assert config.num_attention_heads == groups
    entries = json.loads((tmp_path / "out/onnx/genai_config.json").read_text())["model"]["decoder"]
    assert (entries["num_key_value_heads"], entries["num_attention_heads"]) == (1, groups)
    assert entries["head_size"] == model.config.hidden_size // model.config.num_attention_heads
    assert getattr(config, "head_dim", entries["head_size"]) == entries["head_size"]


def test_a_number_of_heads_that_differs_by_layer_is_not_read_from_the_config() -> None:
    """Such a config raises an error for the number of all layers, so no code of an attention can read it."""
    attention, make = nn.Module(), cast(Any, PreTrainedConfig)
    by_layer = {0: {"num_attention_heads": 8}}
    attention.config = make(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, per_layer_config=by_layer
    )
    attention.num_heads = 4  # type: ignore[assignment]
    assert counted_heads(attention, {4: 2, 2: 1}, {}) == {"config.num_key_value_heads": 1, "num_heads": 2}


def test_a_class_whose_code_counts_heads_itself_keeps_its_cache(tmp_path: Path) -> None:
    """A norm over all heads divides by their number, so that its class cannot take fewer."""
    from transformers import Olmo2Config

    torch.manual_seed(0)
    config = Olmo2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, pad_token_id=None,
    )  # fmt: skip
    dense: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    plan = one_head_less(dispfx.capture(dense, sites=("heads",)))
    report = apply(dense, plan, out=tmp_path / "out", export="none")
    assert all(line.holds for line in report.verify)
    assert report.cache is not None and report.cache.pruned == report.cache.dense


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_another_head_on_fewer_heads_computes_what_the_masked_dense_decoder_does(
    fewer: Folder, masked: Any, kind: Any, tmp_path: Path
) -> None:
    masked.save_pretrained(tmp_path / "dense")
    model, dense = (
        kind.from_pretrained(path, num_labels=3, pad_token_id=0) for path in (fewer.path, tmp_path / "dense")
    )
    dense.score.load_state_dict(model.score.state_dict())
    with torch.no_grad():
        assert relative_error(model(IDS).logits, dense(IDS).logits) < 1e-5
    labels = IDS[:, 0] % 3 if kind is AutoModelForSequenceClassification else IDS % 3
    for one in (model, dense):
        one(IDS, labels=labels).loss.backward()
    grads = [one.model.layers[0].self_attn.v_proj.weight.grad for one in (model, dense)]
    # The second of two key/value heads is left, with half of the features that it reads.
    assert grads[0].shape[0] == 8
    read = fewer.plan.kept["model.layers.0.self_attn.read"].long()
    assert relative_error(grads[0], grads[1][8:, read]) < 1e-4


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_on_fewer_heads_train_are_merged_and_read_again(pruned: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        pruned, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.5)
    before = model.train()(input_ids=IDS, labels=IDS).loss
    before.backward()
    optimizer.step()
    with torch.no_grad():
        expected = model.eval()(input_ids=IDS, labels=IDS)
        assert expected.loss < before
        merged = model.merge_and_unload()
        merged.save_pretrained(tmp_path)
        again: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert relative_error(again(IDS).logits, expected.logits) < 1e-5
    assert cached_heads(again) == [1, 2]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantized_onnx_model_caches_fewer_heads(fewer: Folder, kind: Any, tmp_path: Path) -> None:
    """One token at a time gives what the whole text at once gives; rounding is the quantizer's."""
    folder = Path(shutil.copytree(fewer.path, tmp_path / "out"))
    session = quantized_session(folder, kind)
    assert [cache.heads for cache in session.caches] == [1, 1, 2, 2]
    decoder, steps = one_at_a_time(session, IDS)
    assert relative_error(steps, decoder(IDS)) < 1e-4
    with torch.no_grad():
        dense = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits
    assert relative_error(steps, dense) < (0.05 if kind == "int8" else 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fewer_heads_in_half_precision(
    fewer: Folder, masked: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The differences are those of rounding."""
    dense: Any = tiny_transformer("llama").to(dtype)
    plan = fewer.plan
    if dtype == torch.float16:  # Weights that are rounded to it first are others in a plan's fingerprint.
        plan = Plan.from_masks(dispfx.capture(dense, sites="heads"), plan.kept)
    plan.save(tmp_path / "plan.safetensors")
    report = apply(dense, tmp_path / "plan.safetensors", out=tmp_path / "out", export="none")
    assert all(line.holds for line in report.verify)
    # 2 layers of 2 heads of 8 features, keys and values, in two bytes.
    assert report.cache is not None and (report.cache.dense, report.cache.pruned) == (128, 96)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == dtype and cached_heads(model) == [1, 2]
    masked.to(dtype)
    with torch.no_grad():
        assert relative_error(model(IDS).logits, masked(IDS).logits) < 0.03
    assert torch.equal(
        *(one.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0) for one in (model, masked))
    )


def test_a_plan_of_heads_of_another_decoder_is_refused(fewer: Folder, tmp_path: Path) -> None:
    with pytest.raises(dispfx.DispfxError, match="the plan was made for a decoder with fingerprint"):
        apply(tiny_transformer("qwen3"), fewer.plan, out=tmp_path / "out", export="none")
    assert not (tmp_path / "out").exists()
