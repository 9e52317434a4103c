"""What is counted of a run on a GPU, by what torch asks for there without one."""

from typing import Any

import pytest
import torch
import transformers

from dispfx.api import capture
from dispfx.estimate.cuda_memory import block_bytes, workspaces_bytes
from dispfx.estimate.resident import BEGUN_BYTES, resident_bytes
from dispfx.estimate.run_estimate import estimate
from dispfx.ir.program import Program
from dispfx.settings.learning_settings import LearnSettings
from tests.measure.live_memory import learning_on_a_gpu, peak_of_a_step_on_a_gpu

CUDA = torch.device("cuda")
MEBI = 2**20
# Of the operations nothing is left out; what kernels take inside is estimated, and not in what is held.
TOLERANCE = 0.01
# The vectors of all features are estimated too, and are no block here.
OF_VECTORS = 0.03
SPARE = 0.15

SIZES: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 3, "num_attention_heads": 12}
SIZES |= {"vocab_size": 16_000, "intermediate_size": 2048}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, SIZES),
    "qwen3": (transformers.Qwen3Config, SIZES | {"num_key_value_heads": 4, "head_dim": 64}),
    # The way back through the norm before the head is more than the loss.
    "small vocabulary": (transformers.LlamaConfig, SIZES | {"vocab_size": 128, "intermediate_size": 256}),
    "mixtral": (transformers.MixtralConfig, SIZES | {"num_local_experts": 8, "num_key_value_heads": 4}),
}


def program(name: str, dtype: torch.dtype = torch.bfloat16) -> Program:
    """Return a decoder without values that is wide enough for whole blocks."""
    kind, sizes = CONFIGS[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(kind(**sizes), dtype=dtype)
    return capture(model.eval())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", [(2, 512), (8, 1024)], ids=str)
def test_the_memory_of_a_step_is_what_torch_asks_for_on_a_gpu(name: str, shape: tuple[int, int]):
    batch, tokens = shape
    settings = LearnSettings(batch_size=batch, seq_len=tokens)
    decoder = program(name)
    found = estimate(decoder, settings, device=CUDA).step.peak
    measured = peak_of_a_step_on_a_gpu(decoder, settings)
    assert abs(found / measured - 1) < TOLERANCE, f"{found} estimated, {measured} held"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", [(2, 512), (8, 1024)], ids=str)
def test_learning_allocates_what_is_estimated_and_reserves_no_more_than_is_needed(
    name: str, shape: tuple[int, int]
):
    settings = LearnSettings(batch_size=shape[0], seq_len=shape[1])
    decoder = program(name)
    found = estimate(decoder, settings, device=CUDA)
    allocator = learning_on_a_gpu(decoder, settings)
    beside = found.peak_bytes - found.weight_bytes
    assert -TOLERANCE < beside / allocator.most_allocated - 1 < OF_VECTORS, (beside, allocator.most_allocated)
    needed = resident_bytes(found.held_bytes, found.step.peak, CUDA)
    reserved = allocator.most_reserved
    assert reserved <= needed < (1 + SPARE) * reserved + BEGUN_BYTES, (needed, reserved)


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        (0, 0),
        (1, 512),
        (513, 1024),
        (9 * MEBI + 1, 9 * MEBI + 512),
        (43 * MEBI, 44 * MEBI),
        (44 * MEBI, 44 * MEBI),
        (43 * MEBI - 512, 43 * MEBI - 512),
        (44 * MEBI - 100, 44 * MEBI),
    ],
)
def test_a_tensor_takes_a_block_or_its_whole_segment(size: int, taken: int):
    assert block_bytes(size) == taken


def test_workspaces_are_those_of_two_threads_on_three_streams(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert workspaces_bytes(CUDA) == 6 * 32 * MEBI
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert workspaces_bytes(CUDA) == 6 * (8 * MEBI + 128 * 1024)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8:16:2")
    assert workspaces_bytes(CUDA) == 6 * (4096 * 8 + 16 * 2) * 1024


def test_what_a_graph_on_a_gpu_holds_is_counted_beside_the_step():
    """The gradient of the hypernetwork, which is there after a step only on a CPU."""
    settings = LearnSettings(batch_size=1, seq_len=128)
    decoder = program("llama")
    on_cpu, on_gpu = estimate(decoder, settings), estimate(decoder, settings, device=CUDA)
    gradient = 4 * on_cpu.hypernetwork_parameters
    assert on_cpu.workspace_bytes == 0 < on_gpu.workspace_bytes
    assert on_gpu.hypernetwork_bytes == on_cpu.hypernetwork_bytes + gradient + 20 * on_cpu.features
    assert on_cpu.gradient_bytes == gradient and on_gpu.gradient_bytes == 0
    expected = on_gpu.weight_bytes + on_gpu.hypernetwork_bytes + on_gpu.workspace_bytes + on_gpu.step.peak
    assert on_gpu.peak_bytes == expected
