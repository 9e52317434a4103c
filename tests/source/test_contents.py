"""Folders that are no whole checkpoint: each is called what it is, with the file and what to do."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from dispfx.errors import SourceError
from dispfx.source import load_config, load_source

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134217728\n"


@pytest.fixture
def copied(decoder_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(decoder_folder, tmp_path / "copied")


def refusal(folder: Path) -> str:
    with pytest.raises(SourceError) as error:
        load_source(str(folder))
    said = str(error.value)
    assert len(said.splitlines()) <= 3, said
    return said


def change_config(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def sharded(folder: Path) -> list[Path]:
    """Replace the weights of a folder by shards."""
    model = LlamaForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="5KB")
    return sorted(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("model_index.json", "diffusion pipeline"),
        ("params.json", "publisher's own format"),
        ("model.onnx", "only an ONNX model"),
        ("small.Q4.gguf", "GGUF files"),
        ("inner/config.json", "there is one in inner"),
    ],
)
def test_a_folder_of_another_kind_is_called_that(tmp_path: Path, name: str, held: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    said = refusal(tmp_path)
    assert held in said and "try:" in said
    if held.startswith(("GGUF", "there")):
        assert f"{tmp_path / name}".removesuffix("/config.json") in said.splitlines()[2]


def test_a_folder_with_an_adapter_alone_gets_the_command_that_merges_it(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    said = refusal(tmp_path)
    assert "only an adapter" in said and "some/base" in said
    assert f"A.from_pretrained('{tmp_path}').merge_and_unload().save_pretrained('MERGED')" in said


@pytest.mark.parametrize("base", ["x" * 5000, "a\0b", 7, None, ["x"]])
def test_any_base_of_an_adapter_is_read(base: Any, tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    assert "only an adapter" in refusal(tmp_path)


def test_an_adapter_of_a_pruned_decoder_is_not_said_to_be_ready_to_compile(tmp_path: Path):
    (tmp_path / "plan.safetensors").touch()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    said = refusal(adapter)
    assert "which dispfx has already pruned" in said and "compile" not in said


def test_an_adapter_beside_a_decoder_is_refused_because_it_would_be_loaded_with_it(copied: Path):
    (copied / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    assert "next to the decoder's own files" in refusal(copied)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_note_of_git_lfs_is_called_that(copied: Path, name: str):
    (copied / name).write_text(LFS)
    said = refusal(copied)
    assert "git-lfs" in said and str(copied / name) in said and f"git -C {copied} lfs pull" in said


def test_shards_that_an_index_names_must_be_there(copied: Path):
    shards = sharded(copied)
    assert len(shards) > 2
    assert torch.isfinite(load_source(str(copied)).model.get_input_embeddings().weight).all()  # type: ignore[operator]
    shards[1].unlink()
    said = refusal(copied)
    assert f"1 of the {len(shards)} weight files" in said and shards[1].name in said
    # Sizes are read from the config alone.
    assert load_config(str(copied)).config is not None


def test_a_shard_that_is_cut_off_is_named(copied: Path):
    shard = sharded(copied)[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    said = refusal(copied)
    assert "truncated or damaged" in said and shard.name in said and "download" in said


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("model.onnx", "an ONNX model"),
        ("small.gguf", "a GGUF file"),
        ("tf_model.h5", "a TensorFlow checkpoint"),
        ("flax_model.msgpack", "a Flax checkpoint"),
        ("consolidated.00.pth", "publisher's own format"),
    ],
)
def test_weights_of_another_kind_beside_a_config_are_called_that(copied: Path, name: str, held: str):
    (copied / "model.safetensors").rename(copied / name)
    said = refusal(copied)
    assert held in said and str(copied / name) in said


@pytest.mark.parametrize("shard", ["10GB", "5KB"])
def test_weights_in_bin_files_are_read_without_running_them(copied: Path, shard: str):
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = [names] if shard == "10GB" else [names[::2], names[1::2]]
    files = ["pytorch_model.bin"] if len(halves) == 1 else ["a.bin", "b.bin"]
    for file, half in zip(files, halves, strict=True):
        torch.save({name: tensors[name] for name in half}, copied / file)
    if len(files) > 1:
        weight_map = {name: file for file, half in zip(files, halves, strict=True) for name in half}
        index = {"metadata": {}, "weight_map": weight_map}
        (copied / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = load_source(str(copied)).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("t5", "an encoder-decoder"),
        ("roberta_is_no_decoder", "cannot be used"),
        ("clip", "no causal language model"),
        ("llava", "also reads images"),
        ("deberta-v2", "it is an encoder"),
    ],
)
def test_a_model_of_another_kind_is_called_that(copied: Path, kind: str, reason: str):
    (copied / "config.json").write_text(json.dumps({"model_type": kind}))
    assert reason in refusal(copied)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "hqq", "never-heard-of"])
def test_weights_that_stay_packed_are_refused_by_their_format(copied: Path, method: str):
    section = {"quant_method": method, "bits": 4, "group_size": 128, "load_in_4bit": True}
    change_config(copied, quantization_config=section)
    said = refusal(copied)
    assert f"compressed with {method}" in said and "before it was compressed" in said


def test_a_format_that_can_be_expanded_names_the_library_that_is_missing(
    copied: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whether the library is there or not, transformers is told that it is not."""
    place = "transformers.quantizers.quantizer_compressed_tensors.is_compressed_tensors_available"
    monkeypatch.setattr(place, lambda *_: False)
    monkeypatch.setattr(
        "transformers.utils.quantization_config.is_compressed_tensors_available", lambda *_: False
    )
    change_config(
        copied, quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}
    )
    assert "pip install 'compressed-tensors" in refusal(copied)


def test_fp8_weights_are_expanded(copied: Path):
    tensors = load_file(copied / "model.safetensors")
    stored = {}
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            stored[name] = tensor
            continue
        scale = tensor.abs().max() / 448
        stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(stored, copied / "model.safetensors", metadata={"format": "pt"})
    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    change_config(copied, quantization_config=section)

    source = load_source(str(copied), dtype="float32")

    found = source.model.state_dict()
    assert found.keys() >= tensors.keys()
    for name, tensor in tensors.items():
        assert torch.allclose(found[name], tensor, atol=0.07 * float(tensor.abs().max())), name
    assert getattr(source.config, "quantization_config", None) is None
