"""vLLM serves pruned folders token by token as PyTorch runs them.

vLLM has requirements of its own, so it gets a Python of its own.  DISPFX_VLLM names that Python, and without
it these tests are left out; docs/serving.md says how to make one.  The dispfx of this checkout is installed
next to vLLM's environment, as a wheel.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import dispfx
from dispfx import api
from tests.serving.families import SHOWN, VOCABULARY, tiny_decoder
from tests.wheels import build, copied_checkout

pytestmark = [
    pytest.mark.clients,
    pytest.mark.long,
    pytest.mark.skipif("DISPFX_VLLM" not in os.environ, reason="DISPFX_VLLM names no Python that has vLLM"),
]

CLIENT = Path(__file__).with_name("vllm_client.py")
TOKENS = 32
PROMPTS = [
    [5, 9, 3],
    [17, 2, 88, 41, 7, 29],
    [11] * 9,
    [64, 3, 77, 21, 90, 14, 33, 8, 55, 19, 4, 100],
    list(range(20, 45)),
    list(range(3, 60)),
]
# Served by the modules of the decoder itself: vLLM's class fuses modules that it does not name.
OWN_MODULES = ("stablelm",)
SERVED = [name for name in SHOWN if name not in OWN_MODULES]
EAGER = {"enforce_eager": True}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
OWN = {"model_impl": "transformers"}
# Logits have a standard deviation of 1.6 to 5.3.  float16 gave up to 0.25; scales of one layer, shifted by a
# row, gave 1.9 to 3.3.
NEAR = 1.0


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with this checkout, installed without its requirements."""
    place = tmp_path_factory.mktemp("vllm")
    wheel = build("wheel", copied_checkout(place), place / "wheel")
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place / "site")]
    subprocess.run([*words, str(wheel)], check=True)
    return str(place / "site")


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("folders"))


@cache
def folder(name: str, place: str, align: int = 4) -> Path:
    """Return the folder of a pruned tiny decoder."""
    path = Path(place, f"{name}-{align}")
    model = tiny_decoder(name)
    plan = dispfx.Plan.random(dispfx.capture(model), 0.4, seed=1, align=align)
    api.apply(model, plan, out=path, export="none")
    return path


@cache
def rounded(name: str, place: str, scheme: str = "int4") -> Path:
    """Return the folder of a pruned tiny decoder with weights of 8 or 4 bits."""
    path = folder(name, place, align=32)
    ids = torch.randint(0, VOCABULARY, (400,), generator=torch.Generator().manual_seed(3))
    text = Path(place, "text.safetensors")
    save_file({"tokens": ids.to(torch.int32)}, text)
    api.export(path, quantize=scheme, data=str(text))
    return path / scheme


def far(path: Path, batch: list[list[int]]) -> float:
    """Return how far below the best logit of transformers in float32 the chosen tokens are at most."""
    model: Any = dispfx.load(path)
    worst = 0.0
    for prompt, tokens in zip(PROMPTS, batch, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        taken = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float((logits.amax(1) - taken).max()))
    return worst


@cache
def dense_experts(place: str) -> Path:
    """Return the folder of a mixture whose experts and routers are whole."""
    path = Path(place, "dense-experts")
    model = tiny_decoder("mixtral")
    plan = dispfx.Plan.random(dispfx.capture(model), 0.4, seed=1, align=4)
    selections = [
        one if "self_attn" in one.site else replace(one, kept=torch.arange(one.size, dtype=torch.int32))
        for one in plan.selections
    ]
    api.apply(model, replace(plan, selections=tuple(selections)), out=path, export="none")
    return path


@cache
def expected(path: Path, prompts: str) -> list[list[int]]:
    """Return what transformers generates greedily from each prompt alone."""
    model: Any = dispfx.load(path)
    found = []
    for prompt in json.loads(prompts):
        ids = torch.tensor([prompt])
        length = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        found.append(
            model.generate(ids, attention_mask=torch.ones_like(ids), **length)[0, len(prompt) :].tolist()
        )
    return found


def asked(path: Path, *batches: list[list[int]], **options: Any) -> dict[str, Any]:
    """Return a run of the client."""
    return {"folder": str(path), "batches": list(batches), "tokens": TOKENS, "options": EAGER | options}


