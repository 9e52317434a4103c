import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from dispfx.deploy import checkpoint, reload, weights
from dispfx.deploy.section import ModelFiles, read_section
from dispfx.errors import DataError, OutputError
from dispfx.huggingface.entries import ROUNDED_VERSION, SCHEMA_VERSION
from tests.deploy.conftest import Written, inner_plan, mlp_sites, plan_of, slice_in_place, tiny_llama, write

STOCK = """
import sys, warnings
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM
for loader in (AutoModelForCausalLM, LlamaForCausalLM, AutoModel):
    for options in ({}, {"ignore_mismatched_sizes": True}, {"use_safetensors": False}):
        try:
            loader.from_pretrained(sys.argv[1], **options)
            print("LOADED", loader.__name__, options)
        except Exception as error:
            print("refused", error)
assert "dispfx" not in sys.modules
"""


def test_transformers_without_dispfx_refuses_the_folder_whatever_the_options(written: Written) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", STOCK, str(written.folder)],
        env=environment,
        cwd=written.folder,
        capture_output=True,
        text=True,
    )

    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == 9
    assert all(line.startswith("refused") and "pruned by dispfx" in line for line in lines), ran.stdout


def test_without_our_entry_transformers_would_run_with_random_weights(written: Written) -> None:
    # The reason for the entry, kept as a test: it can go when this stops being true.
    config = json.loads((written.folder / "config.json").read_text())
    del config["transformers_weights"], config["quantization_config"]
    (written.folder / "config.json").write_text(json.dumps(config))

    model = AutoModelForCausalLM.from_pretrained(written.folder, ignore_mismatched_sizes=True)

    assert model.model.layers[0].mlp.down_proj.weight.shape == (16, 24)


