"""`bench`: the speed of a folder's decoder compared with the dense one, step by step.

    folder → captured with a cache, lowered by its plan, filled  ┐
    MODEL, or the folder's own class with random weights         ┘→ the same passes → timed in turn

Without a dense MODEL the dense side has random weights: speed depends on shapes, not on values.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dispfx.benchmark.alignments import MeasuredOn, check_alignments, measured_plans, realigned
from dispfx.benchmark.decoder_speed import Contender, Mode, compare
from dispfx.benchmark.onnx_comparison import compare_onnx
from dispfx.benchmark.speed_row import SpeedRow
from dispfx.benchmark.timing import device_name
from dispfx.compiler.cached_programs import capture_cached
from dispfx.compiler.pipelines import gathered
from dispfx.compiler.programs import lower_program, only_planned
from dispfx.deploy.checkpoint import skeleton
from dispfx.errors import DataError, OutputError, PlanMismatchError
from dispfx.ir.cached_inputs import CachedShape
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from dispfx.run.folders import Opened
from dispfx.run.opening import open_model, open_output
from dispfx.settings import ModelSettings
from dispfx.settings.trees import BenchSettings
from dispfx.settings.verb_settings import TIMED_BATCHES, TimingSettings
from dispfx.source.experts import Experts, has_choice_of_experts
from dispfx.source.loading import moved
from dispfx.source.source import longest_context, named_context
from dispfx.words.chosen_device import chosen_device

MODES: dict[str, tuple[Mode, ...]] = {
    "eager": ("eager",),
    "compiled": ("compiled",),
    "both": ("eager", "compiled"),
}
ONNX_FACTS = {"runtime": "ONNX Runtime", "head": "it reads all tokens"}
LENGTHS = {"cuda": (128, 512, 2048), "cpu": (16, 64)}
_STANDARD_DEVIATION = 0.02


@dataclass(frozen=True)
class Steps:
    """Which steps to time.

    Args:
        batches: sequences at a time.
        prompts: lengths of a prefill.
        pasts: numbers of cached tokens before a decode step.
        modes: eager, compiled or both.
    """

    batches: Sequence[int]
    prompts: Sequence[int]
    pasts: Sequence[int]
    modes: Sequence[Mode]

    def shapes(self) -> Iterator[tuple[CachedShape, Mode]]:
        """Yield every step, prefills first."""
        prefills = [CachedShape(batch, tokens, 0) for tokens in self.prompts for batch in self.batches]
        decodes = [CachedShape(batch, 1, past) for past in self.pasts for batch in self.batches]
        for shape in (*prefills, *decodes):
            for mode in self.modes:
                yield shape, mode


@dataclass(frozen=True)
class Benched:
    """A speed table, and the facts needed to repeat it."""

    rows: tuple[SpeedRow, ...]
    facts: dict[str, str]


def bench(folder: Any, *, on_row: Callable[[SpeedRow], None] = lambda row: None, **changes: Any) -> Benched:
    """Time prefill and decode steps of a folder's decoder, pruned and dense.

    Args:
        folder: an output folder with a checkpoint, or `BenchSettings`.
        on_row: called with every row as soon as it is measured.
        changes: single settings, as in `batch=[1], prompt=[128]`.  `eval_data`, which needs `dense`, is the
            text for plans at other alignments: features are chosen on its last sixteen windows (or last
            half), and the plans are measured on the rest, in `facts`.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        OutputError: if the folder holds no checkpoint.
        DataError: if a length does not fit the decoder's context, or a text cannot be measured on.
        BudgetError: if no widths of an alignment come close to the ratio.
        PlanMismatchError: if the dense decoder has other shapes.
        CaptureError, UnsupportedGraphError: if the decoder cannot be captured with a cache.
    """
    settings = BenchSettings.given(folder, changes)
    timing, folder, eval_data = settings.timing, settings.model.model, settings.text.eval_data
    alignments, dense, runtime = timing.align, timing.dense, timing.runtime
    place = chosen_device(settings.model.device)
    check_alignments(
        alignments,
        has_text=bool(eval_data),
        has_dense=dense is not None,
        in_torch=runtime == "torch",
    )
    opened = open_output(settings.model)
    steps = _steps(opened, place, timing)
    context = longest_context(opened.config)
    # First, so that an unusable text is reported before anything slow.
    on = None
    if eval_data:
        on = MeasuredOn.read(eval_data, opened.tokenizer, context, settings.text.eval_windows)
    sides = _Sides(opened, dense, place)
    measured: list[tuple[Plan, float]] = []
    if on is not None:
        measured = measured_plans(sides.program("grouped"), sides.plan, alignments, on)
    facts = _facts(opened, *sides.of("batched"), dense, place)
    if runtime == "onnx":
        shapes = list(dict.fromkeys(shape for shape, _ in steps.shapes()))
        return Benched(
            tuple(compare_onnx(Path(folder).name, *sides.of("batched"), shapes, place, on_row)),
            facts | ONNX_FACTS,
        )
    if measured:
        named = zip(("as it is", *(f"× {align}" for align in alignments)), measured, strict=True)
        facts |= {"perplexity of the plan": ", ".join(f"{name} {value:.3f}" for name, (_, value) in named)}
    rows: list[SpeedRow] = []
    for shape, mode in steps.shapes():
        kernels = ("library", "generated") if place.type == "cuda" and shape.batch == 1 else ("library",)
        row = compare(Path(folder).name, *sides.of(experts_for(shape)), shape, mode, kernels=kernels)
        rows.append(row)
        on_row(row)
    plans = [plan for plan, _ in measured[1:]]
    for row in _aligned_rows(sides, steps, alignments, plans):
        rows.append(row)
        on_row(row)
    return Benched(tuple(rows), facts)


def _aligned_rows(
    sides: "_Sides", steps: Steps, alignments: Sequence[int], plans: Sequence[Plan]
) -> Iterator[SpeedRow]:
    """Yield a prefill and a decode step of one sequence at each alignment, with these plans if given."""
    mode: Mode = "compiled" if "compiled" in steps.modes else "eager"
    longest = CachedShape(1, max(steps.prompts), 0), CachedShape(1, 1, max(steps.pasts))
    for shape in longest if alignments else ():
        experts = experts_for(shape)
        whole, _ = sides.of(experts)
        program = sides.program(experts)
        plans = plans or realigned(program, sides.plan.fitted(program.sites), alignments)
        for align, plan in zip(alignments, plans, strict=True):
            pruned = _contender(lower_program(program, plan.fitted(program.sites)), plan.achieved)
            yield compare(f"widths × {align}, {pruned.removed:.1%} removed", whole, pruned, shape, mode)


def experts_for(shape: CachedShape) -> Experts:
    """Return how a step computes experts: a single token gathers the weights of its experts."""
    return "batched" if shape.batch * shape.tokens == 1 else "grouped"


class _Sides:
    """The dense and the pruned decoder, for each way of computing experts that a step may need.

    Both ways read the same weights.  A decoder without a choice has one.
    """

    def __init__(self, opened: Opened, dense: str | nn.Module | None, device: torch.device):
        """Open both.

        Raises:
            OutputError: if the folder holds no checkpoint.
            PlanMismatchError: if the dense decoder has other shapes.
        """
        if opened.plan is None or opened.program is None:
            raise OutputError(
                "bench needs a folder that transformers loads, but this one holds only a graph",
                where=str(opened.path),
            )
        self._opened = opened
        self.plan = opened.plan
        self._empty = _empty(opened)
        self._dense = _with_random_weights(_empty(opened)) if dense is None else _named(dense, device)
        self._chooses = has_choice_of_experts(self._empty)
        self._programs: dict[Experts, Program] = {}
        self._made: dict[Experts, tuple[Contender, Contender]] = {}

    def program(self, experts: Experts) -> Program:
        """Return the dense decoder with its cache and the sites of the folder's plan, one capture per way."""
        experts = experts if self._chooses else "batched"
        if experts not in self._programs:
            captured = capture_cached(
                self._dense, select=self.plan.select, sites=self.plan.sites, experts=experts
            )
            self._programs[experts] = only_planned(captured, self.plan)
        return self._programs[experts]

    def of(self, experts: Experts) -> tuple[Contender, Contender]:
        """Return dense and pruned."""
        experts = experts if self._chooses else "batched"
        if experts not in self._made:
            plan = self.plan
            empty = only_planned(
                capture_cached(self._empty, select=plan.select, sites=plan.sites, experts=experts), plan
            )
            program = self.program(experts)
            _require_same_shapes(program, empty)
            dense = _contender(lower_program(program, Plan.random(program, 0.0, seed=0)), 0.0)
            self._made[experts] = dense, _pruned(self._opened, empty)
        return self._made[experts]


