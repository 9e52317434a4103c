"""An opened output folder: its pruned decoder, config and tokenizer."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.analysis.label_map import Mismatch
from dispfx.capturing.module_capture import VERIFIED_LENGTHS
from dispfx.compiler.cached_programs import capture_cached
from dispfx.compiler.pipelines import gathered
from dispfx.compiler.programs import analyse, lower_program, only_planned
from dispfx.deploy import reload
from dispfx.deploy.checkpoint import PLAN_FILE, implementations, own_config, skeleton
from dispfx.deploy.digests import changed
from dispfx.deploy.exported import PROGRAM_FILE, load_program
from dispfx.deploy.section import CONFIG_FILE, read_layout
from dispfx.deploy.weights import read_tensors
from dispfx.errors import OutputError, PlanMismatchError
from dispfx.huggingface.model_loading import load_model
from dispfx.huggingface.planning import plan_modules, site_cuts, ways
from dispfx.ir.lengths import Lengths, hold_to
from dispfx.ir.program import Program
from dispfx.ir.token_tables import tokens_read
from dispfx.plan.plan import Plan
from dispfx.report import load_report
from dispfx.source import load_folder_tokenizer
from dispfx.source.experts import Experts
from dispfx.source.loading import named_tokenizer
from dispfx.source.transformers_classes import require_head
from dispfx.verification.equivalence import Verification
from dispfx.words.chosen_device import chosen_device, require_default_device
from dispfx.words.given import path_given
from dispfx.words.preconditions import is_saved_again, refuse_adapter, refuse_rounded


@dataclass(frozen=True, eq=False)
class Opened:
    """The decoder of an output folder.

    Args:
        path: the folder.
        plan: what was pruned, or None if the folder holds only a graph.
        device: of the decoder.
        trust_remote_code: whether code that comes with the checkpoint may run.
        experts: how the program computes a mixture of experts, as in `dispfx.compiler.programs.capture`.
        named_tokenizer: folder or hub id of a tokenizer, in place of the folder's own.
    """

    path: Path
    plan: Plan | None
    device: str | torch.device = "cpu"
    trust_remote_code: bool = False
    experts: Experts = "grouped"
    named_tokenizer: str | None = None

    @cached_property
    def decoder(self) -> nn.Module:
        """The decoder: token ids (B, T) to logits (B, T, V), or to an output with `.logits`.

        It is a transformers model if the folder has a checkpoint, and a graph otherwise.
        """
        if self.plan is None:
            program = load_program(self.path).to(self.device)
            hold_to(program, self._lengths or Lengths())
            return program
        if read_layout(self.path) is None:
            return self.graph_module
        return load_model(
            self.path,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            **implementations(self.path),
        )

    @cached_property
    def program(self) -> Program | None:
        """The lowered program, captured again; None if the folder holds only a graph."""
        return None if self._captured is None else self._captured.program

    @cached_property
    def _captured(self) -> "_Captured | None":
        if self.plan is None:
            return None
        return self._lowered(self.plan, partial(analyse, experts=self.experts), self.device)

    def stored(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the weight files with other values for parameters of `program`.

        Args:
            values: by path, in the shapes that the lowered graph has.

        Raises:
            OutputError: if the folder holds a graph alone.
        """
        if self._captured is None:
            raise OutputError("a graph alone has no weight files", where=str(self.path))
        found = read_tensors(self.path)
        for path, value in values.items():
            found[path] = self._captured.raised(path, found[path], value.detach().cpu())
        return found

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The decoder as a graph.

        Raises:
            OutputError: if the folder holds only a graph, which is in its final form.
        """
        if self.program is None:
            raise OutputError(
                "this needs a checkpoint, but the folder holds only program.pt2",
                where=str(self.path),
                hint="choose other forms when the folder is written, "
                "as in `dispfx apply MODEL PLAN --export onnx`",
            )
        return self.program.graph_module

    @cached_property
    def vocabulary_size(self) -> int:
        """Width of the logits."""
        with torch.no_grad():
            # At a length that every form is verified at: torch may have traced it for no shorter one.
            shape = (2, min(VERIFIED_LENGTHS))
            output = self.decoder(torch.zeros(shape, dtype=torch.int64, device=self.device))
        return getattr(output, "logits", output).shape[-1]

    @cached_property
    def known_tokens(self) -> int:
        """Number of token ids that the decoder reads."""
        if isinstance(self.decoder, torch.fx.GraphModule):
            return tokens_read(self.decoder.graph) or self.vocabulary_size
        embedding: Any = self.decoder.get_input_embeddings()  # type: ignore[operator]
        return getattr(embedding, "num_embeddings", self.vocabulary_size)

    @property
    def text_tokens(self) -> int:
        """Number of token ids that a text may hold."""
        return min(self.known_tokens, self.vocabulary_size)

    @property
    def _lengths(self) -> Lengths | None:
        """The lengths for which the dense decoder's graph holds, found with its weights; None if unknown."""
        path = self.path / PLAN_FILE
        plan = self.plan or (Plan.load(path) if path.is_file() else None)
        return None if plan is None else plan.lengths

    @property
    def config(self) -> Any | None:
        """The decoder's own transformers config, or None."""
        return own_config(self.path, self.trust_remote_code) if self.plan is not None else None

    @property
    def tokenizer(self) -> Any | None:
        """The tokenizer that was named, or the folder's own; None without either."""
        if self.named_tokenizer is not None:
            return named_tokenizer(self.named_tokenizer, self.trust_remote_code)
        return load_folder_tokenizer(self.path, self.trust_remote_code)

    def release(self) -> None:
        """Free the decoder; it is read again on the next access."""
        self.__dict__.pop("decoder", None)

    def fast(self) -> torch.fx.GraphModule:
        """Return the decoder with gather-add writes.

        Raises:
            OutputError: if the folder holds a graph alone.
        """
        assert self.graph_module is not None and self.program is not None
        return gathered(self.program).graph_module

    def cached(self) -> Program:
        """Return the lowered program of the decoder with its cache, on the CPU.

        Raises:
            CaptureError, UnsupportedGraphError: if the decoder takes no cache of keys and values.
            OutputError: if the folder holds a graph alone.
        """
        if self.plan is None:
            raise OutputError("the folder holds only a graph, which has no cache", where=str(self.path))
        return self._lowered(self.plan, capture_cached, "cpu").program

    def _lowered(
        self, plan: Plan, capture: Callable[..., Program], device: str | torch.device
    ) -> "_Captured":
        """Capture the decoder without its weights, lower it, and insert the stored weights."""
        refuse_rounded(self.path)
        model = skeleton(self.path, device=device, trust_remote_code=self.trust_remote_code)
        program = only_planned(capture(model, select=plan.select, sites=plan.sites), plan)
        lowered = lower_program(program, plan)
        layout = read_layout(self.path)
        captured = _Captured(lowered)
        if layout is None:
            reload.fill(lowered.graph_module, self.path)
        else:
            kept = plan.by_site(program.sites)
            planned = _planned_again(program, kept, model, layout.indices, self.path)
            stays = site_cuts(program.sites, kept)
            captured = _Captured(lowered, partial(planned.raised, stays=stays))
            convert = partial(planned.lowered, stays=stays)
            reload.fill(lowered.graph_module, self.path, convert, buffers=dict(model.named_buffers()))
        # The lengths for which the graph holds cannot be checked with zero weights.
        lowered.hold_to(self._lengths or lowered.lengths)
        lowered.graph_module.requires_grad_(False)
        # Graphs are reference cycles: without this the skeleton's zero weights would stay in memory.
        gc.collect()
        return captured


