"""A loaded pruned model can be copied, saved whole, and sent to another process."""

import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.programs import token_ids
from tests.tiny_transformers import VOCABULARY

IDS = token_ids(2, 9, vocabulary=VOCABULARY)
Folders = Callable[[str], Path]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", ("llama", "gpt2", "neox", "gemma3", "phi", "mixtral"))
def test_a_copy_and_one_saved_whole_compute_the_same_and_share_nothing(
    unverified: Callable[[str], Path], name: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(unverified(name))
    expected = logits(model)

    copies = [copy.deepcopy(model), saved_and_loaded(model)]
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()

    for other in copies:
        assert type(other) is type(model)
        assert torch.equal(logits(other), expected)


FRESH = """
import sys, torch
model, ids = torch.load(sys.argv[1], weights_only=False)
norm = model.model.layers[0].input_layernorm
model.model.layers[0].input_layernorm = torch.nn.Sequential(norm)
torch.save(model(ids).logits, sys.argv[2])
"""


def test_another_process_reads_a_model_and_may_change_it(unverified: Folders, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(unverified("llama"))
    torch.save((model, IDS), tmp_path / "model")

    subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path / "model"), str(tmp_path / "logits")],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )

    assert torch.equal(torch.load(tmp_path / "logits", weights_only=True), logits(model))
