"""The tables that have one run a row: each is a declaration of rows and columns."""

from collections.abc import Callable
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from dispfx.report.pictures import CYCLE, MARKERS, Picture, draw_picture
from reproduction.cells import (
    PAPER_STEPS,
    PERPLEXITIES,
    Found,
    Options,
    Row,
    RunTable,
    achieved,
    deviation,
    hours,
    hours_of_paper_steps,
    of_all,
    of_paper,
    parameters,
    seconds,
    steps,
    steps_to_budget,
)
from reproduction.paper import COST, PERPLEXITY, SECOND_HAND, WORKED_BACK, family
from reproduction.runs import Bench
from reproduction.setup import Setup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METHODS = ("sensitivity", "fluctuation", "activation", "magnitude", "random")


def ratio_rows(bench: Bench, options: Options) -> list[Row]:
    return [
        Row("dense", None),
        *(Row(f"{ratio:.0%} removed", Setup.of(ratio)) for ratio in options.ratios),
    ]


def hypernetwork_rows(bench: Bench, options: Options) -> list[Row]:
    ratio = options.ratio
    return [
        Row("full: GRU, norm, heads", Setup.of(ratio)),
        Row("no GRU: fixed input, linear", Setup.of(ratio, hypernetwork="linear")),
        Row("none: single logits", Setup.of(ratio, hypernetwork="none")),
        Row("none, learning rate 0.2", Setup.of(ratio, hypernetwork="none", lr=0.2)),
    ]


def lambda_rows(bench: Bench, options: Options) -> list[Row]:
    standard = bench.settings(Setup(options.ratio)).lambda_
    return [
        Row(f"λ = {value:g}", _changed(options.ratio, lambda_=None if value == standard else value))
        for value in options.lambdas
    ]


def _changed(ratio: float, **changes: Any) -> Setup:
    """Return a setup without changes of None, so that tables share its run."""
    return Setup(ratio, tuple(sorted((key, value) for key, value in changes.items() if value is not None)))


def seed_rows(bench: Bench, options: Options) -> list[Row]:
    standard = bench.settings(Setup(options.ratio)).seed
    return [
        Row(f"seed {seed}", _changed(options.ratio, seed=None if seed == standard else seed))
        for seed in options.seeds
    ]


