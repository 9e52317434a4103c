"""A plan as layers × features."""

from dataclasses import replace

import torch

from dispfx.plan.plan import Selection
from dispfx.report import SiteWidth
from dispfx.report.layers import layers_of
from tests.report.runs import INNER, LAYERS, WIDTH, plan_of


def test_the_five_selections_come_in_the_papers_order():
    plan = plan_of()
    layers = layers_of(replace(plan, selections=plan.selections[::-1]))
    assert [one.name for one in layers.series] == ["S1", "S2", "S3", "S4", "S5"]
    assert layers.series[0].title == "S1: attention read"


def test_a_mask_has_a_row_for_each_layer_and_one_for_each_kept_feature():
    plan = plan_of()
    layers = layers_of(plan)
    assert (layers.names, layers.width) == (("0", "1", "2"), WIDTH)
    masks_LF = layers.series[0].masks_LF(WIDTH)
    for layer in range(LAYERS):
        kept = next(s.kept for s in plan.selections if s.site == f"layers.{layer}.attention.read")
        assert masks_LF[layer].nonzero().flatten().tolist() == kept.tolist()


def test_the_use_of_a_feature_counts_reads_and_writes_and_not_what_is_inside():
    plan = plan_of()
    layers = layers_of(plan)
    assert layers.stream_sites == 4 * LAYERS
    assert layers.uses_F[0] == 4 * LAYERS and layers.uses_F[WIDTH - 1] == 0
    kept = sum(len(s.kept) for s in plan.selections if s.size == WIDTH)
    assert int(layers.uses_F.sum()) == kept
    assert [one.name for one in layers.on_stream] == ["S1", "S2", "S3", "S5"]


def test_selections_without_a_symbol_go_by_their_names_without_the_number():
    plan = plan_of()
    older = replace(plan, selections=tuple(replace(s, symbol="") for s in plan.selections))
    layers = layers_of(older)
    assert {one.name for one in layers.series} == {
        f"layers.#.{name}"
        for name in ("attention.read", "attention.write", "mlp.read", "mlp.inner", "mlp.write")
    }
    inner = next(one for one in layers.series if one.kind == "inner")
    assert inner.widths() == [(INNER // 2 + 1, INNER)] * LAYERS


def test_a_layer_without_a_selection_is_empty_and_several_of_one_kind_are_averaged():
    plan = plan_of()
    first = plan.selections[0]
    twin = Selection(
        "layers.0.attention.read2", WIDTH, torch.tensor([WIDTH - 1], dtype=torch.int32), ("x:0",), symbol="S1"
    )
    left = tuple(s for s in plan.selections if s.site != "layers.1.attention.read")
    sites = [SiteWidth(twin.site, "read", WIDTH, 1)]
    series = layers_of(replace(plan, selections=(*left, twin)), sites).series[0]
    masks_LF = series.masks_LF(WIDTH)
    assert masks_LF[1].isnan().all() and series.widths()[1] is None
    assert masks_LF[0, WIDTH - 1] == 0.5 and masks_LF[0, 0] == 0.5
    assert series.widths()[0] == (len(first.kept) + 1, 2 * WIDTH)


def test_the_layer_is_the_number_that_varies_and_else_the_branch():
    kept = torch.tensor([0], dtype=torch.int32)

    def names(*sites: str):
        selections = tuple(Selection(site, 4, kept, (f"{site}:0",)) for site in sites)
        return layers_of(replace(plan_of(), selections=selections)).names

    assert names("towers.1.layers.0.mlp.read", "towers.1.layers.7.mlp.read") == ("0", "7")
    assert names("first.read", "second.read") == ("first", "second")
    assert names("stream") == ("stream",)
