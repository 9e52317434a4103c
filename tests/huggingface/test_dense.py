from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dispfx.api import capture
from dispfx.api.compilation import apply
from dispfx.errors import DispfxError
from dispfx.plan.plan import Plan
from tests.huggingface.conftest import Folder, logits_without_dispfx
from tests.plain_decoders import FORMS, build
from tests.programs import relative_error, token_ids
from tests.tiny_transformers import VOCABULARY

IDS = token_ids(2, 9, vocabulary=VOCABULARY)


def test_the_full_size_checkpoint_needs_no_dispfx_and_gives_the_pruned_logits(
    llama: Folder, tmp_path: Path
) -> None:
    report = apply(llama.dense, llama.plan, out=tmp_path / "out", export="dense")
    (found,) = logits_without_dispfx(IDS, tmp_path / "out" / "dense")

    pruned: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    dense: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "dense")
    with torch.no_grad():
        assert relative_error(found, pruned(IDS).logits) < 1e-5
    assert [line.name for line in report.verify].count("dense = lowered") == 3
    assert dense.num_parameters() == llama.dense.num_parameters()  # type: ignore[operator]
    kept = llama.plan.kept["model.layers.0.mlp.write"].long()
    rows = dense.model.layers[0].mlp.down_proj.weight.abs().sum(dim=1)
    assert sorted(rows.nonzero().flatten().tolist()) == kept.tolist()


def test_a_module_that_transformers_does_not_know_has_no_dense_checkpoint(tmp_path: Path) -> None:
    model = build(FORMS["pre-norm"])
    plan = Plan.random(capture(model), 0.3, 0)

    with pytest.raises(DispfxError, match="`export='dense'` writes a transformers checkpoint"):
        apply(model, plan, out=tmp_path / "out", export="dense")

    assert not (tmp_path / "out").exists()