def constrained_rows(bench: Bench, options: Options) -> list[Row]:
    rows = []
    for ratio in sorted({options.ratios[len(options.ratios) // 2], options.ratio}):
        rows += [
            Row(f"{ratio:.0%}, each branch its own", Setup.of(ratio)),
            Row(f"{ratio:.0%}, S1 = S2 = S3 = S5", Setup.of(ratio, constrained=True)),
        ]
    return rows


def step_rows(bench: Bench, options: Options) -> list[Row]:
    most = bench.settings(Setup(options.ratio)).steps
    chosen = sorted({max(1, most // part) for part in (16, 8, 4, 2)})
    shorter = [Row(f"{count:,} steps", Setup.of(options.ratio, steps=count)) for count in chosen]
    return [*shorter, Row(f"{most:,} steps", Setup.of(options.ratio))]


def score_rows(bench: Bench, options: Options) -> list[Row]:
    rows = [Row("dense", None)]
    for ratio in sorted({options.ratios[len(options.ratios) // 2], options.ratio}):
        rows.append(Row(f"{ratio:.0%}, learned", Setup.of(ratio)))
        rows += [Row(f"{ratio:.0%}, {method}", Setup.of(ratio, method=method)) for method in _METHODS]
    return rows


def cost_rows(bench: Bench, options: Options) -> list[Row]:
    return [Row(f"{ratio:.0%} removed", Setup.of(ratio)) for ratio in options.ratios]


def spread(bench: Bench, options: Options, found: Found) -> list[str]:
    values = [outcome.perplexity[0] for _, outcome in found if outcome is not None]
    if len(values) < 2:
        return []
    return [
        f"Perplexity {mean(values):.3f} ± {stdev(values):.3f} over {len(values)} seeds (sample deviation)."
    ]


def paper_note(bench: Bench, options: Options, found: Found) -> list[str]:
    own = family(bench.source.name)
    if own in PERPLEXITY:
        return [f"{SECOND_HAND} {WORKED_BACK}" if own == "LLaMA-2-7B" else SECOND_HAND]
    known = PERPLEXITY["LLaMA-2-7B"]
    said = ", ".join(f"{value:.2f} at {ratio:.0%}" for ratio, value in known.items())
    return [
        f"The paper has no figure for this decoder. Its LLaMA-2 7B, on WikiText-2: {said}. {SECOND_HAND} "
        f"{WORKED_BACK}"
    ]


def cost_notes(bench: Bench, options: Options, found: Found) -> list[str]:
    notes = ["Device-hours of one device, preparing and compiling included."]
    timed = [one.learning_seconds for _, one in found if one is not None and one.learning_seconds is not None]
    if options.price is None:
        notes.append("Money: not computed; `--price` is that of one device for one hour, in dollars.")
    elif timed:
        most = max(timed) / 3600 * options.price
        notes.append(f"Money at ${options.price:g} an hour: at most ${most:.4f} a run.")
    known = family(bench.source.name)
    if known in COST:
        cards, each = COST[known]
        notes.append(
            f"The paper, {known}, {PAPER_STEPS:,} steps: {each} h on {cards} A100, {cards * each:.2f} hours. "
            f"{SECOND_HAND}"
        )
    return notes


def curve(
    title: str, at: Callable[[Bench, Setup], float], label: str, *, logarithmic: bool = False
) -> Callable[[str, Bench, Found], Picture]:
    """Return what draws perplexity against one property of the runs."""

    def draw_of(name: str, bench: Bench, found: Found) -> Picture:
        points = sorted((at(bench, row.setup), one.perplexity[0]) for row, one in found if row.setup and one)
        across, up = zip(*points, strict=True)

        def draw(figure: "Figure") -> None:
            axes = figure.add_subplot()
            axes.plot(across, up, color=CYCLE[0], marker=MARKERS[0], markersize=5)
            axes.set(xlabel=label, ylabel="perplexity")
            if logarithmic:
                axes.set_xscale("log")
                axes.set_xticks(across, [f"{value:g}" for value in across])
                axes.set_xticks([], minor=True)
            axes.grid(axis="y")

        said = ", ".join(f"{x:g}: {y:.3f}" for x, y in points)
        return draw_picture(name, title, f"Curve of perplexity by {label}: {said}.", draw, height=2.8)

    return draw_of


def _ratio_of(bench: Bench, setup: Setup) -> float:
    return setup.ratio


def _steps_of(bench: Bench, setup: Setup) -> float:
    return bench.settings(setup).steps


def _lambda_of(bench: Bench, setup: Setup) -> float:
    return bench.settings(setup).lambda_


RUN_TABLES = {
    "ratio": RunTable(
        "Perplexity against ratio (Table 1)",
        ratio_rows,
        (*PERPLEXITIES, ("paper", of_paper), ("of the layers removed", achieved)),
        notes=paper_note,
        draw=curve(
            "Perplexity against the share removed.", _ratio_of, "share of the layers' weights removed"
        ),
    ),
    "hypernetwork": RunTable(
        "What the logits come from (Table 4)", hypernetwork_rows, (*PERPLEXITIES, ("seconds", seconds))
    ),
    "lambda": RunTable(
        "Weight of the budget loss",
        lambda_rows,
        (*PERPLEXITIES, ("within a point of the ratio from step", steps_to_budget)),
        draw=curve("Perplexity against the weight of the budget loss.", _lambda_of, "λ"),
    ),
    "seeds": RunTable("Five seeds (Table 10)", seed_rows, PERPLEXITIES, notes=spread),
    "constrained": RunTable("One selection for the whole stream (Figure 5)", constrained_rows, PERPLEXITIES),
    "steps": RunTable(
        "Perplexity against steps (Figure 5)",
        step_rows,
        PERPLEXITIES,
        draw=curve("Perplexity against steps of learning.", _steps_of, "steps", logarithmic=True),
    ),
    "scores": RunTable("Scored once, and learned", score_rows, (*PERPLEXITIES, ("seconds", seconds))),
    "cost": RunTable(
        "Cost (Table 6)",
        cost_rows,
        (
            ("steps", steps),
            ("seconds", seconds),
            ("device-hours", hours),
            ("… of 10,000 steps", hours_of_paper_steps),
        ),
        notes=cost_notes,
    ),
    "compression": RunTable(
        "Compression asked and reached (Figure 10)",
        cost_rows,
        (
            ("of the layers", achieved),
            ("off by (points)", deviation),
            ("parameters", parameters),
            ("of all parameters", of_all),
        ),
    ),
}
