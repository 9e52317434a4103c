"""Pruned folders to quantize, and texts of token ids."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import dispfx
from dispfx import api
from tests.tiny_transformers import VOCABULARY


def made(folder: Path, model: nn.Module, align: int = 1) -> Path:
    """Write a folder of a decoder that is pruned by 40%, without an ONNX model."""
    plan = dispfx.Plan.random(dispfx.capture(model), 0.4, seed=1, align=align)
    api.apply(model, plan, out=folder)
    return folder


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def tokens(path: Path, count: int = 80) -> Path:
    """Write a text of token ids."""
    ids = torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(3))
    save_file({"tokens": ids.to(torch.int32)}, path)
    return path
