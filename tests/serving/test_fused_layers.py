"""What the layers of an engine are told, from layouts alone: no engine is imported."""

import subprocess
import sys

import pytest
import torch

import dispfx
from dispfx.analysis.label_map import Mismatch
from dispfx.errors import DispfxError, OutputError, PlanMismatchError
from dispfx.huggingface.entries import METHOD, SCHEMA_VERSION
from dispfx.huggingface.layout import Layout, ModuleLayout, digest
from dispfx.huggingface.planning import plan_modules
from dispfx.serving.fused_layers import FusedLayer, Gather, ServedLayout, shared
from dispfx.serving.stored_indices import StoredIndices
from tests.captures import plain
from tests.tiny_transformers import tiny_transformer

LAYER = "model.layers.0."
QKV = [f"{LAYER}self_attn.{name}_proj" for name in "qkv"]


def linear(inputs: int | None, outputs: int | None, **gathers: object) -> ModuleLayout:
    """Return the layout of a linear layer, 8 → 8 in the dense decoder."""
    sizes = {name: size for name, size in (("in_features", inputs), ("out_features", outputs)) if size}
    return ModuleLayout({"weight": (outputs or 8, inputs or 8)}, sizes, **gathers)  # type: ignore[arg-type]


def served(**modules: ModuleLayout) -> ServedLayout:
    return ServedLayout(Layout({path.replace("__", "."): one for path, one in modules.items()}, ""))


def section(layout: Layout) -> dict[str, object]:
    return {"quant_method": METHOD, "schema_version": SCHEMA_VERSION, "layout": layout.to_json(), "sites": []}


def test_modules_that_read_a_norm_gather_by_its_index_and_one_of_them_loads_it():
    norm = ModuleLayout(select=(8, 3), readers=("q", "k", "late"))
    layout = served(norm=norm, q=linear(3, None), k=linear(3, None), late=linear(3, None))

    assert layout.renamed() == {"norm.dispfx_select": "q.dispfx_read"}
    fused = layout.fused(["q", "k"])
    assert fused == FusedLayer(
        ("q", "k"), 3, (None, None), Gather(8, 3, False, ("norm.dispfx_select",), True), None
    )
    late = layout.fused(["late"])
    assert late is not None and late.read == Gather(8, 3, False, ("norm.dispfx_select",), False)
    layout.require_all_served()


def test_modules_with_reads_of_their_own_are_fused_where_they_read_as_many_features():
    layout = served(q=linear(3, None, read=(8, 3)), k=linear(3, None, read=(8, 3)))
    fused = layout.fused(["q", "k"])
    assert fused is not None and fused.read == Gather(8, 3, False, ("q.dispfx_read", "k.dispfx_read"))


@pytest.mark.parametrize(
    "other",
    [
        linear(4, None, read=(8, 4)),
        linear(3, None),
        ModuleLayout(),
        linear(3, None, read=(8, 3), padded=True),
    ],
    ids=["more features", "no index", "dense", "padded"],
)
def test_modules_that_read_other_features_are_not_fused_rule_1(other: ModuleLayout):
    layout = served(q=linear(3, None, read=(8, 3)), k=other)
    with pytest.raises(OutputError, match="fused with k, which read other features") as error:
        layout.fused(["q", "k"])
    assert error.value.where == "q"


def test_a_reader_of_a_norm_is_not_fused_with_one_that_reads_the_stream_rule_1():
    norm = ModuleLayout(select=(8, 3), readers=("q",))
    layout = served(norm=norm, q=linear(3, None), k=linear(3, None, read=(8, 3)))
    with pytest.raises(OutputError, match="other features"):
        layout.fused(["q", "k"])


def test_a_writer_has_its_own_index_and_is_not_fused():
    layout = served(o=linear(None, 5, write=(8, 5)), p=linear(None, 5, write=(8, 5)))
    fused = layout.fused(["o"])
    assert fused is not None and fused.write == Gather(8, 5, True, ("o.dispfx_write",))
    with pytest.raises(OutputError, match="fused in o, p"):
        layout.fused(["o", "p"])


def test_modules_that_the_plan_leaves_alone_are_none_of_the_format():
    assert served(o=linear(None, 5, write=(8, 5))).fused(["q", "k"]) is None


