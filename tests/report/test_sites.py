"""What `inspect` and the progress say about branches and sites."""

import io
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from dispfx.ir.lengths import Lengths
from dispfx.ir.sites import Branch, Refusal, ResidualStream, Site, Slice
from dispfx.report.site_tables import found_lines, print_sites, program_plain, refusal_lines, site_rows


def site(name: str, branch_kind: Any, kind: Any, size: int, cuts: int = 1) -> Site:
    slices = tuple(Slice(f"{name}.weight{i}", 1) for i in range(cuts))
    return Site(name, name.rpartition(".")[0], branch_kind, kind, size, slices)


def program(layers: int = 3, refused: int = 0) -> Any:
    sites, branches = [], []
    for i in range(layers):
        attention, mlp = f"layers.{i}.attention", f"layers.{i}.mlp"
        sites += [
            site(f"{attention}.read", "attention", "read", 16, 3),
            site(f"{mlp}.inner", "mlp", "inner", 24 if i < 2 else 40, 3),
        ]
        branches += [
            Branch(attention, "attention", (f"{attention}.read",), (), ()),
            Branch(mlp, "mlp", (), (f"{mlp}.inner",), ()),
        ]
    left = tuple(Refusal(f"layers.{i}.x", "no rule", f"w{i}", "model.py:3") for i in range(refused))
    return SimpleNamespace(
        sites=tuple(sites),
        branches=tuple(branches),
        stream=ResidualStream(16, ("embedding", "add"), ("add",)),
        refused=left,
        left_dense=left,
        size=1_200_000,
        lengths=Lengths(),
        model_class="tests.Tiny",
        fingerprint="abc",
        dtype=torch.float32,
        measured=True,
    )


def test_equal_sites_are_one_row_with_the_range_of_their_layers():
    assert site_rows(program()) == [
        ("layers.{0…2}.attention.read  (3 sites)", "read S1", "16", "3 parameter axes"),
        ("layers.{0…1}.mlp.inner  (2 sites)", "inner S4", "24", "3 parameter axes"),
        ("layers.2.mlp.inner", "inner S4", "40", "3 parameter axes"),
    ]


def test_a_range_with_holes_lists_its_numbers():
    given = program(4)
    given.sites = tuple(entry for entry in given.sites if entry.name != "layers.1.attention.read")
    assert site_rows(given)[0][0] == "layers.{0,2,3}.attention.read  (3 sites)"


def test_a_site_without_a_number_keeps_its_name():
    given = program(0)
    given.sites = (site("mixer.read", "mixer", "read", 8),)
    assert site_rows(given) == [("mixer.read", "read", "8", "1 parameter axis")]


def test_features_of_several_experts_are_counted_as_a_product():
    given = program(0)
    slices = (Slice("up", 1, None, True), Slice("down", 2, None, True))
    given.sites = (Site("mlp.inner", "mlp", "mlp", "inner", 8 * 1500, slices, experts=8),)
    assert site_rows(given) == [("mlp.inner", "inner S4", "8 × 1,500", "2 parameter axes")]
    assert program_plain(given)["sites"][0]["experts"] == 8


def test_branches_and_sites_are_counted_by_kind():
    assert found_lines(program()) == [
        "residual stream 16 wide, 1.20 M parameters",
        "6 branches (3 attention, 3 mlp), 6 sites (3 read, 3 inner)",
    ]


def test_refusals_name_parameter_and_line_and_are_cut_short():
    assert refusal_lines(program(refused=1).refused) == ["left dense: layers.0.x: no rule (w0, model.py:3)"]
    lines = refusal_lines(program(refused=8).refused)
    assert len(lines) == 6 and "3 more" in lines[-1]
    assert len(refusal_lines(program(refused=8).refused, limit=None)) == 8


def test_the_json_holds_every_site_and_every_cut():
    plain = program_plain(program(refused=1))
    assert plain["stream"] == {"width": 16} and plain["parameters"] == 1_200_000
    assert len(plain["sites"]) == 6 and plain["dtype"] == "float32"
    assert plain["sites"][0] == {
        "name": "layers.0.attention.read",
        "branch": "layers.0.attention",
        "kind": "read",
        "symbol": "S1",
        "size": 16,
        "experts": 1,
        "slices": [{"parameter": f"layers.0.attention.read.weight{i}", "axis": 1} for i in range(3)],
    }
    assert plain["branches"][1]["sites"] == ["layers.0.mlp.inner"]
    assert plain["refused"][0]["source"] == "model.py:3"


def test_inspect_prints_all_of_it():
    stream = io.StringIO()
    print_sites(program(refused=7), Console(file=stream, width=40))
    text = stream.getvalue()
    assert "layers.{0…2}.attention.read" in text and text.count("left dense") == 7