def started(runs: list[dict[str, Any]], packages: str, ranks: int = 1) -> Iterator[dict[str, Any]]:
    """Yield what vLLM makes of each run."""
    python = Path(os.environ["DISPFX_VLLM"])
    words = [str(python), "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)][
        : 1 if ranks == 1 else 5
    ]
    settings = {
        "PYTHONPATH": packages,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "found.jsonl")
        done = subprocess.run(
            [*words, str(CLIENT), json.dumps(runs), str(file)],
            capture_output=True, text=True, timeout=840, cwd=place, env=os.environ | settings,
        )  # fmt: skip
        found = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    assert len(found) == len(runs), done.stderr[-3000:]
    yield from map(json.loads, found)


def compare(names: list[str], place: str, packages: str, ranks: int, **options: Any) -> dict[str, str]:
    """Return what is wrong with each family that has other tokens than transformers."""
    paths = [folder(name, place) for name in names]
    runs = [asked(path, PROMPTS, **options) for path in paths]
    wrong = {}
    for name, path, found in zip(names, paths, started(runs, packages, ranks), strict=True):
        if "error" in found:
            wrong[name] = found["error"]
        elif found["greedy"] != [expected(path, json.dumps(PROMPTS))]:
            wrong[name] = "other tokens"
    return wrong


def test_every_family_gives_the_tokens_of_pytorch(place: str, packages: str):
    assert not compare(SERVED, place, packages, 1)


def test_every_family_gives_the_tokens_of_pytorch_on_two_ranks(place: str, packages: str):
    assert not compare(SERVED, place, packages, 2, **TWO_RANKS)


def test_the_transformers_backend_gives_the_tokens_of_pytorch(place: str, packages: str):
    assert not compare(["llama", "gemma2", *OWN_MODULES], place, packages, 1, **OWN)


def test_a_batch_of_16_in_chunks_with_cached_prefixes_gives_the_tokens_of_pytorch(place: str, packages: str):
    """Prompts of 33 to 97 tokens that share a prefix, at most 32 tokens per step; then the same again."""
    prompts = [[*range(1, 33), *[(7 * i + j) % 128 for j in range(1 + 4 * i)]] for i in range(16)]
    path = folder("llama", place)
    options = {"max_num_batched_tokens": 32, "enable_prefix_caching": True, "enable_chunked_prefill": True}
    (found,) = started([asked(path, prompts, prompts, **options)], packages)
    assert found["greedy"] == [expected(path, json.dumps(prompts))] * 2, found.get("error")
    assert min(found["cached"][1]) >= 32


def test_the_compiled_decoder_gives_the_tokens_of_pytorch(place: str, packages: str):
    path = folder("llama", place)
    (found,) = started([asked(path, PROMPTS, enforce_eager=False)], packages)
    assert found.get("greedy") == [expected(path, json.dumps(PROMPTS))], found.get("error")


def test_a_mixture_with_whole_experts_gives_the_tokens_of_pytorch(place: str, packages: str):
    path = dense_experts(place)
    (found,) = started([asked(path, PROMPTS, **OWN)], packages)
    assert found.get("greedy") == [expected(path, json.dumps(PROMPTS))], found.get("error")


@pytest.mark.parametrize(
    "options", [{}, OWN, {"enforce_eager": False}], ids=["own class", "modules", "compiled"]
)
def test_weights_of_4_bits_give_the_tokens_of_pytorch(options: dict[str, Any], place: str, packages: str):
    """vLLM's kernel of a CPU computes in float16, so a token may be one of two that are nearly equal."""
    names = ["llama"] if options else ["llama", "qwen3", "phi3", "opt", "olmo2"]
    paths = [rounded(name, place) for name in names]
    runs = [asked(path, PROMPTS, **{"dtype": "float16"} | options) for path in paths]
    for path, found in zip(paths, started(runs, packages), strict=True):
        assert "error" not in found, found
        assert far(path, found["greedy"][0]) < NEAR, path


def test_weights_of_4_bits_are_shared_by_two_ranks(place: str, packages: str):
    """Ranks of 80 features, of the second folder, are too narrow for the kernel."""
    paths = [rounded("llama", place), rounded("qwen3", place)]
    runs = [asked(path, PROMPTS, dtype="float16", **TWO_RANKS) for path in paths]
    served, refused = started(runs, packages, 2)
    assert far(paths[0], served["greedy"][0]) < NEAR, served
    assert "no kernel for int4 weights of 80" in refused["error"] and "--align 64" in refused["error"]
    assert "where: model.layers.0.mlp.down_proj" in refused["error"]