@pytest.mark.parametrize(
    ("outputs", "dense", "expected"),
    [
        ((5, 6), [8, 8], [5, 6]),
        ((None, 6), [8, 8], [8, 6]),
        ((10,), [8, 8], [5, 5]),
        ((None,), [8, 4, 4], [8, 4, 4]),
        ((16,), [8, 4, 4], [8, 4, 4]),
    ],
)
def test_a_product_is_divided_as_the_modules_or_evenly_where_it_is_fused_on_disk(outputs, dense, expected):
    assert FusedLayer(("x",), None, outputs, None, None).output_sizes(dense) == expected


@pytest.mark.parametrize(("total", "dense"), [(9, [8, 8]), (12, [8, 4, 4])])
def test_a_product_that_cannot_be_divided_is_refused(total: int, dense: list[int]):
    with pytest.raises(OutputError, match=f"its {total} features"):
        FusedLayer(("x",), None, (total,), None, None).output_sizes(dense)


def test_ranks_share_evenly_or_the_message_names_the_module_and_the_option():
    assert shared(12, 4, "down") == 3
    with pytest.raises(OutputError, match="13 features cannot be shared evenly by 2 ranks") as error:
        shared(13, 2, "model.layers.0.mlp.down_proj")
    assert error.value.where == "model.layers.0.mlp.down_proj" and "--align 2" in str(error.value)


def test_a_module_without_a_layer_is_named_rule_4():
    layout = served(o=linear(None, 5, write=(8, 5)), other=linear(3, None, read=(8, 3)))
    layout.fused(["o"])
    with pytest.raises(OutputError) as error:
        layout.require_all_served()
    assert error.value.where == "other"


def test_a_mixture_is_refused_where_experts_are_pruned_rule_3():
    layout = served(mlp__experts__0__up=linear(3, None, read=(8, 3)))
    layout.require_untouched("mlp.gate", "a gate")
    with pytest.raises(OutputError, match="a mixture of experts is served only") as error:
        layout.require_untouched("mlp.experts", "a mixture of experts")
    assert error.value.where == "mlp.experts.0.up"


@pytest.mark.parametrize("name", ["experts", "norm"])
def test_a_pruned_module_that_is_not_linear_is_refused_by_name_rule_3(name: str):
    with pytest.raises(OutputError, match="not a linear layer") as error:
        served(**{name: ModuleLayout({"weight": (3,)}, {"hidden_dim": 3})})
    assert error.value.where == name


def test_a_buffer_that_an_engine_would_compute_otherwise_is_refused_by_name_rule_3():
    """`.to(bfloat16)` rounds the frequencies of positions, and vLLM computes them from the config."""
    layout = Layout({"q": linear(3, None, read=(8, 3))}, "", ("model.rotary_emb.inv_freq",))
    with pytest.raises(OutputError, match="stores this buffer") as error:
        ServedLayout.of_section(section(layout))
    assert error.value.where == "model.rotary_emb.inv_freq" and "--dtype" in str(error.value)


def test_a_folder_from_before_readers_is_to_be_written_again():
    old = Layout({"norm": ModuleLayout(select=(8, 3)), "q": linear(3, None)}, "")
    with pytest.raises(OutputError, match="an older dispfx wrote it") as error:
        ServedLayout.of_section(section(old))
    assert "dispfx apply" in str(error.value)


def test_a_decoder_that_is_a_graph_alone_is_refused_with_its_reason():
    entries = section(Layout({}, "")) | {"layout": None, "reason": "no module holds it"}
    with pytest.raises(OutputError, match="no module holds it"):
        ServedLayout.of_section(entries)
    with pytest.raises(OutputError, match="no dispfx section"):
        ServedLayout.of_section({"quant_method": "fp8"})


