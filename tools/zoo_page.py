"""What a sweep of `tools/zoo.py` found, as JSON and as a page.

    OUT.json    {"sections": {title: {"cached": …, "dtype": …, "tolerance": …, "rows": [row, …]}}}
    OUT.md      one part a section: versions, totals, and a table with one line an architecture

A sweep adds its section to those that are there, or replaces rows of the same name in its own.  Every row
says which libraries and which state of the compiler made it, so that the page can tell rows of another state.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

REQUIRED_SHARE = 0.95
# As `dispfx.analysis.coverage` names them; a page is made without the package.
UNREAD = "not read by the graph"
EARLIER = "¹"
TITLE = "# Every causal language model of transformers, tiny"
METHOD = """\
Made by `tools/zoo.py`. It builds every architecture that transformers registers with a few small layers and
random weights, and captures, analyses, gates (two random plans of 30%) and lowers it (in both forms). At two
shapes that were not traced, the lowered decoder must equal the gated one, and the gated one must equal the
module with zeros for removed weights. Noise in place of removed weights must change no bit of the gated
decoder. A mixture of experts is captured twice, with gathered and with grouped experts, and the plan of one
must lower the other ("experts"). No architecture is named anywhere in the compiler. Block weights are the
matrices that a branch reads; those that no site cuts are listed with the reason. Errors are relative, the
largest of all shapes and plans. Seconds are from a busy machine."""
CACHED_METHOD = """\
Captured with a key-value cache: a prefill of 12 tokens and 20 decode steps give what one pass over the 32
tokens gives, for the dense decoder and for one lowered by a random plan of 30%."""
HALF_METHOD = """\
The tolerance is 2⁻⁶: a product is summed in float32 and its result rounded to 8 bits, so another order of
sums flips a rounding by half a step, 2⁻⁸, on average; flips of independent sign add up as a walk, √(6
products · 2 layers) · 2⁻⁸ = 1.4e-2."""

COLUMNS = (
    "branches | sites | weights gated | not gated, by reason | identity | lowered = gated | zeroed = gated | "
    "experts | seconds"
)
CACHED_COLUMNS = "sites | identity | cached = recomputed | lowered and cached = gated | seconds"


@dataclass
class Row:
    """What one architecture did."""

    name: str
    status: str = "error"
    reason: str = ""
    identity: float | None = None
    bit_identical: bool = False
    lowered: float | None = None
    gathered: float | None = None
    zeroed: float | None = None
    unread: bool = False
    experts: float | None = None
    own_experts: int = 0
    cached: float | None = None
    cached_lowered: float | None = None
    branches: dict[str, int] = field(default_factory=dict)
    sites: int = 0
    heads: int = 0
    values: int = 0
    share: float = 0.0
    not_gated: dict[str, float] = field(default_factory=dict)
    refused: list[list[str]] = field(default_factory=list)
    layers: int = 0
    analysis_seconds: float = 0.0
    seconds: float = 0.0
    made: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Compiled with no refusal and nearly every block weight gated that the graph reads."""
        read = 1.0 - self.not_gated.get(UNREAD, 0.0)
        return self.status == "compiled" and not self.refused and self.share >= REQUIRED_SHARE * read


@dataclass(frozen=True)
class Section:
    """Rows of one kind of sweep, by name.

    Args:
        cached: whether decoders were captured with a key-value cache.
        dtype: of their weights.
        tolerance: of lowered against gated.
        rows: by architecture.
    """

    cached: bool
    dtype: str
    tolerance: float
    rows: Mapping[str, Row]

    @property
    def made(self) -> Mapping[str, str]:
        """What most rows were made with, the date left out."""
        counts = Counter(json.dumps(origin(row), sort_keys=True) for row in self.rows.values())
        return json.loads(counts.most_common(1)[0][0]) if counts else {}

    def earlier(self) -> list[str]:
        """Return the names of rows that another state of the compiler or other libraries made."""
        return sorted(name for name, row in self.rows.items() if origin(row) != self.made)


