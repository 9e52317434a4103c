import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import dispfx
from dispfx.deploy import weights
from dispfx.errors import OutputError, PlanMismatchError
from dispfx.huggingface.modules import index_buffers
from dispfx.verification.equivalence import ModuleDecoder
from dispfx.verification.graphs import zeroed_tensors
from tests.huggingface.conftest import Folder
from tests.programs import relative_error, token_ids
from tests.tiny_transformers import VOCABULARY

IDS = token_ids(2, 11, vocabulary=VOCABULARY)


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def test_from_pretrained_gives_the_decoders_own_class_and_the_zeroed_decoders_logits(llama: Folder) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama.path)

    with torch.no_grad():
        expected = ModuleDecoder(llama.dense, zeroed_tensors(llama.program, llama.plan))(IDS)
    assert type(model) is LlamaForCausalLM
    assert relative_error(logits(model), expected) < 1e-5
    assert model.num_parameters() < llama.dense.num_parameters()  # type: ignore[operator]


def test_dispfx_load_gives_the_same_model(llama: Folder) -> None:
    model: Any = dispfx.load(llama.path)

    assert type(model) is LlamaForCausalLM
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(llama.path)))


FRESH = """
import sys
{first}
{second}
import torch
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.save(model(torch.load(sys.argv[2], weights_only=True)).logits, sys.argv[3])
"""
IMPORTS = ("import dispfx", "from transformers import AutoModelForCausalLM")


@pytest.mark.parametrize("imports", [IMPORTS, IMPORTS[::-1]], ids=["dispfx first", "transformers first"])
def test_a_fresh_process_gets_the_same_bits_whatever_is_imported_first(
    llama: Folder, tmp_path: Path, imports: tuple[str, str]
) -> None:
    torch.save(IDS, tmp_path / "ids")
    code = FRESH.format(first=imports[0], second=imports[1])
    paths = [str(llama.path), str(tmp_path / "ids"), str(tmp_path / "logits")]

    subprocess.run(
        [sys.executable, "-c", code, *paths], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )

    found = torch.load(tmp_path / "logits", weights_only=True)
    assert torch.equal(found, logits(AutoModelForCausalLM.from_pretrained(llama.path)))


def test_importing_dispfx_imports_neither_torch_nor_transformers() -> None:
    code = "import dispfx, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"

    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert ran.stdout.strip() == "[]"


def test_linear_layers_stay_plain_and_have_their_true_sizes(llama: Folder) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(llama.path)
    kept = llama.plan.kept
    layer: Any = model.model.layers[0]

    assert type(layer.self_attn.q_proj) is torch.nn.Linear
    assert layer.self_attn.q_proj.in_features == len(kept["model.layers.0.self_attn.read"])
    assert type(layer.mlp.down_proj) is torch.nn.Linear
    assert layer.mlp.down_proj.out_features == len(kept["model.layers.0.mlp.write"])
    assert layer.mlp.down_proj.in_features == len(kept["model.layers.0.mlp.inner"])
    norm: Any = layer.input_layernorm
    assert type(norm) is LlamaRMSNorm
    select: Any = norm.dispfx_select
    assert torch.equal(select, kept["model.layers.0.self_attn.read"])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
def test_a_folder_loads_in_half_precision(llama: Folder, dtype: torch.dtype, tolerance: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama.path, dtype=dtype)

    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    expected = logits(AutoModelForCausalLM.from_pretrained(llama.path))
    assert relative_error(logits(model), expected) < tolerance


def test_a_loaded_model_is_not_taken_for_a_quantised_one(llama: Folder) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama.path)

    assert not model.is_quantized and not hasattr(model, "hf_quantizer")
    assert {parameter.dtype for parameter in model.half().parameters()} == {torch.float16}
    assert {parameter.dtype for parameter in model.float().parameters()} == {torch.float32}


def test_what_is_saved_again_loads_again_and_keeps_its_lock(llama: Folder, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama.path)

    model.save_pretrained(tmp_path, max_shard_size="20KB")

    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert set(weights.read_headers(tmp_path)) == set(weights.read_headers(llama.path))
    assert "pruned by dispfx" in json.loads((tmp_path / "config.json").read_text())["transformers_weights"]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_the_body_without_the_head_loads_and_is_saved_again(llama: Folder, tmp_path: Path) -> None:
    whole: Any = AutoModelForCausalLM.from_pretrained(llama.path)
    body = AutoModel.from_pretrained(llama.path)

    body.save_pretrained(tmp_path)

    with torch.no_grad():
        expected = whole.model(IDS).last_hidden_state
        assert torch.equal(body(IDS).last_hidden_state, expected)
        assert torch.equal(AutoModel.from_pretrained(tmp_path)(IDS).last_hidden_state, expected)


def test_a_config_alone_does_not_build_the_dense_decoder(llama: Folder) -> None:
    with pytest.raises(OutputError, match="kept indices are stored with its weights"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llama.path))


def test_another_weight_format_on_top_is_refused(llama: Folder) -> None:
    asked = BitsAndBytesConfig(load_in_8bit=True)

    with pytest.raises(ValueError, match="DispfxConfig"):
        AutoModelForCausalLM.from_pretrained(llama.path, quantization_config=asked)


def test_indices_of_another_compilation_are_refused(llama: Folder, tmp_path: Path) -> None:
    shutil.copytree(llama.path, tmp_path / "other")
    tensors = {name: tensor.clone() for name, tensor in weights.read_tensors(llama.path).items()}
    kept = tensors["model.layers.0.input_layernorm.dispfx_select"]
    free = next(i for i in range(int(kept[0]) + 1, 32) if i not in kept.tolist())
    kept[kept.tolist().index(free - 1)] = free
    weights.write_tensors(tmp_path / "other", tensors, {})

    for opened in (AutoModelForCausalLM.from_pretrained, dispfx.load):
        with pytest.raises(PlanMismatchError, match="not those that the config was written with"):
            opened(tmp_path / "other")


