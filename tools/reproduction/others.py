"""The tables that are more than one run a row: curves, texts, speed, samples."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dispfx.benchmark.decoder_speed import Contender, Mode, compare
from dispfx.compiler.cached_programs import capture_cached, lower_cached
from dispfx.compiler.pipelines import gathered
from dispfx.compiler.programs import lower, lower_program
from dispfx.deploy.generate import generate
from dispfx.ir.cached_inputs import CachedShape
from dispfx.ir.program import Program
from dispfx.learning.records import StepRecord
from dispfx.plan.plan import Plan
from dispfx.report.pictures import CYCLE, MARKERS, Picture, draw_picture, smoothed, thinned
from dispfx.report.plans import difference_rows, plan_difference
from dispfx.source import encode
from reproduction.cells import NOT_RUN, Content, Options, why_not
from reproduction.paper import SECOND_HAND, THROUGHPUT, family
from reproduction.runs import Bench
from reproduction.setup import Setup
from reproduction.tasks import tasks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Fill = Callable[[str, Bench, Options], Content]
# Steps that are timed: batch, new tokens, cached tokens.
_SHAPES = {
    "cpu": (CachedShape(1, 64, 0), CachedShape(1, 1, 64), CachedShape(8, 1, 64)),
    "cuda": (CachedShape(1, 2048, 0), CachedShape(1, 1, 512), CachedShape(64, 1, 512)),
}
_MODES: dict[str, tuple[Mode, ...]] = {"cpu": ("eager",), "cuda": ("eager", "compiled")}
_NEW_TOKENS = 48
_DEMO_PROMPTS = ("copy abc xyz =", "7 + 5 =", "keys mo = bird , ra = 12 ; ra ->")
_PROMPTS = ("The city lies on the river", "In 1905, Albert Einstein", "To make bread, first")


def curves(rows: Callable[[Bench, Options], Sequence[tuple[str, Setup]]]) -> Fill:
    """Return what lays the loss and budget curves of some runs over each other."""

    def fill(name: str, bench: Bench, options: Options) -> Content:
        found = [(label, setup, bench.steps(setup)) for label, setup in rows(bench, options)]
        header = ("", "loss, first tenth", "loss, last tenth", "R, first tenth", "R, last tenth")
        lines = [(label, *_ends(records, bench.failures.get(setup.name))) for label, setup, records in found]
        drawn = [(label, records) for label, _, records in found if records]
        notes = ["Losses in nats a token, with sampled masks, meaned over a tenth of the steps."]
        return Content(header, lines, notes, _curves(name, drawn) if drawn else None)

    return fill


def _ends(records: Sequence[StepRecord], failure: str | None) -> list[str]:
    if not records:
        return [failure or NOT_RUN, "", "", ""]
    tenth = max(1, len(records) // 10)
    parts = [[one.loss for one in records], [one.budget_loss for one in records]]
    means = [sum(part) / tenth for values in parts for part in (values[:tenth], values[-tenth:])]
    return [f"{value:.4f}" for value in means]


def _curves(name: str, drawn: Sequence[tuple[str, Sequence[StepRecord]]]) -> Picture:
    def draw(figure: "Figure") -> None:
        upper, lower_axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for number, (label, records) in enumerate(drawn):
            colour, marker = CYCLE[number % 5], MARKERS[number % 5]
            at = [one.step for one in records]
            for axes, values in (
                (upper, [one.loss for one in records]),
                (lower_axes, [one.budget_loss for one in records]),
            ):
                across, up = thinned(at, values)
                every = max(1, len(across) // 8)
                axes.plot(
                    across,
                    smoothed(up),
                    color=colour,
                    marker=marker,
                    markersize=4,
                    markevery=every,
                    linewidth=1.2,
                    label=label,
                )
                axes.grid(axis="y")
        upper.set(ylabel="loss (nats)")
        upper.legend(fontsize=9)
        lower_axes.set(xlabel="step", ylabel="budget loss R")

    said = "; ".join(f"{label}: loss ends at {records[-1].loss:.3f}" for label, records in drawn)
    caption = "Language-model loss and budget loss by step: running means over a twentieth of the steps."
    return draw_picture(name, caption, f"Curves by step. {said}.", draw, height=4.2)


def method_curves(bench: Bench, options: Options) -> Sequence[tuple[str, Setup]]:
    ratio = options.ratio
    return (
        ("full", Setup.of(ratio)),
        ("no hypernetwork, learning rate 0.2", Setup.of(ratio, hypernetwork="none", lr=0.2)),
        ("constrained", Setup.of(ratio, constrained=True)),
    )


def ratio_curves(bench: Bench, options: Options) -> Sequence[tuple[str, Setup]]:
    chosen = sorted({options.ratios[0], options.ratios[len(options.ratios) // 2], options.ratios[-1]})
    return [(f"{ratio:.0%} removed", Setup.of(ratio)) for ratio in chosen]


def text_curves(bench: Bench, options: Options) -> Sequence[tuple[str, Setup]]:
    texts = bench.texts[:2]
    return [(text.learned_name, Setup.of(options.ratio, text=at)) for at, text in enumerate(texts)]


def texts(name: str, bench: Bench, options: Options) -> Content:
    """Compare what is kept after learning on two texts, and perplexity on both."""
    header = ("", "first text", "second text", "both", "overlap", "by chance")
    if len(bench.texts) < 2:
        return Content(header, [(f"{NOT_RUN}: no second text (--other-data)", *[""] * 5)])
    setups = [Setup.of(options.ratio, text=at) for at in range(2)]
    plans = [bench.plan(setup) for setup in setups]
    first, second = plans
    if first is None or second is None:
        return Content(header, [(NOT_RUN, *[""] * 5)], list(bench.failures.values()))
    notes = [f"First text: {bench.texts[0].learned_name}. Second text: {bench.texts[1].learned_name}."]
    for at, setup in enumerate(setups):
        found = bench.run(setup)
        assert found is not None
        on_both = " and ".join(f"{value:.3f}" for value in found.perplexity)
        notes.append(f"Learned on the {('first', 'second')[at]}: perplexity {on_both} on first and second.")
    dense = " and ".join(f"{value:.3f}" for value in bench.dense.perplexity)
    notes.append(f"Dense: {dense}. Overlap is |A ∩ B| / |A ∪ B|, the mean over sites.")
    return Content(header, [tuple(row) for row in difference_rows(plan_difference(first, second))], notes)


def throughput(name: str, bench: Bench, options: Options) -> Content:
    """Time prefill and decode, dense and pruned."""
    header = ("", "mode", "dense (ms)", "pruned (ms)", "×", "bound")
    setup = Setup.of(options.ratio)
    plan = bench.plan(setup)
    if plan is None:
        return Content(header, [(NOT_RUN, *[""] * 5)])
    rows = bench.kept(setup, "speed.json", lambda: _timed(bench, plan))
    if rows is None:
        return Content(header, [(why_not(bench, setup, "speed.json"), *[""] * 5)])
    notes = [
        f"{plan.achieved:.1%} of the layers' weights removed; widths are multiples of {plan.budget.align}."
    ]
    known = family(bench.source.name)
    if known in THROUGHPUT:
        least, most = THROUGHPUT[known]
        notes.append(
            f"The paper, {known}: {least:.2f} to {most:.2f} times the dense throughput. {SECOND_HAND}"
        )
    return Content(header, rows, notes)


def _timed(bench: Bench, plan: Plan) -> list[list[str]]:
    dense, pruned = _contenders(bench, plan)
    device = bench.program.device.type
    rows = []
    for shape in _SHAPES[device]:
        for mode in _MODES[device]:
            row = compare(bench.source.name, dense, pruned, shape, mode)
            place = f"{row.kind} {shape.batch} × {shape.tokens}, past {shape.past}"
            times = [f"{side.seconds * 1e3:.2f}" if side else row.note for side in (row.dense, row.pruned)]
            factor = "" if row.speedup is None else f"{row.speedup:.2f}"
            rows.append([place, mode, *times, factor, f"{row.bound:.2f}"])
    return rows


def _contenders(bench: Bench, plan: Plan) -> tuple[Contender, Contender]:
    program = capture_cached(bench.source.model)
    dense = lower_program(program, Plan.random(program, 0.0, seed=0))
    pruned = lower_cached(bench.source.model, plan, write="index-add")
    return _contender(dense, 0.0), _contender(pruned, plan.achieved)


def _contender(reference: Program, share: float) -> Contender:
    return Contender(reference, gathered(reference), share)


def samples(name: str, bench: Bench, options: Options) -> Content:
    """Continue prompts greedily, dense and pruned."""
    tokenizer = bench.source.tokenizer
    usual = _DEMO_PROMPTS if bench.source.origin == "demo" else _PROMPTS
    ratios = sorted({options.ratios[len(options.ratios) // 2], options.ratio})
    header = ("prompt", "dense", *(f"{ratio:.0%} removed" for ratio in ratios))
    if tokenizer is None:
        return Content(header, [(f"{NOT_RUN}: no tokenizer", *[""] * (1 + len(ratios)))])
    plans = [bench.plan(Setup.of(ratio)) for ratio in ratios]
    decoders = [bench.program.graph_module, *(plan and lower(bench.program, plan) for plan in plans)]
    rows = []
    for prompt in options.prompts or usual:
        ids = encode(prompt, tokenizer)[None].to(bench.program.device)
        said = [prompt]
        for decoder in decoders:
            if decoder is None:
                said.append(NOT_RUN)
                continue
            end = getattr(bench.source.config, "eos_token_id", None)
            longer = generate(decoder, ids, max_new_tokens=_NEW_TOKENS, eos=end)
            said.append(
                _one_line(tokenizer.decode(longer[0, ids.shape[1] :].cpu(), skip_special_tokens=True))
            )
        rows.append(tuple(said))
    return Content(header, rows, [f"The likeliest {_NEW_TOKENS} tokens; a line break is shown as ⏎."])


def _one_line(text: str) -> str:
    return text.strip().replace("\n", " ⏎ ").replace("|", "\\|")


OTHERS: dict[str, tuple[str, Fill]] = {
    "curves": ("Loss and budget: full, no hypernetwork, constrained (Figure 5)", curves(method_curves)),
    "ratio-curves": ("Loss and budget at several ratios", curves(ratio_curves)),
    "text-curves": ("Loss and budget on two texts", curves(text_curves)),
    "texts": ("Structures learned on two texts", texts),
    "throughput": ("Throughput (Figure 5)", throughput),
    "samples": ("Generation, dense and pruned", samples),
    "tasks": ("Zero-shot tasks (Tables 3 and 7 to 9)", tasks),
}
