"""Write an output folder: lower, verify, write, read back, measure."""

import platform
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dispfx
from dispfx.analysis.coverage import coverage
from dispfx.analysis.label_map import Mismatch
from dispfx.compiler.programs import lower
from dispfx.demo.probe import skill_probe
from dispfx.deploy.checkpoint import (
    own_config,
    require_rebuilt,
    site_indices,
    underived_buffers,
    write_checkpoint,
)
from dispfx.deploy.digests import digests
from dispfx.deploy.folder import new_folder
from dispfx.deploy.section import write_model_files
from dispfx.deploy.size import stored_size
from dispfx.errors import SourceError, first_line, memory_shortage
from dispfx.huggingface.layout import MARK
from dispfx.huggingface.saving import PrunedModel, build_pruned
from dispfx.ir.program import Program
from dispfx.ir.sites import Site
from dispfx.plan.parameter_count import ParameterCount
from dispfx.plan.plan import Plan
from dispfx.quality.measuring import measure
from dispfx.report import (
    Bytes,
    Parameters,
    PerplexityChange,
    Protocol,
    Ratio,
    Refused,
    Report,
    SiteWidth,
    SkillChange,
    UngatedWeights,
    model_card,
    save_report,
)
from dispfx.report.page import write_page
from dispfx.run.folders import open_folder
from dispfx.run.length_checks import window_of
from dispfx.run.run_text import Text
from dispfx.run.targets import Form, Target, Written, require_target, save_graph, target_named
from dispfx.run.timed_stages import Stages
from dispfx.settings import RunSettings
from dispfx.settings.trees import ApplySettings
from dispfx.source import Source
from dispfx.source.own_code import carry_code, is_own_code, private_code
from dispfx.source.transformers_classes import code_of_class
from dispfx.verification.equivalence import Verification, require
from dispfx.verification.graphs import (
    beyond_lines,
    captured_lines,
    identity_lines,
    lowered_lines,
    module_lines,
    reloaded_lines,
    short_shapes,
)

_PROBE_SEED, _PROBE_SAMPLES = 7, 100
_NAMED_VERSIONS = ("torch", "transformers", "safetensors", "onnx", "onnxruntime-gpu", "onnxruntime")


@dataclass(frozen=True, eq=False)
class Task:
    """One folder to write.

    Args:
        path: DIR.
        state: DIR.state, or None if nothing was learned.
        settings: of the run.
        command: that reproduces this result.
    """

    path: Path
    state: Path | None
    source: Source
    program: Program
    plan: Plan
    text: Text
    settings: RunSettings | ApplySettings
    command: str | None = None

    @property
    def exports(self) -> str:
        """The requested export, or the default."""
        return self.settings.output.export or ("onnx" if self.source.origin == "demo" else "none")

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
            _write_files(source, folder)
        except Exception as error:
            # Configs and tokenizers are foreign code that may raise anything.
            raise SourceError(
                f"the decoder's config, tokenizer or code cannot be written: {first_line(error)}",
                where=source.name,
            ) from error
        config = own_config(folder, is_own_code(source.model, source.config))
        require_rebuilt(source.model, config)


def _write_files(source: Source, folder: Path) -> None:
    write_model_files(
        folder,
        config=source.config,
        architecture=type(source.model).__name__,
        generation_config=source.generation_config,
        tokenizer=source.tokenizer,
    )
    carry_code(folder, {"AutoConfig": source.config, "AutoModelForCausalLM": source.model})


