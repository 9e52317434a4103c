"""An output folder, opened: its pruned decoder and what lies beside it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dispfx.api.programs import analyse, lower_program, only_planned
from dispfx.deploy import reload
from dispfx.deploy.checkpoint import own_config, skeleton
from dispfx.deploy.exported import PROGRAM_FILE, load_program
from dispfx.deploy.section import CONFIG_FILE
from dispfx.errors import OutputError
from dispfx.ir.program import Program
from dispfx.passes.gather_add import GatherAdd
from dispfx.pipeline import Pipeline
from dispfx.source import load_folder_tokenizer


@dataclass(frozen=True, eq=False)
class Opened:
    """The decoder of an output folder.

    Args:
        path: the folder.
        decoder: token ids (B, T) to logits (B, T, V).
        program: the lowered program, or None where the folder holds a graph alone.
    """

    path: Path
    decoder: nn.Module
    program: Program | None

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The decoder as a graph.

        Raises:
            OutputError: if the folder holds a graph alone, which is in its final form.
        """
        if self.program is None:
            raise OutputError(
                "this needs a checkpoint, and the folder holds program.pt2 alone", where=str(self.path)
            )
        return self.program.graph_module

    @property
    def vocabulary_size(self) -> int:
        """Width of the logits."""
        if self.program is not None:
            return self.program.vocabulary_size
        with torch.no_grad():
            return self.decoder(torch.zeros((2, 2), dtype=torch.int64)).shape[-1]

    @property
    def config(self) -> Any | None:
        """The decoder's own transformers config, or None."""
        return own_config(self.path) if self.program is not None else None

    @property
    def tokenizer(self) -> Any | None:
        """The folder's tokenizer, or None."""
        return load_folder_tokenizer(self.path)

    def fast(self) -> torch.fx.GraphModule:
        """Return the decoder with gather-add writes.

        Raises:
            OutputError: if the folder holds a graph alone.
        """
        assert self.graph_module is not None and self.program is not None
        return Pipeline([GatherAdd()]).run(self.program.clone()).graph_module


def is_output(path: str | Path) -> bool:
    """Whether a folder was written by dispfx."""
    folder = Path(path).expanduser()
    return (folder / "plan.safetensors").is_file() and (folder / "report.json").is_file()


def open_folder(
    folder: str | Path, *, device: str | torch.device = "cpu", trust_remote_code: bool = False
) -> Opened:
    """Open an output folder; dense weights are never read or held.

    Raises:
        OutputError: if the folder is not one of ours.
        DataError: if a file is missing or damaged.
        PlanMismatchError: if the folder's files do not belong together.
    """
    path = Path(folder).expanduser()
    if (path / PROGRAM_FILE).is_file() and not (path / CONFIG_FILE).is_file():
        return Opened(path, load_program(path).to(device), None)
    plan = reload.read_plan(path)
    model = skeleton(path, device=device, trust_remote_code=trust_remote_code)
    program = lower_program(only_planned(analyse(model), plan), plan)
    reload.fill(program.graph_module, path)
    program.graph_module.requires_grad_(False)
    return Opened(path, program.graph_module, program)


def load(
    folder: str | Path, *, device: str | torch.device = "cpu", trust_remote_code: bool = False
) -> nn.Module:
    """Return the pruned decoder of an output folder: token ids (B, T) to logits (B, T, V).

    Raises:
        As `open_folder`.
    """
    return open_folder(folder, device=device, trust_remote_code=trust_remote_code).decoder
