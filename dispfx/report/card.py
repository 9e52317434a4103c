"""The model card of a folder: what was done, what it cost, how to load the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from dispfx.report.numbers import shown_perplexity
from dispfx.report.schema import Behaviour, Report
from dispfx.report.settings_table import settings_rows
from dispfx.report.tuning_record import tuning_lines
from dispfx.verification.equivalence import Verification


@dataclass(frozen=True)
class FolderContents:
    """What an output folder holds, which decides how it is loaded.

    Args:
        folder: its name, for the commands shown.
        as_modules: whether transformers loads it; a graph needs dispfx.load.
        onnx: whether an ONNX model was also written.
        tokenizer: whether the folder has a tokenizer.
        code: Python module that registers the decoder's class with transformers, if needed.
        own_code: whether the folder contains code of the decoder or tokenizer.
    """

    folder: str
    as_modules: bool = True
    onnx: bool = False
    tokenizer: bool = True
    code: str | None = None
    own_code: bool = False

    @property
    def name(self) -> str:
        """Last part of the folder's path."""
        return PurePath(self.folder).name


def model_card(
    report: Report, contents: FolderContents, *, base_model: str, on_hub: bool = False, data: str = ""
) -> str:
    """Return the text of DIR/README.md.

    Args:
        report: of the compilation.
        contents: of DIR.
        base_model: MODEL as the user wrote it.
        on_hub: whether `base_model` is a hub id, and so a public link.
        data: name of the text that the masks were learned from; empty if they were not learned.
    """
    parts = [
        _front_matter(base_model if on_hub else None),
        f"# {contents.name}",
        _summary(report, base_model),
        _figures(report),
        _tuned(report),
        _loading(contents),
        _without_cache(report),
        _origin(report, data),
        _settings(report),
        _verification(report.verify),
        _left_dense(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(base_model: str | None) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [pruned, dispfx]"]
    if base_model is not None:
        lines.append(f"base_model: {base_model}")
    return "\n".join(["---", *lines, "---"])


def _summary(report: Report, base_model: str) -> str:
    name = f"`{PurePath(base_model).name}`"
    if report.tuned is not None:
        name = f"{name} with tuned weights: a decoder"
    return (
        f"{name} without {report.ratio.achieved:.1%} of {report.ratio.counted}, "
        f"compiled by dispfx: {_selected(report)} (the method of arXiv 2410.11988). {_attention(report)}"
    )


def _selected(report: Report) -> str:
    """Say what selects features: every branch, or one selection for the whole stream."""
    if any(site.kind == "stream" for site in report.sites):
        return "the residual stream keeps one subset of its features, which every branch reads and writes"
    return (
        "every attention and MLP branch reads, uses and writes its own subset of features, and the residual "
        "stream keeps its full width"
    )


def _attention(report: Report) -> str:
    """Say what attention keeps, and what becomes of the KV cache."""
    told = [f"{kept:,} of {size:,} {name}" for name, size, kept in report.attention_widths]
    if not told:
        return "Attention heads are not pruned, so the KV cache keeps its size."
    left = ""
    if report.cache is not None:
        left = f", and the KV cache {report.cache.pruned:,} of {report.cache.dense:,} bytes per token"
    return f"Attention keeps {' and '.join(told)}{left}."


def _figures(report: Report) -> str:
    lines = [
        "| | before | after |",
        "|---|---:|---:|",
        f"| parameters | {report.parameters.dense:,} | {report.parameters.pruned:,} |",
        f"| bytes | {report.bytes.dense:,} | {report.bytes.pruned:,} |",
    ]
    if report.cache is not None:
        lines += [
            f"| KV cache, bytes per token{of} | {report.cache.dense:,} | {kept:,} |"
            for of, kept in report.cache.by_form
        ]
    measured = report.perplexity
    lines += [_of_text(one) for one in report.behaviour[:1]]
    lines += [_of_text(one, f", {one.text}") for one in report.behaviour[1:]]
    if measured is not None and not report.behaviour:
        lines.append(
            f"| perplexity | {shown_perplexity(measured.dense)} | {shown_perplexity(measured.pruned)} |"
        )
    lines.extend(
        f"| skill: {name} | {skill.dense:.1%} | {skill.pruned:.1%} |" for name, skill in report.skills.items()
    )
    if measured is None:
        return "\n".join(lines)
    protocol = measured.protocol
    held_out = (
        f", the last {protocol.held_out_share:.0%} of the text, never learned from"
        if protocol.held_out_share is not None
        else ""
    )
    lines += [
        "",
        f"Perplexity on {protocol.text or 'the given text'}{held_out}: {protocol.windows} "
        f"windows of {protocol.context} tokens without overlap, {protocol.tokens:,} predicted tokens."
        f"{protocol.begins}",
    ]
    if report.behaviour:
        lines[-1] += (
            " KL is the mean over tokens of KL(dense ‖ pruned) in nats; the percentage is how often both "
            "decoders find the same token likeliest."
        )
    return "\n".join(lines)


def _of_text(one: Behaviour, of: str = "") -> str:
    return (
        f"| KL per token{of} | 0 | {one.kl:.4f} ({one.top1:.1%}) |\n"
        f"| perplexity{of} | {shown_perplexity(one.perplexity_dense)} "
        f"| {shown_perplexity(one.perplexity_pruned)} |"
    )


def _tuned(report: Report) -> str:
    if report.tuned is None:
        return ""
    said = "\n".join(f"- {line}" for line in tuning_lines(report.tuned))
    return (
        "## Recovered\n\nAfter pruning, the weights were trained to predict what the dense decoder predicts, "
        f"so they differ from the original's.\n\n{said}"
    )


def _loading(contents: FolderContents) -> str:
    name, code, tokenizer = contents.name, contents.code, contents.tokenizer
    trust, flag = (", trust_remote_code=True", " --trust-remote-code") if contents.own_code else ("", "")
    with_transformers = [
        *([f"import {code}  # registers the decoder's class"] if code else []),
        "import dispfx  # lets transformers load the folder",
        f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if tokenizer else ''}",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}"{trust})',
        *([f'tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})'] if tokenizer else []),
    ]
    # The commands do not import foreign code.
    by_command = not (contents.as_modules and code)
    commands = [
        *([f'dispfx generate {name}{flag} --prompt "…"'] if tokenizer and by_command else []),
        *([f"dispfx verify {name}{flag}"] if by_command else []),
    ]
    as_graph = [
        "import dispfx",
        "",
        f'decoder = dispfx.load("{name}"{trust})  # token ids (batch, tokens) → logits',
    ]
    lines = [
        "## Use",
        "",
        *(["Loading this folder runs its Python files: read them first.", ""] if contents.own_code else []),
        "```python",
        *(with_transformers if contents.as_modules else as_graph),
        "```",
    ]
    if commands:
        lines += ["", "```", *commands, "```"]
    if contents.onnx:
        lines += ["", "`onnx/model.onnx` is the same decoder for ONNX Runtime."]
    return "\n".join(lines)