def test_a_reloaded_decoder_is_bit_identical(written: Written) -> None:
    ids_BT = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))
    plan = reload.read_plan(written.folder)
    loaded: Any = slice_in_place(checkpoint.skeleton(written.folder), plan)

    reload.fill(loaded, written.folder)

    with torch.no_grad():
        assert torch.equal(loaded(ids_BT).logits, written.lowered(ids_BT).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert not loaded.training


def test_the_config_is_the_decoders_own_with_two_entries_more(written: Written, tmp_path: Path) -> None:
    config = tiny_llama().config
    (tmp_path / "plain").mkdir()
    ModelFiles(config, "LlamaForCausalLM").write(tmp_path / "plain")
    plain = json.loads((tmp_path / "plain" / "config.json").read_text())

    entries = json.loads((written.folder / "config.json").read_text())

    section = entries.pop("quantization_config")
    assert "dispfx" in entries.pop("transformers_weights")
    assert entries == {**plain, "dtype": "float32"}
    assert plain["architectures"] == ["LlamaForCausalLM"]
    assert plain["hidden_size"] == 16 and plain["intermediate_size"] == 24
    assert section["quant_method"] == "dispfx" and section["schema_version"] == SCHEMA_VERSION
    assert (section["ratio"], section["of"], section["fingerprint"]) == (0.3, "blocks", "0123abcd")
    assert section["sites"][:2] == ["layer0.mlp.read: read 16 of 16", "layer0.mlp.inner: inner 17 of 24"]
    assert not hasattr(config, "quantization_config")


def test_the_section_of_a_weight_format_that_was_undone_is_not_written(tmp_path: Path) -> None:
    config = tiny_llama().config
    config.quantization_config = {"quant_method": "gguf"}

    ModelFiles(config).write(tmp_path)

    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert config.quantization_config == {"quant_method": "gguf"}


def test_the_tokenizer_and_the_generation_config_are_in_the_folder(tmp_path: Path) -> None:
    own = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", eos_token="b")

    written = write(tmp_path / "out", tiny_llama(), inner_plan(), tokenizer=tokenizer)

    assert (written.folder / "generation_config.json").is_file()
    assert AutoTokenizer.from_pretrained(written.folder).convert_tokens_to_ids(["b", "a"]) == [2, 1]


def test_reads_and_writes_are_stored_as_indices_and_inner_sites_are_not(tmp_path: Path) -> None:
    kept = [torch.tensor([0, 3, 4]), torch.arange(20), torch.arange(16), torch.arange(24)]
    plan = plan_of(mlp_sites(), kept)

    written = write(tmp_path / "out", tiny_llama(), plan)

    indices = {k: v for k, v in weights.read_tensors(written.folder).items() if k.startswith("dispfx_index")}
    assert list(indices) == ["dispfx_index.layer0.mlp.read"]
    assert indices["dispfx_index.layer0.mlp.read"].dtype == torch.int32
    assert indices["dispfx_index.layer0.mlp.read"].tolist() == [0, 3, 4]
    assert reload.read_plan(written.folder) == plan


def test_parameters_are_counted_from_the_file_without_indices_and_a_tied_one_once(written: Written) -> None:
    dense = sum(parameter.numel() for parameter in tiny_llama().parameters())

    assert weights.count_parameters(written.folder) == dense - 3 * 16 * (24 - 17) - 3 * 16 * (24 - 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skeleton_has_the_buffers_and_dtypes_of_the_decoder_and_zeros_for_weights(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    # Casting a decoder rounds its rotary frequencies, which building one in that dtype does not.
    model: Any = tiny_llama(tie_word_embeddings=False)
    model.to(dtype)
    model.lm_head.float()
    frequencies = model.model.rotary_emb.inv_freq.clone()
    written = write(tmp_path / "out", model, inner_plan())

    skeleton: Any = checkpoint.skeleton(written.folder)

    assert torch.equal(skeleton.model.rotary_emb.inv_freq, frequencies)
    assert skeleton.model.rotary_emb.inv_freq.dtype == dtype
    assert skeleton.model.embed_tokens.weight.dtype == dtype
    assert skeleton.lm_head.weight.dtype == torch.float32
    assert all(not parameter.any() for parameter in skeleton.parameters())
    assert skeleton.model.layers[0].mlp.down_proj.weight.shape == (16, 24)


def test_a_derived_buffer_is_not_stored_and_a_changed_one_is() -> None:
    model: Any = tiny_llama()
    assert checkpoint.underived_buffers(model, model.config) == frozenset()

    model.model.rotary_emb.inv_freq[0] += 1e-3
    assert checkpoint.underived_buffers(model, model.config) == {"model.rotary_emb.inv_freq"}


def test_a_skeleton_touches_no_memory_for_its_weights(tmp_path: Path) -> None:
    # 6.5 billion float32 parameters would need 26 GB; the test runs where there is no such memory.
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
    )
    write_empty(tmp_path, config)
    before = resident_bytes()

    skeleton = checkpoint.skeleton(tmp_path)

    assert sum(parameter.numel() for parameter in skeleton.parameters()) > 6e9
    assert resident_bytes() - before < 200e6


def test_a_skeleton_may_have_layers_of_width_0(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=0, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    write_empty(tmp_path, config)

    skeleton: Any = checkpoint.skeleton(tmp_path)

    assert skeleton.model.layers[0].mlp.down_proj.weight.shape == (16, 0)
    assert skeleton.model.layers[0].mlp.up_proj.weight.shape == (0, 16)


def write_empty(folder: Path, config: LlamaConfig) -> None:
    """Write a folder whose weight file holds none of the decoder's."""
    ModelFiles(config).write(folder)
    entries = json.loads((folder / "config.json").read_text())
    entries["quantization_config"] = {"quant_method": "dispfx", "schema_version": SCHEMA_VERSION, "sites": []}
    (folder / "config.json").write_text(json.dumps(entries))
    weights.write_tensors(folder, {"one": torch.zeros(1)}, {})


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_config_cannot_choose_an_attention_that_would_be_fetched(written: Written) -> None:
    path = written.folder / "config.json"
    entries = json.loads(path.read_text())
    entries["quantization_config"]["attention"] = "some-owner/some-kernel"
    path.write_text(json.dumps(entries))

    skeleton: Any = checkpoint.skeleton(written.folder)

    assert skeleton.config._attn_implementation == "sdpa"


def test_remote_code_is_refused_without_a_question(written: Written) -> None:
    path = written.folder / "config.json"
    entries = json.loads(path.read_text())
    entries["model_type"] = "unheard_of"
    entries["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    path.write_text(json.dumps(entries))
    (written.folder / "code.py").write_text("raise SystemExit('this must not run')")
    started = time.monotonic()

    with pytest.raises(DataError, match=r"comes with the folder: code\.py"):
        checkpoint.skeleton(written.folder)

    assert time.monotonic() - started < 5


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000, '{"model_type": "llama"}'])
def test_a_config_that_is_not_ours_is_refused(written: Written, text: str) -> None:
    (written.folder / "config.json").write_text(text)

    with pytest.raises((DataError, OutputError)):
        read_section(written.folder)
    with pytest.raises((DataError, OutputError)):
        checkpoint.skeleton(written.folder)


def test_a_folder_of_a_later_format_names_both_versions(written: Written) -> None:
    path = written.folder / "config.json"
    entries = json.loads(path.read_text())
    entries["quantization_config"]["schema_version"] = ROUNDED_VERSION + 1
    path.write_text(json.dumps(entries))

    with pytest.raises(
        OutputError, match=f"format {ROUNDED_VERSION + 1}, but this version reads 3 to {ROUNDED_VERSION}"
    ):
        read_section(written.folder)


def test_a_config_that_transformers_cannot_build_is_a_data_error(written: Written) -> None:
    path = written.folder / "config.json"
    entries = json.loads(path.read_text())
    entries["num_attention_heads"] = "many"
    path.write_text(json.dumps(entries))

    with pytest.raises(DataError):
        checkpoint.skeleton(written.folder)
