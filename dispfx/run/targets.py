"""Export targets: what `--export` writes next to the checkpoint, each with the comparison that proves it.

    none     nothing
    onnx     DIR/onnx, a model with a KV cache
    pt2      DIR/program.pt2, a graph that torch.export reads
    dense    DIR/dense, an ordinary checkpoint that needs no dispfx

A custom target, `mine.py:target` or a Python function, takes a `Form`, writes files into `form.folder`
(DIR/target, by the function's name), reads them back, and returns comparisons from `form.compare`.  A target
without a comparison is rejected, and so is one whose comparison fails.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.analysis.label_map import Mismatch
from dispfx.compiler.programs import exportable, lower
from dispfx.deploy import exported
from dispfx.errors import DispfxError, UnsupportedGraphError, VerificationError
from dispfx.huggingface.dense import write_ordinary, zeroed_twin
from dispfx.huggingface.model_loading import load_model
from dispfx.huggingface.ordinary import build_ordinary, ordinary_config
from dispfx.ir.program import Program
from dispfx.plan.budget import Budget
from dispfx.plan.plan import Plan
from dispfx.run.folders import Opened, Written
from dispfx.source import Source
from dispfx.verification.equivalence import Verification, compare_decoders, random_token_ids
from dispfx.verification.graphs import (
    compared_shapes,
    dense_lines,
    exported_lines,
    tolerance_of,
    zeroed_tensors,
)
from dispfx.words.option_names import option
from dispfx.words.own_function import OwnFunction, own_or_choice

DENSE_FOLDER = "dense"


@dataclass(frozen=True, eq=False)
class Form:
    """The pruned decoder for a target to write in its own format.

    Args:
        name: of the target; its files go to a folder of this name.
        source: the dense decoder, with its config and tokenizer.
        program: of the dense decoder.
        plan: what is kept.
        decoder: the pruned graph, token ids (B, T) to logits (B, T, V).
        opened: DIR with the checkpoint, as read back.
    """

    name: str
    source: Source
    program: Program
    plan: Plan
    decoder: torch.fx.GraphModule
    opened: Opened

    @cached_property
    def folder(self) -> Path:
        """The folder of the target's own files, made at its first use."""
        folder = self.opened.path / self.name
        folder.mkdir()
        return folder

    def ids(self, batch: int = 2, tokens: int = 8) -> Tensor:
        """Return token ids (B, T) for tracing or exporting the decoder."""
        return random_token_ids(self.program.known_tokens, (batch, tokens), device=self.program.device)

    def compare(
        self, read_back: Callable[[Tensor], Any], *, tolerance: float | None = None
    ) -> list[Verification]:
        """Compare a decoder that was read back with the pruned graph, on new token ids.

        Args:
            read_back: token ids (B, T) to logits (B, T, V), or to an output with `.logits`.
            tolerance: largest allowed relative error; by default that of the dtype.
        """
        return compare_decoders(
            f"{self.name} = lowered",
            self.decoder,
            read_back,
            tolerance_of(self.program) if tolerance is None else tolerance,
            vocabulary_size=self.program.known_tokens,
            shapes=compared_shapes(self.program),
            device=self.program.device,
        )

    def exportable(self) -> Program:
        """Return the dense decoder's program in operations that every exporter knows."""
        return exportable(self.source.model, self.program, self.plan)


Target = Callable[[Form], Written]


def export_of(asked: Any, source: Source) -> Any:
    """Return the target that was asked for, or the default: ONNX for the demo, none otherwise."""
    return asked or ("onnx" if source.origin == "demo" else "none")


def target_named(export: Any) -> tuple[str, Target]:
    """Return a target's name and its writer.

    Raises:
        DispfxError: if the target is unknown, listing the known ones.
        SourceError: if a user's function cannot be loaded.
    """
    found = own_or_choice(TARGETS, export, "export")
    if not isinstance(found, OwnFunction):
        return export, found
    return found.function.__name__, lambda form: Written(_checked(found, found(form)))


def require_target(export: Any, source: Source) -> None:
    """Raise if a decoder cannot be written in the requested form; None requests the default.

    Raises:
        DispfxError: if a dense checkpoint was asked of a module that transformers does not know, or there is
            no such target.
        SourceError: if a user's function cannot be loaded.
    """
    if export is not None:
        target_named(export)
    if export == "dense" and source.config is None:
        raise DispfxError(
            f"{option('export', 'dense')} writes a transformers checkpoint, "
            "but transformers does not know this module",
            where=source.name,
            hint=f"{option('export', 'pt2')} writes the pruned graph",
        )


