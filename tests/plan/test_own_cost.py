"""A ratio of a user's own cost: parameters, latency, and one budget per layer."""

from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import dispfx
from dispfx.errors import BudgetError, DataError, DispfxError, SourceError
from dispfx.plan.budget import Budget
from dispfx.plan.groups import Groups
from dispfx.plan.hardening import ParameterCount, hard_masks, harden
from dispfx.plan.latency_table import LatencyTable
from dispfx.plan.plan_making import layer_of
from tests.command_line import run
from tests.ir.site_strategies import decoder_sites
from tests.plain_decoders import FORMS, build
from tests.programs import program_of, token_ids
from tests.trust.runs import write_tokens

Shapes = dict[str, tuple[Any, ...]]
TABLE = LatencyTable("cpu", "float32", 1, (1, 64), (1, 64), ((1e-6, 4e-6), (4e-6, 1e-5)))
SMALL: dict[str, Any] = {"steps": 3, "seq_len": 8, "batch_size": 2, "recipe": "paper"}


def parameters(shapes: Shapes) -> Any:
    return sum(prod(shape) for shape in shapes.values())


def latency(shapes: Shapes) -> Any:
    return sum(TABLE.product_seconds(*shape) for shape in shapes.values() if len(shape) == 2)


def by_layer(shapes: Shapes) -> dict[str, Any]:
    found: dict[str, Any] = defaultdict(int)
    for path, shape in shapes.items():
        if layer_of(path) != path:
            found[layer_of(path)] += prod(shape)
    return found


@pytest.fixture(scope="module")
def program() -> dispfx.Program:
    return program_of("pre-norm")


def test_the_parameters_as_a_cost_of_ones_own_give_the_plan_that_counting_all_parameters_gives():
    sites, shapes = decoder_sites(4, 64, 168, key_width=32)
    own, known = (ParameterCount.of_sites(sites, shapes, of) for of in (parameters, "total"))
    logits = torch.randn(own.features, generator=torch.Generator().manual_seed(0))
    kept = [harden(logits, sites, one, Budget(0.3, one.of)) for one in (own, known)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*kept, strict=True))
    masks = torch.rand(2, own.features, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(own.count(masks) / own.dense, known.count(masks) / known.dense)
    ours, theirs = (one.slopes(Groups.alone(sites)) / one.dense for one in (own, known))
    assert torch.allclose(ours, theirs)


def test_a_latency_table_is_a_cost_that_learning_differentiates(program: dispfx.Program):
    plan = dispfx.learn(program, token_ids(1, 400)[0], 0.3, ratio_of=latency, **SMALL)
    count = ParameterCount.of_sites(program.sites, program.shapes, latency)
    left = count.count_kept(hard_masks(program.sites, plan.for_sites(program.sites)))
    assert abs(1.0 - left / count.dense - 0.3) < 0.005 and plan.achieved == 1.0 - left / count.dense
    assert plan != dispfx.learn(program, token_ids(1, 400)[0], 0.3, **SMALL)
    assert not torch.equal(count.slopes(Groups.alone(program.sites)), torch.zeros(count.features))


@pytest.mark.parametrize("method", ["learned", "magnitude"])
def test_every_number_meets_the_ratio_alone(program: dispfx.Program, method: str):
    plan = dispfx.learn(program, token_ids(1, 400)[0], 0.3, ratio_of=by_layer, method=method, **SMALL)
    masks = hard_masks(program.sites, plan.for_sites(program.sites))
    parts = ParameterCount.of_sites(program.sites, program.shapes, by_layer).parts()
    assert len(parts) == 2
    assert all(abs(0.7 - part.count_kept(masks) / part.dense) < 0.005 for part in parts)


def weights_and_cache(shapes: Shapes) -> Any:
    """Bytes of all weights, and of the keys and values of 512 cached tokens."""
    rows = sum(shape[0] for path, shape in shapes.items() if path.endswith(("key.weight", "value.weight")))
    return 4 * parameters(shapes) + 4 * 512 * rows


def test_weights_and_cache_are_one_number_that_heads_make_smaller():
    program = dispfx.capture(build(FORMS["pre-norm"]), sites="heads")
    plan = dispfx.learn(program, token_ids(1, 400)[0], 0.4, ratio_of=weights_and_cache, **SMALL)
    shapes = {path: tuple(one.shape) for path, one in dispfx.lower(program, plan).named_parameters()}
    left = weights_and_cache(shapes) / weights_and_cache(dict(program.shapes))
    # A cost is counted in as many steps as there are parameters that can be cut.
    assert abs(0.6 - left) < 0.005 and abs(1.0 - plan.achieved - left) < 1e-4
    assert any(one.kind == "heads" and not one.full for one in plan.selections)
    plain = dispfx.learn(program, token_ids(1, 400)[0], 0.4, ratio_of="total", **SMALL)
    heads = [sum(len(one.kept) for one in each.selections if one.kind == "heads") for each in (plan, plain)]
    assert heads[0] < heads[1], "what heads cost in the cache counts"


def test_features_that_cost_nothing_are_kept(program: dispfx.Program):
    def only_mlp(shapes: Shapes) -> Any:
        return sum(prod(shape) for path, shape in shapes.items() if ".mlp." in path)

    plan = dispfx.Plan.random(program, 0.3, 0, of=only_mlp)
    full = {one.site: one.full for one in plan.selections}
    assert all(full[site.name] is (".mlp" not in site.branch) for site in program.sites)


def test_numbers_that_share_a_selection_cannot_meet_a_ratio_separately(program: dispfx.Program):
    with pytest.raises(BudgetError, match="depend on one selection"):
        dispfx.learn(
            program, token_ids(1, 400)[0], 0.3, ratio_of=by_layer, constrained=True, method="random", **SMALL
        )


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (lambda shapes: 1.0, "returned 1"),
        (lambda shapes: -parameters(shapes), "returned -"),
        (lambda shapes: {}, "returned no number"),
        (lambda shapes: {"a": "b"}, "must return a number, or a dict of numbers"),
    ],
)
def test_a_cost_is_positive_numbers_with_gradients(program: dispfx.Program, cost: Any, words: str):
    with pytest.raises(BudgetError, match=words):
        dispfx.Plan.random(program, 0.3, 0, of=cost)