def write_output(task: Task, stages: Stages) -> Report:
    """Write DIR, verify it, read it back, and return its report.

    Raises:
        VerificationError: if two forms disagree; DIR does not exist then.
    """
    with stages("lower"):
        lowered = lower(task.program, task.plan)
        pruned = _modules(task, lowered)
    if isinstance(pruned, Mismatch):
        stages.observer.note(
            f"transformers cannot hold this decoder as modules ({pruned.reason}); dispfx.load opens it"
        )
    lines: list[Verification] = []
    with stages("verify"):
        lines += captured_lines(task.program)
        _add(lines, identity_lines(task.program), stages)
        _add(lines, lowered_lines(task.program, task.plan, lowered, task.source.model), stages)
        if isinstance(pruned, PrunedModel):
            _add(lines, module_lines(task.program, lowered, pruned.model), stages)
            _add(lines, beyond_lines(task.program, task.plan, task.source.model, pruned.model), stages)
    with new_folder(task.path) as folder, private_code(folder):
        with stages("write"):
            _write_decoder(task, folder, lowered, pruned)
        with stages("reload"):
            # A graph is compared bit by bit, so it must compute its experts like the written one.
            experts = "batched" if isinstance(pruned, PrunedModel) else "grouped"
            opened = open_folder(
                folder,
                device=task.program.device,
                trust_remote_code=task.runs_own_code,
                experts=experts,
            )
            reloaded = opened.decoder
            name, written = (
                ("modules", pruned.model) if isinstance(pruned, PrunedModel) else ("lowered", lowered)
            )
            _add(lines, reloaded_lines(name, task.program, written, reloaded), stages)
        name, target = target_named(task.exports)
        form = Form(name, task.source, task.program, task.plan, lowered, opened)
        exported = Written([]) if name == "none" else _exported(target, form, lines, stages)
        with stages("measure"):
            measured = _perplexity(task, reloaded)
            skills = _skills(task, reloaded)
        with stages("digest"):
            files = digests(folder)
        report = _report(task, folder, tuple(lines), measured, skills, files, stages)
        report = replace(report, onnx_without_cache=exported.no_cache)
        _write_words(task, folder, report, as_modules=isinstance(pruned, PrunedModel))
    return report


def _exported(target: Target, form: Form, lines: list[Verification], stages: Stages) -> Written:
    """Write the requested form, and record its comparisons."""
    with stages(form.name):
        written = target(form)
        _add(lines, written.lines, stages)
    if written.no_cache is not None:
        stages.observer.note(f"the ONNX model has no KV cache: {written.no_cache}")
    return written


def _add(lines: list[Verification], found: list[Verification], stages: Stages) -> None:
    """Record and show comparisons, and stop at one that fails."""
    lines += found
    for line in found:
        stages.observer.verified(line)
    require(*found)


def _modules(task: Task, lowered: nn.Module) -> PrunedModel | Mismatch | None:
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
        except Exception as error:
            if memory_shortage(error) is not None:
                raise
            # The code between the modules belongs to the decoder and may raise anything.
            return f"it raised {first_line(error)}"
        worst = max(line.max_rel_error for line in lines)
        return None if all(line.holds for line in lines) else f"its logits differ by {worst:.1e}"

    kept = plan.for_sites(program.sites)
    return build_pruned(
        program,
        {site.name: indices for site, indices in zip(program.sites, kept, strict=True)},
        model,
        lowered,
        underived=underived_buffers(model, config),
        agrees=agrees,
    )


def _write_decoder(
    task: Task, folder: Path, lowered: torch.fx.GraphModule, pruned: PrunedModel | Mismatch | None
) -> None:
    """Write a transformers checkpoint, or a graph for a module that transformers does not know."""
    config = task.source.config
    if pruned is not None:
        stored = _stored(task, lowered, pruned)
        write_checkpoint(
            folder,
            parameters=stored[0],
            buffers=stored[1],
            layout=pruned.layout if isinstance(pruned, PrunedModel) else pruned.reason,
            plan=task.plan,
            sites=task.program.sites,
            config=config,
            architecture=type(task.source.model).__name__,
            generation_config=task.source.generation_config,
            tokenizer=task.source.tokenizer,
        )
        carry_code(folder, {"AutoConfig": config, "AutoModelForCausalLM": task.source.model})
    if config is None:
        save_graph(task.source, task.program, task.plan, lowered, folder)
        task.plan.save(folder / "plan.safetensors")


