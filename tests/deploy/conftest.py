"""A tiny transformers decoder, and a plan for it, that the tests of this folder share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from dispfx.deploy.checkpoint import StoredDecoder, site_indices, underived_buffers, write_checkpoint
from dispfx.deploy.section import ModelFiles
from dispfx.ir.sites import Site, Slice
from dispfx.plan.budget import Budget
from dispfx.plan.plan import Plan, Selection, site_keys

WIDTH, INNER, VOCABULARY = 16, 24, 40


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Return a decoder of two layers with grouped-query attention, on seeded weights."""
    torch.manual_seed(0)
    options = {"num_hidden_layers": 2, "tie_word_embeddings": True, **changes}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **options,
    )
    return LlamaForCausalLM(config).eval()


def mlp_sites() -> tuple[Site, ...]:
    """Return an inner site a layer, which ordinary linear layers can follow, and reads that are full."""
    sites = []
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp"
        read = (Slice(f"{mlp}.gate_proj.weight", 1), Slice(f"{mlp}.up_proj.weight", 1))
        inner = (
            Slice(f"{mlp}.gate_proj.weight", 0),
            Slice(f"{mlp}.up_proj.weight", 0),
            Slice(f"{mlp}.down_proj.weight", 1),
        )
        sites.append(Site(f"layer{layer}.mlp.read", f"layer{layer}.mlp", "mlp", "read", WIDTH, read))
        sites.append(Site(f"layer{layer}.mlp.inner", f"layer{layer}.mlp", "mlp", "inner", INNER, inner))
    return tuple(sites)


def plan_of(sites: tuple[Site, ...], kept: list[Tensor]) -> Plan:
    """Return the plan that keeps `kept[i]` at site i."""
    selections = tuple(
        Selection(site.name, site.size, indices.to(torch.int32), site_keys(site))
        for site, indices in zip(sites, kept, strict=True)
    )
    return Plan("0123abcd", Budget(0.3), selections, 0.3, seed=5, versions={"torch": torch.__version__})


def inner_plan() -> Plan:
    """Return a plan that keeps 17 and 20 of the inner features and reads everything."""
    generator = torch.Generator().manual_seed(1)
    kept = []
    for width in (17, 20):
        kept.append(torch.arange(WIDTH))
        kept.append(torch.randperm(INNER, generator=generator)[:width].sort().values)
    return plan_of(mlp_sites(), kept)


def slice_in_place(model: nn.Module, plan: Plan) -> nn.Module:
    """Slice the weights that the plan's keys name; stands in for lowering where only widths change."""
    for selection in plan.selections:
        for key in selection.keys:
            path, _, axis = key.rpartition(":")
            parameter = model.get_parameter(path)
            owner = model.get_submodule(path.rpartition(".")[0])
            owner.weight = nn.Parameter(parameter.detach().index_select(int(axis), selection.kept))
    return model


@dataclass
class Written:
    """A folder, and the lowered decoder that was written into it."""

    folder: Path
    lowered: nn.Module
    plan: Plan


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Write a pruned decoder, with real smaller weights, into a folder."""
    return write(tmp_path / "out", tiny_llama(), inner_plan())


def write(
    folder: Path, model: LlamaForCausalLM, plan: Plan, *, tokenizer: Any = None, **options: Any
) -> Written:
    """Prune `model` in place by `plan` and write it into a new `folder`."""
    names = underived_buffers(model, model.config)
    lowered = slice_in_place(model, plan)
    folder.mkdir()
    write_checkpoint(
        folder,
        ModelFiles(model.config, type(model).__name__, model.generation_config, tokenizer),
        StoredDecoder(
            parameters=dict(lowered.named_parameters()),
            buffers={
                **{name: buffer for name, buffer in lowered.named_buffers() if name in names},
                **site_indices(plan, mlp_sites()),
            },
            layout="its modules are not looked at in these tests",
        ),
        plan,
        mlp_sites(),
        **options,
    )
    return Written(folder, lowered, plan)
