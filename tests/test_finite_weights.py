"""A weight with NaN or infinity is named before a decoder is captured, and so before anything is learned."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dispfx.api
from dispfx.analysis.finite_weights import require_finite_weights
from dispfx.errors import CaptureError, SourceError, UnsupportedGraphError
from dispfx.plan.plan import Plan
from tests.api.conftest import RATIO, SETTINGS, random_tokens
from tests.api.plain import build_decoder
from tests.learning_options import options_of

NAME = "layers.0.mlp.up.weight"


def decoder_with(value: float, name: str = NAME) -> nn.Module:
    model = build_decoder()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    return model


def compiled(model: nn.Module, out: Path) -> Any:
    return dispfx.compile(model, RATIO, out=out, data=random_tokens(), **options_of(SETTINGS))


def learned(model: nn.Module, out: Path) -> Any:
    return dispfx.api.learn_plan(model, RATIO, out=out, data=random_tokens(), **options_of(SETTINGS))


def applied(model: nn.Module, out: Path) -> Any:
    plan = Plan.random(dispfx.capture(build_decoder()), 0.3, 0)
    return dispfx.api.apply(model, plan, out=out)


RUNS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "compile": compiled,
    "learn": learned,
    "apply": applied,
    "preview": lambda model, out: dispfx.api.preview(
        dispfx.api.RunSettings.of(
            model=model, ratio=RATIO, out=out, data=random_tokens(), **options_of(SETTINGS)
        )
    ),
    "inspect": lambda model, out: dispfx.api.inspect(model),
    "capture": lambda model, out: dispfx.capture(model),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(("value", "told"), [(math.nan, "1 times NaN"), (math.inf, "1 times infinity")])
def test_a_weight_that_is_not_finite_is_named_before_anything_is_done(
    tmp_path: Path, name: str, value: float, told: str
):
    with pytest.raises(SourceError, match=f"weights must be finite: {told} in {NAME}") as error:
        RUNS[name](decoder_with(value), tmp_path / "out")
    assert error.value.where == NAME and error.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_several_weights_are_named_and_the_others_counted():
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(6)))
    with torch.no_grad():
        for weight in list(model.parameters())[1:]:
            weight[0, 0], weight[1, 1] = math.nan, -math.inf
    with pytest.raises(SourceError) as error:
        require_finite_weights(model)
    assert error.value.problem == (
        "weights must be finite: 1 times NaN and 1 times infinity in 1.weight; also in 2.weight, 3.weight, "
        "4.weight, …"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_of_every_type_are_looked_at(dtype: torch.dtype):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3, 3).to(dtype), requires_grad=False)
    require_finite_weights(model)
    model.weight.data[1, 1] = math.nan
    with pytest.raises(SourceError, match="1 times NaN in weight"):
        require_finite_weights(model)


def test_a_mask_of_minus_infinity_and_parameters_without_values_are_let_pass():
    model = nn.Module()
    model.mask = nn.Parameter(torch.full((3, 3), -math.inf).triu(1), requires_grad=False)
    model.empty = nn.Parameter(torch.empty(0))
    model.count = nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
    model.nowhere = nn.Parameter(torch.empty(3, device="meta"))
    require_finite_weights(model)


def test_a_branch_of_zeros_is_the_inputs_fault(tmp_path: Path):
    model = build_decoder()
    nn.init.zeros_(model.get_parameter("layers.0.mlp.down.weight"))
    with pytest.raises(UnsupportedGraphError, match="zero throughout") as caught:
        compiled(model, tmp_path / "out")
    assert (caught.value.where, caught.value.exit_code) == ("layers.0.mlp.down.weight", 2)
    assert caught.value.hint is not None and "skip='layers.0.mlp'" in caught.value.hint


@pytest.mark.parametrize("name", ["compile", "learn", "apply", "preview"])
def test_a_decoder_without_values_can_only_be_inspected(name: str, tmp_path: Path):
    with pytest.raises(SourceError, match="are on the meta device") as caught:
        RUNS[name](build_decoder().to("meta"), tmp_path / "out")
    assert caught.value.where in ("embedding.weight", "positions")
    assert RUNS["inspect"](build_decoder().to("meta"), tmp_path).sites


@pytest.mark.parametrize("name", RUNS)
def test_a_sparse_weight_is_named(name: str, tmp_path: Path):
    model = build_decoder()
    layer: Any = model.get_submodule("layers.0.mlp")
    layer.up.weight = nn.Parameter(layer.up.weight.detach().to_sparse())
    with pytest.raises(CaptureError, match=r"layout torch\.sparse_coo") as caught:
        RUNS[name](model, tmp_path / "out")
    assert caught.value.where == NAME