def origin(row: Row) -> dict[str, str]:
    """Return what a row was made with, the date left out."""
    return {key: value for key, value in row.made.items() if key != "date"}


def state_of_compiler(checkout: Path) -> str:
    """Return a digest of the source that decides about a row: capture, analysis and passes."""
    found = hashlib.sha256()
    package = checkout / "dispfx"
    rooms = ("analysis", "capturing", "compiler", "ir", "source")
    paths = [*package.glob("*.py"), *(path for room in rooms for path in package.glob(f"{room}/**/*.py"))]
    for path in sorted([*paths, *(checkout / "passes").glob("*.py")]):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def read_sections(path: Path) -> dict[str, Section]:
    """Return the sections of OUT.json; none where it is not there, or from before there were any."""
    if not path.is_file():
        return {}
    plain = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(plain, dict):
        return {}
    return {title: _section_of(entry) for title, entry in plain["sections"].items()}


def _section_of(entry: Mapping[str, Any]) -> Section:
    # Rows of earlier sweeps may have fields that are no longer made.
    known = {one.name for one in fields(Row)}
    rows = [Row(**{name: row[name] for name in row if name in known}) for row in entry["rows"]]
    return Section(entry["cached"], entry["dtype"], entry["tolerance"], {row.name: row for row in rows})


def with_rows(sections: Mapping[str, Section], title: str, like: Section) -> dict[str, Section]:
    """Return the sections with the rows of `like` in the one of that title; its other rows stay."""
    before = sections[title].rows if title in sections else {}
    rows = {**before, **like.rows}
    return {**sections, title: replace(like, rows={name: rows[name] for name in sorted(rows)})}


