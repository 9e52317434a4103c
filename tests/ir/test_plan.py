"""The plan: its file, what is refused in one, and how it finds its sites again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dispfx
from dispfx.errors import BudgetError, DataError, PlanMismatchError
from dispfx.ir.program import Program
from dispfx.ir.sites import Site, Slice
from dispfx.plan.budget import Budget
from dispfx.plan.plan import SCHEMA_VERSION, Plan, Selection, site_keys
from tests.plain_decoders import FORMS, build
from tests.programs import relative_error, token_ids


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build(FORMS["fused-gate-up"], layers=1)


@pytest.fixture(scope="module")
def program(model: nn.Module) -> Program:
    return dispfx.capture(model)


def indices(*kept: int) -> Tensor:
    return torch.tensor(kept, dtype=torch.int32)


def small_plan() -> Plan:
    selections = (
        Selection("layer.read", 4, indices(0, 2), ("a:1", "b:1")),
        Selection("layer.write", 4, indices(0, 1, 2, 3), ("c:0",)),
    )
    return Plan("f" * 64, Budget(0.3, "total", 8), selections, 0.31, 7, {"torch": "2.0"})


def test_a_plan_reads_back_as_it_was_written(tmp_path: Path, program: Program):
    for plan in (small_plan(), Plan.random(program, 0.4, 3, align=8)):
        plan.save(tmp_path / "plan.safetensors")
        assert Plan.load(tmp_path / "plan.safetensors") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.safetensors"], "nothing is left beside it"


def test_the_file_is_one_int32_tensor_a_site_and_a_json_header(tmp_path: Path):
    path = tmp_path / "plan.safetensors"
    small_plan().save(path)
    tensors = load_file(path)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "layer.read": [0, 2], "layer.write": [0, 1, 2, 3],
    }  # fmt: skip
    assert all(tensor.dtype == torch.int32 for tensor in tensors.values())
    assert header_of(path) == {
        "schema_version": 1,
        "fingerprint": "f" * 64,
        "budget": {"ratio": 0.3, "of": "total", "align": 8},
        "achieved": 0.31,
        "seed": 7,
        "versions": {"torch": "2.0"},
        "sites": [
            {"name": "layer.read", "size": 4, "keys": ["a:1", "b:1"]},
            {"name": "layer.write", "size": 4, "keys": ["c:0"]},
        ],
    }


def header_of(path: Path) -> dict[str, Any]:
    size = int.from_bytes(path.read_bytes()[:8], "little")
    return json.loads(json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]["dispfx"])


def test_a_failed_write_leaves_the_old_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "plan.safetensors"
    small_plan().save(path)
    before = path.read_bytes()

    def full_disk(*words: Any, **rest: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("dispfx.plan.plan.os.replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        small_plan().save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def tampered(tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> Path:
    """Write a plan whose header and tensors went through `change`."""
    path = tmp_path / "plan.safetensors"
    small_plan().save(path)
    header, tensors = header_of(path), load_file(path)
    header = change(header, tensors) or header
    save_file(tensors, path, metadata={"dispfx": json.dumps(header)})
    return path


def without(key: str) -> Callable[[dict[str, Any], dict[str, Tensor]], Any]:
    return lambda header, tensors: header.pop(key) and None


def put(*path: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], Any]:
    """Return a change that sets the entry at a path of the header to the last word."""

    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        *steps, key, value = path
        entry: Any = header
        for step in steps:
            entry = entry[step]
        entry[key] = value

    return change


def unlike_experts(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    header["sites"][0]["experts"] = 2
    tensors["layer.read"] = indices(0, 1)


def tensor(name: str, value: Tensor | None) -> Callable[[dict[str, Any], dict[str, Tensor]], Any]:
    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return change


TAMPERED = {
    **{f"without {key}": without(key) for key in (
        "schema_version", "fingerprint", "budget", "achieved", "seed", "versions", "sites")},
    "a later schema": put("schema_version", SCHEMA_VERSION + 1),
    "a schema in words": put("schema_version", "1"),
    "a ratio of one": put("budget", "ratio", 1.0),
    "a negative ratio": put("budget", "ratio", -0.1),
    "a ratio that is no number": put("budget", "ratio", float("nan")),
    "another thing counted": put("budget", "of", "layers"),
    "an alignment of zero": put("budget", "align", 0),
    "an alignment that is no number": put("budget", "align", float("inf")),
    "no budget": put("budget", None),
    "achieved in words": put("achieved", "much"),
    "achieved that is no number": put("achieved", float("nan")),
    "a list for versions": put("versions", ["2.0"]),
    "a site of another size": put("sites", 0, "size", 2),
    "a site of an endless size": put("sites", 0, "size", float("inf")),
    "a site in words": put("sites", 0, "size", "many"),
    "a site without keys": put("sites", 0, {"name": "layer.read", "size": 4}),
    "one key in place of a list": put("sites", 0, "keys", "a:1"),
    "no keys": put("sites", 0, "keys", []),
    "two sites of one name": put("sites", 1, "name", "layer.read"),
    "two sites of the same keys": put("sites", 1, "keys", ["a:1", "b:1"]),
    "a site without a tensor": tensor("layer.read", None),
    "a tensor without a site": tensor("layer.inner", indices(0)),
    "int64 indices": tensor("layer.read", torch.tensor([0, 2])),
    "float indices": tensor("layer.read", torch.tensor([0.0, 2.0])),
    "two dimensions": tensor("layer.read", indices(0, 2).view(1, 2)),
    "no index": tensor("layer.read", indices()),
    "too many": tensor("layer.read", indices(0, 1, 2, 3, 4)),
    "falling indices": tensor("layer.read", indices(2, 0)),
    "an index twice": tensor("layer.read", indices(1, 1)),
    "a negative index": tensor("layer.read", indices(-1, 2)),
    "an index past the end": tensor("layer.read", indices(0, 4)),
    "no experts": put("sites", 1, "experts", 0),
    "experts that do not divide the features": put("sites", 1, "experts", 3),
    "experts in words": put("sites", 1, "experts", "two"),
    "more experts than kept features": put("sites", 1, "experts", 10**12),
    "experts that keep unlike numbers": unlike_experts,
    "a list for a header": lambda header, tensors: [header],
    "a word for a header": lambda header, tensors: "plan",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(TAMPERED))
def test_a_tampered_plan_is_refused(name: str, tmp_path: Path):
    path = tampered(tmp_path, TAMPERED[name])
    with pytest.raises(DataError, match="this file is not a plan") as error:
        Plan.load(path)
    assert error.value.where == str(path)


def test_an_untouched_plan_goes_the_same_way_and_is_read(tmp_path: Path):
    assert Plan.load(tampered(tmp_path, lambda header, tensors: None)) == small_plan()


@pytest.mark.parametrize("content", [b"", b"text", b"\xff" * 64, (10**9).to_bytes(8, "little")])
def test_another_file_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "plan.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match="this file is not a plan"):
        Plan.load(path)


def test_a_pointer_of_git_lfs_is_called_that(tmp_path: Path):
    path = tmp_path / "plan.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4224\n")
    with pytest.raises(DataError, match="is a git-lfs pointer") as error:
        Plan.load(path)
    assert error.value.hint == f"git -C {tmp_path} lfs pull"


def test_tensors_without_our_header_are_refused(tmp_path: Path):
    save_file({"layer.read": indices(0)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="this file is not a plan"):
        Plan.load(tmp_path / "model.safetensors")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(DataError, match="the plan file does not exist"):
            Plan.load(path)


def site(name: str, *keys: str, size: int = 4) -> Site:
    slices = tuple(Slice(*(key.split(":")[0], int(key.split(":")[1]))) for key in keys)
    return Site(name, "layer", "mlp", "read", size, slices)


def test_sites_are_found_by_the_parameter_axes_they_cut_in_any_order():
    """Another capture may name, order and spell its sites in another way."""
    sites = (site("other", "c:0"), site("names", "b:1", "a:1"))
    found = small_plan().for_sites(sites)
    assert [kept.tolist() for kept in found] == [[0, 1, 2, 3], [0, 2]]
    assert site_keys(sites[1]) == ("a:1", "b:1")


def by_experts(*kept: int, size: int = 6, experts: int = 2) -> Plan:
    selection = Selection("layer.inner", size, indices(*kept), ("a:1", "b:2"), experts)
    return Plan("f" * 64, Budget(0.3), (selection,), 0.3)


STACKS = (Slice("a", 1, None, True), Slice("b", 2, None, True))
EXPERT_SITE = Site("layer.inner", "layer", "mlp", "inner", 6, STACKS, experts=2)
SHARED_SITE = Site("layer.inner", "layer", "mlp", "inner", 3, (Slice("a", 1), Slice("b", 2)))


def test_features_of_experts_read_back_and_their_number_stands_in_the_header(tmp_path: Path):
    path = tmp_path / "plan.safetensors"
    plan = by_experts(0, 2, 3, 4)
    plan.save(path)
    assert Plan.load(path) == plan
    assert header_of(path)["sites"] == [
        {"name": "layer.inner", "size": 6, "keys": ["a:1", "b:2"], "experts": 2}
    ]
    assert [kept.tolist() for kept in plan.for_sites((EXPERT_SITE,))] == [[0, 2, 3, 4]]


def test_one_selection_for_all_experts_is_the_same_for_each():
    """A plan from before experts had features of their own goes on to work, with what it kept."""
    (kept,) = by_experts(0, 2, size=3, experts=1).for_sites((EXPERT_SITE,))
    assert kept.tolist() == [0, 2, 3, 5] and kept.dtype == torch.int32
    fitted = by_experts(0, 2, size=3, experts=1).fitted((EXPERT_SITE,))
    assert fitted == by_experts(0, 2, 3, 5)
    (kept,) = fitted.for_sites((SHARED_SITE,))
    assert kept.tolist() == [0, 2]


def test_unlike_selections_of_experts_are_no_shared_one():
    with pytest.raises(PlanMismatchError, match="of 3 features, but the plan has one for 6 features of 2"):
        by_experts(0, 2, 3, 4).for_sites((SHARED_SITE,))
    three = Site("layer.inner", "layer", "mlp", "inner", 6, STACKS, experts=3)
    with pytest.raises(PlanMismatchError, match="of 3 experts, but the plan has one for 6 features of 2"):
        by_experts(0, 2, 3, 4).for_sites((three,))


def test_a_site_that_the_plan_does_not_know_is_named():
    with pytest.raises(PlanMismatchError, match="a site of 4 features, but the plan has none") as error:
        small_plan().for_sites((site("new", "d:0"),))
    assert error.value.where == "new" and "learned on" in str(error.value)


def test_a_site_of_another_size_is_named_with_both_sizes():
    with pytest.raises(PlanMismatchError, match="a site of 6 features, but the plan has one for 4") as error:
        small_plan().for_sites((site("wide", "c:0", size=6),))
    assert error.value.where == "wide"


def test_a_selection_without_a_site_is_named():
    with pytest.raises(
        PlanMismatchError, match=r"prunes 1 site\(s\) that the decoder does not have"
    ) as error:
        small_plan().for_sites((site("read", "a:1", "b:1"),))
    assert error.value.where == "layer.write"


@pytest.mark.parametrize(
    ("planned", "captured", "hint"),
    [
        (("heads",), (), "with `sites='heads'`"),
        ((), ("heads",), "without `sites`"),
        (("heads", "attention-values"), ("heads",), "with `sites='attention-values'`"),
        (("heads",), ("heads", "attention-values"), "without `sites='attention-values'`"),
    ],
    ids=["with", "without", "with values", "without values"],
)
def test_a_plan_with_heads_says_how_the_decoder_is_captured(planned: Any, captured: Any, hint: str):
    model = build(FORMS["pre-norm"], layers=1)
    plan = Plan.random(dispfx.capture(model, sites=planned), 0.3, 0)
    with pytest.raises(PlanMismatchError) as error:
        dispfx.gated(dispfx.capture(model, sites=captured), plan)
    kind = "values" if "attention-values" in (*planned, *captured) else "heads"
    assert hint in str(error.value) and str(error.value.where).endswith(kind)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (
            torch.tensor([-1, 0, 2], dtype=torch.int32),
            "strictly increasing",
        ),  # a feature counted from the end
        (torch.tensor([0, 2, 2], dtype=torch.int32), "strictly increasing"),
        (torch.tensor([2, 0], dtype=torch.int32), "strictly increasing"),
        (torch.tensor([0, 99], dtype=torch.int32), "strictly increasing"),
        (torch.tensor([], dtype=torch.int32), "indices for 32 features"),
        (torch.ones(32, dtype=torch.bool), "indices for 32 features"),
        ([0, 2], "indices are a tensor, found a list"),
    ],
)
def test_a_selection_that_was_changed_by_hand_is_held_to_what_a_file_may_hold(
    program: Program, tmp_path: Path, kept, message: str
):
    plan = Plan.random(program, 0.4, 1)
    first, *others = plan.selections
    changed = replace(plan, selections=(replace(first, kept=kept), *others))
    for use in (
        lambda: dispfx.lower(program, changed),
        lambda: dispfx.gated(program, changed),
        lambda: changed.save(tmp_path / "plan.safetensors"),
    ):
        with pytest.raises(PlanMismatchError, match=message) as error:
            use()
        assert error.value.where == first.site
    assert list(tmp_path.iterdir()) == []


def test_a_selection_that_is_there_twice_is_refused(program: Program):
    plan = Plan.random(program, 0.4, 1)
    twice = replace(plan, selections=(*plan.selections, plan.selections[0]))
    with pytest.raises(PlanMismatchError, match="two of its sites cut the same axes"):
        dispfx.lower(program, twice)


def test_a_plan_of_one_capture_lowers_another_capture(model: nn.Module, program: Program, tmp_path: Path):
    Plan.random(program, 0.4, 1).save(tmp_path / "plan.safetensors")
    other = dispfx.capture(model)
    plan = Plan.load(tmp_path / "plan.safetensors")
    ids = token_ids(2, 9)
    assert torch.equal(dispfx.lower(other, plan)(ids), dispfx.lower(program, plan)(ids))


def test_another_decoder_of_the_same_shape_is_refused(program: Program):
    """Only the weights differ: the digest in the fingerprint sees it."""
    other = dispfx.capture(build(FORMS["fused-gate-up"], layers=1, seed=5))
    plan = Plan.random(program, 0.4, 1)
    for use in (dispfx.lower, dispfx.gated):
        with pytest.raises(PlanMismatchError, match="made for a decoder with fingerprint") as error:
            use(other, plan)
        assert "same model" in str(error.value)


def test_a_ratio_of_all_parameters_counts_those_that_the_graph_does_not_read():
    """A layer that is left out of the forward pass is written all the same."""
    model = build(FORMS["pre-norm"])
    model.register_module("left_out", nn.Linear(40, 50))
    program = dispfx.capture(model)
    dense = sum(parameter.numel() for parameter in model.parameters())
    assert program.size == dense
    plan = Plan.random(program, 0.2, 1, of="total")
    left = sum(parameter.numel() for parameter in dispfx.lower(program, plan).parameters())
    assert plan.achieved == pytest.approx(1 - left / dense, abs=1e-9)


@pytest.mark.parametrize("of", ["blocks", "total"])
def test_a_ratio_of_zero_keeps_everything(program: Program, of):
    plan = Plan.random(program, 0.0, seed=3, of=of)
    assert all(selection.full for selection in plan.selections) and plan.achieved == 0.0


def test_a_random_plan_meets_its_ratio_and_is_the_seed_s(program: Program):
    plan = Plan.random(program, 0.3, 5)
    assert abs(plan.achieved - 0.3) <= 1e-3
    assert plan == Plan.random(program, 0.3, 5) and plan.kept != {}
    assert plan.selections != Plan.random(program, 0.3, 6).selections
    assert len({len(kept) for kept in plan.kept.values()}) > 1, "widths differ from site to site"


def test_an_aligned_plan_has_aligned_widths(program: Program):
    plan = Plan.random(program, 0.3, 5, align=8)
    narrow = [selection for selection in plan.selections if not selection.full]
    assert narrow and all(len(selection.kept) % 8 == 0 for selection in narrow)


def test_a_ratio_out_of_reach_is_refused_with_the_largest(program: Program):
    with pytest.raises(BudgetError, match="the sites can remove at most"):
        Plan.random(program, 0.9999, 0)


def test_sites_that_keep_the_least_they_may_are_named():
    selections = (
        Selection("one", 4, indices(2), ("a:0",)),
        Selection("two", 4, indices(0, 2), ("b:0",)),
        Selection("whole", 1, indices(0), ("c:0",)),
        Selection("one an expert", 4, indices(1, 3), ("d:0",), experts=2),
    )
    assert Plan("f" * 64, Budget(0.3), selections, 0.3).emptied == ("one", "one an expert")
    assert "two" in Plan("f" * 64, Budget(0.3, "blocks", 2), selections, 0.3).emptied


def test_selections_are_compared_by_their_indices():
    kept = Selection("a", 4, indices(0, 2), ("w:0",))
    assert kept == Selection("a", 4, indices(0, 2), ("w:0",))
    assert kept != Selection("a", 4, indices(0, 3), ("w:0",))
    assert kept != Selection("a", 4, indices(0), ("w:0",)) and kept != "a"
    assert not kept.full


def test_gated_by_a_loaded_plan_equals_gated_by_the_plan(program: Program, tmp_path: Path):
    plan = Plan.random(program, 0.5, 2)
    plan.save(tmp_path / "p")
    ids = token_ids(2, 9)
    assert (
        relative_error(
            dispfx.gated(program, Plan.load(tmp_path / "p"))(ids), dispfx.gated(program, plan)(ids)
        )
        == 0
    )


def test_a_plan_names_the_papers_selections_and_an_older_file_need_not(tmp_path: Path, program: Program):
    plan = Plan.random(program, 0.3, seed=0)
    path = tmp_path / "plan.safetensors"
    plan.save(path)
    symbols = [site.symbol for site in program.sites]
    assert set(symbols) >= {"S3", "S4", "S5"}
    assert [one.symbol for one in Plan.load(path).selections] == symbols

    small_plan().save(path)
    assert "symbol" not in header_of(path)["sites"][0], "as in files that were written before there was one"
    assert Plan.load(path).selections[0].symbol == ""


@pytest.mark.parametrize("ratio", ["0.3", None, [0.3], True])
def test_a_ratio_that_is_no_number_is_a_budget_error(program: Program, ratio: Any):
    with pytest.raises(BudgetError, match="ratio must be a share between 0 and 1"):
        Plan.random(program, ratio, 1)


def test_a_ratio_of_numpy_is_a_number(program: Program, tmp_path: Path):
    ratio: Any = np.float32(0.25)
    plan = Plan.random(program, ratio, 1)
    scores = {site.name: torch.rand(site.size) for site in program.sites}
    assert abs(Plan.from_scores(program, scores, ratio).achieved - 0.25) <= 1e-3
    plan.save(tmp_path / "plan.safetensors")
    assert Plan.load(tmp_path / "plan.safetensors") == plan


def test_a_smaller_alignment_is_not_advised_where_there_is_none(program: Program):
    alone = program.clone()
    alone.sites = tuple(site for site in program.sites if site.kind == "inner")
    with pytest.raises(BudgetError, match="multiples of 1") as error:
        Plan.random(alone, 0.43, 1)
    assert error.value.hint == "ask for that ratio"
