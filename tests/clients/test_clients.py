"""Programs that know nothing of dispfx run the ONNX folders it writes, token by token as PyTorch does.

Each client runs in a Python of its own, since their requirements clash.  The interpreters are made on first
use below DISPFX_CLIENTS, which must name a folder; without it these tests are left out.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dispfx
from dispfx import api
from tests.tiny_transformers import VOCABULARY, tiny_transformer

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif("DISPFX_CLIENTS" not in os.environ, reason="DISPFX_CLIENTS names no folder"),
]

HERE = Path(__file__).parent
TOKENS = 32
PROMPTS = [[11, 5, 17, 29, 8], [40, 3, 60, 21, 7, 9, 33, 12]]
FAMILIES = ("llama", "qwen3", "gpt2", "phi", "gemma3")
REQUIREMENTS = {
    "plain": ["onnxruntime>=1.31", "numpy"],
    "genai": ["onnxruntime-genai==0.18.0", "numpy"],
    "openvino": ["openvino>=2026.4", "numpy"],
    "optimum": ["optimum-onnx[onnxruntime]==0.1.0", "transformers>=4.57,<4.58", "torch"],
}
# What a client gets wrong by itself, with what it says: optimum-onnx 0.1.0 makes the first cache of the
# size width / heads, whatever the model's inputs say, and of all heads for this type of decoder.
AT_FAULT = {
    ("optimum", "qwen3"): "Got invalid dimensions for input: past_key_values.1.key",
    ("optimum", "phi"): "Got invalid dimensions for input: past_key_values.1.key",
}


@cache
def interpreter(client: str) -> str:
    """Return a Python that has the client, made on first use."""
    place = Path(os.environ["DISPFX_CLIENTS"]).expanduser() / client
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS[client]], check=True)
        (place / "ready").touch()
    return str(python)


def started(client: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a client on the prompts."""
    words = [interpreter(client), str(HERE / f"{client}_client.py"), str(folder), json.dumps(PROMPTS)]
    return subprocess.run([*words, str(TOKENS)], capture_output=True, text=True, timeout=300)


def run(client: str, folder: Path) -> dict[str, Any]:
    """Return what a client makes of the prompts."""
    done = started(client, folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@cache
def folder(name: str, ratio: float, place: str) -> Path:
    """Return a compiled folder with an ONNX model, of a tiny decoder."""
    path = Path(place, f"{name}-{ratio}")
    model = tiny_transformer(name)
    program = dispfx.capture(model)
    plan = dispfx.Plan.random(program, ratio, seed=1, align=4)
    # genai needs a token that ends a text; it is one that these texts do not reach.
    lowered = dispfx.lower(program, plan)
    reached = {0, *(token for prompt in PROMPTS for token in greedy(lowered, prompt))}
    config: Any = model.config
    config.eos_token_id = min(set(range(VOCABULARY)) - reached)
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = config.eos_token_id  # type: ignore[union-attr]
    api.apply(model, plan, out=path, export="onnx")
    return path


def greedy(model: nn.Module, prompt: list[int]) -> list[int]:
    """Return what PyTorch makes of a prompt, computing the whole text for every token."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(TOKENS):
            output = model(ids)
            logits: Tensor = getattr(output, "logits", output)
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids[0].tolist()


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("clients"))


@pytest.mark.parametrize("ratio", [0.4, 0.0])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("client", REQUIREMENTS)
def test_a_client_gives_the_tokens_of_pytorch(client: str, name: str, ratio: float, place: str):
    path = folder(name, ratio, place)
    if (client, name) in AT_FAULT:
        assert AT_FAULT[client, name] in started(client, path / "onnx").stderr
        return
    model = dispfx.load(path)
    expected = [greedy(model, prompt) for prompt in PROMPTS]

    found = run(client, path / "onnx")

    assert found["greedy"] == expected
    if "padded" in found:
        assert [tokens[-TOKENS:] for tokens in found["padded"]] == [tokens[-TOKENS:] for tokens in expected]
        assert [len(tokens) - TOKENS for tokens in found["beams"]] == [len(prompt) for prompt in PROMPTS]


def test_a_program_that_knows_nothing_of_dispfx_refuses_the_checkpoint_itself(place: str):
    """Another transformers than ours, and the exporter of optimum, which takes a folder for a dense one."""
    words = [interpreter("optimum"), str(HERE / "refusing_client.py"), str(folder("llama", 0.4, place))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=place)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"transformers", "mismatched", "optimum"}
    assert all("pruned by dispfx" in said for said in found.values()), found
