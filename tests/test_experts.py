"""Mixtures of experts: grouped for learning, batched for export, and one plan for both."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import dispfx
from dispfx import api
from dispfx.analysis.coverage import coverage
from dispfx.compiler.programs import exportable
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from dispfx.settings.learning_settings import LearnSettings
from dispfx.source.experts import experts_as, has_choice_of_experts
from dispfx.verification.equivalence import ModuleDecoder
from dispfx.verification.graphs import zeroed_tensors
from tests.learning_options import options_of
from tests.plain_decoders import perturb
from tests.programs import relative_error, token_ids

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
}  # fmt: skip
# What is special about the experts -> (model type, its sizes).
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "fused gate and up": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "small experts, weights not renormalised": ("qwen3_moe", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
    }),
    "shared experts, a dense layer, latents": ("deepseek_v3", LATENT),
    "interleaved gate and up, transposed, with biases": ("gpt_oss", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rope_parameters": None,
        "layer_types": ["full_attention", "full_attention"],
    }),
    "a gate on the shared expert": ("qwen2_moe", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }),
}  # fmt: skip
GROUPED, BATCHED = "grouped_mm", "bmm"


def build(name: str, *, layers: int = 2) -> Any:
    model_type, changes = MIXTURES[name]
    sizes = SIZES | changes | {"num_hidden_layers": layers}
    sizes |= {"layer_types": changes["layer_types"][:layers]} if "layer_types" in changes else {}
    torch.manual_seed(0)
    return perturb(AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)))


def operations(program: Program) -> str:
    return " ".join(str(node.target) for node in program.graph.nodes if node.op == "call_function")


@pytest.fixture(scope="module", params=MIXTURES)
def captures(request: pytest.FixtureRequest) -> tuple[Program, Program]:
    model = build(request.param)
    return dispfx.capture(model), dispfx.capture(model, experts="batched")


def test_a_capture_is_grouped_unless_it_is_to_be_exported(captures: tuple[Program, Program]):
    grouped, batched = captures
    assert GROUPED in operations(grouped) and BATCHED not in operations(grouped)
    assert BATCHED in operations(batched) and GROUPED not in operations(batched)


def test_both_offer_the_same_sites_and_refuse_nothing(captures: tuple[Program, Program]):
    grouped, batched = captures
    assert not grouped.refused and not batched.refused
    assert grouped.sites == batched.sites
    assert coverage(grouped).share == coverage(batched).share == 1.0


def test_every_expert_has_features_of_its_own_in_both(captures: tuple[Program, Program]):
    for program in captures:
        stacked = {path for path, shape in program.shapes.items() if len(shape) == 3}
        sites = [site for site in program.sites if site.experts > 1]
        assert {site.kind for site in sites} == {"inner"} and {site.experts for site in sites} == {4}
        assert {
            cut.parameter for site in sites for cut in site.slices if len(program.shapes[cut.parameter]) == 3
        } == stacked
        plan = Plan.random(program, 0.3, seed=1)
        for site in sites:
            each = plan.kept[site.name].view(4, -1) % site.per_expert
            assert len({tuple(own) for own in each.tolist()}) == 4


def test_with_everything_kept_no_bit_changes(captures: tuple[Program, Program]):
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    for program in captures:
        everything = dispfx.gated(program, Plan.random(program, 0.0, seed=0))
        assert torch.equal(everything(ids), program.graph_module(ids))


@pytest.mark.parametrize("made_on", [0, 1], ids=["grouped", "batched"])
def test_a_plan_made_on_one_lowers_the_other(captures: tuple[Program, Program], made_on: int):
    plan = Plan.random(captures[made_on], 0.3, seed=1)
    for shape in ((2, 9), (1, 17)):
        ids = token_ids(*shape, vocabulary=VOCABULARY)
        expected = dispfx.gated(captures[0], plan)(ids)
        assert relative_error(expected, captures[0].graph_module(ids)) > 1e-3, "the plan must matter"
        for program in captures:
            for write in ("index-add", "gather-add"):
                # The two add a token's experts in another order.
                assert relative_error(dispfx.lower(program, plan, write=write)(ids), expected) <= 1e-5


def test_gradients_of_the_gates_are_the_same_in_both(captures: tuple[Program, Program]):
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    gradients = []
    for program in captures:
        masks = [torch.full((site.size,), 0.7, requires_grad=True) for site in program.sites]
        api.gate(program)(ids, masks).square().mean().backward()
        gradients.append([mask.grad for mask in masks])
    for ours, theirs in zip(*gradients, strict=True):
        assert float(ours.abs().max()) > 0 and relative_error(ours, theirs) <= 1e-4


def test_the_module_keeps_its_own_implementation():
    model = build("fused gate and up", layers=1)
    model.set_experts_implementation("eager")
    dispfx.capture(model)
    assert model.get_experts_implementation() == {"": "eager"}
    with pytest.raises(ZeroDivisionError), experts_as(model, "batched"):
        assert model.get_experts_implementation() == {"": "batched_mm"}
        _ = 1 / 0
    assert model.get_experts_implementation() == {"": "eager"}


def test_only_mixtures_have_a_choice():
    assert has_choice_of_experts(build("fused gate and up", layers=1))
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    assert not has_choice_of_experts(dense) and not has_choice_of_experts(nn.Linear(2, 2))
    program = dispfx.capture(dense.eval())
    assert exportable(dense, program, Plan.random(program, 0.3, seed=0)) is program


def test_where_one_way_cannot_be_captured_the_other_is(monkeypatch: pytest.MonkeyPatch):
    model = build("fused gate and up", layers=1)
    forward = type(model).forward

    def batched_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.get_experts_implementation()[""] == "grouped_mm":
            raise RuntimeError("no such kernel")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", batched_only)
    assert BATCHED in operations(dispfx.capture(model))


@pytest.mark.parametrize(
    "name", ["fused gate and up", "interleaved gate and up, transposed, with biases"], ids=["fused", "biases"]
)
def test_a_mixture_compiles_from_text_to_a_verified_folder(tmp_path: Path, name: str):
    model = build(name, layers=1)
    tokens = torch.randint(VOCABULARY, (600,), generator=torch.Generator().manual_seed(0))
    report = api.compile(
        model,
        0.3,
        data=tokens,
        out=tmp_path / "out",
        **options_of(LearnSettings(steps=3, seq_len=16)),
        export="onnx",
        align=1,
    )
    assert all(line.holds for line in report.verify)
    names = {line.name for line in report.verify}
    assert {"lowered = zeroed", "removed is unread", "reloaded = modules", "onnx = checkpoint"} <= names
    assert abs(report.ratio.achieved - 0.3) <= 1e-3 and not report.refused
    # What stands in the folder is the module with zeros, each expert with its own.
    plan = Plan.load(tmp_path / "out" / "plan.safetensors")
    program = dispfx.capture(model)
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    zeroed = ModuleDecoder(model, zeroed_tensors(program, plan))(ids)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert relative_error(loaded(ids).logits, zeroed) <= 1e-5


def test_a_plan_with_one_selection_for_all_experts_is_applied_as_such(tmp_path: Path):
    """Plans from before experts had features of their own stay what they were."""
    model = build("fused gate and up", layers=1)
    program = dispfx.capture(model)
    own = Plan.random(program, 0.3, seed=1)
    first = {
        site.name: one.kept[: len(one.kept) // site.experts]
        for site, one in zip(program.sites, own.selections, strict=True)
    }
    old = replace(
        own,
        selections=tuple(
            replace(one, size=site.per_expert, kept=first[site.name], experts=1)
            for site, one in zip(program.sites, own.selections, strict=True)
        ),
    )
    old.save(tmp_path / "old.safetensors")
    assert b'experts":' not in (tmp_path / "old.safetensors").read_bytes()
    report = api.apply(model, tmp_path / "old.safetensors", out=tmp_path / "out", export="none")
    assert all(line.holds for line in report.verify)
    own_features = [site for site in program.sites if site.experts > 1]
    assert own_features
    for site in own_features:
        kept = (
            Plan.load(tmp_path / "out" / "plan.safetensors").kept[site.name].view(site.experts, -1)
            % site.per_expert
        )
        assert all(torch.equal(expert, first[site.name]) for expert in kept)
