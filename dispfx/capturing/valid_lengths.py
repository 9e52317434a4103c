"""For which sequence lengths does a traced graph hold?

While torch traces a decoder it notes every condition on a size that Python code asked for: `tokens <= 24`, or
`tokens % 64 != 0`.  The graph was traced on one side of each, and holds for other lengths where all of them
are as they were, and where they are not but make no difference.

Entry points: `conditions_of` reads the conditions, `valid_lengths` finds the range around the traced length.

1. Only conditions of the decoder's own code count, and the bounds that torch gives as a range: most of what
   torch itself asks of sizes has to do with strides and changes no number.
2. At the first length that breaks a condition, decoder and graph are both run.  Where they agree there, at
   the next length that breaks it, and at one at least three times as long, the condition makes no difference.
   Beyond a bound the decoder is traced anew, for what a bound implies is not noted.
3. Where the decoder raises, that is its own limit; otherwise its arithmetic changes there.
4. One token is its own case, because torch takes no size for one that may be 1: it is run.
5. Where the decoder's code turned the size into a plain number, as `len(x)` and `float(x.shape[1])` do, torch
   notes no later condition.  Decoder and graph are run at growing lengths, and the end is searched for.
"""

import inspect
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import sympy
import torch
from torch import nn
from torch.export import ExportedProgram

from dispfx.capturing.graph_export import user_frame
from dispfx.capturing.unlifting import user_inputs
from dispfx.errors import CaptureError
from dispfx.ir.lengths import End, Lengths

# Longer sequences are not run, and told by a trace alone.
LONGEST_RUN = 4096

