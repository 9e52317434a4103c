import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dispfx.deploy import reload, weights
from dispfx.errors import PlanMismatchError
from tests.deploy.conftest import Written, inner_plan, mlp_sites, plan_of, slice_in_place, tiny_llama, write

INDEX = "dispfx_index.layer0.mlp.read"


@pytest.fixture
def cut(tmp_path: Path) -> Written:
    """Write a folder with one read index."""
    kept = [torch.tensor([0, 3, 4]), torch.arange(20), torch.arange(16), torch.arange(24)]
    return write(tmp_path / "cut", tiny_llama(), plan_of(mlp_sites(), kept))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in weights.read_tensors(folder).items()}
    change(tensors)
    weights.write_tensors(folder, tensors, {})


def test_the_plan_of_an_untouched_folder_is_read(cut: Written) -> None:
    assert reload.read_plan(cut.folder) == cut.plan


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop(INDEX),
        lambda tensors: tensors.update({INDEX: torch.tensor([0, 3, 5], dtype=torch.int32)}),
        lambda tensors: tensors.update({INDEX: torch.tensor([0, 3], dtype=torch.int32)}),
        lambda tensors: tensors.update({INDEX: torch.tensor([0, 3, 4])}),
        lambda tensors: tensors.update({"dispfx_index.other": torch.tensor([0], dtype=torch.int32)}),
    ],
    ids=["missing", "changed", "shorter", "int64", "extra"],
)
def test_indices_that_are_not_the_plans_are_refused(cut: Written, change: Callable[..., Any]) -> None:
    rewrite(cut.folder, change)

    with pytest.raises(PlanMismatchError, match="ind"):
        reload.read_plan(cut.folder)


def test_the_plan_of_another_compilation_is_refused(cut: Written, written: Written) -> None:
    (cut.folder / "plan.safetensors").write_bytes((written.folder / "plan.safetensors").read_bytes())

    with pytest.raises(PlanMismatchError, match="sites"):
        reload.read_plan(cut.folder)


@pytest.mark.parametrize(
    ("entry", "value"),
    [("fingerprint", "beef"), ("sites", None), ("sites", [1]), ("sites", [{"name": []}]), ("sites", [])],
)
def test_a_section_that_is_not_the_plans_is_refused(cut: Written, entry: str, value: object) -> None:
    path = cut.folder / "config.json"
    entries = json.loads(path.read_text())
    entries["quantization_config"][entry] = value
    path.write_text(json.dumps(entries))

    with pytest.raises(PlanMismatchError):
        reload.read_plan(cut.folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is not stored"),
        (lambda tensors: tensors.update({"model.extra": torch.ones(2)}), "model.extra is stored"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(15)}),
            r"model.norm.weight: \(16,\) torch.float32 follows from the plan, \(15,\)",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(16, dtype=torch.float64)}),
            "torch.float64 is stored",
        ),
    ],
    ids=["missing", "extra", "shape", "dtype"],
)
def test_weights_that_do_not_fit_the_lowered_decoder_are_refused(
    written: Written, change: Callable[..., Any], named: str
) -> None:
    rewrite(written.folder, change)
    lowered = slice_in_place(tiny_llama(), inner_plan())
    before = {name: parameter.clone() for name, parameter in lowered.named_parameters()}

    with pytest.raises(PlanMismatchError, match=named):
        reload.fill(lowered, written.folder)

    assert all(torch.equal(before[name], parameter) for name, parameter in lowered.named_parameters())


def test_a_meta_decoder_is_filled_and_a_tied_parameter_stays_one(written: Written) -> None:
    lowered: Any = slice_in_place(tiny_llama(), inner_plan()).to("meta")
    lowered.tie_weights()
    lowered.model.rotary_emb = tiny_llama().model.rotary_emb

    reload.fill(lowered, written.folder)

    ids_BT = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(lowered(ids_BT).logits, written.lowered(ids_BT).logits)
    assert lowered.lm_head.weight is lowered.model.embed_tokens.weight
