"""A decoder from its config alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from dispfx.errors import SourceError
from dispfx.source import config_alone, load_config, load_source

FUNCTION = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)

    def forward(self, ids):
        return self.embedding(ids) @ self.embedding.weight.T
"""


@pytest.fixture
def config_folder(decoder_folder: Path, tmp_path: Path) -> Path:
    shutil.copy(decoder_folder / "config.json", tmp_path / "config.json")
    return tmp_path


@pytest.mark.parametrize("name", [".", "config.json"])
def test_a_config_gives_the_decoders_shapes_and_no_values(
    config_folder: Path, decoder_folder: Path, name: str
):
    source = load_config(str(config_folder / name))
    assert isinstance(source.model, LlamaForCausalLM) and not source.model.training
    assert source.tokenizer is None and source.config is not None
    whole = load_source(str(decoder_folder)).model
    expected = {path: (tensor.shape, tensor.dtype) for path, tensor in whole.named_parameters()}
    found = {path: (tensor.shape, tensor.dtype) for path, tensor in source.model.named_parameters()}
    assert found == expected
    assert all(tensor.is_meta for tensor in source.model.parameters())


def test_no_weight_is_read(decoder_folder: Path, tmp_path: Path):
    copied = shutil.copytree(decoder_folder, tmp_path / "copied")
    for path in copied.glob("*.safetensors"):
        path.write_bytes(b"no weights")
    assert all(tensor.is_meta for tensor in load_config(str(copied)).model.parameters())


def test_the_dtype_is_the_configs_own_or_as_told(config_folder: Path):
    file = config_folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": "bfloat16"}))
    for asked, expected in ((None, torch.bfloat16), ("float16", torch.float16)):
        model = load_config(str(file), dtype=asked).model
        assert {parameter.dtype for parameter in model.parameters()} == {expected}


def test_weights_decide_whether_a_config_is_alone(config_folder: Path, decoder_folder: Path):
    assert config_alone(str(config_folder)) and config_alone(str(config_folder / "config.json"))
    assert (
        not config_alone(str(decoder_folder)) and not config_alone("demo") and not config_alone("owner/name")
    )
    (config_folder / "model.safetensors.index.json").write_text("{}")
    assert not config_alone(str(config_folder)), "an index names weights that should be there"


def test_the_demo_and_a_function_are_built_without_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_tiny_decoder.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    for spec in ("demo", "own_tiny_decoder:Tiny"):
        model = load_config(spec).model
        assert all(tensor.is_meta for tensor in model.parameters()) and not model.training


def test_a_config_alone_is_refused_where_weights_are_needed(config_folder: Path):
    for spec in (config_folder, config_folder / "config.json"):
        with pytest.raises(SourceError, match="MODEL is only a config") as caught:
            load_source(str(spec))
        assert "dispfx inspect" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not readable JSON"),
        ("[]", "must hold an object"),
        ('{"model_type": "bert"}', "no causal language model|which is not a causal|cannot be compiled"),
        ('{"model_type": "no such model"}', "config.json cannot be used"),
        ('{"model_type": "llama", "hidden_size": 10, "num_attention_heads": 3}', "config"),
        ('{"model_type": "llama", "hidden_size": -8}', "config"),
    ],
)
def test_a_config_of_no_decoder_is_refused(tmp_path: Path, text: str, said: str):
    file = tmp_path / "config.json"
    file.write_text(text)
    if "bert" in text:
        # BERT can be a causal decoder; a config that names another head is none.
        file.write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    with pytest.raises(SourceError, match=said):
        load_config(str(file))


def test_a_gguf_file_and_a_revision_of_a_file_are_refused(tmp_path: Path, config_folder: Path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(SourceError, match="no separate config"):
        load_config(str(gguf))
    with pytest.raises(SourceError, match="`revision`"):
        load_config(str(config_folder), revision="main")


def test_the_config_of_a_pruned_decoder_is_refused_as_that(config_folder: Path):
    file = config_folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "dispfx"}})
    )
    for spec in (config_folder, file):
        with pytest.raises(
            SourceError, match=r"is that of a decoder that dispfx has already pruned"
        ) as caught:
            load_config(str(spec))
        assert caught.value.where == str(spec)
        assert caught.value.hint == "pass the config of the decoder that it was made from"
    (config_folder / "plan.safetensors").touch()
    with pytest.raises(SourceError, match=r"dispfx inspect .*plan\.safetensors$"):
        load_config(str(file))