@pytest.mark.parametrize(
    ("name", "readers"),
    [
        ("llama", {"input_layernorm": QKV}),
        pytest.param(
            "gemma2",
            {"pre_feedforward_layernorm": [f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj"]},
            marks=pytest.mark.slow,
        ),
        pytest.param("phi", {}, marks=pytest.mark.slow),
    ],
)
def test_layouts_of_real_decoders_say_who_reads_a_norm(name: str, readers: dict[str, list[str]]):
    """Sandwich norms select before a branch alone, and a norm that two branches share selects for neither."""
    model = tiny_transformer(name)
    program = plain(name)
    plan = dispfx.Plan.random(program, 0.4, 1, align=4)
    kept = {selection.site: selection.kept for selection in plan.selections}
    planned = plan_modules(program, kept, model)
    assert not hasattr(planned, "reason")
    found = {
        path.removeprefix(LAYER): set(norm.readers)
        for path, norm in Layout.from_json(planned.layout.to_json()).modules.items()  # type: ignore[union-attr]
        if norm.readers and path.startswith(LAYER)
    }
    for norm, modules in readers.items():
        assert found[norm] == set(modules)
    assert bool(found) == bool(readers)
    assert not any(norm.startswith("post_feedforward") for norm in found)


def test_fewer_values_are_refused_where_queries_keys_and_values_are_one_layer_rule_3():
    """The value projection puts its features among zeros; alone, it and the output projection are served."""
    model = tiny_transformer("llama")
    program = dispfx.capture(model, sites="attention-values")
    kept = {site.name: torch.arange(site.size) for site in program.sites}
    for site in program.sites:
        if site.kind == "values":
            kept[site.name] = torch.arange(site.size).view(site.experts, -1)[:, :6].flatten()
    planned = plan_modules(program, kept, model)
    assert not isinstance(planned, Mismatch)
    layout = ServedLayout(planned.layout)
    with pytest.raises(OutputError, match=r"q_proj.* puts its features among zeros") as error:
        layout.fused(QKV)
    assert error.value.where == QKV[2]
    value, out = (layout.fused([f"{LAYER}self_attn.{name}_proj"]) for name in "vo")
    assert (
        value is not None and value.write is not None and (value.write.features, value.write.kept) == (16, 12)
    )
    assert out is not None and out.read is not None and (out.read.features, out.read.kept) == (32, 24)


def test_an_index_that_is_missing_changed_or_too_long_is_named():
    good = torch.tensor([0, 2, 5], dtype=torch.int32)
    layout = Layout({"q": linear(3, None, read=(8, 3))}, digest({"q.dispfx_read": good}))
    gather = Gather(8, 3, False, ("q.dispfx_read",))
    indices = StoredIndices(layout)
    room = indices.room(gather, 3)
    with pytest.raises(PlanMismatchError, match="not loaded"):
        indices.check(gather, room)
    with pytest.raises(PlanMismatchError, match="3 indices were expected, 2 are stored"):
        indices.loader(gather)(room, good[:2])
    indices.loader(gather)(room, good)
    indices.check(gather, room)
    room[1] = 3
    with pytest.raises(PlanMismatchError, match="not those that the config was written with"):
        indices.check(gather, room)
    room[1] = 8
    with pytest.raises(PlanMismatchError, match="between 0 and 7"):
        indices.check(gather, room)


def test_a_weight_that_was_not_loaded_is_named_rule_4():
    """vLLM itself does not look, and serves what the memory held."""
    layout = Layout({"q": linear(3, None, read=(8, 3)), "o": linear(None, 5, write=(8, 5))}, "")
    indices = StoredIndices(layout)
    # A loader that takes tensors without their names.
    indices.require_weights()
    indices.note("embed.weight")
    indices.note("q.weight")
    with pytest.raises(PlanMismatchError, match="1 of 2 pruned weights") as error:
        indices.require_weights()
    assert error.value.where == "o.weight"
    indices.note("o.weight")
    indices.require_weights()


def test_fused_modules_must_store_one_index_and_share_one_room_rule_2():
    gather = Gather(8, 3, False, ("q.dispfx_read", "k.dispfx_read"))
    indices = StoredIndices(Layout({}, ""))
    room, load = indices.room(gather, 3), indices.loader(gather)
    assert indices.room(gather, 3) is room and room.tolist() == [-1, -1, -1]
    load(room, torch.tensor([0, 2, 5], dtype=torch.int32), "q")
    load(room, torch.tensor([0, 2, 5], dtype=torch.int32), "k")
    with pytest.raises(DispfxError, match=r"q\.dispfx_read, k\.dispfx_read differ"):
        load(room, torch.tensor([0, 2, 6], dtype=torch.int32), "v")


def test_neither_dispfx_nor_the_entry_point_imports_vllm():
    code = "import sys, dispfx, dispfx.serving.plugin; print('vllm' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"], done.stderr
