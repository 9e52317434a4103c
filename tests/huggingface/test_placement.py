"""Where a pruned model lies, and where it is sent."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from dispfx.deploy import section, weights
from dispfx.huggingface.entries import SCHEMA_VERSION
from dispfx.huggingface.layout import Layout, ModuleLayout, digest
from tests.huggingface.conftest import Folder
from tests.programs import token_ids
from tests.tiny_transformers import VOCABULARY

IDS = token_ids(2, 9, vocabulary=VOCABULARY)
pytest.importorskip("accelerate")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


SPLIT = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.norm": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "lm_head": "cpu",
}


@pytest.mark.parametrize("buffers", [False, True], ids=["weights", "weights and buffers"])
@pytest.mark.filterwarnings("ignore")
def test_a_layer_can_lie_on_disk(llama: Folder, tmp_path: Path, buffers: bool) -> None:
    whole = AutoModelForCausalLM.from_pretrained(llama.path)

    model = AutoModelForCausalLM.from_pretrained(
        llama.path, device_map=SPLIT, offload_folder=tmp_path, offload_buffers=buffers
    )

    assert model.model.layers[1].mlp.down_proj.weight.is_meta
    assert torch.equal(logits(model), logits(whole))


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_a_device_map_places_the_model(llama: Folder, device_map: Any) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(llama.path, device_map=device_map)
    whole: Any = AutoModelForCausalLM.from_pretrained(llama.path)

    assert torch.equal(logits(model), logits(whole.to(model.device)))


def test_what_is_pushed_to_the_hub_is_a_pruned_folder(
    llama: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import hub

    sent: dict[str, bytes] = {}

    def create_commit(**given: Any) -> None:
        for operation in given["operations"]:
            content = operation.path_or_fileobj
            sent[operation.path_in_repo] = Path(content).read_bytes()

    def create_repo(repo_id: str, **given: Any) -> SimpleNamespace:
        return SimpleNamespace(repo_id=repo_id)

    card = SimpleNamespace(save=lambda path: Path(path).write_text("a card"))
    api = SimpleNamespace(create_repo=create_repo, create_commit=create_commit)
    monkeypatch.setattr(hub, "hf_api", lambda: api, raising=False)
    monkeypatch.setattr(hub, "create_repo", create_repo, raising=False)
    monkeypatch.setattr(hub, "create_commit", create_commit, raising=False)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *given, **options: card)
    model: Any = AutoModelForCausalLM.from_pretrained(llama.path)

    model.push_to_hub("someone/pruned")

    for name, content in sent.items():
        (tmp_path / name).write_bytes(content)
    assert "pruned by dispfx" in json.loads(sent["config.json"])["transformers_weights"]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


LAYERS, WIDTH, INNER = 24, 4096, 11008
MEASURE = """
import resource, sys, torch, dispfx
from transformers import AutoModelForCausalLM
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
print(sum(parameter.nbytes for parameter in model.parameters()))
"""


def write_wide_decoder(folder: Path) -> None:
    """Write a decoder with the layers of a 7B shape, nearly all of each removed: 10 GB dense, 0.1 GB kept."""
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, vocab_size=64,
        num_attention_heads=32, tie_word_embeddings=True,
    )  # fmt: skip
    folder.mkdir()
    section.ModelFiles(config, "LlamaForCausalLM").write(folder)
    entries = json.loads((folder / "config.json").read_text())
    indices = {}
    modules = {}
    tensors = {"model.embed_tokens.weight": torch.zeros(64, WIDTH), "model.norm.weight": torch.ones(WIDTH)}
    kept = torch.arange(64, dtype=torch.int32)
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        for norm, readers, rows in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), WIDTH),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), 64),
        ):
            modules[f"{path}.{norm}"] = ModuleLayout(select=(WIDTH, 64))
            indices[f"{path}.{norm}.dispfx_select"] = kept.clone()
            tensors[f"{path}.{norm}.weight"] = torch.ones(WIDTH)
            for reader in readers:
                modules[f"{path}.{reader}"] = ModuleLayout({"weight": (rows, 64)})
                tensors[f"{path}.{reader}.weight"] = torch.zeros(rows, 64)
        for writer, columns in (("self_attn.o_proj", WIDTH), ("mlp.down_proj", 64)):
            modules[f"{path}.{writer}"] = ModuleLayout({"weight": (64, columns)}, write=(WIDTH, 64))
            tensors[f"{path}.{writer}.weight"] = torch.zeros(64, columns)
            indices[f"{path}.{writer}.dispfx_write"] = torch.arange(WIDTH, dtype=torch.int32).clamp(max=64)
    layout = Layout(modules, digest(indices)).to_json()
    entries["quantization_config"] = {
        "quant_method": "dispfx",
        "schema_version": SCHEMA_VERSION,
        "layout": layout,
    }
    (folder / "config.json").write_text(json.dumps(entries))
    weights.write_tensors(folder, tensors, indices)


@pytest.mark.slow
def test_loading_never_holds_dense_weights(tmp_path: Path) -> None:
    write_wide_decoder(tmp_path / "wide")

    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "wide")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )

    grown, held = (int(line) for line in ran.stdout.split())
    assert 50e6 < held < 200e6
    # The layers alone would be 19 GB in float32.
    assert grown < 3 * held