# Every length up to here is looked at, and beyond it bounds alone, at powers of two.
_EVERY, _POWERS = 2**17, [2**power for power in range(17, 25)]
# Functions that torch writes sizes with.
_FUNCTIONS = {
    "FloorDiv": np.floor_divide,
    "CleanDiv": np.floor_divide,
    "CeilDiv": lambda size, by: -(-size // by),
    "Mod": np.mod,
    "PythonMod": np.mod,
    "IntTrueDiv": np.divide,
    "FloatTrueDiv": np.divide,
    "PowByNatural": np.power,
    "FloatPow": np.power,
    "ToFloat": np.float64,
    "CeilToInt": np.ceil,
    "FloorToInt": np.floor,
    "TruncToInt": np.trunc,
    "RoundToInt": np.rint,
}
# Lengths that are tried where the decoder's code has the size as a plain number.
_LONGEST_SEARCHED = 2048
# After so many conditions that make no difference, the next one ends the range unseen.
_MOST_HARMLESS = 32
_TORCH = str(Path(torch.__file__).parent)
_CALLS = str(Path(inspect.getfile(nn.Module)))


Outcome = Literal["same", "other", "stops", "limit"]
# What a range ends with, where not all that breaks a condition could be tried too.
_ENDS: dict[Outcome, End] = {"other": "changes", "stops": "stops", "limit": "limit", "same": "changes"}


@dataclass(frozen=True)
class Answer:
    """What a decoder and its graph do at one length.

    Args:
        kind: whether they give the same, the graph gives something else, the graph stops with an error, or
            the decoder does.
        where: the line that raises.
    """

    kind: Outcome
    where: str | None = None


@dataclass(frozen=True, eq=False)
class Condition:
    """Something that holds at the traced length.

    Args:
        holds_at: whether it does at other ones: lengths (N,) int64 -> (N,) bool.
        text: the same for the same condition, in any trace.
        file, line: of the code that asked; None where torch did.
        fixed: whether the size became a plain number, so that conditions on it are not known (rule 5).
    """

    holds_at: Callable[[np.ndarray], np.ndarray]
    text: str
    file: str | None = None
    line: int = 0
    fixed: bool = False

    def holds(self, tokens: int) -> bool:
        return bool(self.holds_at(np.array([tokens]))[0])

    def broken_after(self, tokens: int) -> int | None:
        """Return the first length above `tokens` at which the condition does not hold, if one is found."""
        lengths = np.arange(tokens + 1, _EVERY + 1)
        broken = np.flatnonzero(~self.holds_at(lengths))
        if len(broken):
            return int(lengths[broken[0]])
        for low, high in pairwise(_POWERS):
            if not self.holds(high):
                between = range(low, high + 1)
                return between.start + bisect_left(between, True, key=lambda length: not self.holds(length))
        return None

    def ends_at(self, tokens: int) -> bool:
        """Whether the condition is a bound that is passed there, and not one that is met again."""
        return not self.holds_at(np.array([*range(tokens, 2 * tokens), *_POWERS])).any()


def conditions_of(exported: ExportedProgram, axis: int = 1, other: int = 1) -> list[Condition]:
    """Return the conditions on a size of the first input (B, T), as torch noted them.

    Args:
        exported: as torch traced it, before decompositions.
        axis: of the input: 1 for the number of tokens, 0 for that of sequences.
        other: the other size, with which the conditions are tried.
    """
    name = user_inputs(exported)[0]
    shape = next(node for node in exported.graph.nodes if node.name == name).meta["val"].shape
    sizes = [size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in shape]
    symbol: Any = sizes[axis]
    symbols = [size for size in sizes if not size.is_number]
    if symbol not in symbols:
        return _of_number(exported, int(symbol))
    others = {one: sympy.Integer(other) for one in symbols if one is not symbol}
    guards = [
        guard
        for guard in shape[axis].node.shape_env.guards
        if symbol in guard.expr.free_symbols and guard.expr.free_symbols <= set(symbols)
    ]
    # The guards come first: they know their line.
    return _noted(symbol, guards, others) + _bounds(exported.range_constraints.get(symbol))


def _of_number(exported: ExportedProgram, number: int) -> list[Condition]:
    """Return the conditions on a size that the decoder's code turned into a plain number (rule 5)."""
    values = [node.meta.get("val") for node in exported.graph.nodes]
    sizes = [size for value in values for size in (value, *getattr(value, "shape", ()))]
    environments = (size.node.shape_env for size in sizes if isinstance(size, torch.SymInt))
    guards = getattr(next(environments, None), "guards", ())
    asked = next((one for one in guards if one.expr.is_Equality and number in one.expr.args), None)
    if asked is None:
        return [Condition(lambda lengths: lengths == number, f"is {number}", fixed=True)]
    symbol, place = asked.expr.args[0], _place(asked.sloc.framework_loc)
    others = [one for one in guards if one is not asked and one.expr.free_symbols == {symbol}]
    found = _noted(symbol, others, {})
    return [*found, Condition(lambda lengths: lengths == number, str(asked.expr), *place, fixed=True)]


def _noted(symbol: Any, guards: Sequence[Any], others: Mapping[Any, Any]) -> list[Condition]:
    """Return what torch noted, where the decoder's own code asked for it or it is a bound (rule 1)."""
    return [
        Condition(
            _holds_at(symbol, guard.expr.xreplace(others)),
            str(guard.expr),
            *_place(guard.sloc.framework_loc),
        )
        for guard in guards
        if _is_own(guard.sloc.framework_loc) or _is_bound(guard.expr, symbol)
    ]


def _holds_at(symbol: Any, expression: Any) -> Callable[[np.ndarray], np.ndarray]:
    computed = cache(lambda: sympy.lambdify(symbol, expression, [_FUNCTIONS, "numpy"]))
    return lambda lengths: np.broadcast_to(computed()(lengths), lengths.shape)


def _place(asked: Any) -> tuple[str | None, int]:
    """Return file and line of a frame, where it is of the decoder's own code."""
    file = getattr(asked, "filename", None)
    return (None, 0) if file is None or file.startswith(_TORCH) else (file, asked.lineno)


def _is_own(asked: Any) -> bool:
    """Whether the decoder's own code asked; for code without a file torch names what called it."""
    return _place(asked)[0] is not None or getattr(asked, "filename", None) == _CALLS


def _is_bound(expression: Any, symbol: Any) -> bool:
    return isinstance(expression, sympy.Rel) and expression.args[0] == symbol and expression.args[1].is_number


def _bounds(bounds: Any) -> list[Condition]:
    if bounds is None:
        return []
    least, most = (float(bound) for bound in (bounds.lower, bounds.upper))
    # Every size that torch traces begins at two.
    return [
        Condition(lambda lengths: lengths <= most, f"at most {bounds.upper}"),
        Condition(lambda lengths: np.maximum(lengths, 2) >= least, f"at least {bounds.lower}"),
    ]


@dataclass(frozen=True, eq=False)
class Trial:
    """A decoder and its graph, to be tried at other lengths than the traced one.

    Args:
        module: the decoder.
        run: runs it on a sequence of so many tokens; raises CaptureError where it raises.
        traced_at: traces it at so many tokens; raises CaptureError where torch cannot.
        compared: runs decoder and graph on so many tokens; None where the decoder holds no values.
        conditions: reads those of a trace.
    """

    module: nn.Module
    run: Callable[[int], None]
    traced_at: Callable[[int], ExportedProgram]
    compared: Callable[[int], Outcome] | None
    conditions: Callable[[ExportedProgram], list[Condition]] = conditions_of

    def answer(self, tokens: int) -> Answer:
        """Run both, or trace the decoder anew where that would take long, which shows whether it raises."""
        short = self.compared is not None and tokens <= LONGEST_RUN
        if tokens == 1 and not short:
            return Answer("same")
        try:
            self.run(tokens) if short else self.traced_at(tokens)
        except CaptureError as error:
            return Answer("limit", user_frame(error.__cause__ or error))
        return Answer(self.compared(tokens) if short and self.compared else "other")

    def conditions_at(self, tokens: int) -> list[Condition] | None:
        """Return the conditions of a trace at another length; None where torch cannot."""
        try:
            return self.conditions(self.traced_at(tokens))
        except CaptureError:
            return None

    def place_of(self, condition: Condition, traced: int) -> str | None:
        """Return the module in which a condition is asked, and file and line; None where unknown."""
        if condition.file is None:
            return None
        path = module_at(self.module, condition.file, condition.line, lambda: self.run(traced))
        return ", ".join(part for part in (path, f"{condition.file}:{condition.line}") if part)


def valid_lengths(conditions: Sequence[Condition], traced: int, trial: Trial) -> Lengths:
    """Return the range of lengths, around the traced one, for which a graph holds.

    Args:
        conditions: those of the trace; one that one sequence of that length breaks is for
            `dispfx.capturing.valid_batches`.
        traced: that length.
        trial: the decoder and its graph.
    """
    # Without values nothing can be compared, and every length is as good as the next.
    blind = trial.compared is None
    conditions = [one for one in conditions if one.holds(traced) and not (one.fixed and blind)]
    if any(one.fixed for one in conditions) and trial.answer(traced + 1).kind == "stops":
        return Lengths()  # The graph runs at one length alone, which is no range: the capture says why.
    above = range_above(conditions, traced, trial)
    least, where = _downwards(conditions, traced, trial)
    return Lengths(least, above.most, above.end, above.where or where)


def range_above(conditions: Sequence[Condition], traced: int, trial: Trial) -> Lengths:
    """Return where the range ends above the traced size, as `valid_lengths`."""
    harmless, start = set[str](), traced
    conditions = [one for each in conditions if (one := _searched(each, traced, trial)) is not None]
    while ends := [end for one in conditions if (end := one.broken_after(traced)) is not None]:
        first = min(ends)
        broken = [one for one in conditions if not one.holds(first)]
        said = trial.answer(first)
        going_on = None
        if said.kind == "same" and len(harmless) < _MOST_HARMLESS and _same_later(broken, first, trial):
            harmless.update(one.text for one in broken)
            if any(one.ends_at(first) for one in broken):
                # What `tokens <= 30` implies was not noted, such as `tokens <= 40`.
                going_on = trial.conditions_at(first)
                traced = first
            else:
                going_on = conditions
        if going_on is None:
            where = said.where or trial.place_of(broken[0], start)
            return Lengths(1, first - 1, _ENDS[said.kind], where)
        conditions = [one for one in going_on if one.text not in harmless]
    return Lengths()


def _searched(condition: Condition, traced: int, trial: Trial) -> Condition | None:
    """Return a condition as it is, or for a fixed size the end that was found, or None."""
    if not condition.fixed:
        return condition
    same, kind = traced, "same"
    while kind == "same" and (longer := 2 * same) <= _LONGEST_SEARCHED:
        kind = trial.answer(longer).kind
        if kind == "limit":
            longer = _first(same, longer, lambda tokens: trial.answer(tokens).kind == "limit") - 1
            kind = trial.answer(longer).kind
            break
        same = longer if kind == "same" else same
    if kind == "same":
        return None
    most = _first(same, longer, lambda tokens: trial.answer(tokens).kind != "same") - 1
    return replace(condition, holds_at=lambda lengths: lengths <= most, fixed=False)


def _first(before: int, after: int, holds: Callable[[int], bool]) -> int:
    """Return the first of the lengths after `before`, `after` at the latest, at which something holds."""
    return before + 1 + bisect_left(range(before + 1, after), True, key=holds)


def _same_later(broken: Sequence[Condition], first: int, trial: Trial) -> bool:
    # Where the arithmetic changes continuously, both sides agree at the first length itself.
    later = {end for one in broken for after in (first, 3 * first - 1) if (end := one.broken_after(after))}
    return all(trial.answer(tokens).kind in ("same", "limit") for tokens in later)


def _downwards(conditions: Sequence[Condition], traced: int, trial: Trial) -> tuple[int, str | None]:
    """Return the shortest length, and where it is decided.

    Below a broken condition every length is run, and where two tokens fail, which are fewer than the parts
    that a text may be split into.
    """
    broken: list[Condition] = []
    every = traced > 2 and trial.compared is not None and trial.answer(2).kind != "same"
    every = every and trial.answer(traced).kind == "same"  # and not wrong at any length
    for tokens in range(traced - 1, 0, -1):
        broken = broken or [one for one in conditions if not one.holds(tokens)]
        if (broken or every or tokens == 1) and trial.answer(tokens).kind != "same":
            return tokens + 1, trial.place_of(broken[0], traced) if broken else None
    return 1, None


def module_at(module: nn.Module, file: str, line: int, run: Callable[[], None]) -> str:
    """Return the path of the sub-module that is running when a line is first met; "" if no sub-module is.

    Args:
        module: the decoder, whose paths are meant.
        run: runs it, so that the line is met.
    """
    paths = {id(part): path for path, part in module.named_modules()}
    met: list[str] = []

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        if event == "line" and frame.f_lineno == line and not met:
            met.append(next((paths[each] for each in _modules_running(frame) if paths.get(each)), ""))
        return watch

    with _watched(watch):
        run()
    return met[0] if met else ""


def _modules_running(frame: FrameType | None) -> Iterator[int]:
    """Yield the identity of each object whose method is being run, the innermost first."""
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), nn.Module):
            yield id(found)
        frame = frame.f_back


@contextmanager
def _watched(watch: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """See every line of Python for the time of the block."""
    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)