def _stored(
    task: Task, lowered: nn.Module, pruned: PrunedModel | Mismatch
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the parameters and buffers of a checkpoint by their names on disk."""
    if isinstance(pruned, PrunedModel):
        return pruned.stored_parameters(), pruned.stored_buffers()
    underived = underived_buffers(task.source.model, task.source.config)
    # A model built from the config lacks the statistics of the dense weights.
    buffers = {
        name: tensor
        for name, tensor in lowered.named_buffers()
        if name in underived or name in task.program.dense_statistics
    }
    indices = site_indices(task.plan, task.program.sites) or {MARK: torch.zeros(1, dtype=torch.int32)}
    return dict(lowered.named_parameters()), {**buffers, **indices}


def _report(
    task: Task,
    folder: Path,
    lines: tuple[Verification, ...],
    measured: PerplexityChange | None,
    skills: dict[str, SkillChange],
    files: dict[str, str],
    stages: Stages,
) -> Report:
    dense = task.program.all_parameters
    count = ParameterCount.of_sites(task.program.sites, task.program.shapes, "blocks")
    parameters, size = stored_size(folder)
    return Report(
        ratio=Ratio(task.plan.budget.ratio, task.plan.achieved, task.plan.budget.of),
        parameters=Parameters(
            dense=task.program.size,
            pruned=parameters,
            gated=count.dense,
        ),
        bytes=Bytes(
            dense=sum(tensor.numel() * tensor.element_size() for tensor in dense.values()),
            pruned=size,
        ),
        perplexity=measured,
        verify=lines,
        sites=tuple(
            SiteWidth(site.name, site.kind, site.size, len(task.plan.kept[site.name]))
            for site in task.program.sites
        ),
        refused=(
            *(Refused(refusal.name, refusal.reason) for refusal in task.program.left_dense),
            *left_dense(task.plan, task.program.sites),
        ),
        seed=task.plan.seed,
        versions=versions(),
        device=device_name(task.program.device),
        seconds=dict(stages.seconds),
        command=task.command or "dispfx.compile",
        skills=skills,
        files=files,
        settings=task.settings.plain() if isinstance(task.settings, RunSettings) else None,
        ungated=tuple(
            UngatedWeights(one.reason, one.size, one.parameters) for one in coverage(task.program).ungated
        ),
        lengths=task.program.lengths,
    )


def left_dense(plan: Plan, sites: Sequence[Site]) -> list[Refused]:
    """Return the branches that a latency table kept dense."""
    costs = plan.budget.costs
    if costs is None:
        return []
    reason = f"left dense: it would be slower when cut, on {costs.device} at {costs.tokens} tokens"
    cut = {selection.site for selection in plan.selections if not selection.full}
    branches = dict.fromkeys(site.branch for site in sites)
    cut_branches = {site.branch for site in sites if site.name in cut}
    return [Refused(name, reason) for name in branches if name not in cut_branches]


def _perplexity(task: Task, reloaded: nn.Module) -> PerplexityChange | None:
    """Measure the captured and the reloaded decoder on held-out text."""
    if task.text.measure is None:
        return None
    # A learned plan has already run at the length of its sequences.
    own = task.settings.learning.seq_len if isinstance(task.settings, RunSettings) else None
    context = window_of(task.source, task.program, own)
    values = [
        measure(
            decoder,
            task.text.measure,
            context=context,
            windows=task.settings.text.eval_windows,
            device=task.program.device,
            text=task.text.about,
        )
        for decoder in (task.program.graph_module, reloaded)
    ]
    return PerplexityChange(values[0].value, values[1].value, Protocol(**values[0].protocol))


def _skills(task: Task, reloaded: nn.Module) -> dict[str, SkillChange]:
    """Probe the demo's skills: perplexity hides a lost skill."""
    if task.source.origin != "demo":
        return {}
    before, after = (
        skill_probe(decoder, task.source.tokenizer, _PROBE_SEED, _PROBE_SAMPLES)
        for decoder in (task.program.graph_module, reloaded)
    )
    return {skill: SkillChange(before[skill], after[skill]) for skill in before}


def _write_words(task: Task, folder: Path, report: Report, *, as_modules: bool) -> None:
    """Write the report, the model card, the learning log and the HTML page."""
    save_report(report, folder / "report.json")
    card = model_card(
        report,
        base_model=task.source.name,
        folder=task.path.name,
        # The data that an applied plan was learned from is unknown.
        data=task.text.learned_name if task.state is not None else "",
        onnx=task.exports == "onnx",
        on_hub=task.source.origin == "hub",
        as_modules=as_modules,
        tokenizer=task.source.tokenizer is not None,
        code=code_of_class(task.source.model),
        own_code=task.runs_own_code,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    log = task.state / "metrics.jsonl" if task.state is not None else None
    if log is not None and log.is_file():
        shutil.copyfile(log, folder / "metrics.jsonl")
    write_page(folder, task.path.name)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries used."""
    found = {"python": platform.python_version(), "dispfx": dispfx.__version__}
    for name in _NAMED_VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the machine's processor architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