def test_rounded_weights_that_vllm_would_serve_wrongly_are_refused_by_name(
    place: str, packages: str, tmp_path: Path
):
    llama, half = rounded("llama", place), {"dtype": "float16"}
    short, other = (Path(shutil.copytree(llama, tmp_path / name)) for name in ("short", "other"))
    tensors = load_file(short / "model.safetensors")
    scales = tensors.pop("model.layers.1.mlp.up_proj.weight_scale")
    save_file(tensors, short / "model.safetensors", metadata={"format": "pt"})
    tensors["model.layers.1.mlp.up_proj.weight_scale"] = scales[:-1].contiguous()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    runs = {
        "1 of 56 pruned or rounded weights": asked(short, PROMPTS, **half),
        "where: model.layers.1.mlp.up_proj.weight_scale": asked(other, PROMPTS, **half),
        "do not compute in float32": asked(llama, PROMPTS),
        "no kernel for int8 weights": asked(rounded("llama", place, "int8"), PROMPTS, **half),
        "no kernel for fp8 weights": asked(rounded("llama", place, "fp8"), PROMPTS, **half),
        "--model-impl transformers": asked(rounded("stablelm", place), PROMPTS, **half),
        "does not support adapters": asked(llama, PROMPTS, enable_lora=True, **half),
        "does not support --quantization": asked(llama, PROMPTS, quantization="compressed-tensors", **half),
    }
    for said, found in zip(runs, started(list(runs.values()), packages), strict=True):
        assert said in found.get("error", ""), (said, found)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_merged_adapters_give_the_tokens_of_pytorch(place: str, packages: str, tmp_path: Path):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(folder("llama", place))
    modules = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    (found,) = started([asked(tmp_path / "merged", PROMPTS)], packages)
    assert found.get("greedy") == [expected(tmp_path / "merged", json.dumps(PROMPTS))], found.get("error")
    assert found["greedy"] != [expected(folder("llama", place), json.dumps(PROMPTS))]


def test_what_vllm_would_serve_wrongly_is_refused_by_name(place: str, packages: str, tmp_path: Path):
    llama = folder("llama", place)
    changed, other, short = tmp_path / "changed", tmp_path / "other", tmp_path / "short"
    for copy in (changed, other, short):
        shutil.copytree(llama, copy)
    tensors = load_file(changed / "model.safetensors")
    name = next(one for one in tensors if one.endswith("dispfx_select"))
    absent = next(i for i in range(128) if i not in tensors[name])
    tensors[name][tensors[name] == tensors[name][tensors[name] > absent][0]] = absent
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(folder("llama", place, align=1) / "config.json", other)
    tensors = load_file(short / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, short / "model.safetensors", metadata={"format": "pt"})
    # It rounds the frequencies of positions, which vLLM computes from the config.
    rounded = tiny_decoder("llama").to(torch.bfloat16)
    plan = dispfx.Plan.random(dispfx.capture(rounded), 0.4, seed=1, align=4)
    api.apply(rounded, plan, out=tmp_path / "rounded", export="none")
    runs = {
        # First: after an engine that failed, vLLM has no groups for experts in the same process.
        "all experts in one tensor": asked(dense_experts(place), PROMPTS),
        "not those that the config was written with": asked(changed, PROMPTS),
        "the stored weight has the shape": asked(other, PROMPTS),
        "not a linear layer": asked(folder("mixtral", place), PROMPTS),
        "--model-impl transformers": asked(folder("stablelm", place), PROMPTS),
        "does not support adapters": asked(llama, PROMPTS, enable_lora=True),
        "does not support --quantization fp8": asked(llama, PROMPTS, quantization="fp8"),
        "pruned weights are not in the folder's files": asked(short, PROMPTS),
        "stores this buffer": asked(tmp_path / "rounded", PROMPTS, dtype="auto"),
    }
    for said, found in zip(runs, started(list(runs.values()), packages), strict=True):
        assert said in found.get("error", ""), found


def test_ranks_that_cannot_share_the_features_are_refused_by_name(place: str, packages: str):
    runs = [asked(folder("llama", place, align=1), PROMPTS, **TWO_RANKS)]
    (found,) = started(runs, packages, 2)
    assert re.search(r"\d+ features cannot be shared evenly by 2 ranks", found.get("error", "")), found
    assert "model.layers." in found["error"] and "--align 2" in found["error"]