def write_sections(sections: Mapping[str, Section], out: Path) -> None:
    """Write OUT.json and OUT.md, each whole or not at all."""
    plain = {
        title: {
            "cached": section.cached,
            "dtype": section.dtype,
            "tolerance": section.tolerance,
            "rows": [asdict(row) for row in section.rows.values()],
        }
        for title, section in sections.items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    _replace(Path(f"{out}.json"), json.dumps({"sections": plain}, indent=1) + "\n")
    _replace(Path(f"{out}.md"), page(sections))


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def page(sections: Mapping[str, Section]) -> str:
    """Return the page of all sections."""
    parts = [TITLE, METHOD, *(part for item in sections.items() for part in _part(*item))]
    return "\n\n".join(parts) + "\n"


def _part(title: str, section: Section) -> Iterator[str]:
    rows = list(section.rows.values())
    yield f"## {title}"
    yield _made_by(section)
    if section.cached:
        yield CACHED_METHOD
    yield "\n".join(f"- {line}" for line in totals(rows, section.cached))
    if section.dtype == "bfloat16":
        yield HALF_METHOD
    columns = CACHED_COLUMNS if section.cached else COLUMNS
    earlier = set(section.earlier())
    table = [f"| architecture | result | {columns} |", "|---|---" + "|---" * len(columns.split("|")) + "|"]
    yield "\n".join([*table, *(cells(row, section.cached, row.name in earlier) for row in rows)])


def _made_by(section: Section) -> str:
    made, dates = section.made, sorted({row.made.get("date", "") for row in section.rows.values()})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    versions = (
        f"torch {made.get('torch')}, transformers {made.get('transformers')}, Python {made.get('python')}"
    )
    earlier = section.earlier()
    state = (
        "All rows are from one state of the compiler's analysis and passes."
        if not earlier
        else f"The {len(earlier)} rows marked {EARLIER} are from another state of it or other versions."
    )
    return f"{days}, {versions}, {section.dtype}. {state}"


def totals(rows: Sequence[Row], cached: bool = False) -> list[str]:
    """Return what the rows say together, one sentence a line."""
    by_status = {status: [row for row in rows if row.status == status] for status in STATUSES}
    compiled = by_status["compiled"]
    lines = [f"**{len(rows)} architectures**"]
    if cached:
        done = by_status["cached"]
        worst = max((max(row.cached or 0.0, row.cached_lowered or 0.0) for row in done), default=0.0)
        lines.append(f"**{len(done)} run with a cache**; the largest error is {worst:.0e}")
    else:
        lines += _compiled_lines(compiled)
    lines.append(f"**{len(by_status['refused'])} are refused by name**{_names(by_status['refused'])}")
    if by_status["not built"]:
        count = len(by_status["not built"])
        lines.append(f"{count} cannot be built with these versions{_names(by_status['not built'])}")
    for status, words in (("wrong", "gave a wrong result"), ("error", "failed with an error")):
        lines.append(f"{len(by_status[status]) or 'None'} {words}{_names(by_status[status])}")
    return lines


STATUSES = ("compiled", "cached", "refused", "not built", "wrong", "error")


def _compiled_lines(compiled: Sequence[Row]) -> Iterator[str]:
    whole = sum(row.whole for row in compiled)
    equal = sum(row.identity == 0.0 for row in compiled)
    mixtures = [row for row in compiled if row.experts is not None]
    own = sum(row.own_experts > 0 for row in compiled)
    yield (
        f"**{len(compiled)} compile**, {whole} of them with no refusal and at least {REQUIRED_SHARE:.0%} of "
        f"the block weights gated that the graph reads"
    )
    yield (
        f"with masks of ones, every gated graph is bit-identical to the captured graph; {equal} captured "
        f"graphs are bit-identical to the module, the rest within {_largest(compiled, 'identity')}"
    )
    yield (
        f"the largest error of lowered against gated is {_largest(compiled, 'lowered')}, of the zeroed "
        f"module {_largest(compiled, 'zeroed')}"
    )
    yield (
        f"{len(mixtures)} mixtures of experts were lowered by one plan in both captures, within "
        f"{_largest(mixtures, 'experts')}; in {own} every expert keeps features of its own"
    )


def _largest(rows: Sequence[Row], name: str) -> str:
    found = [value for row in rows if (value := getattr(row, name)) is not None]
    return f"{max(found):.0e}" if found else "0"


def _names(rows: Sequence[Row]) -> str:
    return f": {', '.join(row.name for row in rows)}" if rows else ""


def summary(rows: Sequence[Row], cached: bool = False) -> str:
    """Return the totals as one line without marks."""
    return "; ".join(totals(rows, cached)).replace("**", "")


def cells(row: Row, cached: bool = False, earlier: bool = False) -> str:
    """Return the line of one row."""
    name = f"{row.name} {EARLIER}" if earlier else row.name
    empty = (CACHED_COLUMNS if cached else COLUMNS).count("|")
    if row.status not in ("compiled", "cached", "wrong"):
        reason = row.reason.replace("|", "/").replace("\n", " ").split(" [")[0]
        return f"| {name} | {row.status}: {reason} |{' |' * empty} {row.seconds:.1f} |"
    if cached:
        return (
            f"| {name} | {row.status} | {row.sites} | {row.identity:.0e} | {row.cached:.0e} | "
            f"{row.cached_lowered:.0e} | {row.seconds:.1f} |"
        )
    branches = ", ".join(f"{count} {kind}" for kind, count in row.branches.items())
    refused = f", {len(row.refused)} refused ({row.refused[0][1]})" if row.refused else ""
    experts = "" if row.experts is None else f"{row.experts:.0e}"
    left = "; ".join(f"{share:.1%}: {reason}" for reason, share in row.not_gated.items())
    return (
        f"| {name} | {row.status}{refused} | {branches} | {row.sites} | {row.share:.1%} | {left} | "
        f"{row.identity:.0e} | {row.lowered:.0e} | {row.zeroed:.0e} | {experts} | {row.seconds:.1f} |"
    )
