"""What an output folder says of itself: measurements, report.json, the model card and the page."""

import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from dispfx.analysis.coverage import coverage
from dispfx.demo.probe import skill_probe
from dispfx.deploy.digests import stored_size
from dispfx.ir.sites import Site
from dispfx.plan.parameter_count import ParameterCount
from dispfx.plan.plan import Plan
from dispfx.quality.agreement import Comparison
from dispfx.report import (
    Behaviour,
    Bytes,
    CacheBytes,
    CacheRatio,
    FolderContents,
    MetConstraint,
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
from dispfx.run.cached_bytes import cached_bytes
from dispfx.run.decoder_files import Task
from dispfx.run.length_checks import window_of
from dispfx.run.timed_stages import Stages
from dispfx.settings import RunSettings
from dispfx.source import Source
from dispfx.source.transformers_classes import code_of_class
from dispfx.verification.equivalence import Verification
from dispfx.version import __version__

PROBE_SEED, PROBE_SAMPLES = 7, 100
_NAMED_VERSIONS = ("torch", "transformers", "safetensors", "onnx", "onnxruntime-gpu", "onnxruntime")


def report_of(
    task: Task,
    folder: Path,
    lines: tuple[Verification, ...],
    measured: tuple[Comparison, ...],
    skills: dict[str, SkillChange],
    files: dict[str, str],
    stages: Stages,
) -> Report:
    dense = task.program.all_parameters
    count = ParameterCount.of_sites(task.program.sites, task.program.shapes, "blocks")
    parameters, size = stored_size(folder)
    return Report(
        ratio=Ratio(task.plan.budget.ratio, task.plan.achieved, str(task.plan.budget.of)),
        kv_ratio=_cache_ratio(task.plan),
        constraints=tuple(MetConstraint(**asdict(one)) for one in task.plan.met),
        parameters=Parameters(
            dense=task.program.size,
            pruned=parameters,
            gated=count.dense,
        ),
        bytes=Bytes(
            dense=sum(tensor.numel() * tensor.element_size() for tensor in dense.values()),
            pruned=size,
        ),
        perplexity=perplexity_change(measured),
        behaviour=tuple(map(behaviour_of, measured)),
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


def _cache_ratio(plan: Plan) -> CacheRatio | None:
    asked, cache = plan.budget.kv_ratio, plan.cache
    return None if asked is None or cache is None else CacheRatio(asked, cache.removed)


def cache_change(task: Task, reloaded: nn.Module, of_onnx: int | None = None) -> CacheBytes | None:
    """Return the bytes of the KV caches for each token, if the plan prunes heads or values.

    Args:
        of_onnx: of the ONNX model that was written, if any.
    """
    if not task.plan.sites:
        return None
    dense, pruned = cached_bytes(task.source.model), cached_bytes(reloaded)
    if dense is None or pruned is None:
        return None
    return CacheBytes(dense, pruned).with_onnx(of_onnx)


def left_dense(plan: Plan, sites: Sequence[Site]) -> list[Refused]:
    """Return the branches that a latency table kept dense."""
    costs = plan.budget.costs_of_branches
    if costs is None:
        return []
    reason = f"left dense: it would be slower when cut, on {costs.device} at {costs.tokens} tokens"
    cut = {selection.site for selection in plan.selections if not selection.full}
    branches = dict.fromkeys(site.branch for site in sites)
    cut_branches = {site.branch for site in sites if site.name in cut}
    return [Refused(name, reason) for name in branches if name not in cut_branches]


def compared_texts(task: Task, reloaded: nn.Module) -> tuple[Comparison, ...]:
    """Compare the captured and the reloaded decoder on held-out texts."""
    if not task.text.measured:
        return ()
    # A learned plan has already run at the length of its sequences.
    own = task.settings.learning.seq_len if isinstance(task.settings, RunSettings) else None
    context = window_of(task.source, task.program, own)
    windows = task.settings.text.eval_windows
    return task.text.compared(task.program, reloaded, context=context, windows=windows)


def perplexity_change(measured: Sequence[Comparison]) -> PerplexityChange | None:
    """Return the perplexities on the first text."""
    if not measured:
        return None
    first = measured[0]
    return PerplexityChange(first.dense.value, first.pruned.value, Protocol(**first.dense.protocol))


def behaviour_of(found: Comparison) -> Behaviour:
    """Return what a report says of a text on which two decoders were compared."""
    return Behaviour(
        text=found.dense.protocol["text"],
        tokens=found.agreement.tokens,
        kl=found.agreement.kl_nats,
        top1=found.agreement.top1,
        perplexity_dense=found.dense.value,
        perplexity_pruned=found.pruned.value,
    )


def skill_changes(task: Task, reloaded: nn.Module) -> dict[str, SkillChange]:
    """Probe the demo's skills: perplexity hides a lost skill.  Those of a draft are probed after recovery."""
    if task.source.origin != "demo" or task.is_draft:
        return {}
    before, after = (
        skill_probe(decoder, task.source.tokenizer, PROBE_SEED, PROBE_SAMPLES)
        for decoder in (task.program.graph_module, reloaded)
    )
    return {skill: SkillChange(before[skill], after[skill]) for skill in before}


def write_words(task: Task, folder: Path, report: Report, *, as_modules: bool) -> None:
    """Write the report, the model card, the learning log and the HTML page."""
    contents = FolderContents(
        task.path.name,
        as_modules=as_modules,
        onnx=task.exports == "onnx",
        tokenizer=task.source.tokenizer is not None,
        code=code_of_class(task.source.model),
        own_code=task.runs_own_code,
    )
    log = task.state / "metrics.jsonl" if task.state is not None else None
    if log is not None and log.is_file():
        shutil.copyfile(log, folder / "metrics.jsonl")
    # The data that an applied plan was learned from is unknown.
    data = task.text.learned_name if task.state is not None else ""
    write_pages(folder, report, contents, task.source, data)


def write_pages(folder: Path, report: Report, contents: FolderContents, dense: Source, data: str) -> None:
    """Write report.json, and what people read of it: the model card and the HTML page.

    Args:
        dense: the decoder that the folder's was made from.
        data: name of the text that the masks were learned from, if that is known.
    """
    save_report(report, folder / "report.json")
    card = model_card(report, contents, base_model=dense.name, on_hub=dense.origin == "hub", data=data)
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_page(folder, contents.folder)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries used."""
    found = {"python": platform.python_version(), "dispfx": __version__}
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
