"""Weights of 8 or 4 bits in the layers of an engine: which ones, and which widths.  No engine is imported."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dispfx.errors import OutputError, PlanMismatchError
from dispfx.huggingface.entries import with_rounded_weights
from dispfx.huggingface.layout import Layout, ModuleLayout
from dispfx.quantization.stored_weights import SCHEMES, weights_section
from dispfx.serving.fused_layers import FusedLayer
from dispfx.serving.kernel_widths import require_kernel
from dispfx.serving.rounded_weights import RoundedWeights
from dispfx.serving.stored_indices import StoredIndices


def rounded(*layers: str, scheme: str = "int4") -> RoundedWeights:
    section = with_rounded_weights({}, scheme, layers, weights_section(scheme, ["head"]))
    found = RoundedWeights.of_section(section)
    assert found is not None
    return found


def test_a_folder_with_plain_weights_has_none():
    assert RoundedWeights.of_section({"layout": None}) is None


def test_weights_of_an_unknown_kind_are_refused():
    with pytest.raises(OutputError, match="'int3', but this version reads int8, int4, fp8"):
        RoundedWeights.of_section({"rounded": {"scheme": "int3", "layers": [], "format": {}}})


def test_the_section_alone_says_which_layers_are_rounded_rule_1():
    """An engine that is asked for these layers only has nothing to leave out by its own names."""
    found = rounded("q", "k")
    assert found.format()["ignore"] == [] and found.format()["format"] == "pack-quantized"
    found.format()["config_groups"].clear()
    assert found.format()["config_groups"]
    assert found.fused(["q", "k"]) and not found.fused(["o"])


def test_modules_of_which_some_are_rounded_are_not_fused_rule_2():
    with pytest.raises(OutputError, match="fused in q, k, and only some of these are rounded") as error:
        rounded("q").fused(["q", "k"])
    assert error.value.where == "k"


def test_a_rounded_module_without_a_layer_is_named_rule_3():
    found = rounded("q", "k")
    found.fused(["q"])
    with pytest.raises(OutputError, match="does not say which layer") as error:
        found.require_all_served()
    assert error.value.where == "k" and "--model-impl transformers" in str(error.value)
    found.fused(["k"])
    found.require_all_served()


@pytest.mark.parametrize(
    ("scheme", "tensors"),
    [
        ("int4", ["weight_scale", "weight_packed", "weight_shape", "weight_zero_point"]),
        ("int8", ["weight_scale", "weight_packed", "weight_shape"]),
        ("fp8", ["weight_scale", "weight"]),
    ],
)
def test_every_tensor_of_a_rounded_layer_must_be_loaded_rule_3(scheme: str, tensors: list[str]):
    """Also of a layer that is not pruned; a pruned one has codes in the place of its weight."""
    layout = Layout({"o": ModuleLayout({"weight": (8, 8), "bias": (8,)}, {"out_features": 8})}, "")
    indices = StoredIndices(layout, rounded("o", "q", scheme=scheme))
    names = ["o.bias", *(f"{path}.{name}" for path in ("o", "q") for name in tensors)]
    for missing in names:
        indices._names = set(names) - {missing}
        with pytest.raises(PlanMismatchError, match=f"1 of {len(names)} pruned or rounded weights") as error:
            indices.require_weights()
        assert error.value.where == missing
    indices._names = set(names)
    indices.require_weights()


@pytest.mark.parametrize(
    ("scheme", "inputs", "outputs", "filled"),
    [
        ("int4", 32, [8, 16], True),
        ("int4", 32, [4, 12], False),
        ("int4", 36, [8], False),
        ("int8", 36, [3], True),
        ("int8", 34, [8], False),
        ("fp8", 36, [3], True),
        ("fp8", 35, [8], False),
    ],
)
def test_codes_fill_whole_words_rule_4(scheme: str, inputs: int, outputs: list[int], filled: bool):
    """In int4 the zero points of 4 outputs share a word with those of the next module."""
    assert rounded("q", scheme=scheme).fills_words(inputs, outputs) is filled


class Kernels:
    """A method of an engine whose kernels need multiples of some widths."""

    def __init__(self, inputs: int, outputs: int, reason: str = "Reasons: \n  A is not a CPU"):
        self.multiples, self.reason = (inputs, outputs), reason
        self.asked: list[Any] = []

    def create_weights(
        self, layer: nn.Module, inputs: int, outputs: list[int], *sizes: Any, **_: Any
    ) -> None:
        assert torch.empty(1).is_meta and layer.scheme == "scheme"
        self.asked.append((inputs, outputs, *sizes))
        if inputs % self.multiples[0] or sum(outputs) % self.multiples[1]:
            raise ValueError(f"Failed to find a kernel. {self.reason}")


def asked(
    kernels: Kernels, sizes: tuple[int, list[int]], *, ranks: int = 1, scheme: str = "int4",
    pruned: tuple[int | None, tuple[int | None, ...]] = (1, (1,)), dtype: torch.dtype = torch.float16,
) -> None:  # fmt: skip
    inputs, outputs = sizes
    layer = SimpleNamespace(
        input_size=inputs * ranks, output_size=sum(outputs), scheme="scheme", weight_loader=None
    )
    served = FusedLayer(("down",), pruned[0], pruned[1], None, None)
    require_kernel(layer, kernels, served, rounded("down", scheme=scheme), sizes, dtype)


def test_a_kernel_is_asked_for_with_the_sizes_of_a_rank_and_of_all_rule_1():
    kernels = Kernels(32, 32)
    asked(kernels, (64, [32, 64]), ranks=2)
    assert kernels.asked == [(64, [32, 64], 128, 96, torch.float16)]


@pytest.mark.parametrize(
    ("kernels", "sizes", "ranks", "align"),
    [
        (Kernels(32, 32), (96, [100]), 1, 32),
        (Kernels(32, 32), (80, [128]), 2, 64),
        (Kernels(128, 64), (96, [96]), 1, 128),
        (Kernels(1, 1), (96, [100]), 1, 8),
        (Kernels(1, 1), (96, [4, 12]), 1, 8),
    ],
)
def test_the_smallest_alignment_with_a_kernel_is_named_rule_2(
    kernels: Kernels, sizes: tuple[int, list[int]], ranks: int, align: int
):
    with pytest.raises(OutputError, match=f"no kernel for int4 weights of {sizes[0]} →") as error:
        asked(kernels, sizes, ranks=ranks)
    assert error.value.where == "down" and f"--align {align}," in str(error.value)


def test_dense_widths_stay_and_the_reasons_of_the_engine_are_told_rule_2():
    with pytest.raises(OutputError, match=r"features here \(A is not a CPU\)") as error:
        asked(Kernels(32, 32), (100, [32]), pruned=(None, (1,)), scheme="int8")
    assert "--align" not in str(error.value)


def test_a_product_that_is_fused_on_disk_is_aligned_in_all_its_parts_rule_2():
    with pytest.raises(OutputError, match="--align 64"):
        asked(Kernels(32, 128), (32, [40, 40]), pruned=(1, (80,)))


def test_float32_is_refused_before_loading_rule_3():
    with pytest.raises(OutputError, match="int8 weights do not compute in float32") as error:
        asked(Kernels(1, 1), (32, [32]), scheme="int8", dtype=torch.float32)
    assert error.value.where == "down" and "--dtype float16" in str(error.value)


def test_every_scheme_that_is_written_can_be_read():
    assert {rounded("q", scheme=scheme).scheme for scheme in SCHEMES} == set(SCHEMES)
