"""The decoders of known shapes: each is built, captured and cut, here with narrow layers."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from dispfx.compiler.programs import lower_program

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
shapes = importlib.import_module("decoder_shapes")
sys.path.pop(0)
NARROW = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("llama-2-13b", "batched"),
        ("mixtral-8x7b", "batched"),
        ("mixtral-8x7b", "grouped"),
        ("phi-2", "batched"),
        ("qwen3-8b", "batched"),
    ],
)
def test_every_shape_is_captured_and_cut_with_widths_that_repeat(name: str, experts: str, monkeypatch):
    kind, sizes = shapes.SHAPES[name]
    fewer = {"num_key_value_heads": 2} if "num_key_value_heads" in sizes else {}
    monkeypatch.setitem(shapes.SHAPES, name, (kind, sizes | NARROW | fewer))
    program = shapes.captured(shapes.config_of(name, 2, 32), torch.device("cpu"), torch.float32, experts)
    plan = shapes.periodic_plan(program, 0.5, period=1, align=8)
    assert plan.achieved == pytest.approx(0.5, abs=0.06)
    first, second = shapes.widths_of(plan).reshape(2, -1)
    assert torch.equal(first, second)
    lower_program(program, plan)
