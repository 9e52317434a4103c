"""Decoders of known shapes with random weights, and plans of given widths for them.

The decoder is built on the device with zeros, captured, and cut; random weights come last, so that no dense
weight of a pruned decoder is needed.  Widths repeat every few layers; indices are random in each layer.
"""

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.initialization import no_init_weights

from dispfx.benchmark.decoder_speed import Contender
from dispfx.compiler.cached_programs import capture_cached
from dispfx.compiler.pipelines import gathered
from dispfx.compiler.programs import lower_program
from dispfx.ir.program import Program
from dispfx.ir.sites import Site
from dispfx.plan.budget import Budget
from dispfx.plan.hardening import Groups, ParameterCount, harden
from dispfx.plan.plan import Plan
from dispfx.settings.sections import FurtherSites
from dispfx.source.experts import Experts

SHAPES = {
    "tiny": (LlamaConfig, dict(hidden_size=256, intermediate_size=688, num_attention_heads=4, head_dim=64)),
    "smollm2-135m": (LlamaConfig, dict(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
        tie_word_embeddings=True,
    )),
    "llama-2-7b": (LlamaConfig, dict(hidden_size=4096, intermediate_size=11008, num_attention_heads=32)),
    "llama-2-13b": (LlamaConfig, dict(hidden_size=5120, intermediate_size=13824, num_attention_heads=40)),
    "llama-2-70b": (LlamaConfig, dict(
        hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
    )),
    "qwen3-8b": (Qwen3Config, dict(
        hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128,
    )),
    "phi-2": (PhiConfig, dict(
        hidden_size=2560, intermediate_size=10240, num_attention_heads=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.4},
    )),
    "mixtral-8x7b": (MixtralConfig, dict(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        num_local_experts=8, num_experts_per_tok=2,
    )),
}  # fmt: skip
LAYERS = {
    "tiny": 4,
    "smollm2-135m": 30,
    "llama-2-7b": 32,
    "llama-2-13b": 40,
    "llama-2-70b": 80,
    "qwen3-8b": 36,
    "phi-2": 32,
    "mixtral-8x7b": 32,
}
VOCABULARIES = {"smollm2-135m": 49_152, "qwen3-8b": 151_936, "phi-2": 51_200}
_VOCABULARY = 32_000
POSITIONS = 8192
_STANDARD_DEVIATION = 0.02


def vocabulary_of(name: str) -> int:
    """Return the number of tokens of a shape."""
    return VOCABULARIES.get(name, _VOCABULARY)


def config_of(name: str, layers: int, vocabulary: int) -> PreTrainedConfig:
    """Return the config of a shape with another number of layers and tokens."""
    kind, sizes = SHAPES[name]
    if "num_key_value_heads" not in sizes:
        sizes = sizes | {"num_key_value_heads": sizes["num_attention_heads"]}
    return kind(
        **sizes,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def zeros_decoder(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return the decoder of a config with zeros for weights, in eval mode."""
    with torch.device("meta"), no_init_weights():
        skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.device(device), no_init_weights():
        small = AutoModelForCausalLM.from_config(_without_layers(config), dtype=dtype)
    buffers = dict(small.named_buffers())
    for path, tensor in list(skeleton.named_parameters()):
        owner, _, leaf = path.rpartition(".")
        zeros = torch.zeros(tensor.shape, dtype=dtype, device=device)
        skeleton.get_submodule(owner)._parameters[leaf] = nn.Parameter(zeros, requires_grad=False)
    for path, _ in list(skeleton.named_buffers()):
        owner, _, leaf = path.rpartition(".")
        skeleton.get_submodule(owner)._buffers[leaf] = buffers[path]
    return skeleton.eval()


def _without_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the same config with one small layer: its buffers are those of the whole decoder."""
    first = {"num_hidden_layers": 1}
    if kinds := getattr(config, "layer_types", None):
        first["layer_types"] = kinds[:1]
    return type(config).from_dict(config.to_dict() | first)


def captured(
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    experts: Experts = "batched",
    sites: tuple[FurtherSites, ...] = (),
) -> Program:
    """Return the program, with a cache, of a decoder with zeros for weights.

    Args:
        experts: how a mixture is computed (`dispfx.source.experts`).
        sites: what is pruned besides the paper's selections.
    """
    return capture_cached(zeros_decoder(config, device, dtype), sites=sites, experts=experts)


def periodic_plan(program: Program, ratio: float, *, period: int, align: int, seed: int = 0) -> Plan:
    """Return a plan whose widths repeat every `period` layers and whose indices are random in each layer."""
    if ratio == 0.0:
        return Plan.random(program, 0.0, seed)
    sites = program.sites
    groups = Groups.of(sites, [_place(program, index, period) for index in range(len(sites))])
    generator = torch.Generator().manual_seed(seed)
    logits = [
        torch.randn(size, generator=generator, dtype=torch.float64)
        + 0.25 * torch.randn((), generator=generator, dtype=torch.float64)
        for size in groups.sizes
    ]
    budget = Budget(ratio, "blocks", align)
    count = ParameterCount.of_sites(sites, program.shapes, "blocks")
    alike = harden(torch.cat(logits), sites, count, budget, groups=groups)
    kept = [_drawn(site, len(indices), generator) for site, indices in zip(sites, alike, strict=True)]
    return Plan.of(program, budget, kept, seed)


def _drawn(site: Site, number: int, generator: torch.Generator) -> Tensor:
    """Return `number` random features of a site, (number,) int32, ascending, equally many of each expert."""
    drawn = [
        expert * site.per_expert
        + torch.randperm(site.per_expert, generator=generator)[: number // site.experts]
        for expert in range(site.experts)
    ]
    return torch.cat(drawn).sort().values.to(torch.int32)


def _place(program: Program, index: int, period: int) -> tuple[object, ...]:
    """Return the layer, modulo the period, and the place of a site within it."""
    layers: dict[str, int] = {}
    places: dict[str, int] = {}
    for site in program.sites[: index + 1]:
        layer = ".".join(part for part in site.name.split(".")[: _layer_depth(site.name)])
        layers.setdefault(layer, len(layers))
        places[layer] = places.get(layer, -1) + 1
    site = program.sites[index]
    layer = ".".join(site.name.split(".")[: _layer_depth(site.name)])
    return layers[layer] % period, places[layer], site.size


def _layer_depth(name: str) -> int:
    parts = name.split(".")
    return next(depth for depth, part in enumerate(parts) if part.isdigit()) + 1


def fill(program: Program, seed: int = 0) -> None:
    """Give every parameter random values: matrices small ones, vectors values around one."""
    generator = torch.Generator(device=program.device).manual_seed(seed)
    with torch.no_grad():
        for tensor in program.parameters.values():
            mean, spread = (0.0, _STANDARD_DEVIATION) if tensor.dim() > 1 else (1.0, 0.1)
            tensor.normal_(mean, spread, generator=generator)


def contender(program: Program, plan: Plan) -> Contender:
    """Return a decoder cut by a plan, ready to be measured; tensors that are not cut are shared."""
    reference = lower_program(program, plan)
    fast = gathered(reference)
    return Contender(reference, fast, plan.achieved)


def widths_of(plan: Plan) -> Tensor:
    """Return how many features every site keeps."""
    return torch.tensor([len(selection.kept) for selection in plan.selections])