def _steps(opened: Opened, device: torch.device, timing: TimingSettings) -> Steps:
    """Fill in defaults, and reject lengths that the decoder cannot read."""
    limit = named_context(opened.config) or max(LENGTHS["cuda"])
    for tokens in (*timing.prompt, *(past + 1 for past in timing.past)):
        if tokens > limit:
            raise DataError(f"{tokens} tokens were requested, but the decoder reads 1 to {limit}")
    usual = tuple(length for length in LENGTHS[device.type] if length < limit) or (limit - 1,)
    return Steps(
        tuple(timing.batch) or TIMED_BATCHES,
        tuple(timing.prompt) or usual,
        tuple(timing.past) or usual,
        MODES[timing.mode],
    )


def _pruned(opened: Opened, empty: Program) -> Contender:
    """Lower the captured decoder by the folder's plan, and insert the folder's weights."""
    assert opened.plan is not None and opened.program is not None
    lowered = lower_program(empty, opened.plan)
    lowered.rebuild({**dict(lowered.tensors()), **opened.program.parameters})
    return _contender(lowered, opened.plan.achieved)


def _with_random_weights(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, _STANDARD_DEVIATION)
    return model


def _named(dense: str | nn.Module, device: torch.device) -> nn.Module:
    return moved(open_model(ModelSettings(dense, device=str(device))).model, device)


