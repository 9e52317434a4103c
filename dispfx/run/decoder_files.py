"""The decoder of an output folder: whether it can be written, its modules, and its files."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dispfx.analysis.label_map import Mismatch
from dispfx.deploy.checkpoint import (
    StoredDecoder,
    own_config,
    require_rebuilt,
    site_indices,
    underived_buffers,
    write_checkpoint,
)
from dispfx.deploy.section import ModelFiles
from dispfx.errors import SourceError, first_line, memory_shortage
from dispfx.huggingface.layout import MARK
from dispfx.huggingface.saving import PrunedModel, build_pruned
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from dispfx.run.run_text import Text
from dispfx.run.targets import export_of, require_target, save_graph
from dispfx.settings import RunSettings
from dispfx.settings.trees import ApplySettings
from dispfx.source import Source
from dispfx.source.own_code import carry_code, is_own_code, private_code
from dispfx.verification.graphs import module_lines, outside_lines, short_shapes


@dataclass(frozen=True, eq=False)
class Task:
    """One folder to write.

    Args:
        path: DIR.
        state: DIR.state, or None if nothing was learned.
        settings: of the run.
        command: that reproduces this result.
        is_draft: whether another folder is made from this one, which has the other forms then.
    """

    path: Path
    state: Path | None
    source: Source
    program: Program
    plan: Plan
    text: Text
    settings: RunSettings | ApplySettings
    command: str | None = None
    is_draft: bool = False

    @property
    def exports(self) -> str:
        """The requested export, or the default; none for a draft."""
        return "none" if self.is_draft else self.asked_export

    @property
    def asked_export(self) -> str:
        """The requested export, or the default."""
        return export_of(self.settings.output.export, self.source)

    @property
    def runs_own_code(self) -> bool:
        """Whether code that came with the checkpoint is running, and is copied into the folder."""
        return is_own_code(self.source.model, self.source.config, self.source.tokenizer)


def require_writable(export: Any, source: Source) -> None:
    """Raise if the decoder cannot be written in the requested form, by writing all but its weights once.

    Raises:
        DispfxError: if a dense checkpoint was asked of a module that transformers does not know, or config,
            tokenizer or code cannot be written and read back.
    """
    require_target(export, source)
    if source.config is None:
        return
    with tempfile.TemporaryDirectory(prefix="dispfx-") as name, private_code(Path(name)):
        folder = Path(name)
        try:
            write_files(source, folder)
        except Exception as error:
            # Configs and tokenizers are foreign code that may raise anything.
            raise SourceError(
                f"the decoder's config, tokenizer or code cannot be written: {first_line(error)}",
                where=source.name,
            ) from error
        config = own_config(folder, is_own_code(source.model, source.config))
        require_rebuilt(source.model, config)


def write_files(source: Source, folder: Path) -> None:
    """Write the decoder's config, tokenizer and code, as far as it has them."""
    if source.config is None:
        if source.tokenizer is not None:
            source.tokenizer.save_pretrained(folder)
        return
    _model_files(source).write(folder)
    carry_code(folder, {"AutoConfig": source.config, "AutoModelForCausalLM": source.model})


def _model_files(source: Source) -> ModelFiles:
    return ModelFiles(source.config, type(source.model).__name__, source.generation_config, source.tokenizer)


def pruned_modules(task: Task, lowered: nn.Module) -> PrunedModel | Mismatch | None:
    """Return what `modules_of` does; None for a module that transformers does not know."""
    config = task.source.config
    return None if config is None else modules_of(task.program, task.plan, task.source.model, lowered, config)


def modules_of(
    program: Program, plan: Plan, model: nn.Module, lowered: nn.Module, config: Any
) -> PrunedModel | Mismatch:
    """Return a transformers decoder built from smaller modules, or the reason why that is not possible.

    Args:
        program: of the decoder `model`, which is not changed.
        lowered: the lowered graph, which the result is compared with.
        config: the decoder's.
    """

    def agrees(candidate: nn.Module) -> str | None:
        try:
            lines = module_lines(program, lowered, candidate, shapes=short_shapes(program))
            lines += outside_lines(program, plan, model, candidate)
        except Exception as error:
            if memory_shortage(error) is not None:
                raise
            # The code between the modules belongs to the decoder and may raise anything.
            return f"it raised {first_line(error)}"
        worst = max(line.max_rel_error for line in lines)
        return None if all(line.holds for line in lines) else f"its logits differ by {worst:.1e}"

    return build_pruned(
        program,
        plan.by_site(program.sites),
        model,
        lowered,
        underived=underived_buffers(model, config),
        agrees=agrees,
    )


def write_decoder(
    task: Task, folder: Path, lowered: torch.fx.GraphModule, pruned: PrunedModel | Mismatch | None
) -> None:
    """Write a transformers checkpoint, or a graph for a module that transformers does not know."""
    config = task.source.config
    if pruned is not None:
        stored = _stored(task, lowered, pruned)
        write_checkpoint(folder, _model_files(task.source), stored, task.plan, task.program.sites)
        carry_code(folder, {"AutoConfig": config, "AutoModelForCausalLM": task.source.model})
    if config is None:
        save_graph(task.source, task.program, task.plan, lowered, folder)
        task.plan.save(folder / "plan.safetensors")


def _stored(task: Task, lowered: nn.Module, pruned: PrunedModel | Mismatch) -> StoredDecoder:
    """Return the tensors of a checkpoint by their names on disk."""
    if isinstance(pruned, PrunedModel):
        return StoredDecoder(pruned.stored_parameters(), pruned.stored_buffers(), pruned.layout)
    underived = underived_buffers(task.source.model, task.source.config)
    # A model built from the config lacks the statistics of the dense weights.
    buffers = {
        name: tensor
        for name, tensor in lowered.named_buffers()
        if name in underived or name in task.program.dense_statistics
    }
    indices = site_indices(task.plan, task.program.sites) or {MARK: torch.zeros(1, dtype=torch.int32)}
    return StoredDecoder(dict(lowered.named_parameters()), {**buffers, **indices}, pruned.reason)
