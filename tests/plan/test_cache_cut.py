"""A share of the KV cache as a budget of its own, next to the ratio."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import dispfx
from dispfx.errors import BudgetError, DataError
from dispfx.ir.cache_size import CacheSize
from dispfx.ir.program import Program
from dispfx.ir.sites import Site, Slice
from dispfx.learning.learner import Problem
from dispfx.plan.budget import Budget
from dispfx.plan.cache_cut import cut_cache
from dispfx.plan.class_widths import Ranking
from dispfx.plan.decoder_count import count_of
from dispfx.plan.hardening import Groups, ParameterCount, check_reachable, hard_masks, harden
from dispfx.plan.latency_table import LatencyTable
from dispfx.plan.linear_count import LinearCount
from dispfx.plan.plan import Plan
from dispfx.run.mask_learning import batches_of, task_of
from dispfx.settings import BudgetSettings, LearnSettings
from tests.ir.site_strategies import decoder_sites
from tests.programs import token_ids

LAYERS, HEADS, HEAD = 4, 8, 8
EACH = 2 * HEAD * 4


def decoder_with_heads(layers: int = LAYERS, heads: int = HEADS) -> tuple[list[Site], Any, CacheSize]:
    """Return sites of a decoder whose attentions also have heads, its shapes, and the size of its cache."""
    sites, shapes = decoder_sites(layers, heads * HEAD, 168)
    labels = tuple(position // HEAD for position in range(heads * HEAD))
    for layer in range(layers):
        name = f"layers.{layer}"
        cuts = [
            Slice(f"{name}.{path}", axis, labels) for path, axis in (("q", 0), ("k", 0), ("v", 0), ("o", 1))
        ]
        sites.append(Site(f"{name}.heads", f"{name}.attention", "attention", "heads", heads, tuple(cuts)))
    size = CacheSize(0, {one.name: (EACH,) * heads for one in sites if one.kind == "heads"})
    return sites, shapes, size


SITES, SHAPES, SIZE = decoder_with_heads()


def normal(features: int, seed: int) -> Tensor:
    return torch.randn(features, generator=torch.Generator().manual_seed(seed))


def counted(budget: Budget, cache: CacheSize = SIZE) -> ParameterCount:
    count = ParameterCount.of_sites(SITES, SHAPES, budget.of)
    return count.with_targets(LinearCount.of_cache(SITES, cache), [])


def heads_of(kept: Sequence[Tensor]) -> list[int]:
    return [len(own) for site, own in zip(SITES, kept, strict=True) if site.kind == "heads"]


def removed(count: ParameterCount, kept: Sequence[Tensor]) -> tuple[float, float]:
    """Return the achieved ratio and share of the cache."""
    masks = hard_masks(SITES, kept)
    assert count.cache is not None
    return 1 - count.count_kept(masks) / count.dense, 1 - count.cache.count_kept(masks) / count.cache.dense


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    ratio=st.floats(0.05, 0.85),
    kv_ratio=st.floats(0.01, 0.99),
    align=st.sampled_from([1, 8]),
    seed=st.integers(0, 1000),
)
def test_both_targets_are_met_or_what_can_be_reached_is_named(ratio, kv_ratio, align, seed):
    """Rules 1 and 2: as few whole heads go as remove the share, and the ratio is met as without them."""
    budget = Budget(ratio, align=align, kv_ratio=kv_ratio)
    count = counted(budget)
    logits = normal(count.features, seed)
    try:
        kept = harden(logits, SITES, count, budget)
    except BudgetError as error:
        beyond = kv_ratio > 1 - 1 / HEADS
        assert ("every attention keeps a head" in error.problem) == beyond
        assert beyond or "alone are" in error.problem or "can remove at most" in error.problem
        return
    of_weights, of_cache = removed(count, kept)
    assert abs(of_weights - ratio) <= 0.005 + 0.5 * align / 64 * (align > 1)
    stays = sum(heads_of(kept))
    assert of_cache >= kv_ratio - 1e-9, "never less than asked"
    assert 1 - (stays + 1) / (LAYERS * HEADS) < kv_ratio, "one more head would be too much"
    assert min(heads_of(kept)) >= 1


def test_the_heads_with_the_smallest_logits_go_and_every_attention_keeps_its_best():
    """Rule 1."""
    budget = Budget(0.5, kv_ratio=0.5)
    logits = normal(counted(budget).features, 3)
    by_site = dict(zip([one.name for one in SITES], logits.split([one.size for one in SITES]), strict=True))
    by_site["layers.0.heads"] -= 100.0
    kept = harden(torch.cat(list(by_site.values())), SITES, counted(budget), budget)
    first, *others = [(own, indices) for own, indices in zip(SITES, kept, strict=True) if own.kind == "heads"]
    assert first[1].tolist() == [int(by_site["layers.0.heads"].argmax())]
    threshold = min(float(by_site[site.name][indices].min()) for site, indices in others)
    for site, indices in others:
        gone = set(range(HEADS)) - set(indices.tolist())
        assert all(float(by_site[site.name][head]) <= threshold for head in gone)


@pytest.mark.parametrize(
    ("kv_ratio", "stays"), [(0.5, 16), (0.25, 24), (0.9 - 0.4, 16), (0.26, 23), (0.875, 4)]
)
def test_a_share_of_whole_heads_is_met_exactly(kv_ratio: float, stays: int):
    budget = Budget(0.5, kv_ratio=kv_ratio)
    kept = harden(normal(counted(budget).features, 0), SITES, counted(budget), budget)
    assert sum(heads_of(kept)) == stays


def test_a_share_is_met_with_heads_of_different_sizes():
    """Rule 2: what was too much comes back."""
    large, small = (
        Site(name, name, "attention", "heads", 4, (Slice(name, 0),)) for name in ("large", "small")
    )
    cache = LinearCount.of_cache((large, small), CacheSize(10, {"large": (100,) * 4, "small": (10,) * 4}))
    groups = Groups.alone([large, small])
    logits = torch.tensor([9.0, 8.0, 1.0, 0.5, 9.0, 0.9, 0.8, 0.7], dtype=torch.float64)
    cut = cut_cache(Ranking.of(logits, groups.sizes), groups, cache, 450 - 205)
    # In the order of logits: 100, 10, 10, 10, 100 bytes go for at least 205, and two of 10 come back.
    assert cut.widths_G.tolist() == [2, 3] and cut.left == 450 - 210
    assert cut_cache(Ranking.of(logits, groups.sizes), groups, cache, 450).widths_G.tolist() == [4, 4]
    assert cut_cache(Ranking.of(logits, groups.sizes), groups, cache, 0).widths_G.tolist() == [1, 1]


def test_attentions_that_keep_equally_many_heads_move_together():
    """Rule 3, as with one selection for the whole stream."""
    first, second = (Site(name, name, "attention", "heads", 4, (Slice(name, 0),)) for name in ("a", "b"))
    stream = Site("stream", "stream", "stream", "stream", 8, (Slice("a", 1),))
    sites = [stream, first, second]
    groups = Groups.alone(sites)
    cache = LinearCount.of_cache(sites, CacheSize(0, {"a": (10,) * 4, "b": (10,) * 4}))
    cut = cut_cache(Ranking.of(normal(16, 0).double(), groups.sizes), groups, cache, 50)
    assert cut.widths_G.tolist() == [8, 2, 2] and cut.left == 40


def test_equal_logits_give_the_same_heads():
    """Rule 4."""
    budget = Budget(0.4, kv_ratio=0.4)
    zeros = torch.zeros(counted(budget).features)
    first, second = (harden(zeros, SITES, counted(budget), budget) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert all(own.tolist() == list(range(len(own))) for own in first), "the last ones of a site go first"


def test_a_ratio_that_the_heads_alone_exceed_is_refused_before_learning():
    with pytest.raises(
        BudgetError, match=r"ratio 0\.1000 .* share of 0\.7500 of the KV cache alone are 0\."
    ) as error:
        budget = Budget(0.1, kv_ratio=0.75)
        check_reachable(SITES, counted(budget), budget)
    assert "a smaller `kv_ratio`" in str(error.value.hint)
    least = float(str(error.value.hint).split("at least ")[1].split(",")[0])
    budget = Budget(least, kv_ratio=0.75)
    check_reachable(SITES, counted(budget), budget)


def test_a_ratio_beyond_what_is_left_with_many_heads_is_refused():
    budget = Budget(0.97, align=8, kv_ratio=0.1)
    with pytest.raises(BudgetError, match=r"at most 0\.\d+ at widths .* KV ratio of 0\.1000") as error:
        check_reachable(SITES, counted(budget), budget)
    assert "a larger `kv_ratio`" in str(error.value.hint)


def test_a_share_without_heads_or_without_a_known_size_is_refused(program: Program):
    budget = Budget(0.3, kv_ratio=0.5)
    with pytest.raises(BudgetError, match="no key/value head can be removed"):
        check_reachable(SITES, counted(budget, CacheSize(100)), budget)
    for size, reason in (
        (CacheSize(unknown="an odd attention"), "not known: an odd attention"),
        (CacheSize(100, unaffected="it caches latents"), "do not make it smaller: it caches latents"),
        (None, "a graph without a cache"),
    ):
        with pytest.raises(BudgetError, match=reason):
            count_of(budget, replace(program, cache=size))


@pytest.mark.parametrize("wrong", [0.0, 1.0, -0.5, 50, "half", True, float("nan")])
def test_a_share_is_a_number_between_0_and_1(wrong: Any):
    with pytest.raises(BudgetError, match="kv_ratio"):
        Budget(0.3, kv_ratio=wrong)
    with pytest.raises(BudgetError, match="kv_ratio"):
        BudgetSettings(ratio=0.3, kv_ratio=wrong)


def test_a_share_asks_for_heads():
    assert BudgetSettings(ratio=0.3, kv_ratio=0.5).sites == ("heads",)
    assert BudgetSettings(ratio=0.3).sites == ()


def test_heads_that_a_latency_table_calls_slower_still_go():
    """The share of the cache goes before what a table says."""
    table = LatencyTable("a card", "float32", 1, (1, 1000), (1, 1000), ((1e-6, 1e-3), (1e-3, 1.0)), 12e-3)
    budget = Budget(0.3, kv_ratio=0.5, costs=table)
    kept = harden(normal(counted(budget).features, 0), SITES, counted(budget), budget)
    assert removed(counted(budget), kept)[1] == 0.5
    whole = [
        site.branch for site, own in zip(SITES, kept, strict=True) if site.is_gathered and len(own) == 64
    ]
    attentions = [name for name in whole if name.endswith("attention")]
    assert attentions, "the table must matter"


# A decoder and a text.


def llama(keys: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=keys,
        max_position_embeddings=64,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def program() -> Program:
    return dispfx.capture(llama(8), sites="heads")


TOKENS = token_ids(1, 3000)[0]
QUICK: dict[str, Any] = {"steps": 4, "seq_len": 16, "batch_size": 2}


@pytest.mark.parametrize("further", [{}, {"method": "magnitude"}, {"method": "wanda", "seq_len": 8}])
@pytest.mark.parametrize("keys", [8, 4])
def test_learned_and_scored_plans_meet_both(keys: int, further: dict[str, Any]):
    plan = dispfx.learn(
        dispfx.capture(llama(keys), sites="heads"), TOKENS, 0.3, kv_ratio=0.5, **(QUICK | further)
    )
    assert abs(plan.achieved - 0.3) <= 0.005
    assert sum(len(one.kept) for one in plan.selections if one.kind == "heads") == 3 * keys // 2
    assert plan.cache is not None
    assert (plan.cache.dense, plan.cache.pruned) == (3 * 2 * keys * 8 * 4, 3 * keys * 8 * 4)


def test_learning_has_a_term_for_the_cache(program: Program):
    text = batches_of(TOKENS, LearnSettings(seq_len=16, batch_size=2))
    gated = dispfx.gate(program)

    def problem(budget: Budget) -> Problem:
        return task_of(program, gated, text, budget, LearnSettings(seq_len=16, batch_size=2)).problem()

    assert problem(Budget(0.3)).further_terms == []
    (term,) = problem(Budget(0.3, kv_ratio=0.5)).further_terms
    masks = torch.ones(2, sum(site.size for site in program.sites))
    assert term.target == 768 and term.count(masks).tolist() == [1536.0, 1536.0]


def test_a_program_without_heads_is_refused_with_the_way_to_get_them():
    program = dispfx.capture(llama(8))
    with pytest.raises(BudgetError, match="no key/value head") as error:
        dispfx.learn(program, TOKENS, 0.3, kv_ratio=0.5, **QUICK)
    assert "`sites='heads'`" in str(error.value.hint)


def test_a_plan_file_keeps_share_and_cache_and_older_plans_load(program: Program, tmp_path: Path):
    file = tmp_path / "plan.safetensors"
    plan = dispfx.learn(program, TOKENS, 0.3, kv_ratio=0.5, method="magnitude", **QUICK)
    plan.save(file)
    assert Plan.load(file) == plan
    assert Plan.load(file).budget.kv_ratio == 0.5 and Plan.load(file).cache == plan.cache
    plain = Plan.random(program, 0.3, seed=0)
    plain.save(file)
    text = file.read_bytes()
    assert b"kv_ratio" not in text and b'\\"cache\\"' not in text, "files of other budgets are as before"
    assert Plan.load(file).budget.kv_ratio is None


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'\\"kv_ratio\\": 0.5', b'\\"kv_ratio\\": 5.0'), (b'\\"pruned\\": 7', b'\\"pruned\\": -')],
)
def test_a_plan_with_an_impossible_share_is_not_read(
    program: Program, tmp_path: Path, old: bytes, new: bytes
):
    file = tmp_path / "plan.safetensors"
    dispfx.learn(program, TOKENS, 0.3, kv_ratio=0.5, method="magnitude", **QUICK).save(file)
    data = file.read_bytes()
    assert data.count(old) == 1
    file.write_bytes(data.replace(old, new))
    with pytest.raises(DataError, match="not a plan"):
        Plan.load(file)
