import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dispfx.api import capture
from dispfx.api.compilation import apply
from dispfx.errors import DispfxError
from dispfx.ir.plan import Plan
from tests.huggingface.conftest import Folder
from tests.plain_decoders import FORMS, build
from tests.programs import relative_error, token_ids
from tests.tiny_transformers import VOCABULARY

IDS = token_ids(2, 9, vocabulary=VOCABULARY)
WITHOUT_DISPFX = """
import sys, torch
from transformers import AutoModelForCausalLM
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"] and "dispfx" not in sys.modules
torch.save(model(torch.load(sys.argv[2], weights_only=True)).logits, sys.argv[3])
"""


def test_the_full_size_checkpoint_needs_no_dispfx_and_gives_the_pruned_logits(
    llama: Folder, tmp_path: Path
) -> None:
    report = apply(llama.dense, llama.plan, out=tmp_path / "out", export="dense")
    torch.save(IDS, tmp_path / "ids")

    paths = [str(path) for path in (tmp_path / "out" / "dense", tmp_path / "ids", tmp_path / "logits")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", WITHOUT_DISPFX, *paths], env=environment, cwd=tmp_path, check=True)

    pruned: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    dense: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "dense")
    found = torch.load(tmp_path / "logits", weights_only=True)
    with torch.no_grad():
        assert relative_error(found, pruned(IDS).logits) < 1e-5
    assert [line.name for line in report.verify].count("dense = lowered") == 2
    assert dense.num_parameters() == llama.dense.num_parameters()  # type: ignore[operator]
    kept = llama.plan.kept["model.layers.0.mlp.write"].long()
    rows = dense.model.layers[0].mlp.down_proj.weight.abs().sum(dim=1)
    assert sorted(rows.nonzero().flatten().tolist()) == kept.tolist()


def test_a_module_that_transformers_does_not_know_has_no_dense_checkpoint(tmp_path: Path) -> None:
    model = build(FORMS["pre-norm"])
    plan = Plan.random(capture(model), 0.3, 0)

    with pytest.raises(DispfxError, match="--export dense writes a checkpoint of transformers"):
        apply(model, plan, out=tmp_path / "out", export="dense")

    assert not (tmp_path / "out").exists()