def save_graph(
    source: Source, program: Program, plan: Plan, lowered: torch.fx.GraphModule, folder: Path
) -> None:
    """Write the pruned graph as program.pt2."""
    known = exportable(source.model, program, plan)
    final = lowered if known is program else lower(known, plan)
    exported.save_graph(final, folder)


def _checked(function: OwnFunction, lines: Any) -> list[Verification]:
    found = list(lines) if isinstance(lines, list | tuple) else []
    if not found or not all(isinstance(line, Verification) for line in found):
        raise VerificationError(
            f"target {function.name} must return comparisons of its output, but returned {lines!r}"[:200],
            hint="return form.compare(…) of the decoder that it reads back",
        )
    return found


def _nothing(form: Form) -> Written:
    return Written([])


def _onnx(form: Form) -> Written:
    def plain() -> torch.fx.GraphModule:
        return lower(form.exportable(), form.plan, write="gather-add")

    from dispfx.run.onnx_folder import write_onnx  # imports onnx, which no other target needs

    return write_onnx(form.opened, plain=plain, shapes=compared_shapes(form.program))


def _graph(form: Form) -> Written:
    if form.source.config is None:  # DIR holds program.pt2, which was already compared
        return Written([])
    folder, program = form.opened.path, form.program
    save_graph(form.source, program, form.plan, form.decoder, folder)
    shapes = compared_shapes(program)
    return Written(exported_lines(folder, form.opened.decoder, program.known_tokens, shapes))


def _dense(form: Form) -> Written:
    """Write a smaller decoder if the whole stream has one selection, otherwise one with zeros."""
    if form.plan.select == "before-norm":
        model: Any = ordinary_decoder(form.source, form.program, form.plan, form.decoder)
    else:
        model = zeroed_twin(form.source.model, zeroed_tensors(form.program, form.plan))
    folder = form.opened.path / DENSE_FOLDER
    write_ordinary(model, folder, tokenizer=form.source.tokenizer)
    trusted = form.opened.trust_remote_code
    read = load_model(folder, device=form.program.device, trust_remote_code=trusted)
    return Written(dense_lines(form.program, form.decoder, read))


TARGETS: dict[str, Target] = {"none": _nothing, "onnx": _onnx, "pt2": _graph, "dense": _dense}


def ordinary_decoder(source: Source, program: Program, plan: Plan, lowered: nn.Module) -> Any:
    """Return the decoder left by a plan with one selection for the whole stream, as its own class.

    Args:
        source: the dense decoder.
        program: of the decoder.
        lowered: its lowered graph, to compare the result with.

    Raises:
        UnsupportedGraphError: if the class does not support these widths, or computes something else with
        them.
    """
    found = build_ordinary(source.model, program, plan.by_site(program.sites))
    if isinstance(found, Mismatch):
        raise _no_ordinary_decoder(found.reason, source)
    model: Any = found.to(program.device)  # type: ignore[arg-type]
    lines = dense_lines(program, lowered, model)
    worst = max(line.max_rel_error for line in lines)
    if not all(line.holds for line in lines):
        raise _no_ordinary_decoder(
            f"the smaller decoder's logits differ by {worst:.1e}: its code derives a number from a width",
            source,
        )
    return model


def require_ordinary(source: Source, program: Program, budget: Budget) -> None:
    """Check that a smaller ordinary decoder is possible, by building one with a random plan.

    A class may accept only some widths of the stream, such as multiples of its heads.  Learning may choose
    any multiple of the alignment, so a stream that is one step narrower is tried too.

    Raises:
        UnsupportedGraphError: as `ordinary_decoder`.
        BudgetError: if no widths meet the ratio.
    """
    plan = Plan.random(program, budget.ratio, seed=0, of=budget.of, align=budget.align)
    ordinary_decoder(source, program, plan, lower(program, plan))
    narrower = plan.by_site(program.sites) | {
        site.name: torch.arange(max(1, site.size - budget.align))
        for site in program.sites
        if site.kind == "stream"
    }
    model: Any = source.model
    found = ordinary_config(model, program, narrower)
    if isinstance(found, Mismatch):
        raise _no_ordinary_decoder(found.reason, source)


def _no_ordinary_decoder(reason: str, source: Source) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"this class cannot be built with smaller widths: {reason}",
        where=type(source.model).__name__,
        hint=f"where a multiple is asked for, give one as {option('align')}; or leave out "
        f"{option('export', 'dense')}: the folder itself loads with dispfx",
    )
