"""What a table is: rows that name a run, and columns that read what it gave."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dispfx.report.pictures import Picture
from reproduction.paper import PERPLEXITY, family
from reproduction.runs import Bench
from reproduction.setup import Outcome, Setup

NOT_RUN = "not run"
PAPER_STEPS = 10_000


@dataclass(frozen=True)
class Options:
    """What a user chose for the tables.

    Args:
        ratio: of tables with one ratio.
        ratios, lambdas, seeds: of all other tables.
        price: of one hour of one device, in dollars.
        prompts: of the generation samples.
        tasks: of lm-eval; by default the paper's five, or the demo's own skills.
        task_folder: folder with custom task files, if lm-eval's data cannot be reached.
        task_limit: questions of each at most.
    """

    ratio: float = 0.5
    ratios: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    lambdas: tuple[float, ...] = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    price: float | None = None
    prompts: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    task_folder: str | None = None
    task_limit: int | None = None


@dataclass(frozen=True)
class Content:
    """A filled table.

    Args:
        header, rows: its cells.
        notes: sentences below it.
        picture: where it is a curve and there is one.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    picture: Picture | None = None


@dataclass(frozen=True)
class Row:
    """A run with its label; the dense decoder where there is no setup."""

    label: str
    setup: Setup | None


Cell = Callable[[Bench, Row, Outcome], str]
Found = Sequence[tuple[Row, Outcome | None]]


@dataclass(frozen=True)
class RunTable:
    """A table with one run a row.

    Args:
        title: what is shown.
        rows: from the options.
        columns: title and cell of each.
        notes: sentences on the rows that were found.
        draw: picture of the rows that were found; each has an outcome.
    """

    title: str
    rows: Callable[[Bench, Options], list[Row]]
    columns: Sequence[tuple[str, Cell]]
    notes: Callable[[Bench, Options, Found], list[str]] = lambda bench, options, found: []
    draw: Callable[[str, Bench, Found], Picture] | None = None

    def fill(self, name: str, bench: Bench, options: Options) -> Content:
        """Run what is not there yet, and return the cells; a run without figures says why."""
        found = [
            (row, bench.dense if row.setup is None else bench.run(row.setup))
            for row in self.rows(bench, options)
        ]
        rows = [(row.label, *self._cells(bench, row, outcome)) for row, outcome in found]
        header = ("", *(title for title, _ in self.columns))
        learned = [(row, one) for row, one in found if one is not None and row.setup is not None]
        picture = self.draw(name, bench, learned) if self.draw is not None and len(learned) > 1 else None
        return Content(header, rows, self.notes(bench, options, found), picture)

    def _cells(self, bench: Bench, row: Row, outcome: Outcome | None) -> list[str]:
        if outcome is not None:
            return [cell(bench, row, outcome) for _, cell in self.columns]
        assert row.setup is not None
        return [bench.failures.get(row.setup.name, NOT_RUN), *[""] * (len(self.columns) - 1)]


def why_not(bench: Bench, setup: Setup | None, file: str) -> str:
    """Return why a file of a run, or of the dense decoder, is not there."""
    name = "dense" if setup is None else setup.name
    return bench.failures.get(f"{name}: {file}") or bench.failures.get(name) or NOT_RUN


def perplexity(bench: Bench, row: Row, outcome: Outcome) -> str:
    return f"{outcome.perplexity[0]:,.3f}"


def times_dense(bench: Bench, row: Row, outcome: Outcome) -> str:
    return f"{outcome.perplexity[0] / bench.dense.perplexity[0]:.3f}"


def of_paper(bench: Bench, row: Row, outcome: Outcome) -> str:
    """The paper's perplexity, where it has this decoder at this ratio."""
    figures = PERPLEXITY.get(family(bench.source.name) or "", {})
    value = figures.get(0.0 if row.setup is None else row.setup.ratio)
    return "—" if value is None else f"{value:.2f}"


def achieved(bench: Bench, row: Row, outcome: Outcome) -> str:
    return f"{outcome.achieved:.2%}"


def parameters(bench: Bench, row: Row, outcome: Outcome) -> str:
    return f"{outcome.parameters:,}"


def of_all(bench: Bench, row: Row, outcome: Outcome) -> str:
    """Share of all parameters, counted from the tensors of the pruned decoder."""
    return f"{1 - outcome.parameters / bench.dense.parameters:.2%}"


def deviation(bench: Bench, row: Row, outcome: Outcome) -> str:
    """Points by which the removed share misses what was asked."""
    assert row.setup is not None
    return f"{100 * (outcome.achieved - row.setup.ratio):+.3f}"


def steps(bench: Bench, row: Row, outcome: Outcome) -> str:
    return f"{outcome.steps:,}"


def seconds(bench: Bench, row: Row, outcome: Outcome) -> str:
    if row.setup is None:
        return "—"
    return "cut off" if outcome.learning_seconds is None else f"{outcome.learning_seconds:,.0f}"


def steps_to_budget(bench: Bench, row: Row, outcome: Outcome) -> str:
    """The first step from which the sampled masks stay within a point of the ratio asked."""
    assert row.setup is not None
    last = 0
    for record in bench.steps(row.setup):
        if abs(record.achieved_ratio - row.setup.ratio) > 0.01:
            last = record.step
    return f"{last + 1:,}" if last < outcome.steps else "never"


def hours(bench: Bench, row: Row, outcome: Outcome) -> str:
    """Device-hours of the run."""
    return "cut off" if outcome.learning_seconds is None else f"{outcome.learning_seconds / 3600:.4f}"


def hours_of_paper_steps(bench: Bench, row: Row, outcome: Outcome) -> str:
    """Device-hours of 10,000 such steps, from the time of the last hundred."""
    assert row.setup is not None
    records = bench.steps(row.setup)
    if not records:
        return "—"
    return f"{PAPER_STEPS * outcome.batch_tokens / records[-1].tokens_per_second / 3600:.3f}"


PERPLEXITIES: Sequence[tuple[str, Cell]] = (("perplexity", perplexity), ("× dense", times_dense))