@dataclass(frozen=True, eq=False)
class _Captured:
    """A folder's decoder as a graph.

    Args:
        program: lowered, with the stored weights.
        raised: (path, stored tensor, tensor of the graph) → the stored tensor with the graph's values.
    """

    program: Program
    raised: Callable[[str, Tensor, Tensor], Tensor] = lambda path, stored, value: value


@dataclass(frozen=True)
class Written:
    """Another form of a folder's decoder.

    Args:
        lines: its comparisons.
        no_cache: why an ONNX model has no KV cache.
        cache_bytes: of an ONNX model's KV cache for each token.
    """

    lines: list[Verification]
    no_cache: str | None = None
    cache_bytes: int | None = None

    @property
    def notes(self) -> list[str]:
        """What to tell the user."""
        return [] if self.no_cache is None else [f"the ONNX model has no KV cache: {self.no_cache}"]


def is_output(path: str | Path) -> bool:
    """Whether dispfx wrote a folder, or transformers saved a pruned decoder into it."""
    folder = path_given(path, "a folder")
    return ((folder / PLAN_FILE).is_file() and (folder / "report.json").is_file()) or is_saved_again(folder)


def open_folder(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    experts: Experts = "grouped",
    tokenizer: str | None = None,
) -> Opened:
    """Open an output folder; dense weights are never read or held.

    Args:
        experts: as in `dispfx.compiler.programs.capture`; `batched` to export what is opened.
        tokenizer: folder or hub id of a tokenizer, in place of the folder's own.

    Raises:
        DispfxError: if the device is not available, or the default device of torch is not the CPU.
        OutputError: if dispfx did not write the folder, or transformers saved no decoder into it.
        DataError: if a file is missing or damaged.
        PlanMismatchError: if the folder's files do not belong together.
    """
    require_default_device()
    device = chosen_device(device)
    path = path_given(folder, "a folder that `dispfx compile` wrote")
    refuse_adapter(path)
    if is_saved_again(path):
        require_head(path)
    if (path / PROGRAM_FILE).is_file() and not (path / CONFIG_FILE).is_file():
        return Opened(path, None, device, trust_remote_code, experts, tokenizer)
    return Opened(path, reload.read_plan(path), device, trust_remote_code, experts, tokenizer)