def test_the_line_of_an_error_in_a_cost_is_named(program: dispfx.Program):
    with pytest.raises(SourceError, match="raised KeyError") as caught:
        dispfx.Plan.random(program, 0.3, 0, of=lambda shapes: shapes["none"])
    assert __file__ in str(caught.value.where)


def test_a_cost_that_takes_other_arguments_is_named_with_its_own_line(program: dispfx.Program):
    def of_two(shapes: Shapes, other: int) -> Any:
        return parameters(shapes) + other

    with pytest.raises(SourceError, match="missing 1 required positional argument") as caught:
        dispfx.Plan.random(program, 0.3, 0, of=cast(Any, of_two))
    assert caught.value.where == f"{__file__}:{of_two.__code__.co_firstlineno}"


def test_a_cost_that_changes_between_calls_is_refused(program: dispfx.Program):
    calls = []

    def growing(shapes: Shapes) -> Any:
        calls.append(shapes)
        return parameters(shapes) * len(calls)

    with pytest.raises(BudgetError, match="must return the same numbers whenever"):
        dispfx.Plan.random(program, 0.3, 0, of=growing)


def in_tiles(shapes: Shapes) -> Any:
    """Multiples of 8, as a kernel would pad them."""
    return sum(prod(torch.ceil(torch.as_tensor(size / 8)) for size in shape) for shape in shapes.values())


def with_a_slope(shapes: Shapes) -> Any:
    """The same, with the gradient of what is not padded."""
    plain = sum(prod(torch.as_tensor(size / 8) for size in shape) for shape in shapes.values())
    return plain + (in_tiles(shapes) - plain).detach()


def test_a_cost_with_steps_is_refused_before_learning(program: dispfx.Program):
    with pytest.raises(BudgetError, match="changes in steps: it falls by"):
        dispfx.Plan.random(program, 0.3, 0, of=in_tiles)
    with pytest.raises(BudgetError, match="changes in steps") as raised:
        dispfx.Plan.random(
            program, 0.3, 0, of=lambda shapes: {"a": parameters(shapes), "b": in_tiles(shapes)}
        )
    assert " for b " in str(raised.value)
    ParameterCount.of_sites(program.sites, program.shapes, with_a_slope)


def test_a_plan_holds_the_name_of_a_cost_and_never_runs_it(program: dispfx.Program, tmp_path: Path):
    plan = dispfx.Plan.random(program, 0.3, 0, of=parameters)
    plan.save(tmp_path / "plan.safetensors")
    again = dispfx.Plan.load(tmp_path / "plan.safetensors")
    assert again == plan and str(again.budget.of).startswith(f"{__name__}.parameters (")
    with pytest.raises(BudgetError, match="does not hold the function"):
        ParameterCount.of_sites(program.sites, program.shapes, again.budget.of)
    object.__setattr__(plan.budget, "of", "mine.py:cost")
    plan.save(tmp_path / "hostile.safetensors")
    with pytest.raises(DataError, match="names a function to run"):
        dispfx.Plan.load(tmp_path / "hostile.safetensors")
    with pytest.raises(DispfxError, match="of must be blocks or total"):
        Budget(0.3, "blcks")


def test_the_command_line_takes_a_cost_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def cost(shapes):\n    return sum(a[0] * a[-1] for a in shapes.values())\n")
    words = ["learn", "tests.api.plain:build_decoder", "--ratio", "0.3", "--align", "1", "--quiet"]
    words += ["--data", write_tokens(tmp_path / "tokens.safetensors"), "--steps", "2", "--batch-size", "2"]
    found = run(*words, "--seq-len", "16", "--ratio-of", "mine.py:cost", "--out", "own.safetensors")
    assert found.exit_code == 0, found.output
    assert str(dispfx.Plan.load("own.safetensors").budget.of).startswith("mine.py:cost (")
    found = run(*words, "--ratio-of", "mine.py:costs", "--out", "none.safetensors")
    assert found.exit_code == 2 and "did you mean cost?" in found.stderr


def test_a_mask_of_several_samples_has_a_cost_for_each(program: dispfx.Program):
    count = ParameterCount.of_sites(program.sites, program.shapes, by_layer)
    masks = torch.ones(3, count.features)
    left: Tensor = count.count(masks)
    assert left.shape == (3, 2) and torch.allclose(left, torch.full_like(left, count.dense))


def test_a_plan_can_be_made_where_gradients_are_off(program: dispfx.Program):
    with torch.no_grad():
        plan = dispfx.Plan.random(program, 0.3, 0, of=by_layer)
    assert plan == dispfx.Plan.random(program, 0.3, 0, of=by_layer)
