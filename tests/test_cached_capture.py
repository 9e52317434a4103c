"""A capture with a cache: prefill and decode are the full recompute, dense and lowered."""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor, fx, nn

import dispfx
from dispfx.capturing.cached_capture import capture_cached as capture_prepared
from dispfx.capturing.cached_capture import export_cached_program
from dispfx.compiler.cached_programs import capture_cached, lower_cached
from dispfx.compiler.pipelines import run_pipeline
from dispfx.errors import CaptureError, PlanMismatchError, UnsupportedGraphError
from dispfx.ir.cached_inputs import CachedDecoder, CachedShape, cache_tensors, sample_inputs
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan, site_keys
from dispfx.source.cached_forward import cached_forward
from tests.captures import plain, with_cache
from tests.plain_decoders import FORMS, build
from tests.programs import plan_keeping, relative_error, token_ids
from tests.tiny_transformers import VOCABULARY, tiny_transformer

# Sums over keys run in another order with one query than with many: 2⁻²³ a step, a few hundred steps.
ORDER_OF_SUMS = 1e-5
PREFILL, STEPS = 7, 32
QUICK = ("llama", "gpt2")
SLOW = ("qwen3", "phi", "gemma2", "gemma3", "mixtral", "deepseek")


@dataclass(frozen=True)
class Case:
    """A decoder, captured without and with a cache."""

    model: nn.Module
    plain: Program
    cached: Program