def _without_cache(report: Report) -> str:
    if report.onnx_without_cache is None:
        return ""
    return (
        "The ONNX model has no KV cache, so every step computes the whole text again: "
        f"{report.onnx_without_cache}."
    )


def _origin(report: Report, data: str) -> str:
    learned = (
        (f" The masks were learned from {data}; figures measured on text of that kind flatter them.")
        if data
        else ""
    )
    gives = "these weights again" if report.tuned is None else "the weights before they were tuned"
    return (
        f"## How it was made\n\n```\n{report.command}\n```\n\n"
        f"`plan.safetensors` says which features every site keeps; with the original checkpoint it gives "
        f"{gives}.{learned} Seed {report.seed}, on {report.device}; "
        + ", ".join(f"{name} {version}" for name, version in report.versions.items())
        + "."
    )


def _settings(report: Report) -> str:
    if report.settings is None:
        return ""
    rows = [f"| {name} | {value} |" for name, value in settings_rows(report.settings)]
    text = "All settings of the run, including defaults:"
    return "\n".join([text, "", "| setting | value |", "|---|---:|", *rows])


def _verification(verifications: Sequence[Verification]) -> str:
    if not verifications:
        return ""
    lines = [
        "## Verified",
        "",
        "| | batch × tokens | largest relative error | tolerance |",
        "|---|---|---:|---:|",
    ]
    lines.extend(
        f"| {line.name} | {' × '.join(map(str, line.shape))} | {line.max_rel_error:.2e} "
        f"| {format(line.tolerance, '.0e') if line.tolerance else 'equal bits'} |"
        for line in verifications
    )
    return "\n".join(lines)


def _left_dense(report: Report) -> str:
    if not report.refused:
        return ""
    lines = [f"- `{refused.name}`: {refused.reason}" for refused in report.refused]
    return "\n".join(["## Left dense", "", *lines])
