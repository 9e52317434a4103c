"""GGUF files of the Llama class: transformers reads back what was written, and all else is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import dispfx
from dispfx.api.compilation import apply
from dispfx.plan.plan import Plan
from tests.programs import relative_error

CHECKOUT = Path(__file__).parents[2]
DEMO = CHECKOUT / "dispfx" / "demo" / "decoder"
HEAD = 32


def written(folder: Path, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = CHECKOUT / "tools" / "gguf_file.py"
    return subprocess.run(
        [sys.executable, str(script), str(folder), str(out), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with other inner features in every layer, and one key/value head less in one of them."""
    folder = tmp_path_factory.mktemp("unlike") / "out"
    dense: Any = AutoModelForCausalLM.from_pretrained(DEMO)
    program = dispfx.capture(dense, sites=("heads",))
    kept = {site.name: list(range(site.size)) for site in program.sites}
    for layer in range(4):
        kept[f"model.layers.{layer}.mlp.inner"] = list(range(layer, 384, 2 + layer))
    kept[next(site.name for site in program.sites if site.kind == "heads")] = [1]
    apply(dense, Plan.from_masks(program, kept), out=folder, export="none")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


def test_transformers_reads_the_file_as_the_decoder_that_was_written(tmp_path: Path) -> None:
    done = written(DEMO, tmp_path / "demo.gguf")

    assert done.returncode == 0, done.stderr
    ids = torch.arange(17).unsqueeze(0)
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="demo.gguf")
    expected: Any = AutoModelForCausalLM.from_pretrained(DEMO)
    with torch.no_grad():
        assert relative_error(read(ids).logits, expected(ids).logits) < 1e-6
    own, tokenizer = (
        AutoTokenizer.from_pretrained(*words)
        if len(words) == 1
        else AutoTokenizer.from_pretrained(words[0], gguf_file=words[1])
        for words in ((DEMO,), (tmp_path, "demo.gguf"))
    )
    assert own("copy abc xyz =").input_ids == tokenizer("copy abc xyz =").input_ids


def test_layers_of_unlike_sizes_become_a_decoder_with_sizes_per_layer(unlike: Path, tmp_path: Path) -> None:
    """Points 1 and 3 of the tool: undone, the rows of q and k are those of the folder."""
    out = tmp_path / "unlike.gguf"
    done = written(unlike, out)

    assert done.returncode == 0, done.stderr
    reader = GGUFReader(out)

    def entry(name: str) -> Any:
        return reader.fields[name].contents()

    assert entry("general.architecture") == "deci"
    assert entry("deci.feed_forward_length") == [192, 128, 96, 77]
    assert entry("deci.attention.head_count_kv") == [1, 2, 2, 2]
    assert entry("deci.attention.head_count") == [2, 4, 4, 4]
    stored = load_file(unlike / "model.safetensors")
    tensors = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    assert len(tensors) == 1 + 4 * 9 + 1
    assert np.array_equal(
        tensors["blk.2.ffn_down.weight"], stored["model.layers.2.mlp.down_proj.weight"].numpy()
    )
    for layer in range(4):
        rows = tensors[f"blk.{layer}.attn_k.weight"]
        halves = rows.reshape(-1, HEAD // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        assert np.array_equal(halves, stored[f"model.layers.{layer}.self_attn.k_proj.weight"].numpy())


def test_matrices_get_the_type_that_was_asked_for(unlike: Path, tmp_path: Path) -> None:
    """A row of 77 features is no multiple of 32 and stays float16."""
    written(unlike, tmp_path / "small.gguf", "--type", "q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "small.gguf").tensors}

    assert kinds["blk.3.ffn_up.weight"] == "Q8_0" and kinds["blk.3.ffn_down.weight"] == "F16"
    assert kinds["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("config.json", {"architectures": ["Qwen2ForCausalLM"]}, "only LlamaForCausalLM can be written"),
        ("config.json", {"rope_parameters": {"rope_type": "llama3"}}, "rope_type"),
        ("config.json", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("tokenizer.json", {"normalizer": {"type": "NFC"}}, "only a byte-level BPE"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Digits"}}, "give --pre"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    file: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Point 4 of the tool."""
    folder = tmp_path / "folder"
    shutil.copytree(DEMO, folder)
    entries = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(entries | changes))

    done = written(folder, tmp_path / "out.gguf")

    assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr


def test_a_folder_that_gathers_is_refused(tmp_path: Path) -> None:
    """Point 2 of the tool."""
    dense: Any = AutoModelForCausalLM.from_pretrained(DEMO)
    plan = Plan.random(dispfx.capture(dense), 0.3, 0)
    apply(dense, plan, out=tmp_path / "out", export="none")

    done = written(tmp_path / "out", tmp_path / "out.gguf")

    assert done.returncode == 2 and "llama.cpp cannot gather features" in done.stderr
    assert not (tmp_path / "out.gguf").exists()