def require_record(folder: Path) -> None:
    """Require that a folder's plan and report can be read and agree.

    Raises:
        DataError: if one is missing or damaged.
        PlanMismatchError: if the widths in the report differ from those of the plan.
    """
    plan = Plan.load(folder / PLAN_FILE)
    reported = {site.name: site.kept for site in load_report(folder / "report.json").sites}
    planned = {name: len(kept) for name, kept in plan.kept.items()}
    if reported != planned:
        other = sorted(name for name, _ in reported.items() ^ planned.items())
        raise PlanMismatchError(
            f"report and plan have different widths for {len(set(other))} sites, such as {other[0]}",
            where=str(folder),
            hint="the folder's files are from different runs; write it again",
        )


def require_unchanged(folder: Path) -> None:
    """Require that what a folder's report was written of is what the folder holds.

    Forms that can be made again are not looked at, and a folder that transformers saved has no report.

    Raises:
        OutputError: if a file of the decoder is missing, or has changed.
    """
    if not (folder / "report.json").is_file():
        return
    whole = (folder / CONFIG_FILE).is_file()
    recorded = load_report(folder / "report.json").files
    other = changed(
        folder,
        {
            name: digest
            for name, digest in recorded.items()
            if "/" not in name and not (whole and name == PROGRAM_FILE)
        },
    )
    if other:
        raise OutputError(
            f"{', '.join(other)}: missing, or changed since dispfx wrote the folder",
            where=str(folder),
            hint="copy the folder again, or write it again: its report was made of other files",
        )


def load(
    folder: str | Path, *, device: str | torch.device = "cpu", trust_remote_code: bool = False
) -> nn.Module:
    """Return the pruned decoder of an output folder: token ids (B, T) to logits (B, T, V).

    If the folder holds a checkpoint, it is the transformers model of `AutoModelForCausalLM.from_pretrained`,
    checked against the plan, whose output has `.logits`.  Otherwise it is a graph that returns the logits.

    Raises:
        As `open_folder`.
    """
    return open_folder(folder, device=device, trust_remote_code=trust_remote_code).decoder


def _planned_again(
    program: Program, kept: dict[str, torch.Tensor], model: nn.Module, indices: str, path: Path
):
    """Return how the modules in the folder were pruned, by trying every way."""
    for unseen in ways(program.sites):
        planned = plan_modules(program, kept, model, unseen=unseen)
        if not isinstance(planned, Mismatch) and planned.layout.indices == indices:
            return planned
    raise PlanMismatchError(
        "the stored indices do not follow from the plan",
        where=str(path),
        hint="config.json, plan.safetensors and the weights must come from one compilation",
    )