@pytest.fixture(
    scope="module", params=[*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def case(request) -> Case:
    """One decoder of each arrangement."""
    return captured(request.param)


@pytest.fixture(scope="module")
def llama() -> Case:
    """The decoder for what does not depend on the arrangement."""
    return captured("llama")


@cache
def captured(name: str) -> Case:
    """Return both captures of a decoder."""
    model = tiny_transformer(name)
    return Case(model, plain(name), with_cache(name))


def generated(graph: fx.GraphModule, ids: Tensor, prefill: int, mask: Tensor | None = None) -> Tensor:
    """Return the logits (B, T, V) of a prefill and single steps after it."""
    decoder = CachedDecoder(graph)
    logits = [decoder(ids[:, :prefill], mask)]
    logits += [decoder(ids[:, place : place + 1]) for place in range(prefill, ids.shape[1])]
    return torch.cat(logits, dim=1)


def ids_of(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return token_ids(batch, tokens, vocabulary=VOCABULARY, seed=seed)


def test_prefill_gives_the_logits_of_the_capture_without_a_cache(case: Case):
    for batch, tokens in ((1, 1), (2, 23), (5, 6)):
        ids = ids_of(batch, tokens)
        logits = CachedDecoder(case.cached.graph_module)(ids)
        assert relative_error(logits, case.plain.graph_module(ids)) <= ORDER_OF_SUMS


def test_prefill_and_decode_equal_the_full_recompute(case: Case):
    ids = ids_of(2, PREFILL + STEPS)
    with torch.no_grad():
        recomputed = case.model(ids, use_cache=False).logits
    assert relative_error(generated(case.cached.graph_module, ids, PREFILL), recomputed) <= ORDER_OF_SUMS


def test_a_text_in_pieces_equals_the_text_in_one_piece(case: Case):
    ids = ids_of(3, 20)
    decoder = CachedDecoder(case.cached.graph_module)
    pieces = torch.cat([decoder(ids[:, :1]), decoder(ids[:, 1:12]), decoder(ids[:, 12:])], dim=1)
    assert relative_error(pieces, case.plain.graph_module(ids)) <= ORDER_OF_SUMS


def test_a_left_padded_batch_equals_each_text_alone(case: Case):
    ids, pad = ids_of(2, 24), 5
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, :pad] = 0
    graph = case.cached.graph_module
    both = generated(graph, ids, 12, mask)
    assert relative_error(both[:1], generated(graph, ids[:1], 12)) <= ORDER_OF_SUMS
    assert relative_error(both[1:, pad:], generated(graph, ids[1:, pad:], 12 - pad)) <= ORDER_OF_SUMS


def test_a_plan_of_the_capture_without_a_cache_lowers_the_cached_one(case: Case):
    plan = Plan.random(case.plain, 0.4, seed=1)
    ids = ids_of(2, PREFILL + STEPS, seed=1)
    lowered = dispfx.lower(case.plain, plan)(ids)
    for write in ("index-add", "gather-add"):
        graph = dispfx.lower(case.cached, plan, write=write)
        assert relative_error(generated(graph, ids, PREFILL), lowered) <= ORDER_OF_SUMS
    assert relative_error(lowered, case.plain.graph_module(ids)) > 1e-2, "the plan must remove something"


def test_both_captures_have_the_same_sites_and_the_same_stream(case: Case):
    assert [site_keys(site) for site in case.cached.sites] == [site_keys(site) for site in case.plain.sites]
    assert case.cached.refused == case.plain.refused
    assert case.cached.fingerprint == case.plain.fingerprint
    assert case.cached.shapes == case.plain.shapes
    assert case.cached.stream is not None and case.plain.stream is not None
    assert case.cached.stream.width == case.plain.stream.width
    assert len(case.cached.stream.writes) == len(case.plain.stream.writes)


def test_gates_of_ones_change_no_bit_of_logits_and_cache(case: Case):
    gated = dispfx.gated(case.cached, Plan.random(case.cached, 0.0, seed=0))
    inputs = sample_inputs(
        cache_tensors(case.cached.graph), CachedShape(2, 5, 9), VOCABULARY, case.cached.device
    )
    actual, expected = gated(*inputs), case.cached.graph_module(*inputs)
    assert len(actual) == len(expected) == len(case.cached.outputs)
    assert all(map(torch.equal, actual, expected))


def test_inputs_and_outputs_have_the_names_that_clients_expect(llama: Case):
    layers = [f"{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]
    assert llama.cached.inputs == (
        "input_ids", "attention_mask", "position_ids", *(f"past_key_values.{name}" for name in layers),
    )  # fmt: skip
    assert llama.cached.outputs == ("logits", *(f"present.{name}" for name in layers))
    assert [(cache.heads, cache.size) for cache in cache_tensors(llama.cached.graph)] == [(2, 8)] * 4


def test_a_lowered_cached_decoder_keeps_the_size_of_its_cache(llama: Case):
    program = lower_cached(llama.model, Plan.random(llama.plain, 0.5, seed=2))
    assert cache_tensors(program.graph) == cache_tensors(llama.cached.graph)
    assert program.parameters.keys() == llama.plain.parameters.keys()
    assert sum(map(torch.numel, program.parameters.values())) < sum(
        map(torch.numel, llama.plain.parameters.values())
    )


@pytest.mark.slow
def test_latents_that_are_cached_are_cut_in_the_cache_too():
    """Rule 5 of label_map."""
    case = captured("deepseek")
    kept = {site.name: list(range(site.size)) for site in case.plain.sites}
    latents = "model.layers.1.self_attn.kv_a_layernorm.weight:0"
    (site,) = (site for site in case.plain.sites if latents in site_keys(site))
    kept[site.name] = [0, 3, 4, 9]
    lowered = dispfx.lower(case.cached, plan_keeping(case.plain, kept))
    sizes = {cache.name: cache.size for cache in cache_tensors(lowered.graph)}
    before = {cache.name: cache.size for cache in cache_tensors(case.cached.graph)}
    changed = {name: (before[name], sizes[name]) for name in sizes if before[name] != sizes[name]}
    assert list(changed.values()) == [(10, 4)] and next(iter(changed)).startswith("1.")


@pytest.mark.slow
def test_features_that_leave_the_decoder_other_than_as_its_cache_are_not_pruned():
    program = capture_prepared(cached_forward(tiny_transformer("deepseek")))
    renamed = {name: name.replace("present", "latent") for name in program.outputs}
    program.outputs = tuple(renamed.values())
    found = {site_keys(site) for site in run_pipeline("analyse", program).sites}
    lost = {site_keys(site) for site in captured("deepseek").cached.sites} - found
    assert len(lost) == 2 and all("kv_a_layernorm" in str(keys) for keys in lost)


def test_a_decoder_that_counts_its_positions_in_its_own_way_goes_on_doing_so():
    case = captured("roberta")  # Its positions start behind the padding token's id.
    ids = ids_of(2, 15) % (VOCABULARY - 8) + 8
    graph, pad = case.cached.graph_module, 3
    with torch.no_grad():
        recomputed = case.model(ids, use_cache=False).logits
    assert relative_error(generated(graph, ids, PREFILL), recomputed) <= ORDER_OF_SUMS
    mask = torch.ones(2, PREFILL, dtype=torch.int64)
    mask[1, :pad] = 0
    alone = generated(graph, ids[1:, pad:], PREFILL - pad)
    assert relative_error(generated(graph, ids, PREFILL, mask)[1:, pad:], alone) <= ORDER_OF_SUMS


def test_a_plan_that_skips_a_branch_lowers_the_cached_capture(llama: Case):
    plain = dispfx.capture(llama.model, skip=["*.mlp"])
    plan = Plan.random(plain, 0.3, seed=3)
    ids = ids_of(2, 19)
    program = lower_cached(llama.model, plan)
    assert relative_error(generated(program.graph_module, ids, 8), dispfx.lower(plain, plan)(ids)) <= 1e-5


def test_a_plan_of_another_decoder_is_refused(llama: Case):
    plan = replace(Plan.random(llama.plain, 0.3, seed=0), fingerprint="0" * 64)
    with pytest.raises(PlanMismatchError, match="fingerprint"):
        lower_cached(llama.model, plan)


def test_a_lowered_cached_graph_is_exported_with_named_sizes(llama: Case):
    lowered = dispfx.lower(llama.cached, Plan.random(llama.plain, 0.4, seed=4), write="gather-add")
    exported = export_cached_program(lowered)
    shapes = [node.meta["val"].shape for node in exported.graph.nodes if node.op == "placeholder"]
    dynamic = {str(size) for shape in shapes for size in shape if not isinstance(size, int)}
    assert len(dynamic) == 4, "batch, sequence, past and total"
    for shape in map(CachedShape._make, ((2, 5, 9), (1, 1, 30), (3, 8, 0), (1, 1, 0))):
        inputs = sample_inputs(cache_tensors(lowered.graph), shape, VOCABULARY, torch.device("cpu"))
        for actual, expected in zip(exported.module()(*inputs), lowered(*inputs), strict=True):
            assert torch.equal(actual, expected)


def test_capture_leaves_the_users_module_alone(llama: Case):
    model = tiny_transformer("llama").train()
    before = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    model.config.use_cache = False  # type: ignore[union-attr]
    capture_cached(model)
    assert model.training and all(module.training for module in model.modules())
    assert model.config.use_cache is False  # type: ignore[union-attr]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(before[path], tensor) for path, tensor in model.state_dict().items())


def test_the_state_of_a_convolution_is_refused():
    with pytest.raises(UnsupportedGraphError, match="keys and values"):
        capture_cached(tiny_transformer("lfm2"))


def test_a_decoder_without_a_cache_is_refused():
    with pytest.raises(CaptureError, match="does not take a cache"):
        capture_cached(build(FORMS["pre-norm"]))


def test_a_decoder_starts_anew_after_a_reset(llama: Case):
    decoder, ids = CachedDecoder(llama.cached.graph_module), ids_of(1, 6)
    first = decoder(ids)
    assert not torch.equal(decoder(ids), first)
    decoder.reset()
    assert torch.equal(decoder(ids), first)
