"""MODEL in each of its forms, and every way in which it is refused."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging as transformers_logging

from dispfx.errors import DispfxError, SourceError
from dispfx.source import load_folder_tokenizer, load_source, location
from dispfx.source.quiet import installation

BERT = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)
T5 = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
NO_HEAD = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)


@pytest.fixture
def copied(decoder_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(decoder_folder, tmp_path / "copied")


def test_a_folder_gives_the_decoder_and_its_tokenizer(decoder_folder: Path):
    source = load_source(str(decoder_folder))

    assert source.origin == "folder" and source.name == str(decoder_folder)
    assert isinstance(source.model, LlamaForCausalLM) and not source.model.training
    assert source.config is not None and source.config.model_type == "llama"
    assert source.generation_config is not None
    assert source.tokenizer is not None and len(source.tokenizer) == 256
    expected = LlamaForCausalLM.from_pretrained(decoder_folder)
    for path, tensor in expected.state_dict().items():
        assert torch.equal(tensor, source.model.state_dict()[path]), path


def test_a_folder_without_tokenizer_files_has_no_tokenizer(copied: Path):
    for path in copied.glob("tokenizer*"):
        path.unlink()
    source = load_source(str(copied))
    assert source.tokenizer is None


def test_a_tokenizer_of_another_folder_takes_the_place_of_the_own(copied: Path, decoder_folder: Path):
    for path in copied.glob("tokenizer*"):
        path.unlink()
    source = load_source(str(copied), tokenizer=str(decoder_folder))
    assert source.tokenizer is not None


def test_a_folder_gives_its_tokenizer_alone_or_none(decoder_folder: Path, tmp_path: Path):
    found = load_folder_tokenizer(decoder_folder)
    assert found is not None and len(found) == 256
    assert load_folder_tokenizer(tmp_path) is None


def test_a_broken_tokenizer_is_refused(copied: Path):
    (copied / "tokenizer.json").write_text("{")
    with pytest.raises(SourceError, match="tokenizer cannot be read"):
        load_source(str(copied))


def test_dtype_none_keeps_the_dtype_of_the_weights(tmp_path: Path, decoder_folder: Path):
    LlamaForCausalLM.from_pretrained(decoder_folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    parameters = load_source(str(tmp_path)).model.parameters()
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}


def test_dtype_converts_the_weights(decoder_folder: Path):
    parameters = load_source(str(decoder_folder), dtype="bfloat16").model.parameters()
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}


def test_an_unknown_dtype_is_refused_with_the_known_ones(decoder_folder: Path):
    with pytest.raises(DispfxError, match="bfloat16"):
        load_source(str(decoder_folder), dtype="int4")


def test_loading_leaves_the_log_settings_of_transformers_alone(decoder_folder: Path):
    before = transformers_logging.get_verbosity()
    try:
        transformers_logging.set_verbosity(logging.INFO)
        load_source(str(decoder_folder))
        assert transformers_logging.get_verbosity() == logging.INFO
    finally:
        transformers_logging.set_verbosity(before)


def test_loading_prints_nothing(decoder_folder: Path, capfd: pytest.CaptureFixture[str]):
    load_source(str(decoder_folder))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: BertModel(BERT), "names BertModel"),
        (lambda: BertForMaskedLM(BERT), "names BertForMaskedLM"),
        (lambda: T5ForConditionalGeneration(T5), "type 't5'"),
        (lambda: LlamaModel(NO_HEAD), "names LlamaModel"),
    ],
    ids=["bert", "masked-lm", "t5", "no-head"],
)
def test_what_is_no_causal_language_model_is_refused(tmp_path: Path, model, reason: str):
    model().save_pretrained(tmp_path)
    with pytest.raises(SourceError, match=reason):
        load_source(str(tmp_path))


def test_an_encoder_under_a_causal_name_is_refused_by_what_it_does(tmp_path: Path):
    BertLMHeadModel(BERT).save_pretrained(tmp_path)
    with pytest.raises(SourceError, match="change with a later token"):
        load_source(str(tmp_path))


def test_a_weight_that_would_be_random_is_refused(copied: Path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(copied / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"would be random: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_source(str(copied))


def test_a_folder_without_weights_is_refused(copied: Path):
    (copied / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="weights cannot be loaded"):
        load_source(str(copied))


def test_a_cut_off_weight_file_is_refused(copied: Path):
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SourceError, match="truncated or damaged"):
        load_source(str(copied))


def test_a_folder_without_config_is_refused(tmp_path: Path):
    with pytest.raises(SourceError, match=r"no config\.json"):
        load_source(str(tmp_path))


def test_a_config_that_is_no_json_is_refused(copied: Path):
    (copied / "config.json").write_text("not json")
    with pytest.raises(SourceError, match="not readable JSON"):
        load_source(str(copied))


def test_a_folder_that_dispfx_wrote_is_refused(copied: Path):
    (copied / "plan.safetensors").touch()
    with pytest.raises(SourceError, match="already pruned"):
        load_source(str(copied))


def test_a_folder_with_a_graph_that_dispfx_wrote_is_refused_with_the_way_to_see_its_plan(tmp_path: Path):
    (tmp_path / "plan.safetensors").touch()
    with pytest.raises(SourceError, match="already pruned") as error:
        load_source(str(tmp_path))
    assert f"inspect {tmp_path / 'plan.safetensors'}" in str(error.value)


def test_an_unknown_architecture_is_refused(copied: Path):
    (copied / "config.json").write_text(json.dumps({"model_type": "never-heard-of"}))
    with pytest.raises(SourceError, match=r"config\.json cannot be used"):
        load_source(str(copied))


def test_code_of_a_checkpoint_runs_only_when_it_is_trusted(copied: Path):
    marker = copied / "it-ran"
    (copied / "own.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((copied / "config.json").read_text())
    config["model_type"] = "own"
    config["architectures"] = ["OwnForCausalLM"]
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (copied / "config.json").write_text(json.dumps(config))

    with pytest.raises(SourceError, match="needs code that comes with the checkpoint") as refusal:
        load_source(str(copied))
    assert "`trust_remote_code=True`" in str(refusal.value) and not marker.exists()

    source = load_source(str(copied), trust_remote_code=True)
    assert type(source.model).__name__ == "OwnForCausalLM" and marker.exists()


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path):
    for spec in (str(tmp_path / "absent"), "./absent", "absent.gguf", "~/absent/absent"):
        with pytest.raises(SourceError, match="does not exist"):
            load_source(spec)


def test_a_file_that_is_no_gguf_is_refused(decoder_folder: Path):
    with pytest.raises(SourceError, match=r"is \.gguf"):
        load_source(str(decoder_folder / "model.safetensors"))


def test_a_file_that_only_calls_itself_gguf_is_refused(tmp_path: Path):
    (tmp_path / "fake.gguf").write_bytes(b"not a model")
    with pytest.raises(SourceError):
        load_source(str(tmp_path / "fake.gguf"))


def test_a_word_of_no_known_form_is_refused():
    with pytest.raises(SourceError, match="none of the known forms"):
        load_source("two words")


def test_a_revision_belongs_to_a_hub_id(decoder_folder: Path):
    with pytest.raises(SourceError, match="`revision`"):
        load_source(str(decoder_folder), revision="main")


def test_a_hub_id_out_of_reach_is_refused_at_once():
    with pytest.raises(SourceError, match="MODEL is not a local folder, and the hub cannot be reached"):
        load_source("nobody/nothing")
    with pytest.raises(SourceError, match="`tokenizer` is not a local folder, and the hub cannot be reached"):
        load_source("demo", tokenizer="nobody/nothing")


def test_a_hub_id_out_of_reach_comes_from_the_cache(
    decoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commit = "0" * 40
    repository = tmp_path / "models--somebody--tiny"
    shutil.copytree(decoder_folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))

    assert location.reach_hub("somebody/tiny", None).offline
    source = load_source("somebody/tiny")

    assert source.origin == "hub" and source.tokenizer is not None


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("`pip install compressed-tensors>=0.15.0`", "pip install 'compressed-tensors>=0.15.0'"),
        ("with the command `pip install --upgrade transformers`. If", "pip install --upgrade 'transformers'"),
        ("`tiktoken` is required. Install it with `pip install tiktoken`.", "pip install 'tiktoken'"),
        ("`pip install git+https://somewhere/else`", None),
        ("no such file", None),
    ],
)
def test_what_an_error_says_is_missing_is_told_as_a_command(said: str, hint: str | None):
    assert installation(ValueError(said)) == hint
