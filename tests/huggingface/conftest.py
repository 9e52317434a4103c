"""A pruned folder of a tiny decoder, made once for the tests of this folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispfx.api import capture, export
from dispfx.api.compilation import apply
from dispfx.compiler.programs import lower_program
from dispfx.deploy.checkpoint import StoredDecoder, underived_buffers, write_checkpoint
from dispfx.deploy.section import ModelFiles
from dispfx.huggingface.saving import PrunedModel, build_pruned
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from tests.captures import plain
from tests.programs import token_ids
from tests.tiny_transformers import VOCABULARY, tiny_transformer


@dataclass(frozen=True, eq=False)
class Folder:
    """A folder, and what it was made from."""

    path: Path
    dense: nn.Module
    program: Program
    plan: Plan


WITHOUT_DISPFX = """
import sys, torch
from transformers import AutoModelForCausalLM
ids = torch.load(sys.argv[1], weights_only=True)
for folder in sys.argv[2:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and "dispfx" not in sys.modules
    torch.save(model(ids).logits, folder + ".logits")
"""


def logits_without_dispfx(ids: Tensor, *folders: Path) -> list[Tensor]:
    """Return what a process that never imports dispfx computes for token ids with each checkpoint."""
    first = folders[0].parent
    torch.save(ids, first / "ids")
    paths = [str(path) for path in (first / "ids", *folders)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", WITHOUT_DISPFX, *paths], env=environment, cwd=first, check=True)
    return [torch.load(f"{folder}.logits", weights_only=True) for folder in folders]


def write_folder(path: Path, dense: nn.Module, *, ratio: float = 0.4, seed: int = 3) -> Folder:
    """Prune a decoder by a random plan and write its folder, verified."""
    program = capture(dense)
    plan = Plan.random(program, ratio, seed)
    apply(dense, plan, out=path, export="none")
    return Folder(path, dense, program, plan)


@pytest.fixture(scope="session")
def unverified(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny decoder by name, made once: a checkpoint and its plan, with no report."""
    return cache(lambda name: write_unverified(tmp_path_factory.mktemp(name) / "pruned", name))


def random_plan(program: Program) -> Plan:
    """Return a plan that narrows every site."""
    return Plan.random(program, 0.4, 3)


def write_unverified(path: Path, name: str, make_plan: Callable[[Program], Plan] = random_plan) -> Path:
    """Prune a tiny decoder by a plan and write its checkpoint alone, in a fifth of the time."""
    dense: Any = tiny_transformer(name)
    program = plain(name)
    plan = make_plan(program)
    pruned = build_pruned(
        program, plan.kept, dense, lower_program(program, plan).graph_module,
        underived=underived_buffers(dense, dense.config), agrees=lambda model: disagreement(model, dense),
    )  # fmt: skip
    assert isinstance(pruned, PrunedModel), pruned
    path.mkdir()
    write_checkpoint(
        path,
        ModelFiles(dense.config, type(dense).__name__, dense.generation_config),
        StoredDecoder(pruned.stored_parameters(), pruned.stored_buffers(), pruned.layout),
        plan,
        program.sites,
    )
    return path


def disagreement(model: nn.Module, dense: nn.Module) -> str | None:
    """Return what goes wrong when a pruned decoder is called, or None."""
    ids = token_ids(2, 5, vocabulary=VOCABULARY)
    try:
        with torch.no_grad():
            return None if model(ids).logits.shape == dense(ids).logits.shape else "other shapes"
    except RuntimeError as error:
        return str(error)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A pruned llama with grouped-query attention and random widths."""
    return write_folder(tmp_path_factory.mktemp("llama") / "pruned", tiny_transformer("llama"))


def write_narrower(name: str, path: Path, *, align: int = 8) -> Folder:
    """Write the folder of a tiny decoder, pruned at random by one selection, with its ordinary form."""
    dense = tiny_transformer(name)
    program = capture(dense, select="before-norm")
    plan = Plan.random(program, 0.4, 1, align=align)
    apply(dense, plan, out=path, export="dense")
    return Folder(path, dense, program, plan)


@pytest.fixture(scope="session")
def narrow_llama(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A pruned llama with one selection for the whole stream; not to be changed."""
    return write_narrower("llama", tmp_path_factory.mktemp("narrow") / "out")


def quantized_session(folder: Path, kind: Any) -> Any:
    """Write a folder's ONNX model again, with rounded weights, and open it with its cache."""
    from dispfx.deploy.onnx.session import CachedSession

    shutil.rmtree(folder / "onnx")
    export(folder, onnx=True, quantize=kind, data=torch.arange(VOCABULARY).repeat(4))
    return CachedSession(folder / f"onnx-{kind}" / "model.onnx")


def one_at_a_time(session: Any, ids_BT: Tensor) -> tuple[Any, Tensor]:
    """Return the decoder of a session, with an empty cache, and its logits for one token after the other."""
    decoder = session.decoder()
    decoder.reset()
    steps = torch.cat([decoder(ids_BT[:, t : t + 1]) for t in range(ids_BT.shape[1])], 1)
    decoder.reset()
    return decoder, steps