def _empty(opened: Opened) -> nn.Module:
    return skeleton(opened.path, device=opened.device, trust_remote_code=opened.trust_remote_code)


def _require_same_shapes(program: Program, expected: Program) -> None:
    if program.shapes != expected.shapes:
        raise PlanMismatchError(
            "the dense decoder must have the shapes of the folder's decoder before pruning",
            where=program.model_class,
            hint="name the MODEL that the folder was compiled from",
        )
    if program.dtype != expected.dtype:
        raise PlanMismatchError(
            f"the dense decoder is {program.dtype} and the folder's {expected.dtype}; speeds of different "
            "types say nothing",
            where=program.model_class,
        )


def _contender(reference: Program, removed: float) -> Contender:
    return Contender(reference, gathered(reference), removed)


def _facts(
    opened: Opened,
    dense: Contender,
    pruned: Contender,
    name: str | nn.Module | None,
    device: torch.device,
) -> dict[str, str]:
    counts = [one.reference.size for one in (dense, pruned)]
    return {
        "folder": opened.path.name,
        "dense": "the same class with random weights" if name is None else str(name),
        "device": device_name(device),
        "torch": torch.__version__,
        "dtype": str(pruned.reference.dtype).removeprefix("torch."),
        "parameters": f"{counts[0]:,} → {counts[1]:,}; {pruned.removed:.1%} of the prunable weights removed",
        "head": "of a prefill it reads the last token",
    }
