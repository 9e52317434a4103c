"""`curve`: size and quality of a family's decoders over its ratios, and the smallest one that is good enough.

    MODEL, FAMILY, text → for every ratio: plan → lowered decoder → size, perplexity, KL from the dense one

No decoder is written: `apply` makes that of a ratio.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from dispfx.compiler.programs import lower, only_planned
from dispfx.errors import BudgetError, DataError
from dispfx.ir.program import Program
from dispfx.plan.family import Family
from dispfx.plan.plan import require_same_decoder
from dispfx.quality.agreement import Comparison
from dispfx.report import Observer
from dispfx.report.size_curve import CurvePoint, SizeCurve, write_curve
from dispfx.run.length_checks import window_of
from dispfx.run.opening import open_model
from dispfx.run.preflight import require_room_for_weights
from dispfx.run.readiness import analysed
from dispfx.run.run_text import TextChoice, open_text, require_tokens
from dispfx.run.timed_stages import Stages
from dispfx.settings.trees import CurveSettings
from dispfx.words.option_names import option
from dispfx.words.preconditions import check_new_page

# The ratio of the smallest decoder that is good enough is found to this.
_CLOSE = 0.005


def curve(model: Any, family: Any = None, *, observer: Observer | None = None, **changes: Any) -> SizeCurve:
    """Measure the decoders of a family over its range of ratios.

    Args:
        model: MODEL that the family was learned on, or `CurveSettings`.
        family: the family, or its file.
        observer: receives progress.
        changes: single settings, as in `eval_data="text.txt", points=6, within=0.2`.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        DataError: if there is no text, or it is shorter than two tokens.
        PlanMismatchError: if the family was learned on another decoder.
        OutputError: if the page to write exists.
        BudgetError: if no decoder of the family is as near to the dense one as `within` says.
    """
    settings = CurveSettings.given(model, changes | ({} if family is None else {"family": family}))
    asked, stages = settings.curve, Stages(observer)
    page = None if asked.out is None else asked.out.expanduser()
    if page is not None:
        check_new_page(page)
    given = asked.family if isinstance(asked.family, Family) else Family.load(asked.family)
    chosen = TextChoice(settings.text)
    with stages("open"):
        chosen.check()
        require_room_for_weights(settings.model, copies=2.0 - given.smallest)
        source = open_model(settings.model)
        text = open_text(source, chosen)
    stages.say(text.notes)
    text.require_measurable()
    if text.measure is None:
        raise DataError("text to measure on is needed", hint=f"name a text file with {option('eval_data')}")
    program = only_planned(analysed(source, stages, given.plan), given.plan)
    require_same_decoder(program, given.plan)
    require_tokens(source, text, program.text_tokens)
    context = asked.context or window_of(source, program, None)
    windows = settings.text.eval_windows

    def compared(decoder: nn.Module) -> Comparison:
        return text.compared(program, decoder, context=context, windows=windows)[0]

    with stages("measure"):
        measured = _Measured(program, given, compared, stages.observer)
        step = (given.largest - given.smallest) / (asked.points - 1)
        points = [measured.at(given.smallest + index * step) for index in range(asked.points)]
        within = None if asked.within is None else _smallest_within(measured, points, asked.within)
    assert measured.last is not None
    found = SizeCurve(
        points=tuple(points),
        dense_parameters=program.size,
        dense_bytes=_bytes(program.graph_module),
        dense_perplexity=measured.last.dense.value,
        protocol=dict(measured.last.dense.protocol),
        of=str(given.plan.budget.of),
        within=within,
        limit=asked.within,
    )
    if page is not None:
        write_curve(found, page)
    return found


@dataclass(eq=False)
class _Measured:
    """Decoders of a family, measured one after the other."""

    program: Program
    family: Family
    compared: Callable[[nn.Module], Comparison]
    observer: Observer
    last: Comparison | None = None

    def at(self, ratio: float) -> CurvePoint:
        """Return size and quality at a ratio."""
        plan = self.family.at(self.program, ratio)
        decoder = lower(self.program, plan)
        self.last = found = self.compared(decoder)
        point = CurvePoint(
            ratio=round(ratio, 6),
            achieved=plan.achieved,
            parameters=sum(one.numel() for one in decoder.parameters()),
            bytes=_bytes(decoder),
            kl=found.agreement.kl_nats,
            top1=found.agreement.top1,
            perplexity=found.pruned.value,
        )
        self.observer.note(f"ratio {ratio:.3f}: KL {point.kl:.4f}, perplexity {point.perplexity:.3f}")
        return point


def _smallest_within(measured: _Measured, points: list[CurvePoint], limit: float) -> CurvePoint:
    """Return the point with the largest ratio that is found within a divergence, by halving an interval.

    Raises:
        BudgetError: if every point is further away.
    """
    good = [point for point in points if point.kl <= limit]
    if not good:
        nearest = min(points, key=lambda point: point.kl)
        raise BudgetError(
            f"no decoder of the family is within {limit:g} nats of the dense one: the nearest, at a ratio of "
            f"{nearest.ratio:g}, has KL {nearest.kl:.4f}",
            hint="ask for more, or learn a family that begins at a smaller ratio",
        )
    best = good[-1]
    above = next((after for before, after in pairwise(points) if before is best), None)
    high = best.ratio if above is None else above.ratio
    while high - best.ratio > _CLOSE:
        point = measured.at((best.ratio + high) / 2)
        best, high = (point, high) if point.kl <= limit else (best, point.ratio)
    return best


def _bytes(module: nn.Module) -> int:
    return sum(one.nbytes for one in module.parameters())
