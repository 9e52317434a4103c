"""What other programs decide when they are given a pruned folder: they stop before they compute with it.

transformers without dispfx is run (`tests/deploy/test_checkpoint.py`), and so is optimum's exporter where it
is installed (`tests/clients`).  vLLM and llama.cpp's converter are not installed here: what they look at
first is done again here, as it was read in their source on 2026-11-28, and the names of tensors are looked
up in the table of the gguf package, in which the converter looks them up.  An ordinary folder passes every
one of these checks, so each can fail.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

import dispfx
from dispfx.api import apply
from tests.tiny_transformers import tiny_transformer

# `QuantizationMethods` in vllm/model_executor/layers/quantization/__init__.py, and names of older versions.
# `ModelConfig._verify_quantization` takes the config's `quant_method` in lower case, and raises "Unknown
# quantization method" for any other.
VLLM = """
aqlm awq deepspeedfp tpu_int8 fp8 ptpc_fp8 fbgemm_fp8 deepgemm_fp8 modelopt modelopt_fp4 marlin bitblas
gguf gptq_marlin_24 gptq_marlin gptq_bitblas awq_marlin gptq compressed-tensors bitsandbytes qqq hqq
experts_int8 neuron_quant ipex quark moe_wna16 torchao auto-round inc mxfp4 petit_nvfp4 rtn fp_quant
squeezellm
"""
# Branches of `ModelBase.dequant_model` in convert_hf_to_gguf.py; any other is a NotImplementedError.
LLAMA_CPP = {"bitnet", "fp8", "gptq", "compressed-tensors", "modelopt", "mxfp4"}

# Decoder, selection, and architecture of GGUF.
CASES = {
    "llama": ("after-norm", gguf.MODEL_ARCH.LLAMA),
    # No index stands in its files.
    "qwen3": ("before-norm", gguf.MODEL_ARCH.QWEN3),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Return a name, the folder of the pruned decoder, and that of the dense one."""
    name = request.param
    place = tmp_path_factory.mktemp(name)
    dense: Any = tiny_transformer(name)
    dense.save_pretrained(place / "dense")
    select: Any = CASES[name][0]
    plan = dispfx.Plan.random(dispfx.capture(dense, select=select), 0.4, 1, align=4)
    apply(dense, plan, out=place / "pruned", export="none")
    return name, place / "pruned", place / "dense"


def method(folder: Path) -> str | None:
    """Return the quantisation that a folder's config names."""
    section = json.loads((folder / "config.json").read_text()).get("quantization_config")
    return None if section is None else str(section["quant_method"]).lower()


def stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors in the weight files."""
    found = {}
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("known", [set(VLLM.split()), LLAMA_CPP], ids=["vllm", "llama.cpp"])
def test_the_first_thing_that_is_looked_at_is_a_method_that_nobody_else_knows(
    case: tuple[str, Path, Path], known: set[str]
):
    _, pruned, dense = case
    assert method(dense) is None
    assert method(pruned) is not None and method(pruned) not in known


def test_a_converter_to_gguf_finds_a_tensor_that_it_has_no_name_for(case: tuple[str, Path, Path]):
    """`ModelBase.map_tensor_name` raises "Can not map tensor" for it."""
    name, pruned, dense = case
    layers = AutoConfig.from_pretrained(dense).num_hidden_layers
    names = gguf.get_tensor_name_map(CASES[name][1], layers)

    def unknown(folder: Path) -> set[str]:
        return {
            one for one in stored(folder) if names.get_name(one, try_suffixes=(".weight", ".bias")) is None
        }

    assert not unknown(dense)
    assert any("dispfx" in one for one in unknown(pruned))


def test_a_loader_that_compares_names_and_shapes_finds_others(case: tuple[str, Path, Path]):
    """As vLLM's `load_weights` and torch's strict `load_state_dict` do, where the config's entry is gone."""
    _, pruned, dense = case
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(dense))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def differing(folder: Path) -> list[str]:
        return [name for name, shape in stored(folder).items() if expected.get(name) != shape]

    assert not differing(dense)
    assert any("dispfx" in name for name in differing(pruned))
    assert any(name in expected for name in differing(pruned)), "a weight of another shape"