@pytest.mark.parametrize("value", [-1, 32, 10**9])
def test_indices_outside_of_the_features_are_refused(llama: Folder, tmp_path: Path, value: int) -> None:
    shutil.copytree(llama.path, tmp_path / "other")
    tensors = {name: tensor.clone() for name, tensor in weights.read_tensors(llama.path).items()}
    tensors["model.layers.1.post_attention_layernorm.dispfx_select"][-1] = value
    weights.write_tensors(tmp_path / "other", tensors, {})

    with pytest.raises(PlanMismatchError, match="must lie between 0 and 31"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "other")


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    "change",
    [
        lambda layout: layout.pop("modules"),
        lambda layout: layout.update(modules=3),
        lambda layout: layout.update(modules="{"),
        lambda layout: layout.update(modules="3"),
        lambda layout: layout.update(modules=json.dumps({"model.layers.9.mlp": {"sizes": {"a": 1}}})),
        lambda layout: layout.update(modules=json.dumps({DOWN: {"sizes": {"forward": 1}}})),
        lambda layout: layout.update(modules=json.dumps({DOWN: {"shapes": {"other": [1]}}})),
        lambda layout: layout.update(dtypes={"model.norm.weight": "save"}),
    ],
    ids=[
        "no modules",
        "a number",
        "no JSON",
        "a number as text",
        "no module",
        "no size",
        "no parameter",
        "no dtype",
    ],
)
def test_a_layout_that_is_not_the_decoders_is_refused(llama: Folder, tmp_path: Path, change: Any) -> None:
    shutil.copytree(llama.path, tmp_path / "other")
    config = json.loads((llama.path / "config.json").read_text())
    change(config["quantization_config"]["layout"])
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))

    with pytest.raises(PlanMismatchError):
        AutoModelForCausalLM.from_pretrained(tmp_path / "other")


def test_a_folder_in_the_form_of_version_3_is_read(llama: Folder, tmp_path: Path) -> None:
    shutil.copytree(llama.path, tmp_path / "old")
    config = json.loads((llama.path / "config.json").read_text())
    section = config["quantization_config"]
    section["schema_version"] = 3
    modules = json.loads(section["layout"]["modules"])
    section["layout"]["modules"] = {path: json.dumps(module) for path, module in modules.items()}
    words = [text.split() for text in section["sites"]]
    section["sites"] = [
        {"name": name.removesuffix(":"), "kind": kind, "size": int(size), "kept": int(kept)}
        for name, kind, kept, _, size in words
    ]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))

    expected = logits(AutoModelForCausalLM.from_pretrained(llama.path))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "old")), expected)
    assert torch.equal(logits(dispfx.load(tmp_path / "old")), expected)


@pytest.mark.parametrize("sites", [None, 3, {"a": 1}, [{"name": "a"}], ["a: read 1"], [3]])
def test_a_section_that_lists_no_sites_is_refused(llama: Folder, tmp_path: Path, sites: Any) -> None:
    shutil.copytree(llama.path, tmp_path / "other")
    config = json.loads((llama.path / "config.json").read_text())
    config["quantization_config"]["sites"] = sites
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))

    with pytest.raises(PlanMismatchError, match="lists no sites"):
        dispfx.load(tmp_path / "other")


def test_every_index_buffer_is_stored(llama: Folder) -> None:
    model: Any = dispfx.load(llama.path)
    stored = {name for name in weights.read_headers(llama.path) if weights.is_index(name)}

    assert stored == set(index_buffers(model)) and len(stored) == 8


BY_HAND = """
import json, sys
from transformers import AutoConfig, AutoModelForCausalLM
ways = ({}, {"use_safetensors": True}, {"use_safetensors": False}, {"ignore_mismatched_sizes": True})
for folder in sys.argv[1:]:
    entries = json.load(open(folder + "/config.json"))
    for name in ("quantization_config", "transformers_weights"):
        del entries[name]
    config = AutoConfig.for_model(**entries)
    for options in ways:
        try:
            AutoModelForCausalLM.from_pretrained(folder, config=config, **options)
            print("LOADED", options)
        except Exception as error:
            print("refused", type(error).__name__)
    print("= of", folder, file=sys.stderr)
assert "dispfx" not in sys.modules
"""


def test_a_config_made_by_hand_never_loads_wrong_weights_without_a_word_of_dispfx(
    llama: Folder, narrow_llama: Folder, tmp_path: Path
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", BY_HAND, str(llama.path), str(narrow_llama.path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    lines = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines] == (["refused"] * 3 + ["LOADED"]) * 2, ran.stdout
    # What was asked for by name is reported with every weight that was made up, and names dispfx.
    for told in ran.stderr.split("= of")[:2]:
        assert "MISMATCH" in told and "dispfx_" in told, ran.stderr


def test_a_decoder_without_indices_keeps_its_mark_when_it_is_saved_again(
    narrow_llama: Folder, tmp_path: Path
) -> None:
    read: Any = AutoModelForCausalLM.from_pretrained
    loaded, report = read(narrow_llama.path, output_loading_info=True)
    loaded.save_pretrained(tmp_path / "again")
    again, report_again = read(tmp_path / "again", output_loading_info=True)

    for found in (report, report_again):
        assert not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"]
    body: Any = AutoModel.from_pretrained(narrow_llama.path)
    ids = token_ids(2, 5, vocabulary=VOCABULARY)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, loaded(ids).logits)
        assert body(ids).last_hidden_state.shape[-1] == len(narrow_llama.plan.kept["stream"])
    again.half()
